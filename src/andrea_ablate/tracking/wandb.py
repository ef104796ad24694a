"""The mirror in Weights & Biases."""

from __future__ import annotations

import configparser
import contextlib
import importlib
import importlib.util
import logging
import netrc
import os
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from andrea_ablate.registry import ConfigError, nearest
from andrea_ablate.tracking.mirrors import LOGGERS, Background, Mirror, MirrorInfo, Row
from andrea_ablate.tracking.store import encode

_log = logging.getLogger("andrea_ablate")

# Quiet, quick and discreet: no console capture, no code, git, host, command line or package list, no system monitor.
# A later run of a process starts in about 15 ms this way, and in 150 ms with W&B's own defaults.
_WANDB_SETTINGS: dict[str, Any] = {
    "console": "off",
    "quiet": True,
    "silent": True,
    "host": "",
    "save_code": False,
    "disable_code": True,
    "disable_git": True,
    "disable_job_creation": True,
    "label_disable": True,
    "symlink": False,
    "x_disable_machine_info": True,
    "x_disable_meta": True,
    "x_disable_stats": True,
    "x_disable_viewer": True,
    "x_save_requirements": False,
    "finish_timeout": 60.0,
    "finish_timeout_raises": True,
}
_WANDB_MODES = ("auto", "online", "offline")
SPIKES, POSITIONS = "spike/table", "val/by_position"  # keys of the tables
_BAND = re.compile(r"val_(\d+)/loss_from_(\d+)")
_IN_USE_S = 30.0  # longest wait for an id that an earlier session has not given up yet
_HOSTS = ("api.forge.coreweave.com", "api.wandb.ai")  # W&B's own server: older logins are filed under the second
_FINISH_S = 75.0  # a little more than W&B waits by itself (finish_timeout above)


@LOGGERS.register("wandb")
class WandbLogger:
    """Weights & Biases, online or into ``wandb/`` of the run's folder (send that later with ``wandb sync``).

    Args:
        project: W&B project.
        entity: user or team; None is the account's default.
        mode: ``online``, ``offline``, or ``auto``: what WANDB_MODE (or ``wandb offline``) says, else online if an API
            key is known, else offline. Never a prompt.
        init_timeout_s: longest wait for the server when a run starts, in seconds, > 0.
    Raises: ConfigError when wandb is missing, a value is not allowed, or ``online`` is asked for without an API key.
    """

    def __init__(
        self,
        *,
        project: str = "andrea_ablate",
        entity: str | None = None,
        mode: str = "auto",
        init_timeout_s: float = 20.0,
    ) -> None:
        if not _is_installed():
            raise ConfigError(
                "logger: type=wandb needs the wandb package; run `pip install wandb` or choose logger=none"
            )
        if mode not in _WANDB_MODES:
            raise ConfigError(
                f"logger: mode='{mode}' is not one of {', '.join(_WANDB_MODES)}{nearest(str(mode), _WANDB_MODES)}"
            )
        if not 1 <= len(project) <= 128 or set(project) & set("/\\#?%:"):
            raise ConfigError(rf"logger: project='{project}' must have 1 to 128 characters and none of / \ # ? % :")
        if not init_timeout_s > 0:
            raise ConfigError(f"logger: init_timeout_s={init_timeout_s} must be more than 0 seconds")
        stored = _wandb_files()
        wish = os.environ.get("WANDB_MODE") or stored.get("mode", "") if mode == "auto" else mode
        wish = {"run": "online", "dryrun": "offline"}.get(wish, wish)
        key = _wandb_key(stored)
        has_key = bool(key or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"))
        if wish == "online" and not has_key:
            asked = f"mode={mode}" if mode == "online" else "WANDB_MODE=online"
            raise ConfigError(
                f"logger: {asked} needs a W&B API key and none is known; run `wandb login`, set WANDB_API_KEY, or "
                "choose logger.mode=offline"
            )
        self.mode = wish if wish in ("online", "offline", "disabled") else "online" if has_key else "offline"
        self.secret = key
        self._project, self._entity, self._init_timeout_s = project, entity, init_timeout_s

    def open(self, info: MirrorInfo, history: Iterable[Row]) -> Mirror | None:
        """Start or continue the W&B run of the same id."""
        if self.mode == "disabled":
            return None
        if "wandb" not in sys.modules:
            # A service of its own: that of the process which started this one keeps for good the id of a run whose
            # process was killed, and would refuse the run that goes on with it.
            os.environ.pop("WANDB_SERVICE", None)
        wandb: Any = importlib.import_module("wandb")  # not before it is used: it takes as long as planning a sweep
        known = wandb.Settings.model_fields  # which settings exist depends on the version
        settings = {name: value for name, value in _WANDB_SETTINGS.items() if name in known}
        if self.mode == "online" and self.secret:
            settings["api_key"] = self.secret  # wandb asks at the terminal for a key that it does not find by itself
        run = _begin(
            wandb,
            id=info.run_id,
            # W&B refuses longer texts; the whole name is in the record.
            name=info.name[:128],
            group=info.group[:128],
            tags=list(dict.fromkeys(tag[:64] for tag in info.tags if tag)),
            job_type=info.job_type,
            project=self._project,
            entity=self._entity,
            config=info.config,
            dir=str(info.folder),
            mode=self.mode,
            resume="allow" if info.resumed else None,
            reinit="create_new",  # runs of one process never share a W&B run, nor the one the caller may have open
            settings=wandb.Settings(**settings, init_timeout=self._init_timeout_s),
        )
        # W&B's own counter only grows, and drops what comes with a lower step: steps done again after a resume.
        run.define_metric("*", step_metric="step")
        _log.info("wandb: %s", run.url if self.mode == "online" else f"offline in {info.folder / 'wandb'}")
        return Background(_Wandb(run, wandb, info.folder / "wandb"), timeout_s=_FINISH_S)


def _begin(wandb: Any, **arguments: Any) -> Any:
    """`wandb.init`, repeated while an earlier session of the run is still being closed by a thread of this process."""
    deadline = time.monotonic() + _IN_USE_S
    while True:
        try:
            return wandb.init(**arguments)
        except Exception as error:
            if "is in use" not in str(error) or time.monotonic() > deadline:
                raise
        time.sleep(0.1)


class _Wandb:
    def __init__(self, run: Any, wandb: Any, folder: Path) -> None:
        self._run, self._wandb, self._folder = run, wandb, folder

    def log(self, row: Row) -> None:
        self._run.log(row)

    def finish(self, summary: dict[str, Any], status: str) -> None:
        numbers = {key: value for key, value in summary.items() if key != "spikes"}
        try:
            # W&B's summary turns NaN into nothing; `encode` gives it the word that stands in W&B's history.
            self._run.summary.update(encode({**numbers, "status": status}))
            with _staged_in(self._folder):
                if views := _views(self._wandb, self._run.id, summary):
                    self._run.log(views)
        finally:
            self._run.finish(exit_code=0 if status == "finished" else 1)


@contextlib.contextmanager
def _staged_in(folder: Path) -> Iterator[None]:
    """Tables wait for their upload in `folder`, not in the home folder; W&B takes that from the environment alone."""
    before = os.environ.get("WANDB_DATA_DIR")
    os.environ["WANDB_DATA_DIR"] = before or str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WANDB_DATA_DIR"]


def _views(wandb: Any, run_id: str, summary: Mapping[str, Any]) -> dict[str, Any]:
    """What is no single number as tables, each with a custom chart: the spikes, and the loss by position."""
    views: dict[str, Any] = {}

    def table(columns: list[str], rows: list[list[Any]]) -> Any:
        # JSON has no number for an infinite height, so a column may hold `encode`'s words beside numbers.
        return wandb.Table(columns=columns, data=encode(rows), allow_mixed_types=True)

    if spikes := summary.get("spikes"):
        replays = [f"python -m andrea_ablate.replay {run_id} {spike['start']}" for spike in spikes]
        rows = [[*spike.values(), replay] for spike, replay in zip(spikes, replays, strict=True)]
        views[SPIKES] = table([*spikes[0], "look inside"], rows)
        views[f"{SPIKES}_chart"] = wandb.plot.scatter(
            views[SPIKES], "start", "height", title="Loss spikes: height in nats by step"
        )
    bands = {match: summary[key] for key in summary if (match := _BAND.fullmatch(key))}
    if bands:
        rows = sorted([int(match[1]), int(match[2]), loss] for match, loss in bands.items())
        views[POSITIONS] = table(["length", "from", "loss"], rows)
        views[f"{POSITIONS}_chart"] = wandb.plot.line(
            views[POSITIONS], "from", "loss", stroke="length", title="Validation loss by position"
        )
    return views


def _wandb_files() -> dict[str, str]:
    """What W&B's settings files say (``wandb login --host``, ``wandb offline``): base_url, mode, api_key …"""
    folder = Path(os.environ.get("WANDB_CONFIG_DIR") or os.path.expanduser("~/.config/wandb"))
    parser = configparser.ConfigParser(interpolation=None)
    with contextlib.suppress(configparser.Error, OSError, UnicodeDecodeError):
        parser.read([folder / "settings", Path(os.environ.get("WANDB_DIR") or ".") / "wandb" / "settings"])
    return dict(parser["default"]) if parser.has_section("default") else {}


def _is_installed() -> bool:
    """Whether there is the package; a folder ./wandb with runs imports as an empty one, which has no file."""
    try:
        spec = importlib.util.find_spec("wandb")
    except ValueError:  # what stands in for it was never imported
        return False
    return spec is not None and spec.origin is not None


def _wandb_key(stored: Mapping[str, str]) -> str | None:
    """The API key that W&B would use, found without asking anybody; None if there is none."""
    if key := os.environ.get("WANDB_API_KEY"):
        return key
    url = os.environ.get("WANDB_BASE_URL") or stored.get("base_url")
    hosts = [urlsplit(url).netloc] if url else [*_HOSTS]
    files = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for file in files:
        with contextlib.suppress(OSError, netrc.NetrcParseError):
            entries = netrc.netrc(os.path.expanduser(file))
            for host in hosts:
                if (entry := entries.authenticators(host)) and entry[2]:
                    return entry[2]
    return stored.get("api_key")
