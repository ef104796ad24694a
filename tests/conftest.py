"""What most tests need: the smallest complete run, and the command line called in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support import Answer, Cli, Compose


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Two threads on cores that other tests share wait for each other more than they compute."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(params=["reference", "compiled"])
def impl(request: pytest.FixtureRequest) -> Iterator[str]:
    """The test runs with torch's own operations, and with the compiled ones."""
    from andrea_ablate.ops import library

    if request.param == "compiled" and library.loaded().path is None:
        pytest.skip(f"the compiled library is {library.loaded().reason}")
    with library.using(request.param):
        yield request.param


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder of prepared data for the whole session."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def folders(tmp_path: Path, cache: Path) -> list[str]:
    """Overrides that keep every file of a test in its own folder."""
    return [f"paths.runs={tmp_path}/runs", f"paths.sweeps={tmp_path}/sweeps", f"paths.cache={cache}"]


@pytest.fixture
def tiny(folders: list[str]) -> Compose:
    """``tiny("norm=post", …)``: the configuration of the smallest complete run with these overrides; no tracker."""
    from andrea_ablate.composition import compose

    return lambda *overrides: compose(["size=tiny", "logger=none", *folders, *overrides])


@pytest.fixture
def cli(folders: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """``cli("-m", "norm=pre,post")``: run the command line at size tiny without a tracker and return what it said."""
    from hydra._internal.hydra import Hydra

    from andrea_ablate.cli import main

    def call(*arguments: str) -> Answer:
        given = {part.partition("=")[0] for part in arguments}
        defaults = [part for part in ("size=tiny", "logger=none", *folders) if part.partition("=")[0] not in given]
        with pytest.raises(SystemExit) as exit_info, monkeypatch.context() as patch:
            if not any(key.startswith(("hydra.mode", "experiments")) for key in given):
                # Hydra composes everything once more, only to find this None where neither sets it.
                patch.setattr(Hydra, "get_mode", lambda *_, **__: None)
            main([*arguments, *defaults])
        out, err = capsys.readouterr()
        code = exit_info.value.code
        return Answer(code if isinstance(code, int) else 1, out, err)

    return call
