"""How a table in a terminal breaks the names of arms."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions
from rich.measure import Measurement
from rich.text import Text


@dataclass(frozen=True)
class ArmName:
    """An arm's name in a rich table: broken at its spaces, and a word that is too long after its punctuation."""

    text: str

    def lines(self, width: int) -> list[str]:
        """The name in lines of at most `width` characters, unless one piece alone is longer."""
        lines = [""]
        for word in self.text.split():
            for i, piece in enumerate([word] if len(word) <= width else _pieces(word)):
                longer = f"{lines[-1]} {piece}" if i == 0 and lines[-1] else lines[-1] + piece
                if len(longer) <= width or not lines[-1]:
                    lines[-1] = longer
                else:
                    lines.append(piece)
        return lines

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[Text]:
        # Text, because [qk_norm] in a name would be read as markup.
        yield Text("\n".join(self.lines(options.max_width)))

    def __rich_measure__(self, console: Console, options: ConsoleOptions) -> Measurement:
        longest = max(len(piece) for word in self.text.split() for piece in _pieces(word))
        return Measurement(longest, len(self.text))


def _pieces(word: str) -> list[str]:
    return re.split(r"(?<=[,=/_])|(?<=\.)(?=[a-z])", word)
