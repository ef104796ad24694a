"""What differs between the arms of a sweep beyond what it sweeps: plain mappings in, a list of differences out.

A difference is *declared* where a swept key or a swept option's own YAML file sets it, or where it is computed from
something that is declared. Everything else would change the result without anybody having asked for it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from andrea_ablate.registry import ConfigError

ABSENT = "absent"
_SHOWN_VALUES = 4

# What is computed and from which settings, each with everything below it.
COMPUTED: Mapping[str, Sequence[str]] = {
    "model.vocab_size": ("data.tokenizer",),
    "data.tokenizer.vocab_size": ("data.tokenizer",),
    "d_ff": ("model.d_model", "model.ffn"),
    "d_head": ("model.d_model", "model.n_heads", "model.d_head"),
    "n_kv_heads": ("model.n_heads", "model.attn"),
    "padded_vocab": ("model.vocab_size", "model.vocab_multiple"),
    "total_steps": ("trainer.tokens", "trainer.batch_size", "data.seq_len"),
    "warmup_steps": ("schedule.warmup_tokens", "trainer.tokens", "trainer.batch_size", "data.seq_len"),
    "initial_scale": ("model.init", "model.d_model", "model.n_layers", "d_head"),
    "decay": ("optim",),
    "ops_path": ("ops", "trainer.accelerator"),
}


@dataclass(frozen=True)
class Difference:
    """One key that is not the same in all arms; factors: the swept choices that it comes from, none if undeclared."""

    key: str
    values: Mapping[str, Any]  # by arm
    factors: tuple[str, ...]

    def __str__(self) -> str:
        values = list(dict.fromkeys(str(value) for value in self.values.values()))
        more = [f"{len(values) - _SHOWN_VALUES} more"] if len(values) > _SHOWN_VALUES else []
        return f"{self.key}: {', '.join(values[:_SHOWN_VALUES] + more)}"


def differences(
    settings: Mapping[str, Mapping[str, Any]],
    facts: Mapping[str, Mapping[str, Any]],
    declared: Mapping[str, str],
    computed: Mapping[str, Sequence[str]] = COMPUTED,
) -> list[Difference]:
    """Everything in which the arms differ, but for the keys that are swept themselves.

    Args:
        settings: per arm, dotted key -> value; a key that only some arms have is a difference.
        facts: per arm, what else is known of it; compared between the arms that have it.
        declared: dotted key -> the factor that sets it, and everything below it.
        computed: key -> the keys it is computed from; a difference there explains one here.
    """
    values: dict[str, dict[str, Any]] = {}
    for key in dict.fromkeys(key for arm in settings.values() for key in arm):
        values[key] = {name: arm.get(key, ABSENT) for name, arm in settings.items()}
    for key in dict.fromkeys(key for arm in facts.values() for key in arm):
        values[key] = {name: arm[key] for name, arm in facts.items() if key in arm}
    differing = {}
    for key, by_arm in values.items():
        first, *others = by_arm.values()
        if any(other != first for other in others):
            differing[key] = by_arm

    def factors(key: str, asked: frozenset[str] = frozenset()) -> set[str]:
        found = {factor for top, factor in declared.items() if within(key, top)}
        for top, sources in computed.items():
            if within(key, top):
                for other in differing.keys() - asked - {key}:
                    if any(within(other, source) for source in sources):
                        found |= factors(other, asked | {key})
        return found

    swept = {key for key, factor in declared.items() if key == factor}
    return [
        Difference(key, by_arm, tuple(sorted(factors(key)))) for key, by_arm in differing.items() if key not in swept
    ]


def refuse_undeclared(found: Iterable[Difference], allowed: Sequence[str]) -> None:
    """Raises: ConfigError that names the differences that no factor declares, but for those within `allowed` keys."""
    left = [item for item in found if not item.factors and not any(within(item.key, key) for key in allowed)]
    if left:
        keys = ",".join([*allowed, *(item.key for item in left)])
        raise ConfigError(
            f"the arms differ in {'; '.join(map(str, left))}, which nothing that is swept declares; make it equal, "
            f"or compare all the same with 'allow_confounds=[{keys}]'"
        )


def within(key: str, top: str) -> bool:
    """Whether a dotted key is `top` or lies below it."""
    return key == top or key.startswith(f"{top}.")


def flat(node: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys and values of a nested mapping, the values being what is no mapping."""
    for key, value in node.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
