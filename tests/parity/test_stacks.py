"""Stacks of models that are no decoders alone: T5's decoder without its encoder, BERT's hidden states."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_ablate.config import ModelConfig
from andrea_ablate.convert import FAMILIES
from andrea_ablate.convert.families import Family, layers, linear, norm, one
from andrea_ablate.convert.maps import weights_from_hf
from andrea_ablate.model import TransformerLM
from designs import design

transformers = pytest.importorskip("transformers", reason="pip install 'andrea-ablate[parity]'")
pytestmark = pytest.mark.slow  # importing transformers takes long

LENGTH = 23
SIZES: dict[str, Any] = {"d_model": 36, "n_layers": 3, "n_heads": 6, "vocab_size": 61, "max_seq_len": 40}
T5_STACK = Family(
    "T5ForConditionalGeneration",
    "decoder.",
    (),
    (
        *one("shared.weight", "embedding"),
        *one("decoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight", "pos.bucket_bias"),
        *layers(
            "decoder.block.{i}",
            *(one(f"layer.0.SelfAttention.{name}.weight", f"attn.w_{name}") for name in "qkvo"),
            one("layer.2.DenseReluDense.wi.weight", "ffn.w_up"),
            one("layer.2.DenseReluDense.wi_0.weight", "ffn.w_gate"),
            one("layer.2.DenseReluDense.wi_1.weight", "ffn.w_up"),
            one("layer.2.DenseReluDense.wo.weight", "ffn.w_down"),
            one("layer.0.layer_norm.weight", "attn_norm.before.gain"),
            one("layer.2.layer_norm.weight", "ffn_norm.before.gain"),
        ),
        *norm("decoder.final_layer_norm", "final_norm"),
    ),
)
BERT_STACK = Family(
    "BertModel",
    "embeddings.",
    (),
    (
        *one("embeddings.word_embeddings.weight", "embedding"),
        *one("embeddings.position_embeddings.weight", "pos.vectors"),
        *norm("embeddings.LayerNorm", "on_stream.parts.0"),
        *layers(
            "encoder.layer.{i}",
            linear("attention.self.query", "attn", "q"),
            linear("attention.self.key", "attn", "k"),
            linear("attention.self.value", "attn", "v"),
            linear("attention.output.dense", "attn", "o"),
            linear("intermediate.dense", "ffn", "up"),
            linear("output.dense", "ffn", "down"),
            norm("attention.output.LayerNorm", "attn_norm.after"),
            norm("output.LayerNorm", "ffn_norm.after"),
        ),
    ),
)


def randomise(model: Any) -> None:
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_((parameter.dim() == 1) + 0.2 * torch.randn_like(parameter))


def converted(monkeypatch: pytest.MonkeyPatch, config: ModelConfig, family: Family, state: dict[str, Tensor]) -> Any:
    monkeypatch.setitem(FAMILIES, "stack", family)
    model = TransformerLM(config).eval()
    model.load_state_dict(weights_from_hf(config, "stack", state))
    return model


def tokens(seed: int = 1) -> Tensor:
    return torch.randint(0, 61, (2, LENGTH), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_t5_decoder_stack(monkeypatch: pytest.MonkeyPatch, version: str) -> None:
    """Its attention to the encoder gives nothing here: the output projection of that is zero."""
    given = {"feed_forward_proj": "relu" if version == "1.0" else "gated-gelu", "tie_word_embeddings": version == "1.0"}
    widths = {"d_model": 36, "d_kv": 8, "d_ff": 52, "num_layers": 1, "num_decoder_layers": 3, "num_heads": 6}
    config = transformers.T5Config(
        **widths,
        **given,
        vocab_size=61,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=15,
        attn_implementation="eager",
    )
    their_model = transformers.T5ForConditionalGeneration(config).eval()
    randomise(their_model)
    with torch.no_grad():
        for block in their_model.decoder.block:
            block.layer[1].EncDecAttention.o.weight.zero_()
    state = {
        name: t
        for name, t in their_model.state_dict().items()
        if name.startswith(("shared.", "decoder.")) and ".layer.1." not in name and "embed_tokens" not in name
    }
    ours = design(
        {"logit_multiplier": {"factor": None}} if version == "1.0" else (),
        **SIZES,
        d_head=8,
        tie_embeddings=True,
        norm_type="rmsnorm",
        ffn=("relu4x", {"ratio": "52/36"}) if version == "1.0" else ("geglu", T5_GATE),
        pos=("t5", {"buckets": 8, "max_distance": 15}),
        attn={"scale": 1.0},
    )
    ours.norm["eps"] = 1e-6
    model = converted(monkeypatch, ours, T5_STACK, state)
    nothing = transformers.modeling_outputs.BaseModelOutput(torch.zeros(2, 1, 36))
    expected = their_model(encoder_outputs=nothing, decoder_input_ids=tokens()).logits
    got = model(tokens())
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=0)
    assert torch.equal(got.argmax(-1), expected.argmax(-1))
    for logits in (expected, got):
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens(seed=2).flatten()).backward()
    bias = their_model.decoder.block[0].layer[0].SelfAttention.relative_attention_bias.weight
    torch.testing.assert_close(model.pos.bucket_bias.grad, bias.grad, atol=1e-6, rtol=1e-3)
    torch.testing.assert_close(model.embedding.grad, their_model.shared.weight.grad, atol=1e-5, rtol=1e-3)


T5_GATE = {"ratio": "52/36", "multiple": 1, "activation": "gelu_tanh"}


def test_bert_hidden_states(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.BertConfig(
        vocab_size=61,
        hidden_size=36,
        num_hidden_layers=3,
        num_attention_heads=6,
        intermediate_size=52,
        max_position_embeddings=40,
        layer_norm_eps=1e-3,
        attn_implementation="eager",
    )
    their_model = transformers.BertModel(config, add_pooling_layer=False).eval()
    randomise(their_model)
    state = {name: t for name, t in their_model.state_dict().items() if "token_type" not in name}
    # All tokens are of the first type, whose vector is added to every position.
    state["embeddings.position_embeddings.weight"] = (
        state["embeddings.position_embeddings.weight"] + their_model.embeddings.token_type_embeddings.weight[0]
    )
    ours = design(
        {"embedding_norm": {"eps": 1e-3}},
        **SIZES,
        tie_embeddings=True,
        linear_bias=True,
        norm="post",
        ffn=("gelu4x", {"ratio": "52/36"}),
        pos="learned",
        attn={"causal": False},
    )
    ours.norm["eps"] = 1e-3
    model = converted(monkeypatch, ours, BERT_STACK, state)
    mask = torch.ones(2, LENGTH, dtype=torch.long)
    mask[1, 17:] = 0
    with torch.no_grad():
        for given in (None, mask):
            expected = their_model(tokens(), attention_mask=given).last_hidden_state
            got = model.hidden(tokens(), None if given is None else given.bool())
            seen = torch.ones_like(mask).bool() if given is None else given.bool()
            torch.testing.assert_close(got[seen], expected[seen], atol=1e-4, rtol=0)
