"""The pieces that a family's configuration map is made of: each reads keys of config.json and writes them back.

Our side is *flat*: dotted keys of the model's configuration (``norm.eps``) with every size derived, see `flatten`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from andrea_ablate.composition import choice_options, resource_root
from andrea_ablate.config import ModelConfig, from_mapping, layer_kinds, model_dims
from andrea_ablate.init import INITS
from andrea_ablate.registry import ConfigError
from andrea_ablate.yamltext import load_yaml

Flat = dict[str, Any]
NODES = ("block", "norm", "ffn", "pos", "scaling", "attn", "init")
# What a published configuration says nothing of, and what no logit depends on in evaluation.
INERT = ("init.", "dropout", "vocab_multiple", "attn.backend", "stability.z_loss", "stability.skip_step")
_MISSING: Any = object()


class Seen(dict[str, Any]):
    """A mapping that remembers which of its keys were read.

    Args:
        missing: what is said of a key that is needed and not there.
    """

    def __init__(self, content: Mapping[str, Any], missing: str) -> None:
        super().__init__(content)
        self.missing = missing
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        if key not in self:
            raise ConfigError(self.missing.format(key))
        return super().__getitem__(key)

    def get(self, key: str, default: Any = None) -> Any:
        self.read.add(key)
        return super().get(key, default)


class Part:
    """One piece of a map."""

    def read(self, hf: Seen) -> Flat:
        """Our keys from theirs. Raises ConfigError for a value that has no choice here."""
        return {}

    def write(self, ours: Seen) -> dict[str, Any]:
        """Their keys from ours. Raises ConfigError for a value that the family cannot express."""
        return {}


@dataclass(frozen=True)
class Key(Part):
    """One key for one key.

    Args:
        values: theirs to ours, where the values differ or only these are allowed; several of theirs may mean one of
            ours, the first is written.
        default: what theirs is when it is missing.
    """

    hf: str
    ours: str
    values: Mapping[Any, Any] | None = None
    default: Any = _MISSING

    def read(self, hf: Seen) -> Flat:
        value = hf[self.hf] if self.default is _MISSING else hf.get(self.hf, self.default)
        if self.values is None:
            return {self.ours: value}
        if value not in self.values:
            known = ", ".join(map(str, self.values))
            raise ConfigError(f"{self.hf}={value} has no choice here, only {known}")
        return {self.ours: self.values[value]}

    def write(self, ours: Seen) -> dict[str, Any]:
        value = ours[self.ours]
        if self.values is None:
            return {self.hf: value}
        for theirs, known in self.values.items():
            if known == value:
                return {self.hf: theirs}
        raise ConfigError(_only(self.ours, value, self.values.values()))


@dataclass(frozen=True)
class Factor(Part):
    """A multiplier, or its inverse, for the one number of a stability trick; without the trick it is 1."""

    hf: str
    trick: str
    inverse: bool = False

    def read(self, hf: Seen) -> Flat:
        value = float(hf.get(self.hf, 1.0))
        return {} if value == 1 else {f"stability.{self.trick}.factor": 1 / value if self.inverse else value}

    def write(self, ours: Seen) -> dict[str, Any]:
        value = ours.get(f"stability.{self.trick}.factor", 1.0)
        return {self.hf: 1 / value if self.inverse else value}


@dataclass(frozen=True)
class Cap(Part):
    """A soft-cap; null without."""

    hf: str
    trick: str

    def read(self, hf: Seen) -> Flat:
        value = hf.get(self.hf)
        return {} if value is None else {f"stability.{self.trick}.cap": float(value)}

    def write(self, ours: Seen) -> dict[str, Any]:
        return {self.hf: ours.get(f"stability.{self.trick}.cap")}


@dataclass(frozen=True)
class QKLayerNorm(Part):
    """A switch for stability=qk_layernorm, whose eps is that of the other norms.

    Args:
        hf, eps: the switch and the key of eps. bias, gains: the trick's options in this family.
    """

    hf: str
    eps: str
    bias: bool
    gains: str

    def read(self, hf: Seen) -> Flat:
        if not hf.get(self.hf, False):
            return {}
        trick = {"eps": hf[self.eps], "bias": self.bias, "gains": self.gains}
        return {f"stability.qk_layernorm.{key}": value for key, value in trick.items()}

    def write(self, ours: Seen) -> dict[str, Any]:
        eps = ours.get("stability.qk_layernorm.eps")
        if eps is None:
            return {self.hf: False}
        Fixed({"stability.qk_layernorm.bias": self.bias, "stability.qk_layernorm.gains": self.gains}).write(ours)
        return {self.hf: True, self.eps: eps}


@dataclass(frozen=True)
class Scale(Part):
    """The factor on the attention scores, or the number whose inverse root it is."""

    hf: str
    inverse_root: bool = False

    def read(self, hf: Seen) -> Flat:
        value = hf[self.hf]
        return {"attn.scale": value**-0.5 if self.inverse_root else value}

    def write(self, ours: Seen) -> dict[str, Any]:
        given, d_head = ours["attn.scale"], ours["d_head"]
        if self.inverse_root:
            return {self.hf: d_head if given is None else round(given**-2)}
        return {self.hf: d_head**-0.5 if given is None else given}


class Fixed(Part):
    """Choices that the family always makes. A tuple gives others that are the same function in full precision."""

    def __init__(self, choices: Mapping[str, Any]) -> None:
        self.choices = choices

    def read(self, hf: Seen) -> Flat:
        return {key: value[0] if isinstance(value, tuple) else value for key, value in self.choices.items()}

    def write(self, ours: Seen) -> dict[str, Any]:
        for key, value in self.choices.items():
            allowed = value if isinstance(value, tuple) else (value,)
            if ours[key] not in allowed:
                raise ConfigError(_only(key, ours[key], allowed[:1]))
        return {}


class Only(Part):
    """Keys of theirs that change the function and have one value that we can express, which null stands for, too."""

    def __init__(self, keys: Mapping[str, Any]) -> None:
        self.keys = keys

    def read(self, hf: Seen) -> Flat:
        for key, value in self.keys.items():
            if hf.get(key) not in (None, value):
                raise ConfigError(f"{key}={hf[key]} has no choice here, only {value}")
        return {}

    def write(self, ours: Seen) -> dict[str, Any]:
        return dict(self.keys)


def _only(key: str, value: Any, allowed: Iterable[Any]) -> str:
    return f"model.{key}={value} cannot be expressed, only {', '.join(dict.fromkeys(map(str, allowed)))}"


# ---------------------------------------------------------------------------------------------------------------------
# rope, and layers that differ

_SCALINGS = {"default": "none", "linear": "linear", "dynamic": "dynamic_ntk", "yarn": "yarn", "longrope": "longrope"}
_SCALINGS |= {"llama3": "llama3", "su": "longrope"}
_OPTIONS = {"original_max_position_embeddings": "original_len"}


@dataclass(frozen=True)
class Rope(Part):
    """Base, turned part of a head and scaling: ``rope_parameters``, or the older keys that it replaced.

    Args:
        pairing: of the family. theta, fraction: the base and the turned part where none is given.
        theta_key, fraction_key, local_theta_key: older keys of the same, and of the base in sliding layers.
        nested: whether sliding and full layers have parameters of their own; a scaling is then that of full ones.
        pairing_key: key that is true for neighbours, false for halves; `pairing` where it is missing.
    """

    pairing: str = "half"
    theta: float = 10000.0
    fraction: float = 1.0
    theta_key: str = "rope_theta"
    fraction_key: str = "partial_rotary_factor"
    local_theta_key: str | None = None
    nested: bool = False
    pairing_key: str | None = None

    def read(self, hf: Seen) -> Flat:
        pairing = self.pairing
        if self.pairing_key is not None:
            pairing = "interleaved" if hf.get(self.pairing_key, pairing == "interleaved") else "half"
        older = {"rope_theta": hf.get(self.theta_key), "partial_rotary_factor": hf.get(self.fraction_key)}
        given = hf.get("rope_parameters") or {**older, **(hf.get("rope_scaling") or {})}
        local = given.get("sliding_attention") or {}
        if "full_attention" in given:
            given = given["full_attention"]
        elif self.local_theta_key is not None:
            local = {"rope_theta": hf.get(self.local_theta_key)}
        theta = _number(given.get("rope_theta"), self.theta)
        local_theta = _number(local.get("rope_theta"), theta)
        kind = given.get("rope_type", given.get("type", "default"))
        if kind not in _SCALINGS:
            raise ConfigError(f"rope_type={kind} has no choice here, only {', '.join(_SCALINGS)}")
        flat: Flat = {
            "pos.type": "rope",
            "pos.pairing": pairing,
            "pos.theta": theta,
            "pos.local_theta": None if local_theta == theta else local_theta,
            "pos.rotary_fraction": _number(given.get("partial_rotary_factor"), self.fraction),
            "pos.scaled": "global" if self.nested and kind != "default" else "all",
            "scaling.type": _SCALINGS[kind],
        }
        for key, value in given.items():
            if key in ("rope_theta", "partial_rotary_factor", "rope_type", "type") or value is None:
                continue
            name = f"scaling.{_OPTIONS.get(key, key)}"
            if kind == "dynamic" and name == "scaling.original_len":
                continue  # theirs reads max_position_embeddings instead
            if name not in defaults("scaling", _SCALINGS[kind]):
                raise ConfigError(f"{key}={value} of rope has no choice here")
            flat[name] = value
        if local.get("rope_type", "default") != "default":
            raise ConfigError(f"rope_type={local['rope_type']} in sliding layers has no choice here, only default")
        return flat

    def write(self, ours: Seen) -> dict[str, Any]:
        pairing = ours.get("pos.pairing")
        Fixed({"pos.type": "rope", "pos.pairing": pairing if self.pairing_key else self.pairing}).write(ours)
        switch = {self.pairing_key: pairing == "interleaved"} if self.pairing_key else {}
        kind, scaled, theta = ours["scaling.type"], ours["pos.scaled"], ours["pos.theta"]
        if kind not in _SCALINGS.values():
            raise ConfigError(_only("scaling.type", kind, _SCALINGS.values()))
        if kind != "none" and scaled != ("global" if self.nested else "all"):
            raise ConfigError(_only("pos.scaled", scaled, ["global" if self.nested else "all"]))
        full = {"rope_type": next(hf for hf, name in _SCALINGS.items() if name == kind), "rope_theta": theta}
        full["partial_rotary_factor"] = ours["pos.rotary_fraction"]
        theirs = {name: key for key, name in _OPTIONS.items()}
        for key in defaults("scaling", kind).keys() - {"scaling.type"}:
            name, value = key.removeprefix("scaling."), ours[key]
            if name == "original_len":
                value = ours["max_seq_len"] if value is None else value
                if kind == "dynamic_ntk":
                    Fixed({key: (None, ours["max_seq_len"])}).write(ours)
                    continue
            if value is not None:
                full[theirs.get(name, name)] = value
        local_theta = theta if ours["pos.local_theta"] is None else ours["pos.local_theta"]
        if self.nested:
            local = {"rope_type": "default", "rope_theta": local_theta}
            return {"rope_parameters": {"full_attention": full, "sliding_attention": local}, **switch}
        if local_theta != theta:
            raise ConfigError(_only("pos.local_theta", local_theta, [None]))
        return {"rope_parameters": full, **switch}


def _number(value: Any, default: float) -> float:
    return default if value is None else float(value)


@dataclass(frozen=True)
class LayerTypes(Part):
    """``layer_types``: sliding layers are local, full ones global.

    Args:
        pattern: of the layers where none is given. listed: whether the family has the list.
        switch: key that says whether there is a window at all, and the one that says how many layers have none.
    """

    pattern: tuple[str, ...] = ("local",)
    switch: tuple[str, str] | None = None
    listed: bool = True

    def read(self, hf: Seen) -> Flat:
        n, window = hf["num_hidden_layers"], hf.get("sliding_window")
        every = hf.get("sliding_window_pattern")  # older: every so many layers, one without a window
        pattern = (*["local"] * (every - 1), "global") if every else self.pattern
        kinds = [pattern[i % len(pattern)] for i in range(n)]
        if self.switch:
            windowless = hf.get(self.switch[1], n)
            kinds = ["local" if i >= windowless else "global" for i in range(n)]
            window = window if hf.get(self.switch[0]) else None
        if hf.get("layer_types"):
            kinds = ["local" if kind == "sliding_attention" else "global" for kind in hf["layer_types"]]
        return {"kinds": kinds, "attn.window": window if "local" in kinds else None}

    def write(self, ours: Seen) -> dict[str, Any]:
        window, kinds = ours["attn.window"], ours["kinds"]
        written = {"sliding_window": window}
        types = ["sliding_attention" if kind == "local" and window else "full_attention" for kind in kinds]
        if self.switch:
            written |= {self.switch[0]: window is not None, self.switch[1]: types.count("full_attention")}
        if not self.listed:
            Fixed({"kinds": ["local"] * len(kinds)}).write(ours)
            return written
        return {**written, "layer_types": types}


@dataclass(frozen=True)
class NoRopeLayers(Part):
    """SmolLM3: 1 for a layer with rotation, which is local here, 0 for one without."""

    def read(self, hf: Seen) -> Flat:
        n, every = hf["num_hidden_layers"], hf.get("no_rope_layer_interval", 4)
        Only({"use_sliding_window": False}).read(hf)
        hf.read |= {"sliding_window", "layer_types"}  # without that switch they change nothing
        turned = hf.get("no_rope_layers") or [int((i + 1) % every != 0) for i in range(n)]
        return {"kinds": ["local" if on else "global" for on in turned], "pos.rotated": "local"}

    def write(self, ours: Seen) -> dict[str, Any]:
        rotated = ours["pos.rotated"]
        return {"no_rope_layers": [int(rotated in ("all", kind)) for kind in ours["kinds"]]}


# ---------------------------------------------------------------------------------------------------------------------
# flat and back


@lru_cache
def _options() -> dict[tuple[str, str], Flat]:
    found: dict[tuple[str, str], Flat] = {}
    for option in choice_options():
        if option.node.startswith("model."):
            node = option.node.removeprefix("model.")
            name = option.content.get("type", "")
            found.setdefault((node, name), {f"{node}.{key}": value for key, value in option.content.items()})
    return found


def defaults(node: str, kind: Any) -> Flat:
    """What the YAML option with this type says, by flat key."""
    return _options()[node, kind]


@lru_cache
def _top() -> Flat:
    return dict(load_yaml((resource_root() / "conf" / "config.yaml").read_text(encoding="utf-8"))["model"])


def flatten(config: ModelConfig) -> Flat:
    """Dotted keys of `config`. ``d_ff`` replaces ratio and multiple, ``kinds`` (one per layer) the pattern; the head
    sizes, biases and multipliers are those that the modules get, also where muP gives them."""
    dims, plain = model_dims(config), vars(config)
    flat = {key: value for key, value in plain.items() if not isinstance(value, dict)}
    for node in NODES:
        flat |= {f"{node}.{key}": value for key, value in plain[node].items()}
    for trick, options in config.stability.items():
        flat |= {f"stability.{trick}.{key}": value for key, value in options.items()}
    for key in ("ffn.ratio", "ffn.multiple", "layer_pattern"):
        del flat[key]
    flat |= {"d_ff": dims.d_ff, "d_head": dims.d_head}
    if "attn.n_kv_heads" in flat:
        flat["attn.n_kv_heads"] = dims.n_kv_heads
        flat["attn.bias"] = flat["attn.bias"] or ("all" if config.linear_bias else "none")
    scheme = INITS.build(config.init, **vars(dims))
    if scheme.attn_scale is not None and flat["attn.scale"] is None:
        flat["attn.scale"] = scheme.attn_scale
    if scheme.logit_factor != 1:
        own = flat.get("stability.logit_multiplier.factor", 1.0)
        flat["stability.logit_multiplier.factor"] = scheme.logit_factor * (config.d_model**-0.5 if own is None else own)
        flat = {key: value for key, value in flat.items() if not key.startswith("init.")}
    kinds = layer_kinds(config)
    layers_differ = flat.get("attn.window") is not None or flat.get("pos.local_theta") is not None
    layers_differ |= {flat.get(key, "all") for key in ("pos.rotated", "pos.scaled")} != {"all"}
    flat["kinds"] = kinds if layers_differ else ["local"] * len(kinds)
    return flat


def unflatten(flat: Flat) -> ModelConfig:
    """Inverse of `flatten`; what `flat` leaves out is as the YAML files say."""
    plain: dict[str, Any] = {**_top(), "stability": {}}
    for node in NODES:
        kind = flat.get(f"{node}.type", {"scaling": "none", "init": "gpt2"}.get(node))
        if node == "block":
            plain[node] = {}
        else:
            plain[node] = {key.removeprefix(f"{node}."): value for key, value in defaults(node, kind).items()}
    given = {**flat, "layer_pattern": _shortest(flat["kinds"]), "ffn.ratio": f"{flat['d_ff']}/{flat['d_model']}"}
    given["ffn.multiple"] = 1
    for key, value in given.items():
        if key in ("kinds", "d_ff"):
            continue
        *path, last = key.split(".")
        section = plain
        for name in path:
            section = section.setdefault(name, {})
        section[last] = value
    return from_mapping(ModelConfig, plain)


def unexpressed(ours: Seen) -> list[str]:
    """Keys that no part of a map has read and that are not as without the choice, as ``model.key=value``."""
    found = []
    for key, value in ours.items():
        node, _, name = key.rpartition(".")
        if key == "kinds":
            neutral: Any = ["local"] * len(value)
        elif node in NODES and name != "type":
            neutral = defaults(node, dict.get(ours, f"{node}.type")).get(key)
        else:
            neutral = _top().get(key)
        changes = value != neutral or node.startswith("stability.")
        if changes and key not in ours.read and not key.startswith(INERT):
            found.append(f"model.{key}={value}")
    return found


def _shortest(kinds: list[str]) -> list[str]:
    n = len(kinds)
    return next(kinds[:k] for k in range(1, n + 1) if [kinds[i % k] for i in range(n)] == kinds)
