"""A command's mistakes and interruptions: what is said, and the exit status."""

from __future__ import annotations

import pytest

from andrea_ablate.bench.__main__ import main as bench
from andrea_ablate.command import command
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking.store import StoreError


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (None, 0, ""),
        (ConfigError("a is b; use c"), 2, "a is b; use c\n"),
        (StoreError(5, "runs/x is damaged"), 2, "runs/x is damaged\n"),
        (FileNotFoundError(2, "No such file or directory", "x.csv"), 2, "x.csv: No such file or directory\n"),
        (KeyboardInterrupt(), 130, "Interrupted.\n"),
    ],
)
def test_each_end_has_a_status(
    error: BaseException | None, status: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    @command
    def main(arguments: list[str]) -> None:
        assert arguments == ["x"]
        if error:
            raise error

    assert main(["x"]) == status
    assert capsys.readouterr().err == said


def test_a_fault_of_the_program_keeps_its_trace() -> None:
    @command
    def main() -> None:
        raise TypeError("a fault")

    with pytest.raises(TypeError, match="a fault"):
        main()


def test_bench_says_what_is_wrong_with_an_override(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["bench", "step", "nrom=pre"])
    assert bench() == 2
    assert capsys.readouterr().err == "'nrom' is not a setting or group; did you mean 'norm'?\n"
