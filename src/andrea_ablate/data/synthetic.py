"""Sources of random ids whose entropy is known exactly."""

# Shapes: V vocab

from __future__ import annotations

import bisect
import json
from typing import Any

import numpy as np
from numpy.typing import NDArray

from andrea_ablate.data.corpora import CORPORA
from andrea_ablate.data.files import digest
from andrea_ablate.registry import ConfigError


@CORPORA.register("synthetic")
class Synthetic:
    """Random ids of a known entropy, so that loss minus entropy is what the model has yet to learn.

    ``uniform``: independent, ``H = ln V``. ``zipf``: independent, ``p_k ~ k^-exponent``, ``H = -sum p ln p``.
    ``markov``: a chain, transition logits ``sharpness * N(0, 1)``, ``H = sum_i pi_i H(P_i)`` with ``pi P = pi``.

    Args:
        kind: ``uniform``, ``zipf`` or ``markov``.
        n_tokens: ids in all, the last ``val_fraction`` of them for validation.
        source_seed: of the ids and of the chain's transitions.
        exponent: zipf only, >= 0 (default 1).
        sharpness: markov only, >= 0 (default 2); 0 makes the chain uniform.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        kind: str = "markov",
        n_tokens: int = 1_000_000,
        source_seed: int = 0,
        exponent: float | None = None,
        sharpness: float | None = None,
    ) -> None:
        for option, value, owner in (("exponent", exponent, "zipf"), ("sharpness", sharpness, "markov")):
            if value is not None and (kind != owner or value < 0):
                raise ConfigError(f"data: {option}={value} must be >= 0 and belongs to kind={owner} only; kind={kind}")
        if not isinstance(n_tokens, int) or n_tokens < 2:
            raise ConfigError(f"data: n_tokens={n_tokens} must be a whole number of at least 2")
        if not isinstance(source_seed, int) or source_seed < 0:
            raise ConfigError(f"data: source_seed={source_seed} must be a whole number of at least 0")
        self.kind, self.n_tokens, self.seed = kind, n_tokens, source_seed
        self.names = (f"the synthetic source '{kind}'",) * 2
        self.info: dict[str, Any] = {}
        self.rule = "last tokens"
        self.entropy: float | None
        self.on_disk = False
        self._next_VV: NDArray[Any] | None = None
        if kind == "uniform":
            p_V = np.full(vocab_size, 1 / vocab_size)
        elif kind == "zipf":
            p_V = np.arange(1, vocab_size + 1, dtype=np.float64) ** -(1.0 if exponent is None else exponent)
            p_V /= p_V.sum()
        elif kind == "markov":
            if vocab_size > 4096:
                raise ConfigError(f"data: kind=markov stores V^2 numbers; vocab_size={vocab_size} must be <= 4096")
            z_VV = np.random.default_rng([source_seed, 0]).standard_normal((vocab_size, vocab_size))
            p_VV = _softmax((2.0 if sharpness is None else sharpness) * z_VV)
            p_V = stationary(p_VV)
            self._next_VV = np.cumsum(p_VV, axis=1)
        else:
            raise ConfigError(f"data: kind={kind} must be uniform, zipf or markov")
        self._first_V = np.cumsum(p_V)
        self.entropy = float(entropy(p_V)) if kind != "markov" else float(p_V @ entropy(p_VV))

    def check(self) -> None:
        pass

    def content(self) -> str:
        # The tables themselves are hashed: the last bit of an exp or log may differ between machines.
        tables = [self._first_V] if self._next_VV is None else [self._first_V, self._next_VV]
        options = json.dumps([self.kind, self.n_tokens, self.seed])
        return digest(options.encode(), *(table.tobytes() for table in tables))

    def split(self, val_fraction: float) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        u = np.random.default_rng([self.seed, 1]).random(self.n_tokens)
        # A cumulative sum may end just below 1; without its last entry no draw can pass the last id.
        if self._next_VV is None:
            ids = np.searchsorted(self._first_V[:-1], u, side="right")
        else:
            rows = self._next_VV[:, :-1].tolist()
            state = bisect.bisect_right(self._first_V[:-1].tolist(), float(u[0]))
            chain = [state]
            for x in u[1:].tolist():
                state = bisect.bisect_right(rows[state], x)
                chain.append(state)
            ids = np.array(chain)
        cut = self.n_tokens - int(self.n_tokens * val_fraction)
        return [ids[:cut]], [ids[cut:]]


def stationary(p_VV: NDArray[Any]) -> NDArray[Any]:
    """Stationary distribution of a chain: ``pi P = pi`` with its last equation replaced by ``sum pi = 1``."""
    system = p_VV.T - np.eye(len(p_VV))
    system[-1] = 1.0
    return np.linalg.solve(system, np.eye(len(p_VV))[-1])


def entropy(p: NDArray[Any]) -> NDArray[Any]:
    """Entropy ``-sum p ln p`` in nats over the last axis; 0 ln 0 is 0."""
    h: NDArray[Any] = -np.sum(p * np.log(np.where(p > 0, p, 1.0)), axis=-1)
    return h


def _softmax(x: NDArray[Any]) -> NDArray[Any]:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    p: NDArray[Any] = e / e.sum(axis=-1, keepdims=True)
    return p
