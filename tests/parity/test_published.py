"""The published numbers of parameters that presets are held against, from the cells of the published configurations.

Each count is that of the public class without memory. Where a class is published with a checkpoint's numbers as its
defaults, none is written down here.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from test_presets import PUBLISHED

transformers = pytest.importorskip("transformers", reason="pip install 'andrea-ablate[parity]'")
pytestmark = pytest.mark.slow  # importing transformers takes long


def cells(width: int, inner: int, depth: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> dict[str, Any]:
    named = {"hidden_size": width, "intermediate_size": inner, "num_hidden_layers": depth, "vocab_size": vocab}
    return {**named, "num_attention_heads": heads, "num_key_value_heads": kv_heads, **more}


BLOOM = {"hidden_size": 14336, "n_layer": 70, "n_head": 112, "vocab_size": 250880}
FALCON_40B = {"hidden_size": 8192, "num_hidden_layers": 60, "num_attention_heads": 128, "num_kv_heads": 8}
FALCON_40B |= {"vocab_size": 65024, "new_decoder_architecture": True}
# preset: (the checkpoint whose config.json has the cells, the class, the cells that are not its defaults)
SOURCES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt1": ("openai-community/openai-gpt", "OpenAIGPT", {}),
    "gpt2": ("openai-community/gpt2", "GPT2", {}),
    "bloom": ("bigscience/bloom; arXiv:2211.05100, table 3", "Bloom", BLOOM),
    "gpt_j": ("EleutherAI/gpt-j-6B", "GPTJ", {}),
    "gpt_neox": ("EleutherAI/gpt-neox-20b", "GPTNeoX", {}),
    "llama": ("meta-llama/Llama-2-7b-hf, the sizes of LLaMA 7B", "Llama", {}),
    "llama2": ("meta-llama/Llama-2-70b-hf", "Llama", cells(8192, 28672, 80, 64, 8, 32000)),
    "llama3": ("meta-llama/Meta-Llama-3-8B; arXiv:2407.21783, table 3", "Llama", cells(4096, 14336, 32, 32, 8, 128256)),
    "mistral": ("mistralai/Mistral-7B-v0.1", "Mistral", {}),
    "falcon_7b": ("tiiuae/falcon-7b", "Falcon", {}),
    "falcon_40b": ("tiiuae/falcon-40b", "Falcon", FALCON_40B),
    "mpt": ("mosaicml/mpt-7b", "Mpt", {"d_model": 4096, "n_heads": 32, "n_layers": 32, "vocab_size": 50432}),
    "gemma": (
        "google/gemma-2b; arXiv:2403.08295, table 1",
        "Gemma",
        cells(2048, 16384, 18, 8, 1, 256000, head_dim=256),
    ),
    "gemma2": (
        "google/gemma-2-9b; arXiv:2408.00118, table 1",
        "Gemma2",
        cells(3584, 14336, 42, 16, 8, 256000, head_dim=256),
    ),
    "gemma3": ("google/gemma-3-4b-pt, its text part", "Gemma3", cells(2560, 10240, 34, 8, 4, 262208, head_dim=256)),
    "olmo": ("allenai/OLMo-7B-hf", "Olmo", {}),
    "olmo2": ("allenai/OLMo-2-1124-7B", "Olmo2", cells(4096, 11008, 32, 32, 32, 100352)),
    "olmo3": ("allenai/Olmo-3-1025-7B", "Olmo3", cells(4096, 11008, 32, 32, 32, 100278)),
    "cohere": ("CohereForAI/c4ai-command-r-v01", "Cohere", {}),
    "cohere2": ("CohereForAI/c4ai-command-a-03-2025", "Cohere2", cells(12288, 36864, 64, 96, 8, 256000)),
    "qwen": (
        "Qwen/Qwen-7B, whose class is not public; Qwen 2 has its form",
        "Qwen2",
        cells(4096, 11008, 32, 32, 32, 151936),
    ),
    "qwen2": ("Qwen/Qwen2-7B", "Qwen2", cells(3584, 18944, 28, 28, 4, 152064)),
    "qwen3": ("Qwen/Qwen3-8B", "Qwen3", cells(4096, 12288, 36, 32, 8, 151936, head_dim=128)),
    "phi": ("microsoft/phi-1_5, the sizes of phi-1", "Phi", {}),
    "smollm3": ("HuggingFaceTB/SmolLM3-3B", "SmolLM3", {}),
}
CONFIGS = {"Gemma3": "Gemma3TextConfig"}
MODELS = {"OpenAIGPT": "OpenAIGPTLMHeadModel", "GPT2": "GPT2LMHeadModel"}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_count_is_that_of_the_public_class(name: str) -> None:
    _, family, given = SOURCES[name]
    config = getattr(transformers, CONFIGS.get(family, f"{family}Config"))(**given)
    with torch.device("meta"):
        model = getattr(transformers, MODELS.get(family, f"{family}ForCausalLM"))(config)
    assert sum(p.numel() for p in model.parameters()) == PUBLISHED[name][0]
