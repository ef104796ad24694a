"""Sources: what counts as a document, token shards of other trainers, and sources of known entropy."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from andrea_ablate.data import CORPORA
from andrea_ablate.registry import ConfigError


def build(type: str, vocab_size: int = 257, **options: Any) -> Any:
    return CORPORA.build({"type": type, **options}, vocab_size=vocab_size)


def joined(pieces: list[np.ndarray[Any, Any]]) -> list[int]:
    return [int(i) for piece in pieces for i in piece]


def llm_c(path: Path, ids: list[int], magic: int, version: int, dtype: str, count: int | None = None) -> None:
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    path.write_bytes(header.tobytes() + np.array(ids, dtype).tobytes())


def test_standard_library_without_its_tests() -> None:
    documents = build("stdlib").documents()
    assert sum(map(len, documents)) > 5_000_000
    assert all(documents)
    for module, present in (("ast", True), ("test.test_ast", False), ("unittest.test", False)):
        path = Path(sys.modules["ast"].__file__ or "").parent / (module.replace(".", "/") + ".py")
        if path.exists():
            assert (path.read_bytes() in documents) is present, module
    assert not any(b"build_time_vars = {" in text for text in documents), "depends on the machine that built Python"


def test_text_folder(tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / ".git").mkdir()
    (tmp_path / "a.txt").write_bytes("é\r\nx".encode())
    (tmp_path / "deep/er/b.md").write_bytes(b"B")
    (tmp_path / "copy.py").write_bytes(b"B")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "latin1.txt").write_bytes(b"\xe9")
    (tmp_path / ".git/config").write_bytes(b"hidden")
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n\n{"text": "two\\n"}\n{"text": ""}\n')
    source = build("text", path=str(tmp_path))
    assert sorted(source.documents()) == sorted(["é\r\nx".encode(), b"B", b"B", b"one", b"two\n"])
    assert source.info["skipped"] == 3  # two empty ones, one not UTF-8


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.txt", b"ok\xff", "x.txt' is not UTF-8"),
        ("x.jsonl", b'{"text": "a"}\n{"body": "b"}\n', "line 2 of .*x.jsonl"),
        ("x.jsonl", b'{"text": "a"}\n{"text"', "line 2 of .*x.jsonl"),
        ("x.jsonl", b'{"text": 5}', "line 1 of .*x.jsonl"),
        ("x.jsonl", b'{"text": "\\ud800"}', "line 1 of .*x.jsonl"),
    ],
)
def test_unusable_text_names_the_file(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        build("text", path=str(tmp_path / name)).documents()


@pytest.mark.parametrize(
    ("node", "message"),
    [
        ({"type": "text"}, "path=None, but 'text' needs it"),
        ({"type": "text", "path": "/nowhere/x"}, "/nowhere/x' does not exist"),
        ({"type": "text", "path": "x", "txt_field": "a"}, "did you mean 'text_field'"),
        ({"type": "bin", "path": "/nowhere/*.bin"}, r"/nowhere/\*.bin' matches no file"),
        ({"type": "stdlib", "path": "x"}, "options: none"),
        ({"type": "synthetic", "kind": "uniform", "exponent": 1.0}, "belongs to kind=zipf only"),
        ({"type": "synthetic", "kind": "gauss"}, "uniform, zipf or markov"),
    ],
)
def test_what_cannot_be_asked(node: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build(**node).documents()


@pytest.mark.parametrize(
    ("magic", "version", "dtype", "ids"),
    [
        (20240520, 1, "<u2", [0, 5, 50256, 65535]),
        (20240801, 7, "<u4", [0, 65535, 65536, 128000]),
        (None, None, "<u2", [1, 2, 3]),
        (None, None, "<u4", [65535, 65536, 70000, 128000]),
    ],
)
def test_shards_of_other_trainers(
    tmp_path: Path, magic: int | None, version: int | None, dtype: str, ids: list[int]
) -> None:
    path = tmp_path / "x.bin"
    if magic is None or version is None:
        path.write_bytes(np.array(ids, dtype).tobytes())
    else:
        llm_c(path, ids, magic, version, dtype)
    vocab_size = 65536 if dtype == "<u2" else 128256
    train, val = build("bin", vocab_size, path=str(path)).split(0.34)
    assert joined(train) + joined(val) == ids
    assert len(joined(val)) == 1


def test_shards_follow_their_names_and_val_is_kept_apart(tmp_path: Path) -> None:
    for name, ids in {"fw_train_2.bin": [4, 5], "fw_train_1.bin": [1, 2, 3], "fw_val_1.bin": [9]}.items():
        llm_c(tmp_path / name, ids, 20240520, 1, "<u2")
    assert [joined(x) for x in build("bin", path=str(tmp_path)).split(0.5)] == [[1, 2, 3, 4, 5], [9]]
    pattern = str(tmp_path / "*train*.bin")
    assert [joined(x) for x in build("bin", path=pattern).split(0.6)] == [[1, 2], [3, 4, 5]]
    own = build("bin", path=pattern, val_path=str(tmp_path / "fw_val_1.bin"))
    assert [joined(x) for x in own.split(0.6)] == [[1, 2, 3, 4, 5], [9]]
    assert own.content() != build("bin", path=pattern).content()


def test_damaged_shards_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    llm_c(path, [1, 2, 3], 20240520, 1, "<u2", count=4)
    with pytest.raises(ConfigError, match="x.bin' says 4 ids, 1032 bytes, but it has 1030"):
        build("bin", path=str(path))
    llm_c(path, [1, 2, 3], 20240520, 2, "<u2")
    with pytest.raises(ConfigError, match="20240520 version 2"):
        build("bin", path=str(path))
    llm_c(path, [1, 2, 3], 20240520, 1, "<u2")
    with pytest.raises(ConfigError, match="dtype=uint32, but the header"):
        build("bin", path=str(path), dtype="uint32")
    path.write_bytes(b"\1\0\2")
    with pytest.raises(ConfigError, match="3 bytes, no whole number"):
        build("bin", path=str(path))
    path.write_bytes(np.arange(100, dtype="<u4").tobytes())
    with pytest.raises(ConfigError, match="looks like uint32"):
        build("bin", path=str(path))
    assert joined(build("bin", path=str(path), dtype="uint32").split(0.1)[0]) == list(range(90))


def test_id_outside_the_vocabulary_is_named_with_its_place(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    llm_c(path, [1, 2, 300, 4], 20240520, 1, "<u2")
    with pytest.raises(ConfigError, match="id 300 at token 2 of .*x.bin' is not below vocab_size=257"):
        build("bin", path=str(path)).check()


def test_uniform_and_zipf_entropy() -> None:
    assert build("synthetic", 64, kind="uniform").entropy == pytest.approx(4.158883083359672)  # ln 64
    # By hand: p = 6/11, 3/11, 2/11.
    zipf = build("synthetic", 3, kind="zipf", n_tokens=200_000)
    by_hand = 6 / 11 * np.log(11 / 6) + 3 / 11 * np.log(11 / 3) + 2 / 11 * np.log(11 / 2)
    assert zipf.entropy == pytest.approx(by_hand)
    counts = np.bincount(zipf.split(0.5)[0][0], minlength=3) / 100_000
    assert counts == pytest.approx([6 / 11, 3 / 11, 2 / 11], abs=4 * 0.5 / np.sqrt(100_000))


def test_markov_entropy_is_that_of_the_stream() -> None:
    source = build("synthetic", 6, kind="markov", n_tokens=400_000, source_seed=3)
    (ids,), (held_out,) = source.split(0.25)
    assert (len(ids), len(held_out)) == (300_000, 100_000)
    # The empirical conditional entropy of the pairs; its bias is about 30 / (2 n).
    pairs = np.zeros((6, 6))
    np.add.at(pairs, (ids[:-1], ids[1:]), 1)
    pairs /= pairs.sum()
    given = pairs / pairs.sum(1, keepdims=True)
    assert source.entropy == pytest.approx(-(pairs * np.log(np.where(given > 0, given, 1))).sum(), abs=0.006)
    assert source.entropy < -(pairs.sum(1) * np.log(pairs.sum(1))).sum() - 0.1
    # No memory beyond one id: knowing two ids back does not help.
    triples = np.zeros((36, 6))
    np.add.at(triples, (6 * ids[:-2] + ids[1:-1], ids[2:]), 1)
    triples /= triples.sum()
    two_back = triples / np.maximum(triples.sum(1, keepdims=True), 1e-12)
    assert -(triples * np.log(np.where(two_back > 0, two_back, 1))).sum() == pytest.approx(source.entropy, abs=0.006)
    again = build("synthetic", 6, kind="markov", n_tokens=400_000, source_seed=3)
    assert again.content() == source.content() and np.array_equal(again.split(0.25)[0][0], ids)
    assert build("synthetic", 6, kind="markov", n_tokens=400_000, source_seed=4).content() != source.content()


def test_hugging_face_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    folder = tmp_path / "rows"
    folder.mkdir()
    (folder / "train.jsonl").write_text("".join(json.dumps({"body": x}) + "\n" for x in ("one", "", "zwei é")))
    source = build("hf", name=str(folder), text_field="body")
    assert source.documents() == [b"one", "zwei é".encode()]
    with pytest.raises(ConfigError, match="it has body"):
        build("hf", name=str(folder)).documents()
    with pytest.raises(ConfigError, match="could not be loaded"):
        build("hf", name=str(tmp_path / "absent")).documents()


def test_missing_datasets_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"pip install 'andrea-ablate\[hf\]'"):
        build("hf", name="x").documents()
