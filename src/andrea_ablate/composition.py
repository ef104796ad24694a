"""From the composed Hydra configuration to a RunConfig: finding the YAML files, checking keys, anchoring paths."""

from __future__ import annotations

import math
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from fractions import Fraction
from functools import lru_cache
from pathlib import Path
from typing import Any, cast

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import DictConfig, OmegaConf

from andrea_ablate.config import SWEEP_KEYS, DataConfig, RunConfig, run_config
from andrea_ablate.confounds import flat
from andrea_ablate.registry import ConfigError, nearest
from andrea_ablate.yamltext import load_yaml

PATH_KEYS = {"data": ("path", "val_path"), "data.tokenizer": ("path",), "paths": ("runs", "sweeps", "cache")}


def resource_root() -> Path:
    """The folder that holds ``conf/`` and ``experiments/``: the package itself when installed, else the checkout."""
    package = Path(__file__).parent
    return package if (package / "conf").is_dir() else package.parents[1]


class ExperimentsFolder(SearchPathPlugin):
    """Makes the top-level ``experiments/`` a config group, beside those in ``conf/``."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.append("andrea_ablate", f"file://{resource_root()}")


def compose(overrides: Sequence[str]) -> RunConfig:
    """The configuration of one run from overrides as on the command line, for Python code.

    Raises: ConfigError, and Hydra's own errors for an override that cannot be read or names no option.
    """
    Plugins.instance().register(ExperimentsFolder)
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(resource_root() / "conf"), version_base="1.3"):
        return to_run_config(resolved(hydra.compose("config", list(overrides))), os.getcwd(), overrides)


def resolved(cfg: DictConfig) -> dict[str, Any]:
    """A composed configuration in plain containers, references followed; a missing value raises as in OmegaConf."""
    return cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=True, throw_on_missing=True))


def to_run_config(plain: dict[str, Any], start_folder: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Check and convert one resolved configuration (without its ``hydra`` node), which it alters.

    Args:
        start_folder: where the user started the command; relative paths begin there, whatever folder we are in now.
        overrides: what the user gave, ``key=value``.
    Raises: ConfigError for unknown keys (also forced ones), wrong types, missing values.
    """
    forget_replaced(plain, overrides)
    check_choices(plain)
    for node, keys in PATH_KEYS.items():
        section = _select(plain, node)
        for key in keys if isinstance(section, dict) else ():
            if section.get(key) == "":
                raise ConfigError(f"{node}.{key}= is empty; give a path")
            if section.get(key) is not None:
                section[key] = os.path.abspath(os.path.join(start_folder, os.path.expanduser(str(section[key]))))
    model, tokenizer = plain["model"], plain["data"]["tokenizer"]
    if tokenizer["vocab_size"] is None:
        from andrea_ablate.data.tokenizers import vocab_size  # imports torch, so only where it is needed

        tokenizer["vocab_size"] = vocab_size(tokenizer)
        if model.get("vocab_size", 0) is None:  # it follows the tokenizer's
            model["vocab_size"] = tokenizer["vocab_size"]
    resolve_proportions(model)
    return run_config({key: value for key, value in plain.items() if key not in SWEEP_KEYS})


def references(cfg: DictConfig) -> dict[str, tuple[str, ...]]:
    """Dotted keys whose value is that of other keys, ``${data.seq_len}``, with those."""
    raw = cast(dict[str, Any], OmegaConf.to_container(cfg, resolve=False))
    named = {key: tuple(re.findall(r"\$\{([\w.]+)\}", str(value))) for key, value in flat(raw)}
    return {key: sources for key, sources in named.items() if sources}


def forget_replaced(plain: dict[str, Any], overrides: Iterable[str]) -> None:
    """Take a preset's values back where the user chose another option: it comes with its own values, unless given.

    Hydra merges a preset's values over whichever option is chosen: ``preset=llama3 ffn=gelu4x`` would have its ratio.
    """
    given = dict(override.lstrip("+~").partition("=")[::2] for override in overrides)
    if given.get("preset", "null") == "null":
        return
    path = resource_root() / "conf" / "preset" / f"{given['preset']}.yaml"
    values: dict[str, Any] = load_yaml(path.read_text(encoding="utf-8")).get("model", {})
    for option in choice_options():
        node = option.node.removeprefix("model.")
        if given.get(option.group) == option.name and node in values:
            for key in values[node].keys() - {key.removeprefix(f"{option.node}.") for key in given}:
                if key in option.content:
                    plain["model"][node][key] = option.content[key]
                else:
                    del plain["model"][node][key]
    if "stability" in given:
        kept = re.findall(r"\w+", given["stability"])
        for trick in values.get("stability", {}):
            if trick not in kept and not any(key.startswith(f"model.stability.{trick}.") for key in given):
                del plain["model"]["stability"][trick]


def resolve_proportions(model: dict[str, Any]) -> None:
    """Turn what is written as a fraction of a size, ``1/4``, into a whole number; a preset fits every size so.

    Raises: ConfigError for a fraction that is not above 0, or above 1.
    """
    attn = model["attn"]
    for key, size in (("n_kv_heads", "n_heads"), ("window", "max_seq_len"), ("q_lora_rank", "d_model")):
        value, whole = attn.get(key), model.get(size)
        if not isinstance(value, str) or "/" not in value or not isinstance(whole, int) or whole < 1:
            continue
        try:
            part = Fraction(value)
        except (ValueError, ZeroDivisionError):
            part = Fraction(0)
        if not 0 < part <= 1:
            raise ConfigError(f"model.attn.{key}={value} must be a whole number or a fraction of model.{size}, as 1/4")
        number = max(1, math.floor(part * whole))
        if key == "n_kv_heads":  # it must divide the heads: the next number below that does
            number = max(n for n in range(1, number + 1) if whole % n == 0)
        attn[key] = number


@dataclass(frozen=True)
class Option:
    """One YAML file of a group, such as ``norm=post``: where its keys go, and the keys."""

    group: str
    name: str
    node: str
    content: Mapping[str, Any]

    def __str__(self) -> str:
        return f"{self.group}=[{self.name}]" if self.group == "stability" else f"{self.group}={self.name}"


@lru_cache
def group_names() -> frozenset[str]:
    """Every group, ``norm``, ``size`` …; what else stands before a ``=`` is the dotted key of a value."""
    return frozenset({path.parent.name for path in (resource_root() / "conf").glob("*/*.yaml")} | {"experiments"})


@lru_cache
def choice_options() -> tuple[Option, ...]:
    """Every option of a group that fills one node of the configuration."""
    found = []
    for path in sorted((resource_root() / "conf").glob("*/*.yaml")):
        text = path.read_text(encoding="utf-8")
        node = text.split()[2] if text.startswith("# @package") else path.parent.name
        content = load_yaml(text) or {}
        content.pop("defaults", None)
        if node != "_global_":
            found.append(Option(path.parent.name, path.stem, node, content))
    return tuple(found)


@lru_cache
def choice_keys() -> dict[str, dict[str | None, set[str]]]:
    """Per choice node (``model.norm``, ``optim`` …), per ``type``, the keys that its YAML options define."""
    found: dict[str, dict[str | None, set[str]]] = defaultdict(lambda: defaultdict(set))
    for option in choice_options():
        found[option.node][option.content.get("type")] |= set(option.content)
    # norm= and block= write to one node, so each sees the other's keys.
    block = found["model.block"]
    together = set().union(*block.values())
    found["model.block"] = {kind: together for kind in block if kind}
    return dict(found)


def declared_by(group: str, names: Iterable[str]) -> list[str]:
    """The dotted keys that these options of a group set, with those of the options that they choose in turn."""
    if group not in group_names():
        return []
    found = [
        f"{option.node}.{key}"
        for option in choice_options()
        if option.group == group and option.name in names
        for key in option.content
    ]
    for name in names:
        path = resource_root() / "conf" / group / f"{name}.yaml"
        text = path.read_text(encoding="utf-8") if path.is_file() else ""
        if text.startswith("# @package _global_"):
            content = load_yaml(text)
            for chosen in content.pop("defaults", []):
                for other, option in chosen.items():
                    found += declared_by(other.removeprefix("override ").lstrip("/"), [option])
            found += [key for key, _ in flat(content)]
    return found


def check_choices(plain: Mapping[str, Any]) -> None:
    """Refuse a choice node's type or key that no YAML option of its group defines, before torch is imported."""
    for name in ("model", "data", "trainer", "paths"):
        if not isinstance(plain.get(name), Mapping):
            raise ConfigError(f"'{name}' is a section with keys; set one of them, as in {name}.KEY=VALUE")
    shared = {f.name for f in fields(DataConfig)} - {"options"}
    for node, by_type in choice_keys().items():
        section = _select(plain, node)
        if section is None and node.startswith("model.stability."):
            continue
        if not isinstance(section, Mapping):
            raise ConfigError(f"{node}={section} is not a section with keys; {_choose(node)}")
        kind = section.get("type")
        if kind not in list(by_type):  # what is not hashable is not a name either
            if "type" not in section:
                raise ConfigError(f"'{node}.type' is missing; {_choose(node, 'type')}")
            kinds = [str(name) for name in by_type]
            raise ConfigError(f"{node}.type={kind} is not one of {', '.join(kinds)}{nearest(str(kind), kinds)}")
        known = by_type[kind] | (shared if node == "data" else set())
        for key in section:
            if key not in known:
                raise ConfigError(unknown_key(f"{node}.{key}", [f"{node}.{name}" for name in sorted(known)]))
        for key in sorted(by_type[kind]):
            if key not in section:
                raise ConfigError(f"'{node}.{key}' is missing; {_choose(node, key)}")
    tricks = [option.name for option in choice_options() if option.group == "stability"]
    chosen = _select(plain, "model.stability")
    for trick in chosen if isinstance(chosen, Mapping) else ():
        if trick not in tricks:
            raise ConfigError(f"stability={trick} is not one of {', '.join(tricks)}{nearest(trick, tricks)}")


def unknown_key(key: str, known: Iterable[str]) -> str:
    """One sentence for a key that nobody reads: the options that would read it, or the nearest of the `known` names."""
    owners = [
        str(option) for option in choice_options() if key in dotted_keys(option.content, prefix=f"{option.node}.")
    ]
    if owners:
        return f"'{key}' belongs to {' or '.join(owners)}, which is not chosen"
    known = list(known)
    return f"'{key}' is not a setting or group{nearest(key, known) or nearest(key.rsplit('.')[-1], known)}"


def _choose(node: str, key: str | None = None) -> str:
    options = [option for option in choice_options() if option.node == node and (key is None or key in option.content)]
    return f"choose {' or '.join(map(str, options))}"


def _select(plain: Any, node: str) -> Any:
    for part in node.split("."):
        plain = plain.get(part) if isinstance(plain, Mapping) else None
    return plain


def dotted_keys(node: Any, prefix: str = "") -> Iterator[str]:
    """Every dotted key of a nested mapping."""
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield f"{prefix}{key}"
            yield from dotted_keys(value, f"{prefix}{key}.")
