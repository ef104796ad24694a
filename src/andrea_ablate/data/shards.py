"""Token shards that other trainers wrote."""

from __future__ import annotations

import glob
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from andrea_ablate.data.corpora import CORPORA, required
from andrea_ablate.data.files import CHUNK, digest, file_digest, map_tokens, unreadable
from andrea_ablate.registry import ConfigError

LLM_C_HEADER_BYTES = 256 * 4
LLM_C_FORMATS = {(20240520, 1): "<u2", (20240801, 7): "<u4"}


@CORPORA.register("bin")
class TokenShards:
    """Token shards of llm.c, nanoGPT and modded-nanogpt: uint16 or uint32 ids, with or without llm.c's header.

    One file per split is memory-mapped where it lies; several are joined in the cache.

    Args:
        path: a file, a glob pattern, or a folder of ``.bin`` files, of which those with ``val`` in their name are the
            validation split; shards follow one another in the order of their names.
        val_path: the same for validation; without any, the last ``val_fraction`` of the tokens is held out.
        dtype: ``uint16``, ``uint32`` or ``auto``: as the header says, and without one by the vocabulary's size.
    """

    def __init__(
        self, *, path: str | None = None, val_path: str | None = None, dtype: str = "auto", vocab_size: int
    ) -> None:
        if dtype not in ("auto", "uint16", "uint32"):
            raise ConfigError(f"data: dtype={dtype} must be auto, uint16 or uint32")
        self.dtype, self.vocab_size = dtype, vocab_size
        path = required(path, "bin", "path")
        train, val = self._find(path)
        if val_path is not None:
            val = [path for paths in self._find(val_path) for path in paths]
        self._train, self._val = [self._open(path) for path in train], [self._open(path) for path in val]
        self.names = (f"'{path}'", f"'{val_path if val_path else path if not val else val[0]}'")
        self.info: dict[str, Any] = {"shards": {"train": len(train), "val": len(val)}}
        self.rule = "own file" if val else "last tokens"
        self.entropy: float | None = None
        self.on_disk = True

    def check(self) -> None:
        for path, dtype, offset, count in (*self._train, *self._val):
            ids = map_tokens(path, dtype, offset, count)
            for start in range(0, len(ids), CHUNK):
                block = np.asarray(ids[start : start + CHUNK])
                if int(block.max()) >= self.vocab_size:
                    at = int(np.argmax(block >= self.vocab_size))
                    raise ConfigError(
                        f"data: id {block[at]} at token {start + at} of '{path}' is not below "
                        f"vocab_size={self.vocab_size}; set the tokenizer's vocab_size to that of the ids, "
                        "or data.dtype to their type"
                    )

    def content(self) -> str:
        files = [[[file_digest(path), dtype] for path, dtype, _, _ in part] for part in (self._train, self._val)]
        return digest(json.dumps(files).encode())

    def split(self, val_fraction: float) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        if self._val:
            return [map_tokens(*shard) for shard in self._train], [map_tokens(*shard) for shard in self._val]
        total = sum(count for _, _, _, count in self._train)
        left = total - int(total * val_fraction)
        train: list[NDArray[Any]] = []
        val: list[NDArray[Any]] = []
        for path, dtype, offset, count in self._train:
            here = min(left, count)
            left -= here
            if here:
                train.append(map_tokens(path, dtype, offset, here))
            if here < count:
                val.append(map_tokens(path, dtype, offset + here * np.dtype(dtype).itemsize, count - here))
        return train, val

    def _find(self, path: str) -> tuple[list[Path], list[Path]]:
        """The shards that `path` means: for training, and for validation (only in a folder)."""
        if os.path.isfile(path):
            return [Path(path)], []
        if not os.path.isdir(path):
            if found := sorted(Path(name) for name in glob.glob(path) if os.path.isfile(name)):
                return found, []
            raise ConfigError(f"data: path='{path}' matches no file; give a token file, a folder or a glob")
        found = sorted(Path(path).glob("*.bin"))
        if not found:
            raise ConfigError(f"data: the folder '{path}' holds no .bin file; give a token file, a folder or a glob")
        return [p for p in found if "val" not in p.name], [p for p in found if "val" in p.name]

    def _open(self, path: Path) -> tuple[Path, str, int, int]:
        """Path, dtype, first byte and number of ids of a shard, checked against its size."""
        try:
            with open(path, "rb") as file:
                head = file.read(LLM_C_HEADER_BYTES)
                size = os.fstat(file.fileno()).st_size
        except OSError as error:
            raise unreadable(path, error) from None
        magic, version, count = (int(x) for x in np.frombuffer(head[:12].ljust(12, b"\0"), "<i4"))
        if magic in {known for known, _ in LLM_C_FORMATS}:
            return self._open_llm_c(path, size, magic, version, count)
        dtype = self.dtype if self.dtype != "auto" else "uint16" if self.vocab_size <= 1 << 16 else "uint32"
        itemsize = np.dtype(dtype).itemsize
        if size % itemsize:
            raise ConfigError(
                f"data: '{path}' has {size} bytes, no whole number of {dtype} ids; it is cut or of another dtype"
            )
        ids = np.frombuffer(head[: len(head) // 4 * 4], "<u2")
        if self.dtype == "auto" and dtype == "uint16" and len(ids) >= 64 and size % 4 == 0 and not ids[1::2].any():
            raise ConfigError(f"data: '{path}' has no header and looks like uint32; set data.dtype to uint32 or uint16")
        return path, f"<u{itemsize}", 0, size // itemsize

    def _open_llm_c(self, path: Path, size: int, magic: int, version: int, count: int) -> tuple[Path, str, int, int]:
        dtype = LLM_C_FORMATS.get((magic, version))
        if dtype is None:
            known = ", ".join(f"{m} version {v}" for m, v in LLM_C_FORMATS)
            raise ConfigError(f"data: '{path}' has header {magic} version {version}; known are {known}")
        if self.dtype not in ("auto", np.dtype(dtype).name):
            raise ConfigError(
                f"data: dtype={self.dtype}, but the header of '{path}' says {np.dtype(dtype).name}; use data.dtype=auto"
            )
        needed = LLM_C_HEADER_BYTES + count * np.dtype(dtype).itemsize
        if size != needed:
            raise ConfigError(
                f"data: the header of '{path}' says {count} ids, {needed} bytes, but it has {size}; copy it again"
            )
        return path, dtype, LLM_C_HEADER_BYTES, count
