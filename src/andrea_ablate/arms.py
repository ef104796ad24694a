"""The configuration of every combination of a sweep's values, without composing every combination.

Composing through Hydra takes 0.2 s. Where factors set no key in common, a combination is the first one with the changes
that each of its values makes on its own, so that only those are composed: 20 options instead of 250 arms.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any, cast

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

from andrea_ablate.composition import declared_by, group_names, references, resolved
from andrea_ablate.confounds import flat, within

Path = tuple[str, ...]
Change = tuple[Path, Any]
Compose = Callable[[list[str]], DictConfig]
_PARSER = OverridesParser.create()
MISSING = "???"  # OmegaConf's word for a value that is still to be given


def values_of(override: Override) -> list[str]:
    """``key=value`` for every value that an override of the command line gives to its key."""
    key = override.get_key_element()
    if override.is_sweep_override():
        return [f"{key}={value}" for value in override.sweep_string_iterator()]
    return [f"{key}={override.get_value_element_as_str()}"]


class Arms:
    """Every combination of some overrides' values.

    Args:
        choices: per key, its overrides ``key=value``; those with one value hold for every combination.
        compose: a list of overrides, one for each key -> the composed configuration.

    Attributes: ``references``, see `composition.references`, of every configuration that was composed.
    """

    def __init__(self, choices: Mapping[str, Sequence[str]], compose: Compose) -> None:
        self.choices, self._compose = choices, compose
        self._known: dict[Path, dict[str, Any]] = {}
        self.first = {key: values[0] for key, values in choices.items()}
        self._first_cfg = compose(list(self.first.values()))
        self.references: dict[str, tuple[str, ...]] = {}
        self._learn(self._first_cfg)
        self._first = resolved(self._first_cfg)
        varied = [key for key, values in choices.items() if len(set(values)) > 1]
        self._changes: dict[Path, dict[Path, list[Change]]] = {}
        known = None
        while known != self.references:  # an option may refer to keys that other factors set
            known = dict(self.references)
            sets = {key: self._keys_set_by(key) for key in varied}
            self._changes.clear()
            for key in varied:
                self._add((key,), sets)

    def points(self) -> list[dict[str, str]]:
        """Every combination of the values, key -> override, in the order of the product."""
        return [dict(zip(self.choices, part, strict=True)) for part in product(*self.choices.values())]

    def at(self, point: Mapping[str, str]) -> tuple[list[str], dict[str, Any]]:
        """The overrides of a combination and its resolved configuration, which the caller may change.

        Args:
            point: key -> one of its overrides; the first one where a key is left out.
        """
        given = {**self.first, **point}
        plain: dict[str, Any] = _copied(self._first)
        for factors, changes in self._changes.items():
            for path, value in changes[tuple(given[key] for key in factors)]:
                _put(plain, path, value)
        return list(given.values()), plain

    def _add(self, factors: Path, sets: dict[str, set[str]]) -> None:
        """Compose the values of `factors`, together with those of every factor that touches the same keys."""
        changes: dict[Path, list[Change]] = {}
        touched = set().union(*(sets[key] for key in factors))
        for values in product(*(dict.fromkeys(self.choices[key]) for key in factors)):
            plain = self._composed(dict(zip(factors, values, strict=True)))
            changes[values] = list(_differences(self._first, plain))
            touched |= {".".join(path) for path, _ in changes[values]}
        sets[factors[0]] = touched
        for others in list(self._changes):
            if any(within(a, b) or within(b, a) for a in touched for b in sets[others[0]]):
                del self._changes[others]
                self._add((*others, *factors), sets)
                return
        self._changes[factors] = changes

    def _composed(self, given: Mapping[str, str]) -> dict[str, Any]:
        if all(self.first[key] == value for key, value in given.items()):
            return self._first
        if len(given) == 1 and (plain := self._with_value(*given.items())) is not None:
            return plain
        overrides = tuple({**self.first, **given}.values())
        if overrides not in self._known:
            cfg = self._compose(list(overrides))
            self._learn(cfg)
            self._known[overrides] = resolved(cfg)
        return self._known[overrides]

    def _learn(self, cfg: DictConfig) -> None:
        for key, sources in references(cfg).items():
            self.references[key] = tuple(dict.fromkeys([*self.references.get(key, ()), *sources]))

    def _with_value(self, given: tuple[str, str]) -> dict[str, Any] | None:
        """The first configuration with another number or text, or None for what Hydra must compose."""
        key, override = given
        if key in group_names() or key[0] in "+~" or "@" in key or "${" in override:
            return None
        value = _value_of(override)
        readers = self._readers(key)
        if isinstance(value, (dict, list)) or value == MISSING or readers is None:
            return None
        plain: dict[str, Any] = _copied(self._first)
        for path in (key, *readers):
            _put(plain, tuple(path.split(".")), value)
        return plain

    @cache  # noqa: B019 (it lives as long as the sweep)
    def _readers(self, key: str) -> list[str] | None:
        """The keys whose value is that of `key`, directly or through others; None where one makes more of it."""
        raw = dict(flat(cast(dict[str, Any], OmegaConf.to_container(self._first_cfg, resolve=False))))
        if key not in raw:
            return None
        found = [key]
        for source in found:  # it grows meanwhile
            for reader, text in raw.items():
                if isinstance(text, (str, list)) and f"${{{source}" in str(text):
                    if text != f"${{{source}}}":
                        return None
                    found.append(reader)
        return found[1:]

    def _keys_set_by(self, key: str) -> set[str]:
        """Dotted keys that the values of a factor set, in files too, and the keys that refer to those."""
        name = key.lstrip("+~").partition("@")[0]
        found = {name, *declared_by(name, re.findall(r"\w+", " ".join(self.choices[key])))}
        while True:
            more = {
                reader
                for reader, sources in self.references.items()
                if any(within(source, top) or within(top, source) for source in sources for top in found)
            }
            if more <= found:
                return found
            found |= more


def _differences(old: Mapping[str, Any], new: Mapping[str, Any], where: Path = ()) -> Iterator[Change]:
    """What turns `old` into `new`; a section whose keys or their order differ changes as a whole."""
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict) and list(value) == list(before):
            yield from _differences(before, value, (*where, key))
        elif repr(value) != repr(before):  # 1 and 1.0 are two values
            yield (*where, key), value


def _value_of(override: str) -> Any:
    """What Hydra reads in ``key=value``; of a plain number without asking its parser, which takes a millisecond."""
    text = override.partition("=")[2]
    return int(text) if re.fullmatch("0|[1-9][0-9]*", text) else _PARSER.parse_override(override).value()


def _put(plain: dict[str, Any], path: Path, value: Any) -> None:
    for key in path[:-1]:
        plain = plain[key]
    plain[path[-1]] = _copied(value)


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(item) for key, item in value.items()}
    return [_copied(item) for item in value] if isinstance(value, list) else value
