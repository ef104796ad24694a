"""Typed configuration and the sizes derived from it. Imports neither torch nor Hydra: a typing error answers at once.

A *choice node* (``model.norm``, ``optim`` …) is a plain mapping ``{type: name, option: value, …}``: its registry checks
the options. Everything else is a dataclass below.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar

from andrea_ablate.registry import ConfigError, nearest

# Raise when the same configuration would now give other numbers and no choice's code shows it (codehash.py): it is part
# of every run id.
NUMERICS_VERSION = 1

PRECISIONS = ("32-true", "bf16-mixed")
STRATEGIES = ("ddp", "fsdp")


@dataclass(frozen=True)
class ModelConfig:
    """One transformer. ``d_head: null`` means ``d_model / n_heads``; the last eight fields are choice nodes.

    ``layer_pattern`` says which layers are ``local`` and which ``global``, see `layer_kinds`.
    """

    d_model: int
    n_layers: int
    n_heads: int
    d_head: int | None
    vocab_size: int
    vocab_multiple: int
    max_seq_len: int
    tie_embeddings: bool
    linear_bias: bool
    head_bias: bool
    dropout: float
    layer_pattern: list[str]
    block: dict[str, Any]
    norm: dict[str, Any]
    ffn: dict[str, Any]
    pos: dict[str, Any]
    scaling: dict[str, Any]
    attn: dict[str, Any]
    stability: dict[str, dict[str, Any]]
    init: dict[str, Any]


@dataclass(frozen=True)
class DataConfig:
    """A corpus, its tokenizer and how windows are cut from it. ``options`` belong to the source named by ``type``."""

    type: str
    options: dict[str, Any]
    tokenizer: dict[str, Any]
    seq_len: int
    seed: int
    val_fraction: float
    val_tokens: int
    num_workers: int


@dataclass(frozen=True)
class TrainerConfig:
    """Budget and execution. Intervals count optimizer steps; ``tokens`` and ``batch_size`` (sequences) are global.

    ``seconds`` of training, validation not counted, end a run at the last step that fits, if its tokens do not before.
    The schedule spans ``tokens`` all the same.
    ``strategy`` says what each of several devices holds: all weights (``ddp``) or its part of them (``fsdp``).
    """

    tokens: int
    batch_size: int
    accumulate: int
    grad_clip: float | None
    precision: str
    accelerator: str
    devices: int
    compile: bool
    deterministic: bool
    val_every: int
    val_lengths: list[int]
    checkpoint_every: int
    diverged_after: int
    diverged_factor: float
    seconds: float | None = None
    strategy: str = "ddp"  # absent from older records


@dataclass(frozen=True)
class PathsConfig:
    """Where records, sweep tables and prepared data are kept; relative paths start where the command was started."""

    runs: str
    sweeps: str
    cache: str


@dataclass(frozen=True)
class MachineConfig:
    """What all runs on this machine may take together, null for no limit (turns.py); ``gpus`` is for the plan.

    Attributes: cores; memory_gib; gpus (how many the plan is made for, null for those that are here).
    """

    cores: int | None
    memory_gib: float | None
    gpus: int | None


NO_LIMIT = MachineConfig(cores=None, memory_gib=None, gpus=None)


@dataclass(frozen=True)
class SweepConfig:
    """What holds for a whole sweep and is part of no run: it changes which runs there are, not their numbers.

    ``match`` and ``match_knob`` are explained in matching.py, ``allow_confounds`` in confounds.py, ``margin`` (nats per
    token) in report/compare, ``lr_…`` in tuning.py, ``fail_fast`` in conduct.py. ``match_also`` is a second rule, for
    the same sweep once more. ``plan`` ends the command after the plan.
    """

    match: str
    match_knob: str
    allow_confounds: list[str]
    margin: float
    plan: bool = False
    machine: MachineConfig = NO_LIMIT
    fail_fast: bool = False
    match_also: str = "none"
    lr_grid: list[float] = field(default_factory=list)
    lr_seeds: list[int] = field(default_factory=list)
    lr_extend: bool = False


SWEEP_KEYS = tuple(f.name for f in fields(SweepConfig))
MATCHES = ("none", "params", "nonembedding", "flops")
# Sizes that an arm can be matched by, and the setting that each is given by.
KNOBS = {"d_ff": "model.ffn.ratio", "n_layers": "model.n_layers"}


@dataclass(frozen=True)
class RunConfig:
    """Everything one run needs. ``name``, ``group`` and ``tags`` are for display and never change a number.

    ``ops`` names the path of the fused operations, see `ops.library`.
    """

    seed: int
    name: str | None
    group: str | None
    tags: list[str]
    ops: str
    model: ModelConfig
    data: DataConfig
    optim: dict[str, Any]
    schedule: dict[str, Any]
    trainer: TrainerConfig
    logger: dict[str, Any]
    paths: PathsConfig

    @property
    def tokens_per_step(self) -> int:
        return self.trainer.batch_size * self.data.seq_len

    @property
    def total_steps(self) -> int:
        return max(1, math.ceil(self.trainer.tokens / self.tokens_per_step))

    @property
    def warmup_steps(self) -> int:
        """Warm-up in steps; ``schedule.warmup_tokens: null`` means a tenth of the budget."""
        tokens = self.schedule["warmup_tokens"]
        return math.ceil((self.trainer.tokens / 10 if tokens is None else tokens) / self.tokens_per_step)


@dataclass(frozen=True)
class ModelDims:
    """The sizes that modules are given: all integers, all final."""

    d_model: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    d_head: int
    d_ff: int
    vocab_size: int
    padded_vocab: int
    max_seq_len: int


def model_dims(model: ModelConfig) -> ModelDims:
    """Derive every size from the configuration. Raises ConfigError where the numbers do not fit together."""
    for key in ("d_model", "n_layers", "n_heads", "vocab_size", "vocab_multiple", "max_seq_len"):
        if getattr(model, key) < 1:
            raise ConfigError(f"model.{key}={getattr(model, key)} must be at least 1")
    if not 0 <= model.dropout < 1:
        raise ConfigError(f"model.dropout={model.dropout} must be in [0, 1)")
    if model.d_head is None and model.d_model % model.n_heads:
        raise ConfigError(
            f"model.n_heads={model.n_heads} must divide model.d_model={model.d_model}; "
            f"try {_divisors_near(model.d_model, model.n_heads)} or set model.d_head"
        )
    d_head = model.d_head if model.d_head is not None else model.d_model // model.n_heads
    if d_head < 1:
        raise ConfigError(f"model.d_head={d_head} must be at least 1")
    n_kv_heads = model.attn.get("n_kv_heads")
    n_kv_heads = model.n_heads if n_kv_heads is None else n_kv_heads
    if type(n_kv_heads) is not int or n_kv_heads < 1:
        raise ConfigError(f"model.attn.n_kv_heads={n_kv_heads} must be a whole number from 1 up, or null for n_heads")
    if model.n_heads % n_kv_heads:
        raise ConfigError(
            f"model.attn.n_kv_heads={n_kv_heads} must divide model.n_heads={model.n_heads}; "
            f"try {_divisors_near(model.n_heads, n_kv_heads)}"
        )
    return ModelDims(
        d_model=model.d_model,
        n_layers=model.n_layers,
        n_heads=model.n_heads,
        n_kv_heads=n_kv_heads,
        d_head=d_head,
        d_ff=_d_ff(model.d_model, model.ffn),
        vocab_size=model.vocab_size,
        padded_vocab=_round_up(model.vocab_size, model.vocab_multiple),
        max_seq_len=model.max_seq_len,
    )


def layer_kinds(model: ModelConfig) -> list[str]:
    """``local`` or ``global`` for every layer: the pattern, repeated over the depth.

    A window is that of the local layers; rope may differ in its base, its scaling and whether it is applied.
    """
    pattern = model.layer_pattern
    if not pattern or not {*pattern} <= {"local", "global"}:
        raise ConfigError(
            f"model.layer_pattern={pattern} must be a list of local and global, such as [local,local,local,global]"
        )
    return [pattern[layer % len(pattern)] for layer in range(model.n_layers)]


def part_options(node: Mapping[str, Any]) -> dict[str, Any]:
    """The options a module is given: the node without the keys that `model_dims` turns into sizes."""
    return {key: value for key, value in node.items() if key not in ("ratio", "multiple", "n_kv_heads")}


def _d_ff(d_model: int, ffn: Mapping[str, Any]) -> int:
    try:
        ratio = Fraction(str(ffn.get("ratio")))
    except (ValueError, ZeroDivisionError):
        ratio = Fraction(0)
    multiple = ffn.get("multiple")
    if type(multiple) is not int or multiple < 1:
        raise ConfigError(f"model.ffn.multiple={multiple} must be a whole number of at least 1")
    if ratio <= 0:
        raise ConfigError(f"model.ffn.ratio={ffn.get('ratio')} must be a positive number or fraction, such as 4 or 8/3")
    return _round_up(math.ceil(ratio * d_model), multiple)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _divisors_near(n: int, wanted: int) -> str:
    divisors = sorted((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - wanted))
    return " or ".join(str(d) for d in sorted(divisors[:3]))


# ---------------------------------------------------------------------------------------------------------------------
# from plain mappings to dataclasses

C = TypeVar("C")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


_hints = cache(typing.get_type_hints)


def from_mapping(cls: type[C], node: Mapping[str, Any], where: str = "") -> C:
    """Build dataclass `cls` from a plain mapping; unknown keys, missing keys and wrong types are ConfigErrors."""
    hints = _hints(typing.cast(Any, cls))
    names = [f.name for f in fields(cls)]  # type: ignore[arg-type]
    for key in node:
        if key not in names:
            raise ConfigError(f"'{where}{key}' is not a setting{nearest(key, names)}")
    for key in (f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING):  # type: ignore[arg-type]
        if key not in node:
            raise ConfigError(f"'{where}{key}' is missing; give {where}{key}=…")
    return cls(**{key: _coerce(hints[key], node[key], f"{where}{key}") for key in node})


def run_config(plain: Mapping[str, Any]) -> RunConfig:
    """Build a RunConfig from the resolved configuration as Hydra composes it (``data`` holds its source's options)."""
    data = dict(plain["data"])
    shared = [f.name for f in fields(DataConfig) if f.name != "options"]
    options = {key: data.pop(key) for key in list(data) if key not in shared}
    cfg = from_mapping(RunConfig, {**plain, "data": {**data, "options": options}})
    _check(cfg)
    return cfg


def with_seeds(cfg: RunConfig, seed: Any, data_seed: Any) -> RunConfig:
    """The same run with other seeds, which are checked as those of `run_config`."""
    data = replace(cfg.data, seed=_coerce(int, data_seed, "data.seed"))
    other = replace(cfg, seed=_coerce(int, seed, "seed"), data=data)
    _check(other)
    return other


def sweep_config(plain: Mapping[str, Any]) -> SweepConfig:
    """Build a SweepConfig from those keys of the resolved configuration; the other keys are left alone."""
    cfg = from_mapping(SweepConfig, {key: plain[key] for key in SWEEP_KEYS})
    for key, allowed in (("match", MATCHES), ("match_also", MATCHES), ("match_knob", tuple(KNOBS))):
        value = getattr(cfg, key)
        if value not in allowed:
            raise ConfigError(f"{key}={value} is not one of {', '.join(allowed)}{nearest(value, allowed)}")
    if not 0 < cfg.margin < math.inf:
        raise ConfigError(f"margin={cfg.margin} must be a positive number of nats, such as 0.03")
    if cfg.lr_grid and (len({*cfg.lr_grid}) < 3 or not all(0 < lr < math.inf for lr in cfg.lr_grid)):
        raise ConfigError(
            f"lr_grid={cfg.lr_grid} must be at least three different positive numbers: of two, either is at an edge"
        )
    if cfg.lr_grid and not cfg.lr_seeds:
        raise ConfigError("lr_seeds=[] leaves no seed to choose learning rates on; give at least one, such as [1000]")
    for f in fields(MachineConfig):
        if (limit := getattr(cfg.machine, f.name)) is not None and not 0 < limit < math.inf:
            raise ConfigError(f"machine.{f.name}={limit} must be positive, or null for no limit")
    return cfg


def _check(cfg: RunConfig) -> None:
    t = cfg.trainer
    for key, value, least in (
        ("trainer.tokens", t.tokens, 1),
        ("trainer.batch_size", t.batch_size, 1),
        ("trainer.accumulate", t.accumulate, 1),
        ("trainer.devices", t.devices, 1),
        ("trainer.val_every", t.val_every, 0),
        ("trainer.checkpoint_every", t.checkpoint_every, 0),
        ("trainer.diverged_after", t.diverged_after, 1),
        ("data.seq_len", cfg.data.seq_len, 1),
        ("data.val_tokens", cfg.data.val_tokens, 0),
        ("data.num_workers", cfg.data.num_workers, 0),
    ):
        if value < least:
            raise ConfigError(f"{key}={value} must be at least {least}")
    most = cfg.data.val_tokens or math.inf
    if not all(1 <= length <= most for length in t.val_lengths):
        raise ConfigError(
            f"trainer.val_lengths={t.val_lengths} must be from 1 to data.val_tokens={cfg.data.val_tokens}"
        )
    for key, value in (("seed", cfg.seed), ("data.seed", cfg.data.seed)):
        if not 0 <= value < 2**63:
            raise ConfigError(f"{key}={value} must be from 0 to 2^63 - 1")
    ids = cfg.data.tokenizer.get("vocab_size")
    if isinstance(ids, int) and ids > cfg.model.vocab_size:
        raise ConfigError(
            f"model.vocab_size={cfg.model.vocab_size} is below data.tokenizer.vocab_size={ids}: tokens would have no "
            "embedding; set the tokenizer's, the model's follows it"
        )
    if t.batch_size % (t.accumulate * t.devices):
        raise ConfigError(
            f"trainer.batch_size={t.batch_size} must be a multiple of trainer.accumulate={t.accumulate} times "
            f"trainer.devices={t.devices}; change one of the three"
        )
    if t.precision not in PRECISIONS:
        raise ConfigError(f"trainer.precision={t.precision} is not one of {', '.join(PRECISIONS)}")
    if t.strategy not in STRATEGIES:
        raise ConfigError(f"trainer.strategy={t.strategy} is not one of {', '.join(STRATEGIES)}")
    if t.accelerator not in ("auto", "cpu", "cuda"):
        raise ConfigError(f"trainer.accelerator={t.accelerator} is not one of auto, cpu, cuda")
    if t.grad_clip is not None and not t.grad_clip > 0:
        raise ConfigError(f"trainer.grad_clip={t.grad_clip} must be positive, or null for no clipping")
    if t.seconds is not None and not 0 < t.seconds < math.inf:
        raise ConfigError(f"trainer.seconds={t.seconds} must be a positive number, or null for as long as it takes")
    if not t.diverged_factor > 1:
        raise ConfigError(f"trainer.diverged_factor={t.diverged_factor} must be above 1, such as 3")
    if not 0 < cfg.data.val_fraction < 1:
        raise ConfigError(f"data.val_fraction={cfg.data.val_fraction} must be between 0 and 1")
    if not _is_number(cfg.optim["lr"]) or not 0 < cfg.optim["lr"] < math.inf:
        raise ConfigError(f"optim.lr={cfg.optim['lr']} must be a positive number, such as 1e-3")
    betas = cfg.optim.get("betas", [0, 0])
    if not isinstance(betas, list) or len(betas) != 2 or not all(_is_number(b) and 0 <= b < 1 for b in betas):
        raise ConfigError(f"optim.betas={betas} must be two numbers in [0, 1), such as [0.9,0.95]")
    momentum = cfg.optim.get("momentum", 0)
    if not _is_number(momentum) or not 0 <= momentum < 1:
        raise ConfigError(f"optim.momentum={momentum} must be a number in [0, 1), such as 0.9")
    if cfg.optim.get("nesterov") and not momentum:
        raise ConfigError(
            "optim.nesterov=true looks ahead along a momentum, but optim.momentum=0; change one of the two"
        )
    warmup = cfg.schedule["warmup_tokens"]
    if warmup is not None and not (_is_number(warmup) and 0 <= warmup < math.inf):
        raise ConfigError(f"schedule.warmup_tokens={warmup} must be a number of tokens, or null for a tenth of all")
    if cfg.warmup_steps >= cfg.total_steps and cfg.total_steps > 1:
        raise ConfigError(
            f"schedule.warmup_tokens={warmup} must be below trainer.tokens={t.tokens}; "
            "lower it, or set it to null for a tenth of the budget"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _coerce(hint: Any, value: Any, where: str) -> Any:
    if typing.get_origin(hint) in (types.UnionType, typing.Union):
        if value is None:
            return None
        hint = next(arg for arg in typing.get_args(hint) if arg is not type(None))
    section = is_dataclass(hint) or typing.get_origin(hint) is dict
    if section and not isinstance(value, Mapping):
        raise ConfigError(f"'{where}' is a section with keys, not the value {value!r}")
    if is_dataclass(hint):
        return from_mapping(typing.cast(type, hint), value, f"{where}.")
    if section:
        inner = typing.get_args(hint)[1]
        return {
            str(key): _numbers(item) if inner is Any else _coerce(inner, item, f"{where}.{key}")
            for key, item in value.items()
        }
    if typing.get_origin(hint) is list:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}={value!r} must be a list, such as [{value}]")
        inner = typing.get_args(hint)[0]
        return [str(item) if inner is str else _coerce(inner, item, where) for item in value]
    value = _numbers(value) if hint in (int, float) else value
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if hint is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if hint is str and isinstance(value, (int, float)):
        return str(value)
    if not isinstance(value, hint) or (hint is int and isinstance(value, bool)):
        raise ConfigError(f"{where}={value!r} must be of type {hint.__name__}")
    return value


def _numbers(value: Any) -> Any:
    """Text that spells a number becomes that number: a quoted ``'1e-4'`` in a YAML file is a learning rate, no name."""
    if isinstance(value, Mapping):
        return {str(key): _numbers(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_numbers(item) for item in value]
    if isinstance(value, str) and _NUMBER.fullmatch(value):
        return int(value) if value.lstrip("+-").isdigit() else float(value)
    return value


# ---------------------------------------------------------------------------------------------------------------------
# identity


def to_plain(cfg: RunConfig) -> dict[str, Any]:
    """The configuration as nested dicts, lists and scalars, as it is stored in ``config.yaml`` and sent to trackers."""
    plain = asdict(cfg)
    plain["data"] = {**{k: v for k, v in plain["data"].items() if k != "options"}, **plain["data"]["options"]}
    return plain


def run_id(cfg: RunConfig, corpus: str, device: str, ops: str, code: Mapping[str, str]) -> str:
    """Name a run by its content: everything in the configuration that can change a number, and nothing else.

    Args:
        corpus: fingerprint of the prepared data; it replaces the source's settings (a path does not change a number).
        device: ``cpu`` or ``cuda``, what ``trainer.accelerator: auto`` stands for on this machine.
        ops: ``compiled`` or ``reference``, what ``ops: auto`` stands for: the two differ in the last bits.
        code: hash of the code of each choice, see codehash.py.
    """
    plain = _canonical(cfg)
    for key in ("name", "group", "tags", "logger", "paths"):
        del plain[key]
    for key in ("type", "options", "tokenizer", "val_fraction", "num_workers"):
        del plain["data"][key]
    del plain["trainer"]["checkpoint_every"]
    if plain["trainer"]["seconds"] is None:  # the runs of before there was such a limit keep their names
        del plain["trainer"]["seconds"]
    if cfg.trainer.devices == 1 or cfg.trainer.strategy == "ddp":  # what every run was before there was a choice
        del plain["trainer"]["strategy"]
    plain["trainer"]["accelerator"] = device
    plain["ops"] = ops
    content = {"config": plain, "corpus": corpus, "code": dict(code), "numerics": NUMERICS_VERSION}
    return hashlib.blake2b(json.dumps(content, sort_keys=True).encode(), digest_size=8).hexdigest()


def _canonical(value: Any) -> Any:
    """As plain containers, like `asdict` without its copies; a whole number is an integer."""
    if isinstance(value, dict):
        return {key: _canonical(item) for key, item in value.items()}
    if is_dataclass(value):
        return {key: _canonical(item) for key, item in vars(value).items()}
    if isinstance(value, list):
        return [_canonical(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value
