"""The prepared corpus: split by content, checked when opened, whole or not there."""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import os
import random
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andrea_ablate.config import DataConfig
from andrea_ablate.data import Corpus, prepare
from andrea_ablate.registry import ConfigError


def config(type: str, tokenizer: dict[str, Any] | None = None, **changes: Any) -> DataConfig:
    fields: dict[str, Any] = {"seq_len": 8, "seed": 0, "val_fraction": 0.25, "val_tokens": 0, "num_workers": 0}
    fields.update({key: changes.pop(key) for key in list(changes) if key in fields})
    return DataConfig(type=type, options=changes, tokenizer=tokenizer or {"type": "bytes"}, **fields)


def fresh(cfg: DataConfig, cache: Path) -> Corpus:
    """As another process would see it."""
    # The package's `prepare` is the function; the module of that name is only in sys.modules.
    sys.modules[prepare.__module__]._OPENED.clear()
    return prepare(cfg, cache)


def write_texts(folder: Path, texts: list[str]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for i, text in enumerate(texts):
        (folder / f"{i}.txt").write_text(text, encoding="utf-8", newline="")
    return folder


def documents_of(ids: np.ndarray[Any, Any], end: int = 256) -> list[bytes]:
    ends = np.flatnonzero(ids == end)
    return [bytes(part[:-1].astype(np.uint8)) for part in np.split(ids, ends + 1)[:-1]]


TEXTS = [f"document {i}\n" + "word " * i for i in range(40)]


def test_documents_are_split_and_ordered_by_their_hash(tmp_path: Path) -> None:
    corpus = prepare(config("text", path=str(write_texts(tmp_path / "t", TEXTS))), tmp_path / "cache")

    def place(text: bytes) -> bytes:
        return hashlib.blake2b(text, digest_size=16).digest()

    expected = sorted((text.encode() for text in TEXTS), key=place)
    held = [text for text in expected if place(text)[0] < 0x40]  # a quarter of the first byte's values
    assert documents_of(corpus.val) == held and 0 < len(held) < 20
    assert documents_of(corpus.train) == [text for text in expected if text not in held]
    assert corpus.train.dtype == corpus.val.dtype == np.uint16
    assert isinstance(corpus.train, np.memmap) and not corpus.train.flags.writeable
    assert corpus.info["documents"] == {"train": 40 - len(held), "val": len(held)}
    assert corpus.vocab_size == 257 and corpus.entropy is None
    assert corpus.token_bytes is not None and corpus.token_bytes.tolist() == [1] * 256 + [0]
    json.dumps(corpus.info)


def test_content_decides_not_names_or_order(tmp_path: Path) -> None:
    shuffled = list(TEXTS)
    random.Random(0).shuffle(shuffled)
    first = prepare(config("text", path=str(write_texts(tmp_path / "a", TEXTS))), tmp_path / "cache")
    second = prepare(config("text", path=str(write_texts(tmp_path / "b/c", shuffled))), tmp_path / "cache")
    assert first.fingerprint == second.fingerprint
    assert len(list((tmp_path / "cache").iterdir())) == 1
    (tmp_path / "b/c/0.txt").write_text("another text")
    third = fresh(config("text", path=str(tmp_path / "b/c")), tmp_path / "cache")
    others = [
        fresh(config("text", path=str(tmp_path / "a"), val_fraction=0.5), tmp_path / "cache"),
        fresh(config("text", {"type": "bpe", "vocab_size": 270}, path=str(tmp_path / "a")), tmp_path / "cache"),
    ]
    assert len({c.fingerprint for c in (first, third, *others)}) == 4
    # A new document moves no other one to the other side.
    kept = [text for text in documents_of(first.val) if text != shuffled[0].encode()]
    assert [text for text in documents_of(third.val) if text != b"another text"] == kept


def test_copies_and_empty_files(tmp_path: Path) -> None:
    corpus = prepare(
        config("text", path=str(write_texts(tmp_path / "t", [*TEXTS[:10], *TEXTS[:3], "", ""]))), tmp_path / "cache"
    )
    train, val = documents_of(corpus.train), documents_of(corpus.val)
    assert sorted(train + val) == sorted(text.encode() for text in [*TEXTS[:10], *TEXTS[:3]])
    assert not set(train) & set(val)
    assert (corpus.info["copies"], corpus.info["skipped"]) == (3, 2)


@pytest.mark.parametrize("n", [2, 3])
def test_few_documents_feed_both_sides(tmp_path: Path, n: int) -> None:
    for fraction in (0.01, 0.99):
        cfg = config("text", path=str(write_texts(tmp_path / "t", TEXTS[:n])), val_fraction=fraction)
        corpus = fresh(cfg, tmp_path / "cache")
        assert min(len(documents_of(corpus.val)), len(documents_of(corpus.train))) == 1


def test_an_only_document_is_cut_at_a_line_end(tmp_path: Path) -> None:
    text = "".join(f"line {i} é\n" for i in range(100))
    (tmp_path / "one.txt").write_text(text, encoding="utf-8")
    corpus = prepare(config("text", path=str(tmp_path / "one.txt"), val_fraction=0.1), tmp_path / "cache")
    ids = np.concatenate([corpus.train, corpus.val])
    assert documents_of(ids) == [text.encode()] and ids[-1] == 256
    assert corpus.train[-1] == ord("\n") and 0.08 < len(corpus.val) / len(ids) < 0.12
    assert corpus.info["documents"] == {"train": 0, "val": 1} and corpus.info["split"] == "inside the only document"


@pytest.mark.parametrize("tokenizer", [{"type": "bytes"}, {"type": "bpe", "vocab_size": 264}])
def test_control_token_text_stays_text(tmp_path: Path, tokenizer: dict[str, Any]) -> None:
    texts = ["the end<|endoftext|>is not the end</s>", "a second document, the end of the text"]
    corpus = prepare(config("text", tokenizer, path=str(write_texts(tmp_path / "t", texts))), tmp_path / "cache")
    end = corpus.vocab_size - 1
    assert np.count_nonzero(corpus.train == end) + np.count_nonzero(corpus.val == end) == len(texts)
    assert corpus.token_bytes is not None
    total = corpus.token_bytes[corpus.train].sum() + corpus.token_bytes[corpus.val].sum()
    assert total == sum(map(len, texts))


def test_a_tokenizer_that_alters_the_text_has_no_byte_counts(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=True)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    model.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(show_progress=False, initial_alphabet=alphabet))
    model.save(str(tmp_path / "t.json"))
    cfg = config(
        "text", {"type": "file", "path": str(tmp_path / "t.json")}, path=str(write_texts(tmp_path / "t", TEXTS))
    )
    assert prepare(cfg, tmp_path / "cache").token_bytes is None


def test_wide_ids_round_trip_and_the_sidecar_guards_them(tmp_path: Path) -> None:
    ids = [65535, 65536, 70000, 128000]
    for i in range(2):  # two shards are joined in the cache
        (tmp_path / f"train_{i}.bin").write_bytes(np.array(ids * 5, "<u4").tobytes())
    (tmp_path / "val_0.bin").write_bytes(np.array(ids * 3, "<u4").tobytes())
    cfg = config("bin", {"type": "none", "vocab_size": 128001}, path=str(tmp_path))
    corpus = prepare(cfg, tmp_path / "cache")
    assert corpus.train.tolist() == ids * 10 and corpus.val.tolist() == ids * 3
    assert corpus.train.dtype == np.uint32
    (folder,) = (tmp_path / "cache").iterdir()
    meta = json.loads((folder / "meta.json").read_text())
    for edit in ({"dtype": "uint16"}, {"dtype": "uint16", "tokens": {"train": 80, "val": 24}}):
        (folder / "meta.json").write_text(json.dumps(meta | edit))
        with pytest.raises(ConfigError, match="is damaged .*uint16.*delete that folder"):
            fresh(cfg, tmp_path / "cache")
    (folder / "meta.json").write_text("{")
    with pytest.raises(ConfigError, match="is damaged .meta.json"):
        fresh(cfg, tmp_path / "cache")
    (folder / "meta.json").write_text(json.dumps(meta))
    assert fresh(cfg, tmp_path / "cache").fingerprint == corpus.fingerprint


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    cfg = config("text", path=str(write_texts(tmp_path / "t", TEXTS)))
    prepare(cfg, tmp_path / "cache")
    (folder,) = (tmp_path / "cache").iterdir()
    path = folder / "train.bin"
    whole = path.read_bytes()
    path.write_bytes(whole[:-2])
    with pytest.raises(ConfigError, match=f"train.bin has {len(whole) - 2} bytes, not {len(whole) // 2} uint16 ids"):
        fresh(cfg, tmp_path / "cache")
    path.write_bytes(whole[:100] + bytes([whole[100] ^ 1]) + whole[101:])
    with pytest.raises(ConfigError, match="train.bin does not have the checksum"):
        fresh(cfg, tmp_path / "cache")
    path.unlink()
    with pytest.raises(ConfigError, match="train.bin is missing"):
        fresh(cfg, tmp_path / "cache")


def test_one_token_file_is_read_where_it_lies(tmp_path: Path) -> None:
    path = tmp_path / "tokens.bin"
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 400
    ids = np.random.default_rng(0).integers(0, 50257, 400)
    path.write_bytes(header.tobytes() + ids.astype("<u2").tobytes())
    cfg = config("bin", {"type": "none", "vocab_size": 50257}, path=str(path))
    corpus = prepare(cfg, tmp_path / "cache")
    assert corpus.train.tolist() == ids[:300].tolist() and corpus.val.tolist() == ids[300:].tolist()
    assert isinstance(corpus.val, np.memmap) and str(corpus.val.filename) == str(path)
    assert {p.name for p in (tmp_path / "cache").rglob("*") if p.is_file()} == {"meta.json"}
    # A copy elsewhere is the same corpus; one changed id makes another.
    (tmp_path / "copy.bin").write_bytes(path.read_bytes())
    copy = config("bin", {"type": "none", "vocab_size": 50257}, path=str(tmp_path / "copy.bin"))
    assert prepare(copy, tmp_path / "cache").fingerprint == corpus.fingerprint
    ids[7] ^= 1
    (tmp_path / "copy.bin").write_bytes(header.tobytes() + ids.astype("<u2").tobytes())
    assert fresh(copy, tmp_path / "cache").fingerprint != corpus.fingerprint


def test_id_outside_the_vocabulary(tmp_path: Path) -> None:
    ids = list(range(50))
    ids[41] = 300
    (tmp_path / "t.bin").write_bytes(np.array(ids, "<u2").tobytes())
    with pytest.raises(ConfigError, match="id 300 at token 41 of .*t.bin' is not below vocab_size=257"):
        prepare(config("bin", path=str(tmp_path / "t.bin"), dtype="uint16"), tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize("split", ["train", "val"])
def test_split_shorter_than_a_window(tmp_path: Path, split: str) -> None:
    for name in ("train", "val"):
        count = 3 if name == split else 9
        (tmp_path / f"{name}.bin").write_bytes(np.arange(count, dtype="<u2").tobytes())
    options: dict[str, Any] = {"path": str(tmp_path / "train.bin"), "val_path": str(tmp_path / "val.bin")}
    with pytest.raises(ConfigError, match=f"{split} split of .*{split}.bin' has 3 tokens.*seq_len=8 needs at least 9"):
        prepare(config("bin", **options), tmp_path / "cache")
    assert len(prepare(config("bin", seq_len=2, **options), tmp_path / "cache").train) in (3, 9)


@pytest.mark.parametrize(
    ("cfg", "message"),
    [
        (config("synthetic", {"type": "none", "vocab_size": 8}, val_fraction=0.0), "val_fraction=0.0 must be above 0"),
        (config("synthetic", {"type": "bpe", "vocab_size": 300}), "'bpe' learns from text"),
        (config("stdlib", {"type": "none", "vocab_size": 300}), "type=none reads ids, but this data is text"),
        (config("texts"), "did you mean 'text'"),
        (config("text", path="/nowhere.txt"), "/nowhere.txt' does not exist"),
        (config("stdlib", {"type": "bytes", "vocab_size": 300}), "'bytes' has 257 ids"),
    ],
)
def test_refusals(tmp_path: Path, cfg: DataConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare(cfg, tmp_path / "cache")


def test_unigram_entropy_by_hand(tmp_path: Path) -> None:
    (tmp_path / "train.bin").write_bytes(np.array([0, 0, 1, 2, 0, 0, 1, 2, 0, 1, 0, 2], "<u2").tobytes())
    (tmp_path / "val.bin").write_bytes(np.array([3] * 9, "<u2").tobytes())
    cfg = config("bin", {"type": "none", "vocab_size": 4}, path=str(tmp_path), seq_len=8)
    # Train: 1/2, 1/4, 1/4: 1.5 bits.
    assert prepare(cfg, tmp_path / "cache").unigram_entropy == pytest.approx(1.5 * np.log(2), rel=1e-12)


def test_synthetic_corpus(tmp_path: Path) -> None:
    cfg = config("synthetic", {"type": "none", "vocab_size": 70000}, kind="uniform", n_tokens=4000)
    corpus = prepare(cfg, tmp_path / "cache")
    assert (len(corpus.train), len(corpus.val), corpus.train.dtype.name) == (3000, 1000, "uint32")
    assert corpus.entropy == pytest.approx(np.log(70000)) and corpus.token_bytes is None
    assert 60000 < corpus.train.max() < 70000
    again = fresh(cfg, tmp_path / "cache")
    assert again.fingerprint == corpus.fingerprint and again.entropy == corpus.entropy


def test_second_call_returns_the_same_corpus(tmp_path: Path) -> None:
    cfg = config("text", path=str(write_texts(tmp_path / "t", TEXTS)))
    corpus = prepare(cfg, tmp_path / "cache")
    other_seed = config("text", path=str(tmp_path / "t"), seed=3, num_workers=2)
    assert prepare(cfg, tmp_path / "cache") is corpus and prepare(other_seed, tmp_path / "cache") is corpus


def _prepare_at(cfg: DataConfig, cache: Path, barrier: Any, results: Any) -> None:
    barrier.wait()
    results.put(prepare(cfg, cache).fingerprint)


def test_two_processes_at_once(tmp_path: Path) -> None:
    cfg = config("text", path=str(write_texts(tmp_path / "t", TEXTS * 5)))
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    workers = [context.Process(target=_prepare_at, args=(cfg, tmp_path / "cache", barrier, results)) for _ in range(2)]
    for worker in workers:
        worker.start()
    fingerprints = {results.get(timeout=30) for _ in workers}
    for worker in workers:
        worker.join()
        assert worker.exitcode == 0
    assert fingerprints == {fresh(cfg, tmp_path / "cache").fingerprint}
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_the_slower_of_two_keeps_the_other_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config("text", path=str(write_texts(tmp_path / "t", TEXTS)))
    rename = Path.rename

    def overtaken(self: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "rename", rename)
        fresh(cfg, tmp_path / "cache")
        return rename(self, target)

    monkeypatch.setattr(Path, "rename", overtaken)
    corpus = prepare(cfg, tmp_path / "cache")
    assert len(list((tmp_path / "cache").iterdir())) == 1
    assert corpus.fingerprint == fresh(cfg, tmp_path / "cache").fingerprint


def _stall_while_writing(cfg: DataConfig, cache: Path) -> None:
    Path.rename = lambda self, target: time.sleep(60)  # type: ignore[method-assign,assignment,return-value]
    prepare(cfg, cache)


def test_what_a_killed_process_leaves_is_harmless(tmp_path: Path) -> None:
    cfg = config("text", path=str(write_texts(tmp_path / "t", TEXTS)))
    worker = multiprocessing.get_context("fork").Process(target=_stall_while_writing, args=(cfg, tmp_path / "cache"))
    worker.start()
    deadline = time.monotonic() + 30
    while not list((tmp_path / "cache").glob("*/meta.json")) and time.monotonic() < deadline:
        time.sleep(0.01)
    worker.kill()
    worker.join()
    (left,) = (tmp_path / "cache").iterdir()
    (left / "train.bin").write_bytes(b"half")
    corpus = prepare(cfg, tmp_path / "cache")
    assert len(documents_of(corpus.train)) + len(documents_of(corpus.val)) == len(TEXTS)
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_disk_full_leaves_nothing(tmp_path: Path) -> None:
    cfg = config("text", path=str(write_texts(tmp_path / "t", TEXTS)))
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, hard))
    try:
        with pytest.raises(ConfigError, match=r"could not be written to '.*cache' \(.*; free some space"):
            prepare(cfg, tmp_path / "cache")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path / "cache") == []
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="could not be written to '.*file/cache'"):
        prepare(cfg, tmp_path / "file/cache")
