"""Generation: the cache changes no logit and has the size that the account says; what is asked is what is drawn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from andrea_ablate.accounting import account
from andrea_ablate.attention import KVCache
from andrea_ablate.generate import generate, load, main
from andrea_ablate.model import TransformerLM
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking.store import Store
from andrea_ablate.training.run import run
from designs import content, design, options

TOKENS = torch.arange(10).view(2, 5) * 2


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attn": "gqa2"},
        {"attn": "mqa", "d_head": 6},
        {"attn": "mla"},
        {"attn": {"window": 3}},
        {"attn": ("gqa2", {"window": 3}), "layer_pattern": ["local", "global"], "n_layers": 3},
    ],
    ids=str,
)
def test_the_cache_has_the_size_that_the_account_says(changes: dict[str, Any]) -> None:
    config = design(**changes)
    model, cache = TransformerLM(config), KVCache()
    with torch.no_grad():
        for length in range(1, 9):
            model(TOKENS[:, :1], cache=cache)
            counted = account(config, length)
            assert cache.numel() == 2 * counted.kv_cache_elements
            assert 4 * cache.numel() == counted.kv_cache_bytes(bytes_per_element=4, batch=2)
            held = sum(x.untyped_storage().size() for layer in cache.layers.values() for x in layer.kept)
            assert held == 4 * cache.numel()  # and nothing behind the views
    if "layer_pattern" not in changes and changes.get("attn") in (None, "gqa2"):
        # the lecture's formula: 2 * kv heads * head width * length * layers, times bytes and batch
        heads = 2 if changes else 4
        assert cache.numel() == 2 * heads * 4 * 8 * 2 * 2


@pytest.mark.parametrize("pos", ["rope", "learned", "sine", "alibi", "t5", "none"])
def test_cached_and_uncached_text_are_the_same(pos: str) -> None:
    model = TransformerLM(design(pos=pos, attn={"window": 4}))
    for drawn in ({"temperature": 0.0}, {"temperature": 1.0, "seed": 3}, {"temperature": 0.7, "top_k": 3}):
        quick, slow = (generate(model, TOKENS, 7, **drawn, cached=cached) for cached in (True, False))
        assert torch.equal(quick, slow)
        assert quick.shape == (2, 12) and torch.equal(quick[:, :5], TOKENS)


@pytest.mark.parametrize("scaling", options("scaling"))
@pytest.mark.parametrize("window", [None, 3])
def test_cached_logits_are_the_uncached_ones_past_the_original_length(scaling: str, window: int | None) -> None:
    """Where the frequencies change with the length, layers above the first have read those of before."""
    plan = {"original_len": 4} if "original_len" in content("scaling", scaling) else {}
    model = TransformerLM(design(scaling=(scaling, plan), n_layers=3, max_seq_len=4, attn={"window": window})).double()
    tokens = torch.randint(0, 23, (2, 13), generator=torch.Generator().manual_seed(0))
    for parts in ((2, 1, 1, 1, 1, 1, 1, 5), (3, 7, 2, 1), (13,)):
        cache, done = KVCache(), 0
        with torch.no_grad():
            for count in parts:
                got = model(tokens[:, done : done + count], cache=cache)
                done += count
                torch.testing.assert_close(got, model(tokens[:, :done])[:, -count:], rtol=1e-10, atol=1e-12)
        assert cache.length == 13
        assert {x.shape[1] for layer in cache.layers.values() for x in layer.kept} == {window or 13}


def test_greedy_takes_the_likeliest_and_top_k_of_one_is_greedy() -> None:
    model = TransformerLM(design())
    greedy = generate(model, TOKENS, 4, temperature=0.0)
    for at in range(5, 9):
        assert torch.equal(greedy[:, at], model(greedy[:, :at])[:, -1].argmax(-1))
    assert torch.equal(greedy, generate(model, TOKENS, 4, top_k=1))
    drawn = {tuple(generate(model, TOKENS, 4, seed=seed).flatten().tolist()) for seed in range(5)}
    assert len(drawn) > 1
    assert torch.equal(generate(model, TOKENS, 4, seed=1), generate(model, TOKENS, 4, seed=1))
    assert model.training


def test_draws_follow_the_probabilities() -> None:
    model = TransformerLM(design())
    with torch.no_grad():
        wanted = (model(TOKENS[:1])[0, -1] / 0.5).softmax(-1)
    many = generate(model, TOKENS[:1].expand(20_000, -1), 1, temperature=0.5)[:, -1]
    found = torch.bincount(many, minlength=23) / 20_000
    assert (found - wanted).abs().max() < 0.015


def test_what_cannot_be_generated_is_refused() -> None:
    with pytest.raises(ConfigError, match="causal=false predicts no next token"):
        generate(TransformerLM(design(attn={"causal": False})), TOKENS, 1)
    with pytest.raises(ConfigError, match="give a prompt"):
        generate(TransformerLM(design()), TOKENS[:, :0], 1)
    with pytest.raises(ConfigError, match="temperature=-1"):
        generate(TransformerLM(design()), TOKENS, 1, temperature=-1.0)
    with pytest.raises(ConfigError, match="a sequence of 13 tokens is longer than the position table"):
        generate(TransformerLM(design(pos="learned")), TOKENS, 9)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_finished_run_continues_a_prompt_on_the_command_line(
    tiny: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for i in range(20):
        (tmp_path / f"{i}.py").write_text("".join(f"def f{i}_{j}(x):\n    return x + {i * j}\n" for j in range(60)))
    cfg = tiny("data=text", f"data.path={tmp_path}", "tokenizer=bpe", "data.tokenizer.vocab_size=300")
    name = run(cfg)["run_id"]
    model, loaded = load(Store(Path(cfg.paths.runs)), name[:6])
    assert loaded == cfg and not model.training

    def command(*arguments: str, status: int = 0) -> str:
        monkeypatch.setattr("sys.argv", ["generate", "--runs", cfg.paths.runs, *arguments])
        assert main() == status
        out, err = capsys.readouterr()
        return err if status else out

    said = command(name[:6], "def f", "--count", "12", "--temperature", "0")
    assert said.startswith("def f") and len(said) > len("def f\n")
    assert command(name, "def f", "--count", "12", "--temperature", "0", "--no-cache") == said
    assert "'zzz' names no run" in command("zzz", "def f", status=2)


def test_a_run_without_weights_says_so(tiny: Any) -> None:
    cfg = tiny("optim.lr=1e9", "trainer.diverged_after=1")
    record = run(cfg)
    assert record["status"] == "diverged"
    with pytest.raises(ConfigError, match=r"has no weights \(status: diverged\)"):
        load(Store(Path(cfg.paths.runs)), record["run_id"])
