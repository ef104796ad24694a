"""The shared measurements, on models and tensors whose answer is known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from andrea_ablate.claims.probes.gradients import step_cosine, stream_gradients, token_cosine, weight_gradients
from andrea_ablate.claims.probes.models import built, zipf_tokens
from andrea_ablate.claims.probes.norms import leak, moment_errors, restore_error
from andrea_ablate.claims.probes.stream import (
    Sublayer,
    cut_residual,
    identity_error,
    scale_outputs,
    silence,
    sublayers,
    sum_error,
)

SIZE = ("model.d_model=12", "model.n_heads=3", "model.n_layers=2")


@pytest.mark.parametrize("norm", ["pre", "double", "output", "none"])
def test_sublayers_are_a_chain_of_additions(norm: str) -> None:
    model = built(*SIZE, f"norm={norm}", dtype=torch.float64)
    tokens = zipf_tokens(model, seed=1)
    passed = sublayers(model, tokens)
    assert len(passed) == 4
    assert torch.equal(passed[0].before, model.embedding[tokens])
    for sublayer, following in zip(passed, passed[1:], strict=False):
        assert torch.equal(sublayer.before + sublayer.added, sublayer.after)
        assert torch.equal(sublayer.after, following.before)
    assert torch.equal(model.final_norm(passed[-1].after), model.hidden(tokens))  # and the model is as it was


def test_post_norm_leaves_the_norm_of_a_sum() -> None:
    model = built(*SIZE, "norm=post", dtype=torch.float64)
    first = sublayers(model, zipf_tokens(model, seed=1))[0]
    wanted = torch.nn.functional.layer_norm(first.before + first.added, (12,), eps=1e-5)
    torch.testing.assert_close(first.after, wanted)


@pytest.mark.parametrize("norm", ["pre", "double", "output", "none"])
def test_without_residual_only_the_branch_is_left(norm: str) -> None:
    model = cut_residual(built(*SIZE, f"norm={norm}"))
    for sublayer in sublayers(model, zipf_tokens(model, seed=1)):
        assert torch.equal(sublayer.after, sublayer.added)


def test_errors_of_an_identity_and_of_what_is_none() -> None:
    model = built(*SIZE, dtype=torch.float64)
    assert sum_error(model, zipf_tokens(model, seed=0)) < 1e-14
    assert sum_error(cut_residual(model), zipf_tokens(model, seed=0)) > 0.1
    assert identity_error(silence(built(*SIZE, dtype=torch.float64))) == 0
    assert identity_error(cut_residual(silence(built(*SIZE, dtype=torch.float64)))) == 1


def test_an_identity_path_carries_one_gradient() -> None:
    model = silence(built(*SIZE, dtype=torch.float64))
    found = stream_gradients(model, zipf_tokens(model, seed=0))
    assert found == pytest.approx([found[0]] * 3)
    assert found[0] > 0


def test_weight_gradients_against_a_finite_difference() -> None:
    model = built(*SIZE, dtype=torch.float64)
    tokens = zipf_tokens(model, seed=0)
    weight = model.get_parameter("blocks.1.ffn.w_up")
    found = weight_gradients(model, tokens)["ffn.w_up"]
    assert len(found) == 2
    assert weight.grad is not None
    direction = weight.grad / weight.grad.norm()

    def loss(step: float) -> float:
        with torch.no_grad():
            weight.add_(direction * step)
            logits = model(tokens[:, :-1])
            weight.sub_(direction * step)
        return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))

    assert found[1] == pytest.approx((loss(1e-4) - loss(-1e-4)) / 2e-4, rel=1e-4)


def test_scale_outputs_scales_what_a_raw_branch_adds() -> None:
    model = built(*SIZE, "norm=none", dtype=torch.float64)
    tokens = zipf_tokens(model, seed=0)
    before = sublayers(model, tokens)[0].added
    torch.testing.assert_close(sublayers(scale_outputs(model, 10), tokens)[0].added, 10 * before)


def test_cosines_by_hand() -> None:
    x, y = torch.tensor([[[1.0, 0.0], [0.0, 2.0]]]), torch.tensor([[[1.0, 1.0], [0.0, 5.0]]])
    assert step_cosine(Sublayer(x, y - x, y)) == pytest.approx((0.5**0.5 + 1) / 2)


def test_tokens_of_one_kind_are_alike() -> None:
    model = built(*SIZE, "pos=none")
    assert token_cosine(model, torch.full((2, 5), 7)) == pytest.approx(1)
    assert token_cosine(model, zipf_tokens(model, seed=0)) < 0.9


def test_zipf_tokens_prefer_low_ranks_and_repeat() -> None:
    model = built(*SIZE)
    tokens = zipf_tokens(model, seed=0, batch=64)
    assert tokens.shape == (64, 32)
    assert torch.equal(tokens, zipf_tokens(model, seed=0, batch=64))
    share = 1 / (1 / torch.arange(1, model.dims.vocab_size + 1)).sum()
    assert float((tokens == 0).double().mean()) == pytest.approx(float(share), abs=0.03)


def test_norm_probes_on_norms_made_by_hand() -> None:
    x_ND = torch.tensor([[1.0, 2.0, 3.0], [4.0, 4.0, 10.0]], dtype=torch.float64)

    def centred(x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True)

    mean, variance = moment_errors(centred, x_ND, eps=0.5)
    assert mean == pytest.approx(0)
    assert variance == pytest.approx(8 - 8 / 8.5)  # the rows' variances are 2 / 3 and 8
    assert leak(centred, x_ND) == 0
    assert leak(lambda x: x - x.mean(0), x_ND) > 1
    assert restore_error(x_ND * 2 - 1, x_ND) == pytest.approx(0)
    # Three tokens of one feature, of which a line through the normed values reaches only the mean.
    x_N1 = torch.tensor([[1.0], [0.0], [-1.0]], dtype=torch.float64)
    assert restore_error(torch.tensor([[1.0], [-2.0], [1.0]], dtype=torch.float64), x_N1) == pytest.approx(1)
