"""The loss against numbers worked by hand and float64 NumPy."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from andrea_ablate import ops
from andrea_ablate.loss import IGNORE, LossSums, lm_loss
from andrea_ablate.model import TransformerLM
from designs import design
from oracles import loss as oracle


@pytest.fixture(params=["auto", "reference"], autouse=True)
def _path(request: pytest.FixtureRequest) -> Iterator[None]:
    with ops.using(request.param):
        yield


def loss_of(logits: Tensor, targets: Tensor, alpha: float = 0.0) -> LossSums:
    """The loss of given logits: an output projection by the identity."""
    return lm_loss(logits, torch.eye(logits.shape[-1], dtype=logits.dtype), targets, z_weight=alpha)


def mean(sums: LossSums) -> float:
    return sums.mean().item()


@pytest.mark.parametrize("alpha", [None, 0.3])
@pytest.mark.parametrize("shape", [(1,), (7,), (2, 5), (2, 3, 2)])
def test_sums_match_float64_oracle(alpha: float | None, shape: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    logits = torch.randn(*shape, 11, dtype=torch.float64) * 5
    targets = torch.randint(0, 11, shape)
    targets.view(-1)[1::3] = IGNORE
    sums = loss_of(logits, targets, alpha or 0.0)
    want = oracle.sums(logits.view(-1, 11).numpy(), targets.flatten().tolist(), alpha or 0.0)
    assert tuple(t.item() for t in sums) == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_logits_are_summed_in_fp32(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(500, 11) * 5).to(dtype)
    targets = torch.randint(0, 11, (500,))
    sums = loss_of(logits, targets, 1.0)
    assert sums.nll.dtype == torch.float32
    want = oracle.sums(logits.double().numpy(), targets.tolist(), 1.0)
    assert (sums.nll.item(), sums.penalty.item()) == pytest.approx(want[:2], rel=1e-5)


@pytest.mark.parametrize("alpha", [None, 0.1])
def test_gradients(alpha: float | None) -> None:
    torch.manual_seed(0)
    targets = torch.tensor([1, IGNORE, 3])

    def total(logits: Tensor) -> Tensor:
        sums = loss_of(logits, targets, alpha or 0.0)
        return sums.nll + sums.penalty

    logits = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(total, logits, fast_mode=True)


# ---------------------------------------------------------------------------------------------------------------------
# ignored positions


@pytest.mark.parametrize("alpha", [0.0, 1e-4])
def test_a_batch_without_targets_is_zero_with_zero_gradients(alpha: float) -> None:
    logits = torch.randn(2, 3, 5, requires_grad=True)
    sums = loss_of(logits, torch.full((2, 3), IGNORE), alpha)
    assert (mean(sums), sums.penalty.item(), sums.n_tokens.item()) == (0.0, 0.0, 0)
    (sums.mean() + sums.penalty).backward()
    assert logits.grad is not None
    assert (logits.grad == 0).all()


def test_a_model_given_a_batch_without_targets_gets_zero_gradients() -> None:
    model = TransformerLM(design(("z_loss",)))
    sums = model(torch.zeros(2, 4, dtype=torch.long), torch.full((2, 4), IGNORE))
    (sums.mean() + sums.penalty).backward()
    assert all(p.grad is not None and (p.grad == 0).all() for p in model.parameters())


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e30])
@pytest.mark.parametrize("alpha", [0.0, 1e-4])
def test_what_an_ignored_row_holds_does_not_matter(value: float, alpha: float) -> None:
    logits = torch.zeros(2, 4)
    logits[1] = value
    logits[1, 0] = float("inf")
    logits.requires_grad_()
    clean = torch.zeros(1, 4, requires_grad=True)
    for x, targets in ((logits, [1, IGNORE]), (clean, [1])):
        sums = loss_of(x, torch.tensor(targets), alpha)
        (sums.nll + sums.penalty).backward()
    assert logits.grad is not None
    assert clean.grad is not None
    assert torch.equal(logits.grad[0], clean.grad[0])
    assert (logits.grad[1] == 0).all()


# ---------------------------------------------------------------------------------------------------------------------
# the z-loss


def test_z_loss_counts_predicted_rows_only_and_stays_out_of_the_loss() -> None:
    logits, targets = torch.zeros(2, 4), torch.tensor([1, IGNORE])
    plain, with_z = loss_of(logits, targets), loss_of(logits, targets, 1e-4)
    assert mean(plain) == mean(with_z) == pytest.approx(math.log(4), abs=1e-6)
    assert plain.penalty.item() == 0.0
    assert (with_z.nll + with_z.penalty).item() == pytest.approx(1.386487, abs=5e-7)  # 1.386679 with the ignored row


def test_z_loss_of_weight_zero_adds_nothing() -> None:
    logits, targets = torch.randn(3, 4), torch.tensor([1, 2, 3])
    assert loss_of(logits, targets, 0.0).penalty.item() == 0.0


# ---------------------------------------------------------------------------------------------------------------------
# sums of micro-batches


def test_sums_of_unequal_micro_batches_give_the_token_mean() -> None:
    """Six tokens of loss 1 and one of loss 7; the mean of the two means would be 4."""

    def rows(nats: float, n: int) -> Tensor:
        return torch.tensor([[0.0, math.log(math.expm1(nats))]]).expand(n, 2)

    parts = [loss_of(rows(nats, n), torch.zeros(n, dtype=torch.long)) for nats, n in ((1.0, 6), (7.0, 1))]
    assert [mean(part) for part in parts] == pytest.approx([1.0, 7.0], rel=1e-6)
    total = LossSums(*(sum(column) for column in zip(*parts, strict=True)))  # type: ignore[arg-type]
    assert mean(total) == pytest.approx(13 / 7, rel=1e-6)


@pytest.mark.parametrize("tricks", [(), ("z_loss",)])
def test_micro_batches_with_padding_give_the_gradient_of_the_undivided_batch(tricks: tuple[str, ...]) -> None:
    torch.manual_seed(0)
    model = TransformerLM(design(tricks)).double()
    tokens, targets = torch.randint(0, 23, (4, 8)), torch.randint(0, 23, (4, 8))
    targets[0, 2:] = targets[1] = targets[3, 5:] = IGNORE
    n_tokens = int((targets != IGNORE).sum())

    def gradient(n_micro: int) -> list[Tensor]:
        model.zero_grad()
        for x, y in zip(tokens.chunk(n_micro), targets.chunk(n_micro), strict=True):
            sums = model(x, y)
            ((sums.nll + sums.penalty) / n_tokens).backward()
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for whole, split in zip(gradient(1), gradient(4), strict=True):
        torch.testing.assert_close(split, whole, rtol=1e-9, atol=1e-12)
