"""What all kinds of attention share: the registry, the core over three backends, and which of them can do what."""

# Shapes: B batch, L queries, M keys, H query heads, G key/value heads, K width of a query, N width of a value
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.registry import ConfigError, Registry

ATTENTIONS: Registry[nn.Module] = Registry("attn")
BACKENDS = ("auto", "fused", "sdpa", "eager")

Rotate = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


class Widths(NamedTuple):
    """What accounting and positions must know of a kind of attention beside its parameters.

    turned: dimensions of a head that rope is given. scores: multiply-adds per query and key that it sees, over all
    heads. cache: numbers per token that generation keeps.
    """

    turned: int
    scores: int
    cache: int


def check_backend(backend: str, *, causal: bool, dropout: float, softcap: float | None, sinks: bool) -> None:
    """Refuse a backend that would drop a choice. Raises ConfigError with one that computes it."""
    if backend not in BACKENDS:
        raise ConfigError(f"model.attn.backend='{backend}' is not one of {', '.join(BACKENDS)}")
    if backend == "fused" and dropout:
        raise ConfigError(
            f"model.attn.backend=fused has no dropout, but model.dropout={dropout}; "
            "use model.attn.backend=auto or model.dropout=0"
        )
    if backend == "fused" and not causal:
        raise ConfigError("model.attn.backend=fused is causal; use model.attn.backend=auto for model.attn.causal=false")
    if backend == "sdpa" and softcap is not None:
        raise ConfigError(
            "model.attn.backend=sdpa cannot apply an attention soft-cap, it would be dropped; "
            "use model.attn.backend=eager or auto"
        )
    if backend == "sdpa" and sinks:
        raise ConfigError(
            "model.attn.backend=sdpa has no sinks, they would be dropped; use model.attn.backend=eager or auto"
        )


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    scale: float,
    causal: bool = True,
    window: int | None = None,
    key_mask: Tensor | None = None,
    softcap: float | None = None,
    slopes: Tensor | None = None,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
    backend: str = "auto",
) -> Tensor:
    """Attention: scale, soft-cap, bias, mask, softmax in fp32, in this order. A query without a key gives zeros.

    Args:
        slopes: ``(H,)``; ``slopes[h] * (i - j)`` is taken from the score of query i and key j. No gradient.
        bias: ``(H, R)``; ``bias[h, min(i - j, R - 1)]`` is added to that score. Without causality ``(H, 2R - 1)``, the
            column of distance 0 in the middle. sdpa rounds slopes and bias to the dtype of the queries.
        sinks: ``(H,)``; a further logit per head that takes its share of the softmax and has no value. Not with sdpa.
    Shape: q ``(B, L, H, K)``, k ``(B, M, G, K)``, v ``(B, M, G, N)`` with G dividing H -> ``(B, L, H, N)``;
        key_mask ``(B, M)``. With M > L the queries are the last L positions. Only fused wants N = K.
    """
    length, keys = q.shape[1], k.shape[1]
    if _watchers:
        with torch.no_grad():
            shift_HLM = score_shift(slopes, bias, length, keys, causal)
            allowed = causal_mask(length, keys, window, q.device) if causal else None
            score_BHLM = _scores(q.transpose(1, 2), k.transpose(1, 2), scale, allowed, softcap, shift_HLM)
            for look in _watchers:
                look(score_BHLM)
    if backend == "auto":
        able = q.device.type == "cpu" and causal and not dropout and q.shape[-1] == v.shape[-1]
        fused = able and ops.compiled("attention", q)
        backend = "fused" if fused else "sdpa" if softcap is None and sinks is None else "eager"
    if backend == "fused":
        given = {"softcap": softcap, "slopes": slopes, "bias": bias, "sinks": sinks, "key_mask": key_mask}
        return ops.attention(q, k, v, scale=scale, window=window, **given)[0]  # type: ignore[arg-type]
    ops.note("attention", backend)
    shift_HLM = score_shift(slopes, bias, length, keys, causal)
    square = window is None and key_mask is None and shift_HLM is None and length == keys
    allowed = None if not causal or (square and backend == "sdpa") else causal_mask(length, keys, window, q.device)
    seen = None
    if key_mask is not None:
        shown = key_mask[:, None, None, :]
        allowed = shown if allowed is None else allowed & shown
        # A softmax over nothing is NaN, forward and backward: such rows attend to everything and are zeroed afterwards.
        seen = allowed.any(-1, keepdim=True)
        allowed = allowed | ~seen
    q_BHLK, k_BGMK, v_BGMN = (t.transpose(1, 2) for t in (q, k, v))
    if backend == "sdpa":
        assert softcap is None and sinks is None
        if shift_HLM is not None:
            shift_HLM = shift_HLM.to(q.dtype)
        out_BHLN = F.scaled_dot_product_attention(
            q_BHLK,
            k_BGMK,
            v_BGMN,
            attn_mask=allowed if shift_HLM is None else _forbid(shift_HLM, allowed),
            is_causal=causal and allowed is None,
            dropout_p=dropout,
            scale=scale,
            enable_gqa=q.shape[2] != k.shape[2],
        )
    else:
        out_BHLN = _eager(q_BHLK, k_BGMK, v_BGMN, scale, allowed, softcap, shift_HLM, sinks, dropout)
    if seen is not None:
        out_BHLN = out_BHLN * seen
    return out_BHLN.transpose(1, 2)


def _eager(
    q_BHLK: Tensor,
    k_BGMK: Tensor,
    v_BGMN: Tensor,
    scale: float,
    allowed: Tensor | None,
    softcap: float | None,
    shift_HLM: Tensor | None,
    sinks: Tensor | None,
    dropout: float,
) -> Tensor:
    score_BHLM = _scores(q_BHLK, k_BGMK, scale, allowed, softcap, shift_HLM)
    groups, keys = q_BHLK.shape[1] // k_BGMK.shape[1], k_BGMK.shape[2]
    if sinks is not None:
        sink_BHL1 = sinks[:, None, None].to(score_BHLM.dtype).expand(*score_BHLM.shape[:-1], 1)
        score_BHLM = torch.cat((score_BHLM, sink_BHL1), -1)
    weight_BHLM = score_BHLM.softmax(-1)[..., :keys].to(v_BGMN.dtype)
    v_BHMN = v_BGMN.repeat_interleave(groups, dim=1) if groups > 1 else v_BGMN
    return F.dropout(weight_BHLM, dropout) @ v_BHMN


def _scores(
    q_BHLK: Tensor,
    k_BGMK: Tensor,
    scale: float,
    allowed: Tensor | None,
    softcap: float | None,
    shift_HLM: Tensor | None,
) -> Tensor:
    """What the softmax is taken of, in fp32 or wider: bf16 has 8 significant bits, so a long sum of small weights
    stalls below one."""
    groups = q_BHLK.shape[1] // k_BGMK.shape[1]
    k_BHMK = k_BGMK.repeat_interleave(groups, dim=1) if groups > 1 else k_BGMK
    score_BHLM = q_BHLK @ k_BHMK.transpose(-2, -1) * scale
    if softcap is not None:
        score_BHLM = ops.softcap(score_BHLM, softcap)
    score_BHLM = score_BHLM.to(torch.promote_types(score_BHLM.dtype, torch.float32))
    return _forbid(score_BHLM if shift_HLM is None else score_BHLM + shift_HLM, allowed)


_watchers: list[Callable[[Tensor], None]] = []


@contextmanager
def watching(look: Callable[[Tensor], None]) -> Iterator[None]:
    """Within the block `look` is shown the scores of every `attend`, ``(B, H, L, M)``, -inf where a query may not see.

    For a few steps under a magnifier: the scores are computed for it, whatever the backend. Sinks and a key mask are
    not in them.
    """
    _watchers.append(look)
    try:
        yield
    finally:
        _watchers.remove(look)


def _forbid(score: Tensor, allowed: Tensor | None) -> Tensor:
    return score if allowed is None else score.masked_fill(~allowed, float("-inf"))


def score_shift(slopes: Tensor | None, bias: Tensor | None, length: int, keys: int, causal: bool) -> Tensor | None:
    """What `slopes` or `bias` (see `attend`) add to every score, ``(H, L, M)``; None without either."""
    if bias is not None:
        distance_LM, zero = _distance(length, keys, bias.device), 0 if causal else bias.shape[1] // 2
        return bias[:, (distance_LM + zero).clamp(0, bias.shape[1] - 1)]
    return None if slopes is None else -slopes[:, None, None] * _distance(length, keys, slopes.device)


@lru_cache(maxsize=16)
def causal_mask(length: int, keys: int, window: int | None, device: torch.device | str = "cpu") -> Tensor:
    """Bool ``(L, M)``, True where query i sees key j: ``i - window < j <= i``, the window counts the query itself."""
    distance = _distance(length, keys, device)
    return (distance >= 0) & (distance < (keys if window is None else window))


def _distance(length: int, keys: int, device: torch.device | str) -> Tensor:
    """``i - j`` for query i and key j, the queries being the last of the positions."""
    return torch.arange(keys - length, keys, device=device)[:, None] - torch.arange(keys, device=device)
