"""Which job gets which device, against schedules worked out by hand."""

from __future__ import annotations

import pytest

from andrea_ablate.placement import place
from andrea_ablate.registry import ConfigError


@pytest.mark.parametrize(
    ("seconds", "wanted", "devices", "placed"),
    [
        ([], [], 2, []),
        ([1, 1, 1], [1, 1, 1], 1, [((0,), 0, 1), ((0,), 1, 2), ((0,), 2, 3)]),
        ([5, 1, 1, 1], [1, 1, 1, 1], 2, [((0,), 0, 5), ((1,), 0, 1), ((1,), 1, 2), ((1,), 2, 3)]),
        ([2, 2, 2], [2, 1, 2], 3, [((0, 1), 0, 2), ((2,), 0, 2), ((0, 1), 2, 4)]),
        ([3, 1], [1, 2], 2, [((0,), 0, 3), ((0, 1), 3, 4)]),  # two at once: it waits for the later of them
    ],
)
def test_a_job_takes_what_is_free_first(
    seconds: list[float], wanted: list[int], devices: int, placed: list[tuple[tuple[int, ...], float, float]]
) -> None:
    assert place(seconds, wanted, devices) == placed


def test_more_than_there_are_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"trainer.devices=3, but there are 2"):
        place([1], [3], 2)
