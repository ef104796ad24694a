"""Tokenizers: what is encoded decodes to itself, and text never becomes a control id."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers

from andrea_ablate.data import TOKENIZERS
from andrea_ablate.data.tokenizers import token_dtype, vocab_size
from andrea_ablate.registry import ConfigError

MARKERS = "a<|endoftext|>b</s> <s> [EOS]<pad><|im_end|>"
TEXTS = [MARKERS, "def f(x):\r\n\treturn x  # naïve 漢字 🙂\n", " leading", "\x00\x7f\n\n\n", "low lower lowest " * 40]
DOCUMENTS = [text.encode() for text in TEXTS]


def tokenizer_json(path: Path, end_name: str | None, special: bool = True) -> Path:
    """A byte-level BPE file with added tokens, as models on the hub have it."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, show_progress=False, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()
    )
    model.train_from_iterator(TEXTS, trainer)
    names = [name for name in ("<|im_end|>", end_name) if name]
    model.add_tokens([tokenizers.AddedToken(name, special=special, normalized=False) for name in names])
    model.save(str(path))
    return path


def make(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    if kind == "file":
        return TOKENIZERS.build({"type": kind, "path": str(tokenizer_json(tmp_path / "t.json", "<|endoftext|>"))})
    if kind == "tiktoken":
        tiktoken = pytest.importorskip("tiktoken")
        ranks = {bytes([i]): i for i in range(256)} | {b"lo": 256, b"low": 257}
        tiny = tiktoken.Encoding(
            "tiny", pat_str=r"\w+|\W+", mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 260}
        )
        monkeypatch.setattr(tiktoken, "get_encoding", lambda name: tiny)
        return TOKENIZERS.build({"type": kind, "name": "tiny"})
    return TOKENIZERS.build({"type": kind, "vocab_size": 280 if kind == "bpe" else 257})


@pytest.mark.parametrize("kind", sorted(set(TOKENIZERS.names()) - {"none"}))
def test_round_trip_and_control_ids(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = make(kind, tmp_path, monkeypatch)
    tokenizer.train(DOCUMENTS)
    ids = tokenizer.encode(DOCUMENTS)
    ends = np.flatnonzero(ids == tokenizer.end)
    assert len(ends) == len(TEXTS) and ends[-1] == len(ids) - 1
    assert ids.max() < tokenizer.vocab_size
    assert [tokenizer.decode(part) for part in np.split(ids, ends + 1)[:-1]] == TEXTS
    assert tokenizer.decode(ids) == "".join(TEXTS)
    assert [len(b"".join(tokenizer.pieces[i] for i in part)) for part in np.split(ids, ends + 1)[:-1]] == [
        len(text) for text in DOCUMENTS
    ]
    assert tokenizer.pieces[tokenizer.end] == b""


def test_bytes_by_hand() -> None:
    ids = TOKENIZERS.build({"type": "bytes"}).encode([b"AB", b"", "é".encode()])
    assert ids.tolist() == [65, 66, 256, 256, 0xC3, 0xA9, 256]


def test_bpe_learns_the_frequent_pairs_first_and_alike_each_time() -> None:
    first, second = (TOKENIZERS.build({"type": "bpe", "vocab_size": 260}) for _ in range(2))
    for tokenizer in (first, second):
        tokenizer.train([b"low lower lowest " * 40])
    assert first.to_json() == second.to_json()
    # The pairs of "low" occur most; ties go to the lower pair of ids: (l, o), then (lo, w).
    assert first.pieces is not None and {b"lo", b"low"} <= set(first.pieces)
    assert first.end == 259


def test_a_learnt_vocabulary_reads_back_from_its_file(tmp_path: Path) -> None:
    bpe = TOKENIZERS.build({"type": "bpe", "vocab_size": 280})
    bpe.train(DOCUMENTS)
    (tmp_path / "tokenizer.json").write_text(bpe.to_json() or "", encoding="utf-8")
    again = TOKENIZERS.build({"type": "file", "path": str(tmp_path / "tokenizer.json"), "vocab_size": 280})
    assert again.end == bpe.end and again.pieces == bpe.pieces
    assert again.encode(DOCUMENTS).tolist() == bpe.encode(DOCUMENTS).tolist()


@pytest.mark.parametrize("special", [True, False])
@pytest.mark.parametrize("end_name", ["</s>", None])
def test_added_tokens_of_a_file_are_text(tmp_path: Path, end_name: str | None, special: bool) -> None:
    path = tokenizer_json(tmp_path / "t.json", end_name, special)
    model = tokenizers.Tokenizer.from_file(str(path))
    control = model.token_to_id("<|im_end|>")
    assert control in model.encode(MARKERS).ids, "the library alone takes the marker for a control token"
    tokenizer = TOKENIZERS.build({"type": "file", "path": str(path)})
    assert control not in tokenizer.encode([MARKERS.encode()])
    assert tokenizer.end == (model.token_to_id("</s>") if end_name else model.get_vocab_size())
    assert tokenizer.vocab_size == model.get_vocab_size() + (end_name is None)


def test_vocab_size_without_training(tmp_path: Path) -> None:
    path = str(tokenizer_json(tmp_path / "t.json", "</s>"))
    n = tokenizers.Tokenizer.from_file(path).get_vocab_size()
    assert vocab_size({"type": "bytes", "vocab_size": 257}) == 257
    assert vocab_size({"type": "bpe", "vocab_size": 8449}) == 8449
    assert vocab_size({"type": "none", "vocab_size": 50304}) == 50304
    assert vocab_size({"type": "file", "path": path, "vocab_size": None}) == n
    with pytest.raises(ConfigError, match=f"vocab_size={n + 1}, but .* has {n} ids"):
        vocab_size({"type": "file", "path": path, "vocab_size": n + 1})


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"type": "bytes", "vocab_size": 256}, "'bytes' has 257 ids"),
        ({"type": "none"}, "vocab_size=None of 'none'"),
        ({"type": "bpe", "vocab_size": 256}, "vocab_size=256 of 'bpe' must be a whole number >= 257"),
        ({"type": "bpe", "vocab_sise": 300}, "did you mean 'vocab_size'"),
        ({"type": "file"}, "needs the path"),
        ({"type": "file", "path": "/nowhere.json"}, "/nowhere.json' is not a readable"),
        ({"type": "byte"}, "did you mean 'bytes'"),
    ],
)
def test_refusals(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        vocab_size(node)


def test_unknown_tiktoken_name_is_refused() -> None:
    pytest.importorskip("tiktoken", reason="the tiktoken extra is not installed")
    with pytest.raises(ConfigError, match="name=gpt-9 could not be loaded"):
        vocab_size({"type": "tiktoken", "name": "gpt-9"})


def test_vocabulary_that_a_small_corpus_cannot_fill() -> None:
    with pytest.raises(ConfigError, match="it reaches 260"):
        # "abab": the merges ab, abab and, with the space before the later words, one more.
        TOKENIZERS.build({"type": "bpe", "vocab_size": 1000}).train([b"abab abab"])


def test_broken_file_and_missing_libraries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.json").write_text(json.dumps({"model": "?"}))
    with pytest.raises(ConfigError, match="t.json' is not a readable tokenizer.json"):
        vocab_size({"type": "file", "path": str(tmp_path / "t.json")})
    monkeypatch.setitem(sys.modules, "tiktoken", None)
    with pytest.raises(ConfigError, match="tiktoken library"):
        vocab_size({"type": "tiktoken", "name": "gpt2"})


def test_token_type() -> None:
    assert [token_dtype(n).name for n in (257, 65536, 65537)] == ["uint16", "uint16", "uint32"]
