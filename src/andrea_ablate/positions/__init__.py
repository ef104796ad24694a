"""Position encodings. Each names its seam: ``embedding`` (added once), ``qk`` or ``scores`` (every layer), or none."""

from andrea_ablate.positions.absolute import LearnedPosition, NoPosition, SinePosition
from andrea_ablate.positions.rope import RotaryPosition
from andrea_ablate.positions.scaling import SCALINGS
from andrea_ablate.positions.scores import BucketBias, LinearBias
from andrea_ablate.positions.tables import POSITIONS

__all__ = [
    "POSITIONS",
    "SCALINGS",
    "BucketBias",
    "LearnedPosition",
    "LinearBias",
    "NoPosition",
    "RotaryPosition",
    "SinePosition",
]
