"""Files of token ids: hashes of their content and read-only maps."""

from __future__ import annotations

import hashlib
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from andrea_ablate.registry import ConfigError

CHUNK = 16 << 20


def unreadable(path: Path, error: OSError) -> ConfigError:
    """The error for a file that a person named and that cannot be read."""
    return ConfigError(f"data: '{path}' cannot be read ({error.strerror}); check the path and its permissions")


def digest(*parts: bytes) -> str:
    """blake2b-128 of the parts, as hex; each part's length counts, so that ('ab', 'c') differs from ('a', 'bc')."""
    state = hashlib.blake2b(digest_size=16)
    for part in parts:
        state.update(len(part).to_bytes(8, "little"))
        state.update(part)
    return state.hexdigest()


def file_digest(path: Path) -> str:
    """Hash of a file's bytes: blake2b of the blake2b of each 16 MiB chunk, the chunks hashed in parallel."""

    def one(start: int) -> bytes:
        return hashlib.blake2b(os.pread(handle.fileno(), CHUNK, start), digest_size=16).digest()

    try:
        with open(path, "rb") as handle, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            return digest(*pool.map(one, range(0, os.fstat(handle.fileno()).st_size, CHUNK)))
    except OSError as error:
        raise unreadable(path, error) from None


def map_tokens(path: str | Path, dtype: str, offset: int, count: int) -> NDArray[Any]:
    """Memory-map `count` ids that start `offset` bytes into a file (an empty map is an empty array)."""
    if count == 0:
        return np.zeros(0, dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=(count,))
