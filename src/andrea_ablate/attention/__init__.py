"""Attention: how tokens read one another. `core` computes it, the other files say from what."""

from andrea_ablate.attention.cache import KVCache
from andrea_ablate.attention.core import ATTENTIONS, attend, causal_mask, score_shift, watching
from andrea_ablate.attention.latent import LatentAttention
from andrea_ablate.attention.multihead import MultiHeadAttention

__all__ = [
    "ATTENTIONS",
    "KVCache",
    "LatentAttention",
    "MultiHeadAttention",
    "attend",
    "causal_mask",
    "score_shift",
    "watching",
]
