"""The assembled model is the published one: with its weights, the logits and gradients of Hugging Face's classes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_ablate.convert import config_from_hf, config_to_hf, weights_from_hf, weights_to_hf
from andrea_ablate.convert.keys import flatten
from andrea_ablate.model import TransformerLM
from parity.families import CASES

transformers = pytest.importorskip("transformers", reason="pip install 'andrea-ablate[parity]'")
pytestmark = pytest.mark.slow  # importing transformers takes long

LENGTH = 23  # neither a multiple of the window nor within it, longer than what the scalings extend


@lru_cache
def theirs(name: str) -> Any:
    """A randomly initialised model of the family; gains and biases are random, too."""
    config_class, model_class, given = CASES[name]
    config = getattr(transformers, config_class)(**given, attn_implementation="eager")
    torch.manual_seed(0)
    model = getattr(transformers, model_class)(config).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            centre = 1.0 if key.endswith("norm.weight") or ".ln_" in key else 0.0
            parameter.copy_(centre * (parameter.dim() == 1) + 0.2 * torch.randn_like(parameter))
        if config.model_type == "opt":
            model.model.decoder.embed_positions.weight[:2] = 0  # rows that no sequence from its beginning reads
    return model


def hf_config(model: Any) -> dict[str, Any]:
    plain: dict[str, Any] = model.config.to_dict()
    return plain


def ours(name: str) -> TransformerLM:
    hf = hf_config(theirs(name))
    config, unread = config_from_hf(hf)
    assert not unread
    model = TransformerLM(config).eval()
    model.load_state_dict(weights_from_hf(config, hf["model_type"], theirs(name).state_dict()))
    return model


def tokens(seed: int = 1) -> Tensor:
    """Of one length throughout: their dynamic scaling remembers the longest sequence it has seen."""
    return torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


def check_logits(model: TransformerLM, their_model: Any) -> None:
    with torch.no_grad():
        expected, got = their_model(tokens()).logits, model(tokens())
    assert expected.std() > 0.05
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))


@pytest.mark.parametrize("name", CASES)
def test_logits_are_theirs(name: str) -> None:
    check_logits(ours(name), theirs(name))


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_theirs(name: str) -> None:
    inputs, targets = tokens(), tokens(seed=2)
    their_model, model = theirs(name), ours(name)
    their_model.zero_grad()
    logits = their_model(inputs).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    loss.backward()
    sums = model(inputs, targets)
    (sums.nll / sums.n_tokens).backward()
    torch.testing.assert_close(sums.nll / sums.n_tokens, loss, atol=1e-5, rtol=0)
    tied = their_model.get_output_embeddings().weight is their_model.get_input_embeddings().weight
    assert tied == (model.head is None)
    gradients = {key: p.grad for key, p in their_model.named_parameters() if p.grad is not None}
    hf = hf_config(their_model)
    config, _ = config_from_hf(hf)
    # Gradients lie where weights lie: every layout is linear, and a shift has the gradient of what it shifts.
    expected = weights_from_hf(config, hf["model_type"], gradients)
    for key, parameter in model.named_parameters():
        if hf["model_type"] == "gemma3_text" and ".qk." in key:
            expected[key] = expected[key] - 1
        # A bias of keys that nothing rotates has no gradient: it adds the same to all scores of a query.
        assert (parameter.grad - expected[key]).norm() < 1e-3 * expected[key].norm() + 1e-7, key


@pytest.mark.parametrize("name", CASES)
def test_the_way_back_gives_their_configuration_and_weights(name: str) -> None:
    model, hf = theirs(name), hf_config(theirs(name))
    config, _ = config_from_hf(hf)
    written = config_to_hf(config, hf["model_type"])
    rebuilt = type(model.config)(**{**hf, **written}, attn_implementation="eager")
    assert flatten(config_from_hf(rebuilt.to_dict())[0]) == flatten(config)
    theirs_again = weights_to_hf(config, hf["model_type"], ours(name).state_dict())
    state = model.state_dict()
    if config.tie_embeddings:
        del state["lm_head.weight"]
    assert theirs_again.keys() == state.keys()
    for key, tensor in theirs_again.items():
        torch.testing.assert_close(tensor, state[key], atol=2e-7, rtol=0, msg=key)
    again = type(model)(rebuilt).eval()
    again.load_state_dict(theirs_again, strict=not config.tie_embeddings)
    again.tie_weights()
    with torch.no_grad():
        torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits, atol=1e-5, rtol=0)
