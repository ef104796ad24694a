"""A tiny configuration per Hugging Face family, with odd sizes: six heads, two for keys and values where possible."""

from __future__ import annotations

from typing import Any

COMMON: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "max_position_embeddings": 40,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
GPT: dict[str, Any] = {"vocab_size": 61, "n_embd": 36, "n_layer": 3, "n_head": 6, "n_positions": 40}
GPT |= {"bos_token_id": 1, "eos_token_id": 2}
LLAMA: dict[str, Any] = {**COMMON, "num_key_value_heads": 2, "intermediate_size": 52, "head_dim": 8}
SQUARE: dict[str, Any] = {**LLAMA, "head_dim": 6}  # families whose heads are together as wide as the stream
FALCON: dict[str, Any] = {**COMMON, "ffn_hidden_size": 52, "bias": False}
MLA: dict[str, Any] = {**COMMON, "intermediate_size": 52, "first_k_dense_replace": 3, "num_key_value_heads": 6}
MLA |= {"kv_lora_rank": 10, "qk_nope_head_dim": 5, "qk_rope_head_dim": 4, "v_head_dim": 7}
WINDOW = 5
MIXED = ["sliding_attention", "full_attention", "sliding_attention"]


def rope(theta: float = 500.0, **more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": theta, **more}


YARN = rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=10)
LLAMA3 = rope(rope_type="llama3", factor=8.0, original_max_position_embeddings=16)
LLAMA3 |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONG = rope(rope_type="longrope", factor=4.0, original_max_position_embeddings=10)
LONG |= {"short_factor": [1.0, 1.1, 1.3, 1.7], "long_factor": [1.0, 1.9, 3.1, 4.0]}

# name: (class of the configuration, class of the model, what the configuration is given)
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**GPT, "n_inner": 52}),
    "gpt2, untied": ("GPT2Config", "GPT2LMHeadModel", {**GPT, "tie_word_embeddings": False}),
    "openai-gpt": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", GPT),
    "opt": ("OPTConfig", "OPTForCausalLM", {**COMMON, "ffn_dim": 52}),
    "opt, post": ("OPTConfig", "OPTForCausalLM", {**COMMON, "ffn_dim": 52, "do_layer_norm_before": False}),
    "gpt_neo": (
        "GPTNeoConfig",
        "GPTNeoForCausalLM",
        {
            **{"vocab_size": 61, "hidden_size": 36, "num_layers": 3, "num_heads": 6, "max_position_embeddings": 40},
            **{"attention_types": [[["global", "local"], 1], [["local"], 1]], "window_size": WINDOW},
            **{"bos_token_id": 1, "eos_token_id": 2},
        },
    ),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**GPT, "n_embd": 48, "rotary_dim": 6}),
    "gpt_neox": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**COMMON, "hidden_size": 48, "intermediate_size": 52, "rope_parameters": rope(partial_rotary_factor=0.5)},
    ),
    "gpt_neox, serial": (
        "GPTNeoXConfig",
        "GPTNeoXForCausalLM",
        {**COMMON, "intermediate_size": 52, "use_parallel_residual": False, "attention_bias": False}
        | {"rope_parameters": rope(partial_rotary_factor=0.35)},
    ),
    "phi": (
        "PhiConfig",
        "PhiForCausalLM",
        {**COMMON, "hidden_size": 48, "num_key_value_heads": 2, "intermediate_size": 52}
        | {"rope_parameters": rope(partial_rotary_factor=0.5)},
    ),
    "falcon, 7B": ("FalconConfig", "FalconForCausalLM", {**FALCON, "multi_query": True, "parallel_attn": True}),
    "falcon, 40B": (
        "FalconConfig",
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 2},
    ),
    "falcon, one norm": (
        "FalconConfig",
        "FalconForCausalLM",
        {**FALCON, "new_decoder_architecture": True, "num_kv_heads": 3, "num_ln_in_parallel_attn": 1, "bias": True},
    ),
    "bloom": (
        "BloomConfig",
        "BloomForCausalLM",
        {"vocab_size": 61, "hidden_size": 36, "n_layer": 3, "n_head": 6, "bos_token_id": 1, "eos_token_id": 2},
    ),
    "mpt": (
        "MptConfig",
        "MptForCausalLM",
        {"vocab_size": 61, "d_model": 36, "n_layers": 3, "n_heads": 6, "max_seq_len": 40, "expansion_ratio": 4},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SQUARE, "rope_parameters": rope()}),
    "llama, wide heads, biases": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**LLAMA, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    ),
    "llama, Llama 3 bands": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "rope_parameters": LLAMA3}),
    "llama, YaRN": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "rope_parameters": YARN}),
    "llama, linear": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**LLAMA, "rope_parameters": rope(rope_type="linear", factor=3.0)},
    ),
    "llama, dynamic": (
        "LlamaConfig",
        "LlamaForCausalLM",
        {**LLAMA, "max_position_embeddings": 8, "rope_parameters": rope(rope_type="dynamic", factor=3.0)},
    ),
    "llama, LongRoPE": ("LlamaConfig", "LlamaForCausalLM", {**LLAMA, "rope_parameters": LONG}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": WINDOW}),
    "mistral, no window": ("MistralConfig", "MistralForCausalLM", {**LLAMA, "sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", SQUARE),
    "qwen2, windows": (
        "Qwen2Config",
        "Qwen2ForCausalLM",
        {**SQUARE, "use_sliding_window": True, "sliding_window": WINDOW, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**LLAMA, "rope_parameters": rope(1e6)}),
    "smollm3": ("SmolLM3Config", "SmolLM3ForCausalLM", {**SQUARE, "no_rope_layers": [1, 0, 1]}),
    "granite": (
        "GraniteConfig",
        "GraniteForCausalLM",
        {**SQUARE, "embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2}
        | {"logits_scaling": 5.0},
    ),
    "olmo": ("OlmoConfig", "OlmoForCausalLM", SQUARE),
    "olmo2": ("Olmo2Config", "Olmo2ForCausalLM", {**SQUARE, "rms_norm_eps": 1e-3}),
    "olmo3": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {**SQUARE, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
    "olmo3, YaRN": (
        "Olmo3Config",
        "Olmo3ForCausalLM",
        {**SQUARE, "sliding_window": WINDOW, "layer_types": MIXED}
        | {"rope_parameters": {"full_attention": YARN, "sliding_attention": rope()}},
    ),
    "gemma": ("GemmaConfig", "GemmaForCausalLM", LLAMA),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {**LLAMA, "sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 20}
        | {"attn_logit_softcapping": 1.5, "final_logit_softcapping": 2.0},
    ),
    "gemma3_text": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {**LLAMA, "sliding_window": WINDOW, "layer_types": MIXED, "query_pre_attn_scalar": 20}
        | {"rope_parameters": {"full_attention": rope(1e6), "sliding_attention": rope(100.0)}},
    ),
    "phi, norms of queries and keys": (
        "PhiConfig",
        "PhiForCausalLM",
        {**COMMON, "hidden_size": 48, "intermediate_size": 52, "qk_layernorm": True},
    ),
    "cohere, norms of queries and keys": ("CohereConfig", "CohereForCausalLM", {**SQUARE, "use_qk_norm": True}),
    "deepseek_v2": ("DeepseekV2Config", "DeepseekV2ForCausalLM", {**MLA, "q_lora_rank": None, "qk_nope_head_dim": 6}),
    "deepseek_v3": ("DeepseekV3Config", "DeepseekV3ForCausalLM", {**MLA, "q_lora_rank": 14}),
    "deepseek_v3, halves": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {**MLA, "q_lora_rank": 14, "rope_interleave": False},
    ),
    "cohere": ("CohereConfig", "CohereForCausalLM", {**SQUARE, "logit_scale": 0.3}),
    "cohere2": (
        "Cohere2Config",
        "Cohere2ForCausalLM",
        {**SQUARE, "logit_scale": 0.3, "sliding_window": WINDOW, "layer_types": MIXED},
    ),
}
