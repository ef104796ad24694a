"""Every compiled op in each of its forms: those that run on a GPU too (tests/gpu/cases.py), and the rest."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.ops.activation import REFERENCE_ONLY, REFERENCES, activation_reference
from andrea_ablate.ops.attention import attention_reference
from andrea_ablate.ops.cross_entropy import IGNORE, linear_cross_entropy_reference
from andrea_ablate.ops.norm import norm_reference
from andrea_ablate.ops.qk_rope import qk_rope_reference
from gpu.cases import CASES, Case, Outputs, turned_rows

KINDS = [kind for kind in REFERENCES if kind not in REFERENCE_ONLY]
FORMS = dict(CASES)


def matrices(number: int, vectors: int = 0, scale: float = 1.0):
    """Draws so many matrices, and vectors of their width."""
    return lambda rows, width: [
        *(scale * torch.randn(rows, width) for _ in range(number)),
        *(torch.randn(width) for _ in range(vectors)),
    ]


for kind in KINDS:
    FORMS[kind] = Case(partial(ops.activation, kind=kind), activation_reference(kind), matrices(1, scale=2.0))
    FORMS[f"gated {kind}"] = Case(
        partial(ops.gated, kind=kind),
        lambda gate, up, kind=kind: activation_reference(kind)(gate) * up,
        matrices(2, scale=2.0),
    )
FORMS["gated, both in one"] = Case(
    lambda both: ops.gated(both, None, "silu"),
    lambda both: torch.nn.functional.silu(both.chunk(2, -1)[0]) * both.chunk(2, -1)[1],
    lambda rows, width: [torch.randn(rows, 2 * width)],
)

for center in (False, True):
    name, keys = "layernorm" if center else "rmsnorm", {"eps": 1e-5, "center": center}
    reference = partial(norm_reference, **keys)
    FORMS[f"{name} without parameters"] = Case(
        lambda x, keys=keys: ops.norm(x, None, **keys),
        lambda x, reference=reference: reference(x, None, None, unit_offset=False),
        matrices(1),
    )
    FORMS[f"{name} with an offset"] = Case(
        lambda x, gain, keys=keys: ops.norm(x, gain, **keys, unit_offset=True),
        lambda x, gain, reference=reference: reference(x, gain, None, unit_offset=True),
        matrices(1, 1),
    )
FORMS["add_norm without mean and bias"] = Case(
    lambda x, residual, gain: ops.add_norm(x, residual, gain, eps=1e-5, center=False),
    lambda x, residual, gain: (
        norm_reference(x + residual, gain, None, eps=1e-5, center=False, unit_offset=False),
        x + residual,
    ),
    matrices(2, 1),
)

for form, vectors, settings in (
    ("halves", 2, {"pairing": "half"}),
    ("a rotation alone", 0, {}),
    ("halves without a norm", 0, {"pairing": "half"}),
):
    FORMS[f"qk_rope, {form}"] = Case(
        partial(turned_rows, partial(ops.qk_rope, **settings)),
        partial(turned_rows, partial(qk_rope_reference, **settings)),
        matrices(2, vectors),
        widths=(32, 40, 64, 80, 128),
    )


def _norm_alone(op, q: Tensor, k: Tensor, q_gain: Tensor, k_gain: Tensor) -> Outputs:
    return op(q[None, :, None], k[None, :, None], q_gain=q_gain, k_gain=k_gain)


FORMS["qk_rope, a norm alone"] = Case(
    partial(_norm_alone, ops.qk_rope), partial(_norm_alone, qk_rope_reference), matrices(2, 2), widths=(32, 40, 64, 80)
)


def _loss(op, x: Tensor, weight: Tensor, token_weight: Tensor, target: Tensor) -> Tensor:
    return sum(op(x, weight, target, token_weight, softcap=3.0, z_weight=0.1))


def _some_ignored(rows: int) -> Tensor:
    target = torch.randint(0, 41, (rows,))
    target[1::4] = IGNORE
    return target


FORMS["linear_cross_entropy with everything"] = Case(
    partial(_loss, ops.linear_cross_entropy),
    partial(_loss, linear_cross_entropy_reference),
    lambda rows, width: [torch.randn(rows, width), torch.randn(41, width), torch.rand(rows), _some_ignored(rows)],
    widths=(8, 64, 384),
)


def _attention(op: str, window: int, softcap: float, masked: bool, qkv: tuple[Tensor, ...], given: tuple[Tensor, ...]):
    """Four query heads to two of keys and values, whose numbers are `width` apart in a row."""
    q, k, v = (t.unflatten(-1, (heads, -1))[None] for t, heads in zip(qkv, (4, 2, 2), strict=True))
    bias, sinks = given or (None, None)
    bias = None if bias is None else bias.view(4, -1)
    slopes = (
        None if bias is None else torch.tensor([0.5, 0.1, 0.02, 0.0], dtype=torch.promote_types(q.dtype, torch.float32))
    )
    key_mask = (torch.arange(k.shape[1]) % 3 > 0)[None] if masked else None
    if op == "compiled":
        keys = {"slopes": slopes, "bias": bias, "sinks": sinks, "key_mask": key_mask}
        return ops.attention(q, k, v, scale=0.3, window=window or None, softcap=softcap or None, **keys)[0]
    return attention_reference(q, k, v, slopes, bias, sinks, key_mask, 0.3, window, softcap)[0]


def _attention_case(window: int = 0, softcap: float = 0.0, masked: bool = False, given: bool = False) -> Case:
    def call(op: str):
        return lambda q, k, v, *parameters: _attention(op, window, softcap, masked, (q, k, v), parameters)

    def draw(rows: int, width: int) -> list[Tensor]:
        qkv = [torch.randn(rows, heads * width) for heads in (4, 2, 2)]
        return [*qkv, torch.randn(4 * 7), torch.randn(4)] if given else qkv

    return Case(call("compiled"), call("reference"), draw, widths=(5, 32, 64))


FORMS["attention"] = _attention_case()
FORMS["attention with a window and a softcap"] = _attention_case(window=9, softcap=2.0)
FORMS["attention with everything"] = _attention_case(9, 2.0, True, True)
