"""Parity sees what it is for: it fails with each of these faults, put in on purpose."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from andrea_ablate.convert.keys import flatten, unflatten
from andrea_ablate.convert.maps import config_from_hf, weights_from_hf
from andrea_ablate.model import TransformerLM

pytest.importorskip("transformers", reason="pip install 'andrea-ablate[parity]'")
pytestmark = pytest.mark.slow  # importing transformers takes long

from parity.test_parity import check_logits, hf_config, theirs  # noqa: E402

Weights = dict[str, Tensor]
Change = Callable[[Weights], Weights]


def renamed(old: str, new: str) -> Change:
    return lambda weights: {name.replace(old, new): t for name, t in weights.items()}


def without_final_norm(weights: Weights) -> Weights:
    moved = renamed("_norm.before", "_norm.after")(weights)
    return {name: t for name, t in moved.items() if not name.startswith("final_norm")}


def each(part: str, change: Callable[[Tensor], Tensor]) -> Change:
    return lambda weights: {name: change(t) if part in name else t for name, t in weights.items()}


def swapped(a: str, b: str) -> Change:
    other = {a: b, b: a}
    return lambda weights: {
        next((name.replace(old, new) for old, new in other.items() if old in name), name): t
        for name, t in weights.items()
    }


def tiled(rows: Tensor) -> Tensor:
    """Six query heads that read key/value heads 0, 1, 0, 1, 0, 1 instead of 0, 0, 0, 1, 1, 1."""
    heads = torch.unflatten(rows, 0, (3, 2, -1))
    return heads.transpose(0, 1).flatten(0, 2)


# fault: (the family's case, what is set wrongly, what is done to the weights)
FAULTS: dict[str, tuple[str, dict[str, Any], Change | None]] = {
    "the pairing swapped": ("llama", {"pos.pairing": "interleaved"}, None),
    "the pairing swapped, the other way": ("cohere", {"pos.pairing": "half"}, None),
    "the scale dropped": ("gemma2", {"attn.scale": None}, None),
    "a scale where there is none": ("gpt_neo", {"attn.scale": None}, None),
    "the window wider by one": ("mistral", {"attn.window": 6}, None),
    "the window narrower by one": ("mistral", {"attn.window": 4}, None),
    "windows in the wrong layers": ("gemma2", {"kinds": ["global", "local", "global"]}, None),
    "norms before instead of after the branch": (
        "olmo2",
        {"block.norm_position": "pre"},
        renamed("_norm.branch", "_norm.before"),
    ),
    "norms after the addition": ("opt", {"block.norm_position": "post"}, without_final_norm),
    "norms of the two branches swapped": ("llama", {}, swapped("attn_norm", "ffn_norm")),
    "one shared norm instead of two": ("falcon, 40B", {"block.type": "serial"}, None),
    "serial instead of parallel": ("gpt_neox", {"block.type": "serial"}, None),
    "layer norm instead of RMS norm": ("olmo", {"norm.type": "rmsnorm_plain"}, None),
    "another eps": ("olmo2", {"norm.eps": 1e-5}, None),
    "gains without their offset": ("gemma", {"norm.type": "rmsnorm"}, renamed(".offset", ".gain")),
    "the exact GELU": ("gpt2", {"ffn.activation": "gelu"}, None),
    "SwiGLU instead of GeGLU": ("gemma", {"ffn.activation": "silu"}, None),
    "gate and up swapped": ("llama", {}, swapped("w_gate", "w_up")),
    "another base": ("qwen3", {"pos.theta": 10000.0}, None),
    "one base for all layers": ("gemma3_text", {"pos.local_theta": None}, None),
    "rotation in every layer": ("cohere2", {"pos.rotated": "all"}, None),
    "rotation in the other layers": ("smollm3", {"pos.rotated": "global"}, None),
    "the whole head turned": ("gptj", {"pos.rotary_fraction": 1.0}, None),
    "YaRN without its temperature": ("llama, YaRN", {"scaling.attention_factor": 1.0}, None),
    "YaRN in the sliding layers, too": ("olmo3, YaRN", {"pos.scaled": "all"}, None),
    "Llama 3's bands elsewhere": ("llama, Llama 3 bands", {"scaling.high_freq_factor": 2.0}, None),
    "another factor": ("llama, linear", {"scaling.factor": 4.0}, None),
    "key/value heads tiled": ("llama", {}, each("w_q", tiled)),
    "the embedding scale dropped": ("gemma", {"stability.embedding_scale.factor": 1.0}, None),
    "the residual multiplier dropped": ("granite", {"stability.residual_multiplier.factor": 1.0}, None),
    "the logit multiplier dropped": ("cohere", {"stability.logit_multiplier.factor": 1.0}, None),
    "another soft-cap on scores": ("gemma2", {"stability.attn_softcap.cap": 50.0}, None),
    "another soft-cap on logits": ("gemma2", {"stability.output_softcap.cap": 30.0}, None),
    "biases of the queries lost": ("qwen2", {}, each("q_bias", torch.zeros_like)),
    "the head's bias lost": ("phi", {}, each("head_bias", torch.zeros_like)),
    "positions shifted by one": ("gpt2", {}, each("pos.vectors", lambda t: t.roll(1, 0))),
    "no embedding norm": ("bloom", {}, each("on_stream", torch.ones_like)),
    "the latent's scale from its part without position": ("deepseek_v3", {"attn.scale": 5**-0.5}, None),
    "the pairing swapped in the latent's part": ("deepseek_v3", {"pos.pairing": "half"}, None),
    "no positions": ("mpt", {"pos.type": "none"}, None),
    "attention in both directions": ("gpt2", {"attn.causal": False}, None),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_parity_fails_with_a_fault(fault: str) -> None:
    case, changes, change = FAULTS[fault]
    model, hf = theirs(case), hf_config(theirs(case))
    config, _ = config_from_hf(hf)
    weights = weights_from_hf(config, hf["model_type"], model.state_dict())
    faulty = TransformerLM(unflatten({**flatten(config), **changes})).eval()
    faulty.load_state_dict(change(weights) if change else weights)
    with pytest.raises(AssertionError, match="not close"):
        check_logits(faulty, model)
