"""Which parameters decay, and what one update does to them."""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from andrea_ablate.training.optim import OPTIMIZERS, Muon, orthogonalise, param_groups
from designs import NODES, design, options
from support import Compose

CHOICES: list[dict[str, Any]] = [
    *({group: option} for group in NODES if group != "stability" for option in options(group)),
    *({"stability": (trick,)} for trick in options("stability")),
    {"linear_bias": True, "ffn": "swiglu"},
    {"linear_bias": True, "tie_embeddings": True},
    {"norm_type": "rmsnorm", "norm": {"bias": True}},
    {"attn": {"gate": "elementwise", "sinks": True}, "linear_bias": True, "head_bias": True},
    {"attn": ("mla", {"q_lora_rank": 8}), "linear_bias": True},
    {"stability": {"qk_layernorm": {"bias": True, "gains": "per_head"}}},
]


def random_gradients(model: nn.Module) -> None:
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)


@pytest.mark.parametrize("decay_embeddings", [False, True])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_matrices_decay_and_vectors_never_do(choice: dict[str, Any], decay_embeddings: bool) -> None:
    model = TransformerLM(design(**choice))
    groups = param_groups(model, 0.1, decay_embeddings)
    of = {id(p): group["weight_decay"] for group in groups for p in group["params"]}
    assert sum(len(group["params"]) for group in groups) == len(of) == len(list(model.parameters()))
    for name, parameter in model.named_parameters():
        assert parameter.ndim in (1, 2)
        if name == "embedding" or name.startswith("pos."):
            expected = 0.1 if decay_embeddings else 0.0
        else:
            expected = 0.1 if parameter.ndim == 2 else 0.0
        assert of[id(parameter)] == expected, name


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("optim", OPTIMIZERS.names())
@pytest.mark.parametrize("choice", ["norm_type=rmsnorm", "model.linear_bias=true stability=[qk_norm] pos=learned"])
def test_step_with_zero_gradients_moves_the_decayed_ones_only(optim: str, choice: str, epochs: Compose) -> None:
    cfg = epochs(f"optim={optim}", *choice.split(" "))
    model = TransformerLM(cfg.model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5)  # biases too
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS.build({**cfg.optim, "lr": 0.5, "weight_decay": 0.1}, model=model)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for name, parameter in model.named_parameters():
        decayed = parameter.ndim == 2 and name != "embedding" and not name.startswith("pos.")
        expected = before[name] * (1 - 0.5 * 0.1) if decayed else before[name]
        torch.testing.assert_close(parameter.detach(), expected, rtol=1e-6, atol=0)


def test_three_adamw_updates_follow_the_papers_algorithm(epochs: Compose) -> None:
    cfg = epochs()
    model = TransformerLM(cfg.model)
    node = {**cfg.optim, "lr": 0.01, "betas": [0.8, 0.9], "eps": 1e-3, "weight_decay": 0.2}
    optimizer = OPTIMIZERS.build(node, model=model)
    start = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    m = {name: np.zeros_like(value) for name, value in start.items()}
    v = {name: np.zeros_like(value) for name, value in start.items()}
    for t in (1, 2, 3):
        torch.manual_seed(t)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            g = parameter.grad.double().numpy()
            m[name] = 0.8 * m[name] + 0.2 * g
            v[name] = 0.9 * v[name] + 0.1 * g * g
            decay = 0.2 if parameter.ndim == 2 and name != "embedding" else 0.0
            update = (m[name] / (1 - 0.8**t)) / (np.sqrt(v[name] / (1 - 0.9**t)) + 1e-3)
            start[name] -= 0.01 * (update + decay * start[name])
        optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), start[name], rtol=2e-4, atol=1e-6)


def test_three_lion_updates_follow_the_papers_algorithm(epochs: Compose) -> None:
    cfg = epochs("optim=lion")
    model = TransformerLM(cfg.model)
    node = {**cfg.optim, "lr": 0.01, "betas": [0.8, 0.9], "weight_decay": 0.2}
    optimizer = OPTIMIZERS.build(node, model=model)
    theta = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    m = {name: np.zeros_like(value) for name, value in theta.items()}
    for t in (1, 2, 3):
        torch.manual_seed(t)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            g = parameter.grad.double().numpy()
            decay = 0.2 if parameter.ndim == 2 and name != "embedding" else 0.0
            theta[name] -= 0.01 * (np.sign(0.8 * m[name] + 0.2 * g) + decay * theta[name])
            m[name] = 0.9 * m[name] + 0.1 * g
        optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), theta[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("nesterov", [False, True])
def test_three_sgd_updates_follow_the_formula(nesterov: bool, epochs: Compose) -> None:
    cfg = epochs("optim=sgd")
    model = TransformerLM(cfg.model)
    node = {**cfg.optim, "lr": 0.01, "momentum": 0.8, "nesterov": nesterov, "weight_decay": 0.2}
    optimizer = OPTIMIZERS.build(node, model=model)
    theta = {name: p.detach().double().numpy().copy() for name, p in model.named_parameters()}
    v = {name: np.zeros_like(value) for name, value in theta.items()}
    for t in (1, 2, 3):
        torch.manual_seed(t)
        for name, parameter in model.named_parameters():
            parameter.grad = torch.randn_like(parameter)
            decay = 0.2 if parameter.ndim == 2 and name != "embedding" else 0.0
            g = parameter.grad.double().numpy() + decay * theta[name]
            v[name] = 0.8 * v[name] + g
            theta[name] -= 0.01 * (g + 0.8 * v[name] if nesterov else v[name])
        optimizer.step()
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(parameter.detach().numpy(), theta[name], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["optim=sgd", "optim.momentum=1.0"], "optim.momentum=1.0 must be a number in"),
        (["optim=muon", "optim.momentum=null"], "optim.momentum=None must be a number in"),
        (["optim=sgd", "optim.momentum=0", "optim.nesterov=true"], "optim.nesterov=true .* optim.momentum=0"),
    ],
)
def test_an_impossible_momentum_is_refused_at_composition(changes: list[str], words: str, epochs: Compose) -> None:
    with pytest.raises(ConfigError, match=words):
        epochs(*changes)


UPDATES_WORKED_OUT = {"adamw", "muon", "lion", "sgd"}


def test_every_optimizer_has_an_independent_update() -> None:
    assert set(OPTIMIZERS.names()) == UPDATES_WORKED_OUT


@pytest.mark.parametrize("optim", OPTIMIZERS.names())
def test_a_step_without_gradients_changes_nothing(optim: str, epochs: Compose) -> None:
    """What leaving out a step (skip_step) relies on."""
    cfg = epochs(f"optim={optim}")
    model = TransformerLM(cfg.model)
    optimizer = OPTIMIZERS.build({**cfg.optim, "lr": 0.1}, model=model)
    random_gradients(model)
    optimizer.step()
    weights, state = copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict())
    optimizer.zero_grad()
    optimizer.step()
    assert all(torch.equal(value, weights[name]) for name, value in model.state_dict().items())
    assert str(optimizer.state_dict()) == str(state)


@pytest.mark.parametrize("shape", [(8, 8), (24, 8), (8, 24), (5, 3), (1, 7)])
def test_orthogonalised_matrix_keeps_its_directions_and_evens_its_sizes(shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    matrix = torch.randn(shape)
    u, _, vt = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    result = orthogonalise(matrix).double().numpy()
    inner = u.T @ result @ vt.T
    assert np.abs(inner - np.diag(np.diag(inner))).max() < 1e-4
    assert 0.6 < np.diag(inner).min() <= np.diag(inner).max() < 1.3
    np.testing.assert_allclose(u @ inner @ vt, result, atol=1e-4)


def test_newton_schulz_matches_float64_polynomials_of_the_singular_values() -> None:
    torch.manual_seed(1)
    matrix = torch.randn(6, 10)
    u, s, vt = np.linalg.svd(matrix.double().numpy(), full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    np.testing.assert_allclose(orthogonalise(matrix).numpy(), u @ np.diag(s) @ vt, atol=1e-5)


def test_muon_is_torchs_muon_up_to_its_bf16() -> None:
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in ((16, 16), (32, 16), (16, 48))]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    a = Muon(ours, lr=0.02, momentum=0.9, weight_decay=0.1)
    b = torch.optim.Muon(theirs, lr=0.02, momentum=0.9, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    start = [p.detach().clone() for p in ours]
    for _ in range(4):
        for p, q in zip(ours, theirs, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        a.step()
        b.step()
    for p, q, first in zip(ours, theirs, start, strict=True):
        moved = (q.detach() - first).norm()
        assert (p.detach() - q.detach()).norm() < 0.02 * moved
        assert a.state[p]["momentum_buffer"].equal(b.state[q]["momentum_buffer"])


def test_muon_moves_block_matrices_by_adamws_size_and_leaves_the_rest_to_adamw(epochs: Compose) -> None:
    cfg = epochs("optim=muon", "model.linear_bias=true")
    model = TransformerLM(cfg.model)
    before = copy.deepcopy(model.state_dict())
    optimizer = OPTIMIZERS.build({**cfg.optim, "lr": 1e-3, "weight_decay": 0.0}, model=model)
    random_gradients(model)
    optimizer.step()
    for name, parameter in model.named_parameters():
        moved = (parameter.detach() - before[name]) / 1e-3
        size = moved.square().mean().sqrt().item()
        if name.startswith("blocks.") and parameter.ndim == 2:
            assert 0.14 < size < 0.25, name  # 0.2 is the root mean square of AdamW's updates
        else:
            assert size == pytest.approx(1.0, abs=1e-3), name  # AdamW's first update is the gradient's sign


def test_every_parameter_has_one_optimizer_and_they_share_the_learning_rate(epochs: Compose) -> None:
    cfg = epochs("optim=muon")
    model = TransformerLM(cfg.model)
    optimizer = OPTIMIZERS.build(cfg.optim, model=model)
    ids = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = copy.deepcopy(model.state_dict())
    random_gradients(model)
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, before[name])


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("optim", OPTIMIZERS.names())
def test_tied_head_follows_the_embedding_through_load_copy_and_step(optim: str, epochs: Compose) -> None:
    cfg = epochs("model.tie_embeddings=true", f"optim={optim}")
    tokens = torch.arange(8).view(1, 8)

    def head_is_the_embedding(model: TransformerLM) -> bool:
        with torch.no_grad():
            logits = model.eval()(tokens)
            width = model.embedding.shape[1]
            probe = torch.eye(width).view(1, width, width)
            readout = model.logits(probe)[0].T  # the head's weights, read through the model
        return model.head is None and torch.equal(readout, model.embedding) and bool(logits.isfinite().all())

    model = TransformerLM(cfg.model)
    other = TransformerLM(replace(cfg.model), init_seed=1)
    other.load_state_dict(model.state_dict())
    assigned = TransformerLM(cfg.model, init_seed=2)
    assigned.load_state_dict(model.state_dict(), assign=True)
    compiled = TransformerLM(cfg.model)
    compiled.compile(backend="eager")
    for variant in itertools.chain((model, other, assigned, compiled), (copy.deepcopy(model),)):
        assert head_is_the_embedding(variant)
        optimizer = OPTIMIZERS.build(cfg.optim, model=variant)
        before = variant.embedding.detach().clone()
        sums = variant.train()(tokens, tokens)
        sums.nll.backward()
        optimizer.step()
        assert not torch.equal(variant.embedding, before)
        assert head_is_the_embedding(variant)
