"""Corpora: where documents, or token ids that are ready to use, come from."""

from __future__ import annotations

import json
import os
import platform
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from numpy.typing import NDArray

from andrea_ablate.data.files import unreadable
from andrea_ablate.registry import ConfigError, Registry


@runtime_checkable
class DocumentSource(Protocol):
    """A source of texts; `documents` are UTF-8, not empty and in no particular order."""

    name: str
    info: dict[str, Any]

    def documents(self) -> list[bytes]: ...


@runtime_checkable
class TokenSource(Protocol):
    """A source of token ids.

    Attributes:
        names: where the ids of train and of validation come from, for messages.
        rule: how they are split: ``own file`` or ``last tokens``.
        entropy: nats per token, where it is known exactly.
        on_disk: whether `split` maps files; otherwise it makes the ids.
    """

    names: tuple[str, str]
    info: dict[str, Any]
    rule: str
    entropy: float | None
    on_disk: bool

    def content(self) -> str:
        """Hash of the ids, or of all that decides them."""

    def check(self) -> None:
        """Raise ConfigError when an id is not below the vocabulary's size."""

    def split(self, val_fraction: float) -> tuple[list[NDArray[Any]], list[NDArray[Any]]]:
        """The pieces of train and of validation, in order."""


CORPORA: Registry[DocumentSource | TokenSource] = Registry("data")


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from None


def required(value: Any, source: str, option: str) -> str:
    if not isinstance(value, str) or not value:
        raise ConfigError(f"data: {option}={value!r}, but '{source}' needs it; add data.{option}=...")
    return value


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


@CORPORA.register("stdlib")
class StandardLibrary:
    """The Python files of the running interpreter's standard library, without its tests; one file is one document.

    Left out: test folders, installed packages, and the generated files that record how this interpreter was built.
    """

    def __init__(self) -> None:
        self.name = f"the standard library of Python {platform.python_version()}"
        self.info: dict[str, Any] = {"python": platform.python_version(), "skipped": 0}

    def documents(self) -> list[bytes]:
        found: list[bytes] = []
        for folder, subfolders, files in os.walk(sysconfig.get_paths()["stdlib"]):
            subfolders[:] = [name for name in subfolders if not self._left_out(name)]
            wanted = [name for name in files if name.endswith(".py") and not name.startswith("_sysconfigdata")]
            found.extend(_read(Path(folder, name)) for name in wanted)
        kept = [text for text in found if text and _is_utf8(text)]
        self.info["skipped"] = len(found) - len(kept)
        return kept

    @staticmethod
    def _left_out(folder: str) -> bool:
        names = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
        return folder in names or folder.startswith("config-")


@CORPORA.register("text")
class Text:
    """A UTF-8 file or a folder of them: one file is one document, in a ``.jsonl`` file one line is.

    A folder is searched through all its levels; hidden names and files that are not UTF-8 are skipped and counted.

    Args:
        path: file or folder.
        text_field: the key that holds the text in the lines of ``.jsonl`` files.
    """

    def __init__(self, *, path: str | None = None, text_field: str = "text") -> None:
        self.path = Path(required(path, "text", "path"))
        self.text_field = text_field
        self.name = f"'{self.path}'"
        self.info: dict[str, Any] = {"skipped": 0}

    def documents(self) -> list[bytes]:
        if not self.path.exists():
            raise ConfigError(f"data: path='{self.path}' does not exist; give a text file or a folder of text files")
        kept: list[bytes] = []
        unusable = 0
        for path in self._files():
            text = _read(path)
            if not _is_utf8(text):
                if not self.path.is_dir():
                    raise ConfigError(f"data: '{path}' is not UTF-8 text; convert it, or use data=bin for token ids")
                unusable += 1
            elif path.suffix == ".jsonl":
                kept.extend(self._lines(path, text))
            else:
                kept.append(text)
        documents = [text for text in kept if text]
        self.info["skipped"] = unusable + len(kept) - len(documents)
        return documents

    def _files(self) -> Iterator[Path]:
        if not self.path.is_dir():
            yield self.path
        for folder, subfolders, files in os.walk(self.path):
            subfolders[:] = [name for name in subfolders if not name.startswith(".")]
            for path in (Path(folder, name) for name in files if not name.startswith(".")):
                if path.is_file():
                    yield path

    def _lines(self, path: Path, text: bytes) -> Iterator[bytes]:
        for number, line in enumerate(text.split(b"\n"), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                yield row[self.text_field].encode("utf-8")
            except (ValueError, KeyError, TypeError, AttributeError):
                raise ConfigError(
                    f"data: line {number} of '{path}' is not a JSON object with a text under '{self.text_field}'; "
                    "repair it or set data.text_field"
                ) from None


@CORPORA.register("hf")
class HuggingFace:
    """One split of a data set on the Hugging Face hub (or in a local folder): one row is one document.

    Args:
        name, subset, split: as ``datasets.load_dataset`` takes them.
        text_field: the column that holds the text.
    """

    def __init__(
        self, *, name: str | None = None, subset: str | None = None, split: str = "train", text_field: str = "text"
    ) -> None:
        self.dataset = required(name, "hf", "name")
        self.subset, self.split, self.text_field = subset, split, text_field
        self.name = f"'{self.dataset}' ({split})"
        self.info: dict[str, Any] = {"skipped": 0}

    def documents(self) -> list[bytes]:
        try:
            import datasets  # type: ignore[import-untyped,unused-ignore]
        except ImportError:
            raise ConfigError(
                "data: 'hf' needs the datasets library, which is not installed; run pip install 'andrea-ablate[hf]'"
            ) from None
        try:
            table = datasets.load_dataset(self.dataset, self.subset, split=self.split)
        except Exception as error:  # the library raises its own, urllib's, the hub's and pyarrow's errors
            reason = str(error).strip().split("\n")[0]
            raise ConfigError(f"data: {self.name} could not be loaded ({type(error).__name__}: {reason})") from error
        if self.text_field not in table.column_names:
            raise ConfigError(
                f"data: text_field='{self.text_field}' is not a column of {self.name}; "
                f"it has {', '.join(table.column_names)}"
            )
        rows = list(table[self.text_field])
        try:
            kept = [text.encode("utf-8") for text in rows if text]
        except (AttributeError, UnicodeEncodeError):
            raise ConfigError(
                f"data: column '{self.text_field}' of {self.name} is not text; set data.text_field"
            ) from None
        self.info["skipped"] = len(rows) - len(kept)
        return kept
