"""The Lightning module: one optimizer step per batch, whatever the number of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import lightning
import torch
from torch import Tensor, nn

from andrea_ablate import ops
from andrea_ablate.config import RunConfig
from andrea_ablate.loss import LossSums
from andrea_ablate.model import TransformerLM
from andrea_ablate.training.optim import OPTIMIZERS, set_lr
from andrea_ablate.training.outliers import OutlierGuard
from andrea_ablate.training.schedules import schedule
from andrea_ablate.training.sharding import shard, whole


class LanguageModule(lightning.LightningModule):
    """Trains a TransformerLM. `trainer.global_step`, schedules and intervals all count optimizer steps.

    The loss of a step is the summed loss over the whole batch divided by its number of predicted tokens, so
    micro-batches and ranks with unequal token counts give the gradient of the undivided batch.
    """

    def __init__(self, cfg: RunConfig) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.cfg = cfg
        self.model = TransformerLM(cfg.model, init_seed=cfg.seed)
        self.step = 0  # completed optimizer steps, those before a resume included
        skip: Any = self.model.skip_step
        self.guard = None if skip is None else OutlierGuard(skip.window, skip.sigma)

    def setup(self, stage: str) -> None:
        # In the process that trains: neither a schedule nor a compiled model survives the way to another one.
        ops.choose(self.cfg.ops)
        self.factor = schedule(self.cfg.schedule, self.cfg.warmup_steps, self.cfg.total_steps)
        if self.cfg.trainer.compile:
            self.model.compile()  # in place: parameter names keep no wrapper prefix
        self.weights = list(self.model.parameters())

    def configure_model(self) -> None:
        if self.sharded:
            shard(self.model, self.device_mesh["data_parallel"])  # type: ignore[index]
            self.weights = list(self.model.parameters())

    @property
    def sharded(self) -> bool:
        """Whether this rank holds a part of the weights."""
        return self.cfg.trainer.strategy == "fsdp" and self.trainer.world_size > 1

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        # Lightning's own searches the batch for tensors, which costs a small model more than the copy does.
        return {**batch, **{key: batch[key].to(device, non_blocking=True) for key in ("inputs", "targets")}}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS.build(self.cfg.optim, model=self.model)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        optimizer = self.optimizers()
        lr = self.cfg.optim["lr"] * self.factor(self.step + 1)
        set_lr(optimizer, lr)  # type: ignore[arg-type]
        sums = self._backward(batch)
        grad_norm = self._clip()
        skipped = not self._accepts(sums, grad_norm, batch["n_tokens"])
        if skipped:
            optimizer.zero_grad()  # type: ignore[union-attr]  # without gradients a step changes nothing
        optimizer.step()  # type: ignore[union-attr]
        optimizer.zero_grad()  # type: ignore[union-attr]
        self.step += 1
        return {"nll": sums.nll, "penalty": sums.penalty, "grad_norm": grad_norm, "lr": lr, "skipped": skipped}

    def _accepts(self, sums: LossSums, grad_norm: Tensor, n_tokens: int) -> bool:
        """Whether the step is to change the weights; on a GPU, asking the guard waits for the loss."""
        if self.guard is None:
            return True
        nll = self.reduce_sum(sums.nll.clone())  # a sum over ranks is written over what is summed
        return self.guard.accepts(nll.item() / max(1, n_tokens), grad_norm.item())

    def _backward(self, batch: dict[str, Any]) -> LossSums:
        """Accumulate the gradient of the whole step; return this rank's detached sums."""
        n_micro, ranks = self.cfg.trainer.accumulate, self.trainer.world_size
        # DDP averages gradients over ranks; the global token count is already in the denominator.
        scale = ranks / max(1, batch["n_tokens"])
        done: list[LossSums] = []
        for i, (inputs, targets) in enumerate(
            zip(batch["inputs"].chunk(n_micro), batch["targets"].chunk(n_micro), strict=True)
        ):
            sums: LossSums = self.model(inputs, targets)
            loss = (sums.nll + sums.penalty) * scale
            if ranks == 1:
                loss.backward()  # what Lightning does around it is for DDP, and a small model feels it
            else:
                wait = i < n_micro - 1 and not self.sharded  # there, gradients are summed part by part
                with self.trainer.strategy.block_backward_sync() if wait else nullcontext():  # type: ignore[attr-defined]
                    self.manual_backward(loss)
            done.append(LossSums(*(t.detach() for t in sums)))
        return done[0] if n_micro == 1 else LossSums(*(torch.stack(column).sum() for column in zip(*done, strict=True)))

    def _clip(self) -> Tensor:
        """Clip the global gradient norm; return the norm before clipping."""
        limit = self.cfg.trainer.grad_clip
        if limit is None:
            norm = nn.utils.get_total_norm([p.grad for p in self.weights if p.grad is not None])
        else:
            norm = nn.utils.clip_grad_norm_(self.weights, limit)
        total: Tensor = whole(norm)
        return total

    @torch.no_grad()
    def evaluate(self, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
        """Validation on fixed batches: nats per predicted token, without penalties, and bits per byte if known."""
        self.eval()
        totals = torch.zeros(3, dtype=torch.float64, device=self.device)
        for batch in batches:
            with self.trainer.precision_plugin.val_step_context():
                sums = self.model(batch["inputs"].to(self.device), batch["targets"].to(self.device))
            counts = torch.tensor([batch["n_tokens"], batch["n_bytes"]], dtype=torch.float64)
            totals += torch.cat((sums.nll.double().view(1), counts.to(self.device)))
        self.train()
        nll, tokens, n_bytes = self.reduce_sum(totals).tolist()
        loss = nll / max(1.0, tokens)
        metrics = {"val/loss": loss, "val/tokens": tokens}
        if n_bytes:
            metrics["val/bpb"] = nll / n_bytes / torch.log(torch.tensor(2.0, dtype=torch.float64)).item()
        return metrics

    @torch.no_grad()
    def evaluate_at(self, length: int, batches: Iterable[dict[str, Any]]) -> dict[str, float]:
        """Validation on windows of `length` tokens: nats per token over all positions, and by band of positions.

        The bands begin at 0, 16, 32, 64 …: ``val_512/loss_from_64`` is the loss of positions 64 to 127.
        """
        edges = [0, *(2**i for i in range(4, (length - 1).bit_length())), length]
        totals = torch.zeros(len(edges) - 1, 2, dtype=torch.float64, device=self.device)
        self.eval()
        for batch in batches:
            with self.trainer.precision_plugin.val_step_context():
                x_BLD, targets = self.model.hidden(batch["inputs"].to(self.device)), batch["targets"].to(self.device)
                for total, first, last in zip(totals, edges, edges[1:], strict=False):
                    sums = self.model.loss(x_BLD[:, first:last], targets[:, first:last])
                    total += torch.stack((sums.nll.double(), sums.n_tokens.double()))
        self.train()
        totals = self.reduce_sum(totals)
        nll, tokens = totals.sum(0).tolist()
        bands = {f"val_{length}/loss_from_{first}": total for first, total in zip(edges, totals.tolist(), strict=False)}
        return {
            f"val_{length}/loss": nll / max(1.0, tokens),
            **{key: nll / tokens for key, (nll, tokens) in bands.items() if tokens},
        }

    def reduce_sum(self, values: Tensor) -> Tensor:
        """Sum over ranks."""
        return self.trainer.strategy.reduce(values, reduce_op="sum") if self.trainer.world_size > 1 else values
