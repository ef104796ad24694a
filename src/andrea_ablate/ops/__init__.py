"""The fused operations: compiled where csrc is built, torch's own otherwise. Every op has its file here and in csrc."""

from andrea_ablate.ops.activation import activation, activation_reference, gated
from andrea_ablate.ops.attention import attention
from andrea_ablate.ops.cross_entropy import IGNORE, linear_cross_entropy
from andrea_ablate.ops.library import choose, compiled, loaded, note, path, using
from andrea_ablate.ops.norm import add_norm, norm, norm_narrow
from andrea_ablate.ops.qk_rope import qk_rope
from andrea_ablate.ops.softcap import softcap

__all__ = [
    "IGNORE",
    "activation",
    "activation_reference",
    "add_norm",
    "attention",
    "choose",
    "compiled",
    "gated",
    "linear_cross_entropy",
    "loaded",
    "norm",
    "norm_narrow",
    "note",
    "path",
    "qk_rope",
    "softcap",
    "using",
]
