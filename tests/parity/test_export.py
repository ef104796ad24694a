"""A trained run, exported, is a model and a tokenizer that transformers' automatic classes load, and lm-eval too."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from andrea_ablate.convert.__main__ import main
from andrea_ablate.convert.folder import tokenizer_from
from andrea_ablate.generate import load
from andrea_ablate.tracking.store import Store
from support import Cli

transformers = pytest.importorskip("transformers", reason="pip install 'andrea-ablate[parity]'")
pytestmark = pytest.mark.slow  # importing transformers takes long

TEXT = "def f(x):\n\treturn 'naïve – 日本' # \x00\x7f  <|endoftext|>"


@pytest.mark.parametrize(
    ("choice", "family", "tokenizer"),
    [("preset=llama3", "llama", "bytes"), ("preset=gpt2", "gpt2", "bpe"), ("norm=pre", "gpt_neox", "bytes")],
)
def test_an_exported_run_gives_the_same_logits(
    cli: Cli, tmp_path: Path, choice: str, family: str, tokenizer: str
) -> None:
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(12):
        (texts / f"{i}.txt").write_text(f"Line {i} of a small text, with naïve words – and more.\n" * 20)
    own = [f"tokenizer={tokenizer}"] + (["data.tokenizer.vocab_size=300"] if tokenizer == "bpe" else [])
    answer = cli(choice, "data=text", f"data.path={texts}", f"paths.runs={tmp_path}/r", *own)
    assert answer.status == 0, answer.err
    store = Store(tmp_path / "r")
    name = store.ids()[0]
    assert main([str(store.path(name)), str(tmp_path / "hf"), "--to", family]) == 0

    model, cfg = load(store, name)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()
    reader = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    ids = reader(TEXT.replace("<|endoftext|>", ""), return_tensors="pt").input_ids[:, : cfg.model.max_seq_len]
    assert reader.eos_token_id == cfg.model.vocab_size - 1 == theirs.config.eos_token_id
    if tokenizer == "bytes":
        assert bytes(ids[0].tolist()) == TEXT.replace("<|endoftext|>", "").encode()[: cfg.model.max_seq_len]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, model(ids), atol=1e-4, rtol=0)
    assert reader.decode(reader("a b – c").input_ids) == "a b – c"
    own = tokenizer_from(store.path(name))
    assert own is not None and own.pieces is not None
    assert len(reader) == own.vocab_size == len(own.pieces)
    for i, piece in enumerate(own.pieces[:-1]):
        text = piece.decode("utf-8", errors="replace")
        assert reader.decode([i]) == text == own.decode([i])
    # Every byte that UTF-8 has: all of ASCII, every beginning and every continuation.
    texts = [chr(code) for code in (*range(0x800), *range(0x800, 0x110000, 997)) if not 0xD800 <= code < 0xE000]
    for text in ("".join(texts), " a , b .  c ' s\r\n\t n't ", TEXT.replace("<|endoftext|>", "")):
        ids = reader(text).input_ids
        assert ids == own.encode([text.encode()])[:-1].tolist()
        assert reader.decode(ids) == text
