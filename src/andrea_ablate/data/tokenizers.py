"""Tokenizers: documents to ids, with one end-of-document id after each document.

Text that spells a control token is ordinary text: no tokenizer here turns it into a control id.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from andrea_ablate.registry import ConfigError, Registry

END_NAMES = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "[EOS]")
BATCH_BYTES = 4 << 20


class Tokenizer(Protocol):
    """What `prepare` asks of a tokenizer.

    Attributes:
        vocab_size: number of ids, the end-of-document id among them.
        end: the end-of-document id; None when there is none to write.
        identity: what decides the ids, as plain JSON.
        pieces: the bytes that each id stands for (none for control ids), or None when they are not known.
    """

    vocab_size: int
    end: int | None
    identity: dict[str, Any]
    pieces: list[bytes] | None

    def train(self, documents: Sequence[bytes]) -> None:
        """Learn from the training documents, where the type learns at all."""

    def encode(self, documents: Sequence[bytes]) -> NDArray[Any]:
        """Ids of the documents one after another, each followed by `end`."""

    def decode(self, ids: Iterable[int]) -> str:
        """The text of the ids; control ids have none."""

    def to_json(self) -> str | None:
        """The tokenizer as the text of a tokenizer.json, or None."""


TOKENIZERS: Registry[Tokenizer] = Registry("tokenizer")


def vocab_size(node: Mapping[str, Any]) -> int:
    """Number of ids of a tokenizer node, without training anything.

    Raises: ConfigError when the node's vocab_size is missing or disagrees with the tokenizer.
    """
    return TOKENIZERS.build(node).vocab_size


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest of uint16 and uint32 that holds every id below `vocab_size`."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _check_size(kind: str, asked: Any, least: int, way_out: str) -> int:
    if isinstance(asked, bool) or not isinstance(asked, int) or asked < least:
        raise ConfigError(f"tokenizer: vocab_size={asked} of '{kind}' must be a whole number >= {least}; {way_out}")
    return asked


def _agree(kind: str, asked: int | None, found: int) -> int:
    if asked is not None and asked != found:
        raise ConfigError(f"tokenizer: vocab_size={asked}, but '{kind}' has {found} ids; set it to {found} or null")
    return found


def _join(pieces: Sequence[bytes], ids: Iterable[int]) -> str:
    return b"".join(pieces[i] for i in ids).decode("utf-8", errors="replace")


@TOKENIZERS.register("bytes")
class Bytes:
    """Each byte is its own id, 0 to 255; id 256 ends a document."""

    end = 256

    def __init__(self, *, vocab_size: int | None = 257) -> None:
        self.vocab_size = _agree("bytes", vocab_size, 257)
        self.identity: dict[str, Any] = {"type": "bytes"}
        self.pieces = [bytes([i]) for i in range(256)] + [b""]

    def train(self, documents: Sequence[bytes]) -> None:
        pass

    def encode(self, documents: Sequence[bytes]) -> NDArray[Any]:
        ids = np.frombuffer(b"".join(documents), np.uint8).astype(token_dtype(257))
        return np.insert(ids, np.cumsum([len(text) for text in documents], dtype=np.int64), self.end)

    def decode(self, ids: Iterable[int]) -> str:
        return _join(self.pieces, ids)

    def to_json(self) -> str | None:
        """A byte-level BPE without merges: every byte stays its own token."""
        split = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model = {"type": "BPE", "vocab": _printable_bytes(), "merges": []}
        return json.dumps({"version": "1.0", "pre_tokenizer": split, "decoder": split, "model": model})


@TOKENIZERS.register("none")
class AlreadyIds:
    """No text at all: the corpus is token ids below `vocab_size`."""

    end = None
    pieces = None

    def __init__(self, *, vocab_size: int | None = None) -> None:
        self.vocab_size = _check_size("none", vocab_size, 1, "it is the number of ids of the corpus")
        self.identity: dict[str, Any] = {"type": "none", "vocab_size": self.vocab_size}

    def train(self, documents: Sequence[bytes]) -> None:
        pass

    def encode(self, documents: Sequence[bytes]) -> NDArray[Any]:
        raise ConfigError("tokenizer: type=none reads ids, but this data is text; use bytes, bpe, file or tiktoken")

    def decode(self, ids: Iterable[int]) -> str:
        return " ".join(str(int(i)) for i in ids)

    def to_json(self) -> str | None:
        return None


@TOKENIZERS.register("bpe")
class TrainedBPE:
    """Byte-level BPE (Sennrich et al. 2016, arXiv:1508.07909) learnt from the training documents.

    Args:
        vocab_size: ids in all: 256 bytes, the merges, and the end-of-document id, which is the last one.
    """

    pieces: list[bytes] | None = None

    def __init__(self, *, vocab_size: int | None = None) -> None:
        self.vocab_size = _check_size("bpe", vocab_size, 257, "256 bytes and the end of a document are always there")
        self.end: int | None = self.vocab_size - 1
        self.identity: dict[str, Any] = {"type": "bpe", "vocab_size": self.vocab_size}
        self._model: Any = None

    def train(self, documents: Sequence[bytes]) -> None:
        tokenizers = _tokenizers_library()
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=self.vocab_size - 1,
            show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        )
        model.train_from_iterator((text.decode("utf-8") for text in documents), trainer)
        if model.get_vocab_size() != self.vocab_size - 1:
            raise ConfigError(
                f"tokenizer: vocab_size={self.vocab_size} of 'bpe' is more than the training text can fill; "
                f"it reaches {model.get_vocab_size() + 1}: lower vocab_size or give more text"
            )
        self._model = model
        self.pieces = _byte_pieces(model.get_vocab(), self.vocab_size)

    def encode(self, documents: Sequence[bytes]) -> NDArray[Any]:
        assert self._model is not None and self.end is not None, "train first"
        return _encode_in_batches(_plain_ids(self._model), documents, self.end, self.vocab_size)

    def decode(self, ids: Iterable[int]) -> str:
        assert self.pieces is not None, "train first"
        return _join(self.pieces, ids)

    def to_json(self) -> str | None:
        return str(self._model.to_str(pretty=True))


@TOKENIZERS.register("file")
class FromFile:
    """A tokenizer.json of the tokenizers library.

    The end of a document is the file's own token for it (the first of `END_NAMES` that it knows), otherwise one more id
    after its last one, which is how a vocabulary that `bpe` learnt reads back.

    Args:
        path: the file.
        vocab_size: None, or the number of ids to insist on.
    """

    def __init__(self, *, path: str | None = None, vocab_size: int | None = None) -> None:
        if not path:
            raise ConfigError("tokenizer: 'file' needs the path of a tokenizer.json; add path=...")
        try:
            self._json = Path(path).read_text(encoding="utf-8")
            rules = json.loads(self._json)
            # Marked special, an added token is one that the library can be told to read as ordinary text.
            for token in rules.get("added_tokens") or []:
                token["special"] = token["special"] or bool(token["content"].strip())
            self._model = _tokenizers_library().Tokenizer.from_str(json.dumps(rules))
        except ConfigError:
            raise
        except Exception as error:  # the library raises bare Exception
            raise ConfigError(f"tokenizer: path='{path}' is not a readable tokenizer.json ({error})") from None
        self._model.encode_special_tokens = True
        self._model.no_padding()
        self._model.no_truncation()
        vocabulary: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
        found = max(vocabulary.values(), default=-1) + 1
        known = [vocabulary[name] for name in END_NAMES if name in vocabulary]
        self.end: int | None = known[0] if known else found
        self.vocab_size = _agree(path, vocab_size, found if known else found + 1)
        added = {int(token["id"]) for token in rules.get("added_tokens") or [] if token["special"]}
        ordinary = {piece: i for piece, i in vocabulary.items() if i not in added and i != self.end}
        byte_level = "ByteLevel" in json.dumps(rules.get("decoder"))
        self.pieces = _byte_pieces(ordinary, self.vocab_size) if byte_level else None
        content = hashlib.blake2b(self._json.encode(), digest_size=16).hexdigest()
        self.identity: dict[str, Any] = {"type": "file", "content": content}

    def train(self, documents: Sequence[bytes]) -> None:
        pass

    def encode(self, documents: Sequence[bytes]) -> NDArray[Any]:
        assert self.end is not None
        return _encode_in_batches(_plain_ids(self._model), documents, self.end, self.vocab_size)

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(i) for i in ids if i != self.end]
        return str(self._model.decode(kept)) if self.pieces is None else _join(self.pieces, kept)

    def to_json(self) -> str | None:
        return self._json


@TOKENIZERS.register("tiktoken")
class Tiktoken:
    """An encoding of the tiktoken library, e.g. ``gpt2``; the library fetches its ranks once.

    Args:
        name: as ``tiktoken.get_encoding`` takes it.
        vocab_size: None, or the number of ids to insist on.
    """

    def __init__(self, *, name: str | None = None, vocab_size: int | None = None) -> None:
        if not name:
            raise ConfigError("tokenizer: 'tiktoken' needs the name of an encoding, such as gpt2; add name=...")
        try:
            import tiktoken
        except ImportError:
            raise ConfigError(
                "tokenizer: 'tiktoken' needs the tiktoken library, which is not installed; run pip install tiktoken"
            ) from None
        try:
            self._encoding = tiktoken.get_encoding(name)
        except Exception as error:  # an unknown name, or any error of the download
            raise ConfigError(
                f"tokenizer: name={name} could not be loaded ({type(error).__name__}); it must be one of "
                f"{', '.join(tiktoken.list_encoding_names())}, and the first use needs a network"
            ) from error
        self.vocab_size = _agree(name, vocab_size, self._encoding.n_vocab)
        self.end: int | None = self._encoding.eot_token
        self.identity: dict[str, Any] = {"type": "tiktoken", "name": name}
        self.pieces: list[bytes] = [b""] * self.vocab_size
        for piece in self._encoding.token_byte_values():
            self.pieces[self._encoding.encode_single_token(piece)] = piece

    def train(self, documents: Sequence[bytes]) -> None:
        pass

    def encode(self, documents: Sequence[bytes]) -> NDArray[Any]:
        return _encode_in_batches(
            self._encoding.encode_ordinary_batch, documents, self._encoding.eot_token, self.vocab_size
        )

    def decode(self, ids: Iterable[int]) -> str:
        return _join(self.pieces, ids)

    def to_json(self) -> str | None:
        return None


def _tokenizers_library() -> Any:
    try:
        import tokenizers
    except ImportError:
        raise ConfigError(
            "tokenizer: bpe and file need the tokenizers library, which is not installed; run pip install tokenizers"
        ) from None
    return tokenizers


def _batches(documents: Sequence[bytes]) -> Iterator[list[str]]:
    """Texts in groups of a few MB, since the libraries hold much more than the ids of what they encode at once."""
    batch: list[str] = []
    size = 0
    for text in documents:
        batch.append(text.decode("utf-8"))
        size += len(text)
        if size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _encode_in_batches(
    encode: Callable[[list[str]], Iterable[list[int]]], documents: Sequence[bytes], end: int, vocab_size: int
) -> NDArray[Any]:
    dtype = token_dtype(vocab_size)
    rows = [np.array([*ids, end], dtype) for batch in _batches(documents) for ids in encode(batch)]
    return np.concatenate(rows) if rows else np.zeros(0, dtype)


def _plain_ids(model: Any) -> Callable[[list[str]], Iterable[list[int]]]:
    return lambda texts: (found.ids for found in model.encode_batch_fast(texts, add_special_tokens=False))


def _printable_bytes() -> dict[str, int]:
    """GPT-2's table: the one printable character that a byte-level vocabulary writes for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


def _byte_pieces(vocabulary: Mapping[str, int], vocab_size: int) -> list[bytes]:
    """Bytes of each id of a byte-level vocabulary."""
    table = _printable_bytes()
    pieces = [b""] * vocab_size
    for piece, i in vocabulary.items():
        pieces[i] = bytes(table[c] for c in piece) if all(c in table for c in piece) else piece.encode("utf-8")
    return pieces
