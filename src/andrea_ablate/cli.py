"""The Hydra entry: one run or a multirun. Nothing here imports torch, so help and typing errors answer at once."""

from __future__ import annotations

import logging
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Sequence
from functools import lru_cache
from typing import NoReturn

import hydra
import yaml
from hydra._internal.utils import get_args_parser
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException, MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

from andrea_ablate.command import first_line
from andrea_ablate.composition import (
    ExperimentsFolder,
    choice_options,
    compose,
    declared_by,
    dotted_keys,
    group_names,
    resolved,
    resource_root,
    to_run_config,
    unknown_key,
)
from andrea_ablate.conduct import run_job, single_run
from andrea_ablate.config import RunConfig, sweep_config
from andrea_ablate.registry import ConfigError, nearest
from andrea_ablate.yamltext import load_yaml

# Folders that Hydra would make; records are kept by content instead, so setting these would do nothing.
UNUSED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir", "hydra.output_subdir")
# What brings an option of Hydra's own groups.
PLUGINS = {
    "hydra/launcher/joblib": "'andrea-ablate[joblib]'",
    "hydra/launcher/ray": "'andrea-ablate[ray]'",
    "hydra/launcher/submitit_local": "'andrea-ablate[slurm]'",
    "hydra/launcher/submitit_slurm": "'andrea-ablate[slurm]'",
    "hydra/sweeper/optuna": "hydra-optuna-sweeper",
}
log = logging.getLogger("andrea_ablate")
_SCALAR = re.compile(r"null|true|false|[-+]?[\d.]+(e[-+]?\d+)?", re.IGNORECASE)

USAGE = """\
python -m andrea_ablate [-m] [group=option …] [key=value …]

Train one run, or with -m every combination of comma-separated values, and compare what was trained:

  python -m andrea_ablate -m norm=pre,post ffn=gelu4x,swiglu seed=0,1,2
  python -m andrea_ablate experiments=norm_ffn        the sweep that experiments/norm_ffn.yaml describes

Groups and their options:"""
HELP_END = """
A list chooses several: 'stability=[qk_norm,z_loss]'. Single values by dotted key: optim.lr=1e-3 trainer.tokens=1e6
Every key with its value: --cfg job. Hydra's own flags: --hydra-help."""


def composed(overrides: Sequence[str]) -> RunConfig:
    """`composition.compose` for what a person typed: whatever Hydra refuses is a ConfigError of one sentence."""
    try:
        return compose(overrides)
    except Exception as error:
        if not _raised_by_hydra(error):
            raise
        raise ConfigError(explain(error)) from error


def job(cfg: DictConfig) -> float | None:
    """What Hydra calls for each job. Returns the validation loss, None where there is none, for optimising sweepers."""
    hydra_cfg = HydraConfig.get()
    overrides = OmegaConf.to_container(hydra_cfg.overrides.task, resolve=False)
    assert isinstance(overrides, list)
    if hydra_cfg.mode is not None and hydra_cfg.mode.name == "MULTIRUN":
        plain = resolved(cfg)
        settings, ours = sweep_config(plain), _check_sweeper(hydra_cfg.runtime.choices["hydra/sweeper"], plain["match"])
        run_cfg = to_run_config(plain, hydra_cfg.runtime.cwd, overrides)
        return run_job(run_cfg, overrides, fail_fast=ours and settings.fail_fast, budget=settings.machine)
    try:
        plain = resolved(cfg)
        settings = sweep_config(plain)  # one arm has nothing to match, but a wrong value is a mistake here as well
        if settings.lr_grid:
            raise ConfigError(f"lr_grid={settings.lr_grid} tunes the arms of a sweep; add -m")
        return single_run(to_run_config(plain, hydra_cfg.runtime.cwd, overrides), overrides, settings)
    except (ConfigError, OmegaConfBaseException, OSError) as error:
        # Hydra would print a preamble of its own before passing the error on.
        sys.exit(_say(explain(error)))


@lru_cache
def _check_sweeper(name: str, match: str) -> bool:
    """Whether the sweeper is ours; another one knows no plan, which is said once. Raises: ConfigError with match=."""
    if name != "ablate" and match != "none":
        raise ConfigError(
            f"hydra/sweeper={name} chooses its arms one by one, so match={match} has no first arm to hold them to; "
            "leave hydra/sweeper out, or use match=none"
        )
    if name != "ablate":
        log.warning(
            "hydra/sweeper=%s: there is no plan and no comparison, fail_fast is not heeded, and nothing checks in what "
            "the arms differ beyond what is swept",
            name,
        )
    return name == "ablate"


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line. Exit status: 0 all runs finished, 1 some did not, 2 wrong command, 130 interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    Plugins.instance().register(ExperimentsFolder)
    # With this set Hydra raises its errors instead of printing them, so that they can be said in one sentence here.
    os.environ["HYDRA_FULL_ERROR"] = "1"
    if any(flag in arguments for flag in ("--help", "-h")):
        print(help_text())
        sys.exit(0)
    saved = sys.argv
    try:
        _check_arguments(arguments)
        sys.argv = ["andrea_ablate", *_in_order(arguments)]
        hydra.main(version_base="1.3", config_path=str(resource_root() / "conf"), config_name="config")(job)()
    except KeyboardInterrupt as error:
        by = f" ({error})" if str(error) else ""
        _say(f"Interrupted{by}. Repeat the same command to go on from here.")
        sys.exit(130)
    except Exception as error:
        if not isinstance(error, (ConfigError, OSError)) and not _raised_by_hydra(error):
            raise
        sys.exit(_say(explain(error)))
    finally:
        sys.argv = saved
        GlobalHydra.instance().clear()
    sys.exit(0)


def help_text() -> str:
    """Usage, and every group with its options, read from the YAML files."""
    root = resource_root()
    groups = {folder.name: folder for folder in sorted((root / "conf").iterdir()) if folder.is_dir()}
    groups["experiments"] = root / "experiments"
    named = {name: ", ".join(sorted(p.stem for p in path.glob("*.yaml"))) for name, path in groups.items()}
    listed = [textwrap.fill(f"  {name:<12} {text}", 120, subsequent_indent=" " * 15) for name, text in named.items()]
    return "\n".join((USAGE, *listed, HELP_END))


def _say(text: str) -> int:
    print(text, file=sys.stderr)
    return 2


def _check_arguments(arguments: Sequence[str]) -> None:
    """What Hydra would take without a word, or refuse without naming it."""
    for argument in arguments:
        key, _, value = argument.lstrip("+").partition("=")
        if key in UNUSED:
            raise ConfigError(f"'{argument}': {key} is not used, runs are kept by content; set paths.runs=FOLDER")
        if key not in group_names():
            continue
        if value.startswith("{") or any(_SCALAR.fullmatch(part) for part in re.split(r"[\[\],\s]+", value)):
            raise ConfigError(f"'{argument}': {key} takes the name of an option; --help lists them")
        if value.startswith("[") and key != "stability":
            raise ConfigError(f"'{argument}': {key} takes one option; to compare several, sweep: -m {key}=a,b")


def _in_order(arguments: Sequence[str]) -> list[str]:
    """Overrides, then flags: Hydra's parser wants the overrides in one piece, and people put -m anywhere."""
    parser = get_args_parser()

    def refuse(message: str) -> NoReturn:
        raise ConfigError(f"{message}; --hydra-help lists the flags")

    parser.error = refuse  # type: ignore[method-assign]
    namespace, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        flags = [flag for action in parser._actions for flag in action.option_strings]
        raise ConfigError(f"'{unknown[0]}' is not a flag{nearest(unknown[0], flags) or '; --hydra-help lists them'}")
    overrides: list[str] = list(namespace.overrides)
    rest = list(arguments)
    for override in overrides:
        rest.remove(override)
    return rest if namespace.hydra_help else [*overrides, *rest]


def _raised_by_hydra(error: BaseException) -> bool:
    """Whether Hydra, OmegaConf or the YAML reader refused something, with whatever class of exception."""
    if isinstance(error, (HydraException, OmegaConfBaseException)):
        return True
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return str(frame.f_globals["__name__"]).split(".")[0] in ("hydra", "omegaconf", "yaml", "antlr4")


# ---------------------------------------------------------------------------------------------------------------------
# One sentence for a person: what was asked, what is allowed, the way out. One function per kind of Hydra error.


def explain(error: BaseException) -> str:
    """One sentence for `error`; its own text where that is one."""
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        return _no_such_option(error, error.missing_cfg_file)
    if isinstance(error, OverrideParseException):
        return _unreadable(error)
    if isinstance(error, MissingMandatoryValue):
        return f"{error.full_key} has no value yet; give {error.full_key}=…"
    if isinstance(error, ConfigCompositionException):
        return _not_composed(error)
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem_mark.name}, line {error.problem_mark.line + 1}: {error.problem}"
    if isinstance(error, OmegaConfBaseException) and error.full_key:
        return f"{error.full_key}: {first_line(error)}"
    return first_line(error)


def _no_such_option(error: MissingConfigException, asked: str) -> str:
    group, _, option = asked.rpartition("/")
    if not group:
        return f"there is no configuration '{option}'; leave --config-name out"
    options = list(error.options or ()) or [known.name for known in choice_options() if known.group == group]
    text = f"{group}={option}: '{option}' is not one of {', '.join(options)}"
    if asked in PLUGINS:
        return f"{text}; it comes with `pip install {PLUGINS[asked]}`"
    return f"{text}{nearest(option, options)}"


def _unreadable(error: OverrideParseException) -> str:
    key, equals, value = error.override.partition("=")
    if not equals:
        return f"'{key}' has no value; write {key}=VALUE"
    return f"'{error.override}' cannot be read; a value with special characters needs quotes, as in {key}='\"{value}\"'"


def _not_composed(error: ConfigCompositionException) -> str:
    text = first_line(error)
    # Hydra names the key in the text only.
    unknown = re.search(r"Could not (?:override|delete from config\.) '([^']*)'|Override (\S*) looks like", text)
    if unknown:
        return text[: unknown.start()] + _no_such_key(unknown[1] or unknown[2])
    exists = re.match(r"Could not append to config\. An item is already at '(.*)'", text)
    twice = re.match(r"Multiple values for (\S+)\.", text)
    if exists or twice:
        key = (exists or twice)[1]  # type: ignore[index]
        return f"'{key}' has a value already; write {key}=… without the +"
    if text.startswith(("Ambiguous value", "Sweep parameters")):
        asked = text.split("'")[1]
        return f"'{asked}' has several values: add -m to sweep; a list is written [a,b], a text with a comma '\"a,b\"'"
    cause = error.__cause__
    return f"{text}: {explain(cause)}" if text and cause else explain(cause) if cause else text


def _no_such_key(key: str) -> str:
    if not key:
        return "a value without a key; write key=VALUE"
    name, at, package = key.partition("@")
    if at:
        return f"'{key}': an option goes where its group says; write {name}=… without @{package.partition('=')[0]}"
    return unknown_key(key, _all_keys())


def _all_keys() -> list[str]:
    """Groups and dotted keys of the default configuration."""
    top = load_yaml((resource_root() / "conf" / "config.yaml").read_text(encoding="utf-8"))
    chosen = [pair for entry in top.pop("defaults") if isinstance(entry, dict) for pair in entry.items()]
    found = {*group_names(), *dotted_keys(top), *(option.node for option in choice_options())}
    return sorted(found.union(*(declared_by(group, [name]) for group, name in chosen if isinstance(name, str))))
