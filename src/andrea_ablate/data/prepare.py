"""A corpus on disk: documents are split and tokenised once, then opened memory-mapped and checked each time."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import uuid
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from andrea_ablate.codehash import code_hash
from andrea_ablate.config import DataConfig
from andrea_ablate.data.corpora import CORPORA, DocumentSource, TokenSource
from andrea_ablate.data.files import digest, file_digest, map_tokens
from andrea_ablate.data.synthetic import entropy
from andrea_ablate.data.tokenizers import TOKENIZERS, Tokenizer, token_dtype
from andrea_ablate.registry import ConfigError

FORMAT = 1
BLOCK = 4 << 20


@dataclass
class Corpus:
    """Token ids of both splits, read-only, and what is known about them.

    Attributes:
        fingerprint: hash of source, tokenizer, split rule and the resulting ids.
        train, val: memory-mapped uint16 or uint32.
        token_bytes: bytes of text per id (0 for control ids); None when unknown, or when the tokenizer alters the text.
        unigram_entropy: nats per token of the train split's distribution of ids.
        entropy: nats per token given all earlier ones, where the source has it exactly.
        info: what goes into a record (plain JSON).
        folder: the prepared folder; None for ids that were never prepared.
    """

    fingerprint: str
    train: NDArray[Any]
    val: NDArray[Any]
    vocab_size: int
    token_bytes: NDArray[Any] | None
    unigram_entropy: float
    entropy: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    folder: Path | None = None


@dataclass
class _Splits:
    """Ids of both splits, as the pieces that make them up, before anything is written."""

    train: Sequence[NDArray[Any]]
    val: Sequence[NDArray[Any]]
    info: dict[str, Any]
    token_bytes: NDArray[Any] | None


_OPENED: dict[str, Corpus] = {}


def prepare(cfg: DataConfig, cache: Path) -> Corpus:
    """Tokenise and split the corpus into a folder of `cache` unless it is there already, check it and open it.

    The folder is named after its content and appears by one rename, so that two processes may do this at once.

    Raises: ConfigError for an unusable source or tokenizer, a damaged folder, a split shorter than ``seq_len + 1``.
    """
    wanted = json.dumps(
        [cfg.type, cfg.options, cfg.tokenizer, cfg.val_fraction, os.path.abspath(cache)], sort_keys=True, default=str
    )
    if wanted not in _OPENED:
        _OPENED[wanted] = _prepare(cfg, Path(cache))
    corpus = _OPENED[wanted]
    for split, ids in (("train", corpus.train), ("val", corpus.val)):
        if len(ids) < cfg.seq_len + 1:
            raise ConfigError(
                f"data: the {split} split of {corpus.info['source'][split]} has {len(ids)} tokens, but "
                f"seq_len={cfg.seq_len} needs at least {cfg.seq_len + 1}; lower data.seq_len or give more tokens"
                + (" or another val_fraction" if corpus.info["split"] != "own file" else "")
            )
    return corpus


def tokenizer_of(cfg: DataConfig, cache: Path) -> Tokenizer:
    """The tokenizer of the prepared corpus, as it was learnt. Raises ConfigError as `prepare`."""
    if cfg.tokenizer["type"] != "bpe":
        return TOKENIZERS.build(cfg.tokenizer)
    folder = prepare(cfg, cache).folder
    assert folder is not None
    return TOKENIZERS.build({"type": "file", "path": str(folder / "tokenizer.json")})


def _prepare(cfg: DataConfig, cache: Path) -> Corpus:
    tokenizer = TOKENIZERS.build(cfg.tokenizer)
    source = CORPORA.build({**cfg.options, "type": cfg.type}, vocab_size=tokenizer.vocab_size)
    own_val = isinstance(source, TokenSource) and source.rule == "own file"
    if not own_val and not 0 < cfg.val_fraction < 1:
        raise ConfigError(f"data: val_fraction={cfg.val_fraction} must be above 0 and below 1")
    build: Callable[[], _Splits]
    in_place: tuple[NDArray[Any], NDArray[Any]] | None = None
    if isinstance(source, DocumentSource):
        names = {"train": source.name, "val": source.name}
        documents = source.documents()
        if not documents:
            raise ConfigError(f"data: {source.name} holds no UTF-8 text; check the path")
        hashes = [hashlib.blake2b(text, digest_size=16).digest() for text in documents]
        content = digest(*sorted(hashes))
        build = partial(_from_documents, documents, hashes, tokenizer, cfg.val_fraction)
    else:
        if cfg.tokenizer["type"] == "bpe":
            raise ConfigError(f"tokenizer: 'bpe' learns from text, but data={cfg.type} is ids; use none or file")
        names = {"train": source.names[0], "val": source.names[1]}
        content = source.content()
        if source.on_disk:
            train, val = source.split(cfg.val_fraction)
            in_place = (train[0], val[0]) if len(train) == len(val) == 1 else None
        build = partial(_from_tokens, source, tokenizer, cfg.val_fraction)

    rule = "own file" if own_val else cfg.val_fraction
    code = [code_hash(CORPORA.get(cfg.type)), code_hash(TOKENIZERS.get(cfg.tokenizer["type"]))]
    key = digest(json.dumps([FORMAT, code, content, tokenizer.identity, tokenizer.vocab_size, rule]).encode())
    if not (cache / key).is_dir():
        _write(cache / key, build(), tokenizer, files=in_place is None)
    corpus = _open(cache / key, tokenizer.vocab_size, in_place)
    corpus.entropy = None if isinstance(source, DocumentSource) else source.entropy
    corpus.info = {
        "type": cfg.type,
        "source": names,
        "tokenizer": dict(cfg.tokenizer),
        **source.info,
        **corpus.info,
        "tokens": {"train": len(corpus.train), "val": len(corpus.val)},
    }
    return corpus


def split_documents(
    documents: Sequence[bytes], hashes: Sequence[bytes], val_fraction: float
) -> tuple[list[bytes], list[bytes], str]:
    """Train and validation documents in their order, and the rule that was used.

    A document is held out when its hash, read as a fraction, is below `val_fraction`, so it stays where it is as a
    corpus grows, and copies stay together. The order is that of the hashes; later copies are hashed again so that they
    spread. At least one document goes to each side; an only document is cut at the line end nearest after the fraction.
    """
    copies: Counter[bytes] = Counter()
    ordered: list[tuple[bytes, bytes, bytes]] = []
    for text, content in zip(documents, hashes, strict=True):
        again = copies[content]
        copies[content] += 1
        place = hashlib.blake2b(content + again.to_bytes(8, "little"), digest_size=16).digest() if again else content
        ordered.append((place, content, text))
    if len(copies) == 1:
        only = documents[0].decode("utf-8")
        at = int(len(only) * (1 - val_fraction))
        line_end = only.find("\n", at) + 1
        at = line_end if 0 < line_end < len(only) else at
        return [only[:at].encode()], [only[at:].encode()], "inside the only document"
    distinct = sorted(copies)
    held = {content for content in distinct if int.from_bytes(content[:8], "big") < val_fraction * 2.0**64}
    if not held:
        held = {distinct[0]}
    elif len(held) == len(distinct):
        held.remove(distinct[-1])
    ordered.sort()
    train = [text for _, content, text in ordered if content not in held]
    return train, [text for _, content, text in ordered if content in held], "by document hash"


def _from_documents(documents: list[bytes], hashes: list[bytes], tokenizer: Tokenizer, val_fraction: float) -> _Splits:
    train, val, rule = split_documents(documents, hashes, val_fraction)
    cut = rule == "inside the only document"
    tokenizer.train(train)
    ids: dict[str, NDArray[Any]] = {}
    token_bytes = _token_bytes(tokenizer)
    for split, texts in (("train", train), ("val", val)):
        ids[split] = tokenizer.encode(texts)
        if (ends := int(np.count_nonzero(ids[split] == tokenizer.end))) != len(texts):
            raise ConfigError(
                f"tokenizer: it writes its end-of-document id {tokenizer.end} for ordinary text ({ends} of them in "
                f"{len(texts)} {split} documents); use another tokenizer"
            )
        # A tokenizer that alters the text (lower case, an added space) has no count of the text's own bytes.
        if token_bytes is not None and int(token_bytes[ids[split]].sum(dtype=np.int64)) != sum(map(len, texts)):
            token_bytes = None
    info = {
        "split": rule,
        "documents": {"train": len(train) - cut, "val": len(val)},
        "copies": len(hashes) - len(set(hashes)),
        "bytes": {"train": sum(map(len, train)), "val": sum(map(len, val))},
    }
    return _Splits([ids["train"][: len(ids["train"]) - cut]], [ids["val"]], info, token_bytes)


def _from_tokens(source: TokenSource, tokenizer: Tokenizer, val_fraction: float) -> _Splits:
    source.check()
    train, val = source.split(val_fraction)
    return _Splits(train, val, {"split": source.rule}, _token_bytes(tokenizer))


def _token_bytes(tokenizer: Tokenizer) -> NDArray[Any] | None:
    return None if tokenizer.pieces is None else np.array([len(piece) for piece in tokenizer.pieces], "<i4")


def _write(folder: Path, splits: _Splits, tokenizer: Tokenizer, files: bool) -> None:
    """Write all of `folder` beside it and rename it; when another process was first, its copy stays."""
    temporary = folder.with_name(f"{folder.name}.{uuid.uuid4().hex}.tmp")
    dtype = token_dtype(tokenizer.vocab_size)
    try:
        temporary.mkdir(parents=True)
        if files:
            for split, pieces in (("train", splits.train), ("val", splits.val)):
                with open(temporary / f"{split}.bin", "wb") as output:
                    for block in _blocks(pieces):
                        output.write(block.astype(dtype).data)
        if splits.token_bytes is not None:
            np.save(temporary / "token_bytes.npy", splits.token_bytes)
        if (text := tokenizer.to_json()) is not None:
            (temporary / "tokenizer.json").write_text(text, encoding="utf-8")
        meta = {
            "format": FORMAT,
            "key": folder.name,
            "vocab_size": tokenizer.vocab_size,
            "dtype": dtype.name if files else None,
            "tokens": {"train": sum(map(len, splits.train)), "val": sum(map(len, splits.val))},
            "unigram_entropy": _unigram_entropy(splits.train, tokenizer.vocab_size),
            "info": splits.info,
            "checksums": {path.name: file_digest(path) for path in sorted(temporary.iterdir())},
        }
        (temporary / "meta.json").write_text(json.dumps(meta, indent=1), encoding="utf-8")
        try:
            temporary.rename(folder)
        except OSError:
            if not folder.is_dir():
                raise
    except OSError as error:
        raise ConfigError(
            f"data: the prepared corpus could not be written to '{folder.parent}' ({error.strerror or error}); "
            "free some space or set another cache folder"
        ) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _blocks(pieces: Sequence[NDArray[Any]]) -> Iterator[NDArray[Any]]:
    for piece in pieces:
        for start in range(0, len(piece), BLOCK):
            yield np.asarray(piece[start : start + BLOCK])


def _unigram_entropy(pieces: Sequence[NDArray[Any]], vocab_size: int) -> float:
    counts = np.zeros(vocab_size, np.int64)
    for block in _blocks(pieces):
        counts += np.bincount(block, minlength=vocab_size)
    return float(entropy(counts / max(1, counts.sum())))


def _open(folder: Path, vocab_size: int, in_place: tuple[NDArray[Any], NDArray[Any]] | None) -> Corpus:
    """Open a prepared folder after checking that it is what was written.

    Raises: ConfigError naming the file that disagrees.
    """

    def refuse(what: str) -> ConfigError:
        return ConfigError(f"data: the prepared corpus '{folder}' is damaged ({what}); delete that folder to redo it")

    try:
        meta = json.loads((folder / "meta.json").read_text(encoding="utf-8"))
        tokens, checksums, info = dict(meta["tokens"]), dict(meta["checksums"]), dict(meta["info"])
        unigram = float(meta["unigram_entropy"])
        known = [meta["format"], meta["key"], meta["vocab_size"], meta["dtype"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise refuse(f"meta.json: {type(error).__name__} {error}") from None
    dtype = token_dtype(vocab_size)
    expected = [FORMAT, folder.name, vocab_size, dtype.name if in_place is None else None]
    if known != expected:
        raise refuse(f"meta.json says format, key, vocab_size, dtype = {known}, expected {expected}")
    for split, count in tokens.items():
        path = folder / f"{split}.bin"
        if in_place is None and path.name not in checksums:
            raise refuse(f"{path.name} has no checksum")
        if path.name in checksums and path.is_file() and path.stat().st_size != count * dtype.itemsize:
            raise refuse(f"{path.name} has {path.stat().st_size} bytes, not {count} {dtype.name} ids")
    for name, checksum in checksums.items():
        if not (folder / name).is_file():
            raise refuse(f"{name} is missing")
        if file_digest(folder / name) != checksum:
            raise refuse(f"{name} does not have the checksum in meta.json")
    train, val = in_place or (
        map_tokens(folder / f"{split}.bin", dtype.str, 0, tokens[split]) for split in ("train", "val")
    )
    ids = [checksums.get(f"{split}.bin") for split in ("train", "val")]
    return Corpus(
        # Not of the key alone: another release of a tokenizer library may make other ids from the same text.
        fingerprint=digest(json.dumps([folder.name, ids]).encode()),
        train=train,
        val=val,
        vocab_size=vocab_size,
        token_bytes=np.load(folder / "token_bytes.npy") if "token_bytes.npy" in checksums else None,
        unigram_entropy=unigram,
        folder=folder,
        info=info,
    )
