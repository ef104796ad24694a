"""The claims by topic: the text of each in a YAML file, what measures them in the Python file of the same name.

What trains models for it stands in a file of its own, ``TOPIC_trained.py``.
"""

from andrea_ablate.claims.topics import (
    arithmetic,
    attention,
    attention_trained,
    block,
    ffn,
    ffn_trained,
    norm_position,
    norm_position_trained,
    norm_type,
    norm_type_trained,
    position,
    position_trained,
    regularisation_trained,
    residual,
    residual_trained,
    shape,
    softmax,
    softmax_trained,
)

__all__ = [
    "arithmetic",
    "attention",
    "attention_trained",
    "block",
    "ffn",
    "ffn_trained",
    "norm_position",
    "norm_position_trained",
    "norm_type",
    "norm_type_trained",
    "position",
    "position_trained",
    "regularisation_trained",
    "residual",
    "residual_trained",
    "shape",
    "softmax",
    "softmax_trained",
]
