"""The typed configuration: derived sizes, types, refusals, and what a run's name depends on."""

from __future__ import annotations

import itertools
import subprocess
import sys
from dataclasses import asdict, replace
from typing import Any

import pytest
import yaml

from andrea_ablate.composition import compose
from andrea_ablate.config import (
    ModelConfig,
    RunConfig,
    from_mapping,
    model_dims,
    run_config,
    run_id,
    to_plain,
)
from andrea_ablate.registry import ConfigError
from designs import design


@pytest.fixture(scope="module")
def plain() -> dict[str, Any]:
    """The smallest run as nested dicts, composed once; no test changes it."""
    return to_plain(compose(["size=tiny", "logger=none"]))


def change(plain: dict[str, Any], key: str, value: Any) -> dict[str, Any]:
    """The nested dicts with one dotted key changed; ``...`` takes the key away."""
    head, _, rest = key.partition(".")
    if rest:
        return {**plain, head: change(plain[head], rest, value)}
    return {k: v for k, v in {**plain, head: value}.items() if v is not ...}


# ---------------------------------------------------------------------------------------------------------------------
# derived sizes


def test_sizes_of_a_design() -> None:
    dims = model_dims(design(d_model=96, n_heads=6, attn="gqa2", vocab_size=50, vocab_multiple=64, max_seq_len=7))
    assert (dims.d_model, dims.n_heads, dims.n_kv_heads, dims.d_head) == (96, 6, 2, 16)
    assert (dims.d_ff, dims.vocab_size, dims.padded_vocab, dims.max_seq_len) == (384, 50, 64, 7)


@pytest.mark.parametrize(
    ("d_model", "ratio", "multiple", "d_ff"),
    [
        (768, 4, 1, 3072),
        (768, 1, 1, 768),
        (1024, 64, 1, 65536),  # T5's 11B form
        (768, "8/3", 1, 2048),
        (768, 8 / 3, 1, 2048),
        (128, "8/3", 8, 344),  # 341.33 rounded up once, to the multiple
        (128, "8/3", 1, 342),
        (128, 2.5, 1, 320),
        (10, "1/7", 4, 4),
        (1536, "8/3", 256, 4096),
    ],
)
def test_the_inner_width_is_rounded_up_once(d_model: int, ratio: Any, multiple: int, d_ff: int) -> None:
    ffn = {"ratio": ratio, "multiple": multiple}
    assert model_dims(design(d_model=d_model, n_heads=1, d_head=2, ffn=ffn)).d_ff == d_ff


@pytest.mark.parametrize(("n_kv_heads", "want"), [(None, 6), (1, 1), (2, 2), (6, 6)])
def test_key_value_heads(n_kv_heads: int | None, want: int) -> None:
    assert model_dims(design(d_model=12, n_heads=6, attn={"n_kv_heads": n_kv_heads})).n_kv_heads == want


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"d_model": 128, "n_heads": 3}, ["n_heads=3", "d_model=128", "1 or 2 or 4", "model.d_head"]),
        ({"n_heads": 8, "attn": {"n_kv_heads": 3}}, ["n_kv_heads=3", "n_heads=8", "2 or 4"]),
        ({"attn": {"n_kv_heads": 0}}, ["n_kv_heads=0", "from 1 up", "null"]),
        ({"attn": {"n_kv_heads": -2}}, ["n_kv_heads=-2"]),
        ({"attn": {"n_kv_heads": 1.5}}, ["n_kv_heads=1.5", "whole"]),
        ({"attn": {"n_kv_heads": "two"}}, ["n_kv_heads=two", "whole"]),
        ({"attn": {"n_kv_heads": True}}, ["n_kv_heads=True", "whole"]),
        ({"attn": {"n_kv_heads": 8}}, ["n_kv_heads=8", "n_heads=4"]),
        ({"d_head": 0}, ["d_head=0"]),
        ({"d_model": 0}, ["d_model=0", "at least 1"]),
        ({"n_layers": 0}, ["n_layers=0", "at least 1"]),
        ({"n_heads": -1}, ["n_heads=-1", "at least 1"]),
        ({"vocab_multiple": 0}, ["vocab_multiple=0"]),
        ({"dropout": 1.0}, ["dropout=1.0", "[0, 1)"]),
        ({"dropout": -0.1}, ["dropout=-0.1"]),
        ({"dropout": float("nan")}, ["dropout=nan"]),
        ({"ffn": {"ratio": 0}}, ["ratio=0", "8/3"]),
        ({"ffn": {"ratio": "-8/3"}}, ["ratio=-8/3"]),
        ({"ffn": {"ratio": "8/0"}}, ["ratio=8/0"]),
        ({"ffn": {"ratio": "wide"}}, ["ratio=wide"]),
        ({"ffn": {"ratio": float("inf")}}, ["ratio=inf"]),
        ({"ffn": {"ratio": None}}, ["ratio=None"]),
        ({"ffn": {"multiple": 0}}, ["multiple=0"]),
        ({"ffn": {"multiple": 1.5}}, ["multiple=1.5"]),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_are_refused_with_the_numbers(changes: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        model_dims(design(**changes))
    assert all(word in str(error.value) for word in words), str(error.value)


def test_the_offered_divisors_are_divisors() -> None:
    with pytest.raises(ConfigError, match="try 60 or 72 or 90 or set"):
        model_dims(design(d_model=360, n_heads=70))


# ---------------------------------------------------------------------------------------------------------------------
# from plain values


def test_a_configuration_survives_the_way_through_yaml(plain: dict[str, Any]) -> None:
    cfg = run_config(plain)
    assert run_config(yaml.safe_load(yaml.safe_dump(plain))) == cfg
    assert to_plain(cfg) == plain


@pytest.mark.parametrize("spelled", [1e-4, "1e-4", "1E-4", "0.0001", ".0001", "+1e-4"])
def test_a_number_in_quotes_is_a_number(plain: dict[str, Any], spelled: Any) -> None:
    cfg = run_config(change(plain, "optim.lr", spelled))
    assert type(cfg.optim["lr"]) is float
    assert cfg.optim["lr"] == 1e-4
    assert run_config(change(plain, "trainer.grad_clip", spelled)).trainer.grad_clip == 1e-4


@pytest.mark.parametrize(("value", "want"), [(1e6, 1_000_000), ("1e6", 1_000_000), ("2000", 2000), (5, 5)])
def test_a_whole_number_may_be_written_as_a_float(plain: dict[str, Any], value: Any, want: int) -> None:
    tokens = run_config(change(plain, "trainer.tokens", value)).trainer.tokens
    assert (tokens, type(tokens)) == (want, int)


def test_numbers_inside_lists_and_names_that_only_look_like_numbers(plain: dict[str, Any]) -> None:
    assert run_config(change(plain, "optim.betas", ["9e-1", 0.95])).optim["betas"] == [0.9, 0.95]
    cfg = run_config({**plain, "name": 7, "group": "1e-4", "tags": [1, "b"]})
    assert (cfg.name, cfg.group, cfg.tags) == ("7", "1e-4", ["1", "b"])


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("trainer.tokenss", 5, ["'trainer.tokenss'", "did you mean 'tokens'"]),
        ("sed", 5, ["'sed'", "did you mean 'seed'"]),
        ("model.tie", True, ["'model.tie' is not a setting"]),
        ("trainer.tokens", ..., ["'trainer.tokens' is missing"]),
        ("trainer.tokens", "many", ["trainer.tokens='many'", "int"]),
        ("trainer.tokens", 1.5, ["trainer.tokens=1.5", "int"]),
        ("trainer.tokens", True, ["trainer.tokens=True", "int"]),
        ("trainer.tokens", None, ["trainer.tokens=None", "int"]),
        ("model.dropout", "much", ["model.dropout='much'", "float"]),
        ("model.tie_embeddings", 1, ["model.tie_embeddings=1", "bool"]),
        ("model.tie_embeddings", "true", ["model.tie_embeddings='true'", "bool"]),
        ("model.norm", "rmsnorm", ["'model.norm' is a section", "rmsnorm"]),
        ("model.norm", None, ["'model.norm' is a section"]),
        ("model.stability", {"z_loss": None}, ["'model.stability.z_loss' is a section"]),
        ("trainer", 5, ["'trainer' is a section"]),
        ("tags", "abc", ["tags='abc'", "[abc]"]),
        ("trainer.val_lengths", 64, ["trainer.val_lengths=64", "[64]"]),
        ("trainer.val_lengths", ["long"], ["trainer.val_lengths='long'", "int"]),
    ],
)
def test_a_wrong_key_or_type_is_named(plain: dict[str, Any], key: str, value: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        run_config(change(plain, key, value))
    assert all(word in str(error.value) for word in words), str(error.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("trainer.tokens", 0),
        ("trainer.batch_size", 0),
        ("trainer.accumulate", 0),
        ("trainer.accumulate", 3),  # of a batch of 4
        ("trainer.devices", 8),
        ("trainer.val_every", -1),
        ("trainer.val_lengths", [0]),
        ("trainer.val_lengths", [32, 513]),  # more than data.val_tokens
        ("trainer.checkpoint_every", -1),
        ("trainer.diverged_after", 0),
        ("trainer.diverged_factor", 1.0),
        ("trainer.diverged_factor", float("nan")),
        ("trainer.grad_clip", 0.0),
        ("trainer.grad_clip", float("nan")),
        ("trainer.precision", "fp8"),
        ("trainer.accelerator", "tpu"),
        ("data.seq_len", 0),
        ("data.val_tokens", -1),
        ("data.num_workers", -1),
        ("data.val_fraction", 0.0),
        ("data.val_fraction", 1.0),
        ("data.seed", -1),
        ("seed", -1),
        ("seed", 2**63),
        ("optim.lr", 0.0),
        ("optim.lr", -1e-3),
        ("optim.lr", float("nan")),
        ("optim.lr", float("inf")),
        ("optim.lr", "fast"),
        ("optim.lr", True),
        ("optim.betas", [0.9]),
        ("optim.betas", [0.9, 1.0]),
        ("optim.betas", 0.9),
        ("schedule.warmup_tokens", 1280),  # all of the budget
        ("schedule.warmup_tokens", -1),
        ("schedule.warmup_tokens", float("nan")),
        ("schedule.warmup_tokens", float("inf")),
        ("schedule.warmup_tokens", "few"),
        ("model.vocab_size", 256),  # one less than the tokenizer has
    ],
)
def test_a_value_out_of_range_is_refused_by_its_key(plain: dict[str, Any], key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as error:
        run_config(change(plain, key, value))
    assert f"{key}={value}" in str(error.value)


# ---------------------------------------------------------------------------------------------------------------------
# steps


def test_steps_of_a_budget(plain: dict[str, Any]) -> None:
    def steps(tokens: int, warmup: float | None = None) -> tuple[int, int]:
        cfg = run_config(change(change(plain, "trainer.tokens", tokens), "schedule.warmup_tokens", warmup))
        return cfg.total_steps, cfg.warmup_steps

    assert run_config(plain).tokens_per_step == 4 * 32
    assert steps(1280) == (10, 1)
    assert steps(1281) == (11, 2)
    assert steps(12800) == (100, 10)
    assert steps(12800, 640) == (100, 5)
    assert steps(12800, 641) == (100, 6)
    assert steps(12800, 0) == (100, 0)
    assert steps(1) == (1, 1)


# ---------------------------------------------------------------------------------------------------------------------
# the name of a run

SAME = {
    "name": "other",
    "group": "other",
    "tags": ["other"],
    "logger": {"type": "csv"},
    "paths": {"runs": "/a", "sweeps": "/b", "cache": "/c"},
    "data.num_workers": 3,
    "trainer.checkpoint_every": 7,
    "model.dropout": 0,  # as 0.0
    "model.pos.theta": 10000,  # as 10000.0
    "optim.weight_decay": "0.1",
}
OTHER = {
    "seed": 1,
    "data.seed": 1,
    "data.seq_len": 16,
    "data.val_tokens": 64,
    "optim.lr": 1e-4,
    "optim.betas": [0.9, 0.99],
    "schedule.min_ratio": 0.2,
    "trainer.tokens": 2560,
    "trainer.batch_size": 8,
    "trainer.accumulate": 2,
    "trainer.grad_clip": None,
    "trainer.precision": "bf16-mixed",
    "model.n_layers": 3,
    "model.tie_embeddings": True,
    "model.norm.eps": 1e-6,
    "model.stability": {"z_loss": {"alpha": 1e-4}},
}


def name_of(cfg: RunConfig) -> str:
    return run_id(cfg, "corpus", "cpu", "reference", {"norm": "code"})


@pytest.mark.parametrize("key", SAME)
def test_what_changes_no_number_leaves_the_name_alone(plain: dict[str, Any], key: str) -> None:
    assert name_of(run_config(change(plain, key, SAME[key]))) == name_of(run_config(plain))


@pytest.mark.parametrize("key", OTHER)
def test_what_can_change_a_number_changes_the_name(plain: dict[str, Any], key: str) -> None:
    assert name_of(run_config(change(plain, key, OTHER[key]))) != name_of(run_config(plain))


def test_corpus_code_and_device_are_part_of_the_name_and_auto_is_what_it_stands_for(plain: dict[str, Any]) -> None:
    cfg = run_config(plain)
    names = {
        run_id(cfg, corpus, device, path, {"norm": code})
        for corpus, device, path, code in itertools.product("ab", ("cpu", "cuda"), ("compiled", "reference"), "cd")
    }
    assert len(names) == 16
    assert name_of(run_config(change(plain, "trainer.accelerator", "cpu"))) == name_of(cfg)


def test_a_name_is_safe_as_a_folder_and_the_same_in_another_process(plain: dict[str, Any]) -> None:
    name = name_of(run_config(plain))
    assert len(name) == 16
    assert set(name) <= set("0123456789abcdef")
    program = (
        "import sys, yaml; from andrea_ablate.config import run_config, run_id; "
        "print(run_id(run_config(yaml.safe_load(sys.stdin)), 'corpus', 'cpu', 'reference', {'norm': 'code'}))"
    )
    text = yaml.safe_dump(plain)
    asked = subprocess.run([sys.executable, "-c", program], input=text, capture_output=True, text=True, check=True)
    assert asked.stdout.strip() == name


def test_the_order_of_keys_does_not_matter(plain: dict[str, Any]) -> None:
    def backwards(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: backwards(node[key]) for key in reversed(node)}
        return node

    assert name_of(run_config(backwards(plain))) == name_of(run_config(plain))


def test_a_model_configuration_is_plain_data() -> None:
    config = design(("z_loss",))
    assert from_mapping(ModelConfig, asdict(config)) == config
    assert replace(config, d_model=32) != config
