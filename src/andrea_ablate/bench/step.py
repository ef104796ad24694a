"""``bench step``: a training step against its matrix products and a bare loop.

Loops take turns, a few steps each, so that a machine whose speed drifts slows all alike; medians are printed.
linear: the linear layers' products alone (forward and two backward), in torch's kernels · matmul: these and
attention's six, over half of the keys, which is what a causal mask leaves · bare: the same module, optimizer and
clipping in a plain loop · run: the whole product, with Lightning, data, records and the chosen logger.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from andrea_ablate import machine
from andrea_ablate.config import RunConfig
from andrea_ablate.model import TransformerLM
from andrea_ablate.parameters import MATMUL_ROLES, named_roles
from andrea_ablate.tracking.store import Store
from andrea_ablate.training.identity import identify
from andrea_ablate.training.optim import OPTIMIZERS
from andrea_ablate.training.run import run

WARM_UP = 3


def bench_step(cfg: RunConfig, rounds: int, steps: int) -> dict[str, Any]:
    """Median seconds per step of the loops over `rounds` turns of `steps` steps each, and their ratios."""
    machine.settle()
    _, corpus = identify(cfg)
    model = TransformerLM(cfg.model, init_seed=cfg.seed)
    optimizer = OPTIMIZERS.build(cfg.optim, model=model)
    shape = (cfg.trainer.batch_size, cfg.data.seq_len)
    inputs, targets = (torch.randint(0, corpus.vocab_size, shape) for _ in range(2))

    def bare() -> None:
        sums = model(inputs, targets)
        ((sums.nll + sums.penalty) / targets.numel()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), cfg.trainer.grad_clip or float("inf"))
        optimizer.step()
        optimizer.zero_grad()

    weights = [p.detach() for _, p, role in named_roles(model) if role in MATMUL_ROLES]
    rows = {width: torch.randn(targets.numel(), width) for weight in weights for width in weight.shape}

    def linear() -> None:
        for weight in weights:
            x, dy = rows[weight.shape[1]], rows[weight.shape[0]]
            nn.functional.linear(x, weight)
            torch.mm(dy, weight)
            torch.mm(dy.t(), x)

    dims = model.dims
    heads, keys = shape[0] * dims.n_heads, (shape[1] + 1) // 2
    q, k = torch.randn(heads, shape[1], dims.d_head), torch.randn(heads, keys, dims.d_head)
    score = torch.randn(heads, shape[1], keys)

    def matmul() -> None:
        linear()
        for _ in range(2 * dims.n_layers):
            torch.bmm(q, k.transpose(1, 2))  # scores; their gradient from that of the output
            torch.bmm(score, k)  # the output; the gradient of the queries
            torch.bmm(score.transpose(1, 2), q)  # the gradients of values and keys

    loops = {"linear": linear, "matmul": matmul, "bare": bare}
    times: dict[str, list[float]] = {name: [] for name in (*loops, "run")}
    for turn in range(rounds):
        for name, loop in loops.items():
            taken = []
            for _ in range(WARM_UP + steps):
                start = time.perf_counter()
                loop()
                taken.append(time.perf_counter() - start)
            times[name] += taken[WARM_UP:]
        times["run"] += _run_steps(cfg, turn, WARM_UP + steps)[WARM_UP:]
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "shape": {"batch": shape[0], "seq_len": shape[1], "params": sum(p.numel() for p in model.parameters())},
        "device": machine.describe("cpu"),
        "versions": machine.versions(),
        "median_s": median,
        "tokens_per_s": targets.numel() / median["run"],
        **{
            f"{part}_share_{whole}": median[part] / median[whole]
            for part in ("linear", "matmul")
            for whole in ("bare", "run")
        },
        "overhead": median["run"] / median["bare"] - 1,
    }


def _run_steps(cfg: RunConfig, turn: int, steps: int) -> list[float]:
    """Seconds between the ends of consecutive steps of a real run."""
    with tempfile.TemporaryDirectory() as folder:
        cfg = replace(
            cfg,
            seed=turn,
            schedule={**cfg.schedule, "warmup_tokens": None},
            trainer=replace(cfg.trainer, tokens=steps * cfg.tokens_per_step, val_every=0, checkpoint_every=0),
            paths=replace(cfg.paths, runs=folder),
        )
        record = run(cfg)
        assert record["status"] == "finished", record["reason"]
        ends = [row["wall_s"] for row in Store(Path(folder)).metrics(record["run_id"]) if "wall_s" in row]
    return [b - a for a, b in zip([0.0, *ends], ends, strict=False)]
