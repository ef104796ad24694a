"""Steps of a stored run done again, bit for bit, with what happened inside: the capsule of a spike."""

# Shapes: B batch, L queries, M keys, H heads, D d_model, V vocabulary
from __future__ import annotations

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from andrea_ablate.attention import watching
from andrea_ablate.config import run_config
from andrea_ablate.data import prepare
from andrea_ablate.data.datamodule import DataModule, TrainBatches
from andrea_ablate.registry import ConfigError, nearest
from andrea_ablate.tracking.store import Store
from andrea_ablate.training import checkpoint
from andrea_ablate.training.identity import check
from andrea_ablate.training.module import LanguageModule
from andrea_ablate.training.run import Attempt, isolated

BEFORE, AFTER = 64, 8
# What a checkpoint holds the values of: change it, and the run starts from its first step.
STRUCTURE = ("model", "optim.type", "seed")


def replay(
    store: Store,
    name: str,
    step: int,
    changes: Mapping[str, Any] | None = None,
    *,
    before: int = BEFORE,
    after: int = AFTER,
    exchanged: Sequence[int] = (),
) -> dict[str, Any]:
    """Do steps ``step - before .. step + after`` of a run again, from the nearest checkpoint before them.

    Args:
        name: the run, by its id or the beginning of it.
        changes: settings by dotted key that differ from the run's.
        exchanged: steps that get the batch which the next data seed has there, in place of their own.
    Returns: plain values: ``steps``, one mapping per step (losses and norms, per layer what `Probe` measures, the token
        ids), and ``identical``: whether every loss is the recorded one to the last bit (None where something changed).
    Raises: ConfigError for a step that the run has not, or a key that it has not.
    """
    found = store.find(name)
    recorded = {row["step"]: row["train/loss"] for row in store.metrics(found) if "train/loss" in row}
    cfg = run_config(_changed(store.config(found), changes or {}))
    if step not in recorded:
        raise ConfigError(f"replay: run {found} has no step {step}; its steps are 1 to {max(recorded, default=0)}")
    first, last = max(1, step - before), min(step + after, cfg.total_steps)
    cfg = replace(
        cfg, logger={"type": "none"}, trainer=replace(cfg.trainer, checkpoint_every=0, val_every=0, val_lengths=[])
    )
    check(cfg)
    corpus = prepare(cfg.data, Path(cfg.paths.cache))
    structural = any(key.startswith(STRUCTURE) for key in changes or {})
    start = None if structural else _nearest(store.path(found), first)
    probe = Probe(first, last, exchanged)
    with tempfile.TemporaryDirectory() as scratch, Store(Path(scratch)).open(found) as writer:
        if start is not None:
            (writer.folder / "checkpoints").mkdir()
            shutil.copy(start, writer.folder / "checkpoints")
        attempt = Attempt(cfg, found, corpus, writer, watchers=(probe,))
        with isolated(attempt.device):
            attempt.execute()
        if writer.record["status"] == "failed":
            raise RuntimeError(f"replay of run {found} failed: {writer.record['reason']}")
        rows = {row["step"]: row for row in Store(Path(scratch)).metrics(found) if "train/loss" in row}
    steps = [{**rows[row["step"]], **row} for row in probe.rows if row["step"] in rows]
    untouched = not changes and not exchanged
    same = all(_same(rows[s]["train/loss"], recorded[s]) for s in rows if s in recorded)
    return {
        "run_id": found,
        "step": step,
        "changes": dict(changes or {}),
        "exchanged": list(exchanged),
        "identical": same if untouched else None,
        "steps": steps,
    }


class Probe(lightning.Callback):
    """Measures steps ``first .. last`` from inside and stops the run after the last.

    Per step: the mean and the largest log-partition z of the output; per layer the root mean square of what leaves the
    block, the largest attention score and the mean entropy of the attention weights (nats), the root mean square of its
    gradients as the optimizer sees them, and the norm of its update over that of its weights.
    """

    def __init__(self, first: int, last: int, exchanged: Sequence[int] = ()) -> None:
        self.first, self.last, self.exchanged = first, last, frozenset(exchanged)
        self.rows: list[dict[str, Any]] = []
        self._row: dict[str, Any] = {}
        self._before: list[list[Tensor]] = []
        self._open = ExitStack()

    def on_train_batch_start(  # type: ignore[override]
        self, trainer: lightning.Trainer, pl_module: LanguageModule, batch: Any, batch_idx: int
    ) -> None:
        step = pl_module.step + 1
        if step in self.exchanged:
            batch.update(self._other(trainer.datamodule)[step - 1])  # type: ignore[attr-defined]
        if not self.first <= step <= self.last:
            return
        blocks = list(pl_module.model.blocks)
        self._row = {"step": step, "tokens": batch["inputs"].tolist(), "layers": [{} for _ in blocks]}
        self._before = [[p.detach().clone() for p in block.parameters()] for block in blocks]
        for layer, block in zip(self._row["layers"], blocks, strict=True):
            self._hook(block.register_forward_hook(_rms_into(layer)))
            self._hook(block.get_submodule("attn").register_forward_pre_hook(self._enter(layer)))
        self._hook(pl_module.model.on_output.register_forward_hook(self._partition(pl_module.model)))
        optimizer = trainer.optimizers[0]
        self._hook(optimizer.register_step_pre_hook(lambda *_: self._gradients(blocks)))
        self._open.enter_context(watching(self._scores))

    @staticmethod
    def _other(data: DataModule) -> TrainBatches:
        return TrainBatches(data.corpus.train, data.cfg.seq_len, data.cfg.seed + 1, data.batch_size, 0, 1)

    def _hook(self, handle: Any) -> None:
        self._open.callback(handle.remove)

    def _enter(self, layer: dict[str, Any]) -> Any:
        def enter(*_: Any) -> None:
            self._layer = layer

        return enter

    def _scores(self, score_BHLM: Tensor) -> None:
        weight = score_BHLM.softmax(-1)
        entropy = -(weight * weight.clamp(min=1e-30).log()).sum(-1).mean()
        highest = max(self._layer.get("max_score", float("-inf")), score_BHLM.max().item())
        self._layer.update(max_score=highest, entropy=entropy.item())

    def _partition(self, model: nn.Module) -> Any:
        def look(module: nn.Module, inputs: Any, out_BLD: Tensor) -> None:
            with torch.no_grad():
                z_BL = model.logits(out_BLD.detach()).float().logsumexp(-1)  # type: ignore[operator]
            self._row.update(z_mean=z_BL.mean().item(), z_max=z_BL.max().item())

        return look

    def _gradients(self, blocks: list[nn.Module]) -> None:
        for layer, block in zip(self._row["layers"], blocks, strict=True):
            layer["grad_rms"] = _rms([p.grad for p in block.parameters() if p.grad is not None])

    def on_exception(
        self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, exception: BaseException
    ) -> None:
        self._open.close()  # what watches attention would outlive the run

    def on_train_batch_end(  # type: ignore[override]
        self, trainer: lightning.Trainer, pl_module: LanguageModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._row:
            self._open.close()
            for layer, block, before in zip(self._row["layers"], pl_module.model.blocks, self._before, strict=True):
                moved = [p.detach() - old for p, old in zip(block.parameters(), before, strict=True)]
                size = _rms(before)
                layer["update_ratio"] = _rms(moved) / size if size else 0.0
            self.rows.append(self._row)
            self._row = {}
        if pl_module.step >= self.last:
            trainer.should_stop = True


def _rms_into(layer: dict[str, Any]) -> Any:
    def look(module: nn.Module, inputs: Any, out: Tensor) -> None:
        layer["out_rms"] = _rms([out.detach()])

    return look


def _rms(tensors: Sequence[Tensor]) -> float:
    """Root mean square over all values of some tensors."""
    total = sum(t.float().square().sum().item() for t in tensors)
    return float((total / max(1, sum(t.numel() for t in tensors))) ** 0.5)


def _same(a: float, b: float) -> bool:
    return a == b or (a != a and b != b)


def _nearest(folder: Path, first: int) -> Path | None:
    """The newest kept checkpoint from which step `first` can still be done; None for the beginning."""
    kept = [*checkpoint.newest_first(folder / "checkpoints"), *checkpoint.newest_first(folder / "spikes")]
    fitting = [path for path in kept if checkpoint.step_of(path) < first]
    return max(fitting, key=checkpoint.step_of, default=None)


def _changed(plain: dict[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The stored configuration with some settings changed. Raises ConfigError for a key that it has not."""
    for key, value in changes.items():
        *parents, last = key.split(".")
        node: Any = plain
        for parent in parents:
            node = node.get(parent) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last not in node:
            known = node if isinstance(node, dict) else plain
            raise ConfigError(f"replay: the run has no setting '{key}'{nearest(last, known)}")
        node[last] = value
    return plain
