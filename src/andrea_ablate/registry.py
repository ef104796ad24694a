"""Names for parts: a registry maps the short name in a YAML file to the class that it means."""

from __future__ import annotations

import difflib
import inspect
import types
import typing
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, Generic, TypeVar

T = TypeVar("T")
_PLAIN = (bool, int, float, str)


class ConfigError(ValueError):
    """What a person asked for cannot be done; the message says what is allowed and the way out."""


def nearest(name: str, options: Iterable[str]) -> str:
    """Return ``; did you mean 'x'?`` for the closest of `options`, or an empty string when none is close."""
    found = difflib.get_close_matches(name, list(options), n=1, cutoff=0.5)
    return f"; did you mean '{found[0]}'?" if found else ""


@cache
def _parameters(item: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    return inspect.signature(item, eval_str=True).parameters


class Registry(Generic[T]):
    """Classes (or functions) of one kind by short name; the keyword-only signature of each is its schema.

    Args:
        kind: what is registered, as it appears in messages and in the configuration, e.g. ``norm``.
    """

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._items: dict[str, Callable[..., T]] = {}

    def register(self, name: str) -> Callable[[Any], Any]:
        """Class decorator that files the class under `name`."""

        def add(item: Any) -> Any:
            assert name not in self._items, f"{self.kind} '{name}' is registered twice"
            self._items[name] = item
            return item

        return add

    def names(self) -> list[str]:
        """All registered names, sorted."""
        return sorted(self._items)

    def get(self, name: str) -> Any:
        """Return the class called `name`; raise ConfigError with the nearest name otherwise."""
        if name not in self._items:
            raise ConfigError(
                f"{self.kind}: type='{name}' is not one of {', '.join(self.names())}{nearest(str(name), self._items)}"
            )
        return self._items[name]

    def build(self, node: Mapping[str, Any], **derived: Any) -> T:
        """Call the class named by ``node['type']`` with the node's other keys and the derived sizes it asks for.

        Raises: ConfigError as `check`.
        """
        item, given = self._bind(node, derived)
        result: T = item(**given)
        return result

    def ask(self, method: str, node: Mapping[str, Any], **derived: Any) -> Any:
        """Call a static method of the class named by ``node['type']`` with those options and derived sizes it takes."""
        call = getattr(self.get(node["type"]), method)
        given = {**node, **derived}
        return call(**{key: given[key] for key in _parameters(call) if key in given})

    def check(self, node: Mapping[str, Any], **derived: Any) -> None:
        """Refuse what `build` would refuse, without building.

        Raises: ConfigError for an unknown type, for a key that is unknown, missing, a derived size or of a wrong type.
        """
        self._bind(node, derived)

    def _bind(self, node: Mapping[str, Any], derived: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        item = self.get(node.get("type", ""))
        parameters = _parameters(item)
        asked = {name: p for name, p in parameters.items() if p.kind is p.KEYWORD_ONLY}
        options = {key: value for key, value in node.items() if key != "type"}
        for key in options:
            if key in derived:
                raise ConfigError(f"{self.kind}: {key}={options[key]} is derived from the model's size; remove the key")
            if key not in asked:
                allowed = sorted(asked.keys() - derived.keys())
                raise ConfigError(
                    f"{self.kind}: '{key}' is not an option of '{node['type']}' "
                    f"(options: {', '.join(allowed) or 'none'}){nearest(key, allowed)}"
                )
            self._check_type(key, options[key], asked[key].annotation)
        given = {**options, **{key: value for key, value in derived.items() if key in asked}}
        for key in asked:
            if key not in given and asked[key].default is inspect.Parameter.empty:
                raise ConfigError(f"{self.kind}: '{node['type']}' needs the option '{key}'")
        return item, given

    def _check_type(self, key: str, value: Any, hint: Any) -> None:
        union = typing.get_origin(hint) in (types.UnionType, typing.Union)
        kinds = typing.get_args(hint) if union else (hint,)
        wanted = [kind for kind in kinds if kind in _PLAIN]
        numeric = type(value) is int and float in wanted
        optional = value is None and type(None) in kinds
        if wanted and not numeric and not optional and type(value) not in wanted:
            names = " or ".join(kind.__name__ for kind in wanted)
            raise ConfigError(f"{self.kind}: {key}={value!r} must be of type {names}")
