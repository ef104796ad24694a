"""What a command does with a mistake of the person who typed it, or with Ctrl-C: a sentence, and no trace."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import ParamSpec

from andrea_ablate.registry import ConfigError

P = ParamSpec("P")


def command(main: Callable[P, None]) -> Callable[P, int]:
    """`main` with an exit status: 0 done, 2 refused (ConfigError, OSError), 130 interrupted."""

    @functools.wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> int:
        try:
            main(*args, **kwargs)
        except (ConfigError, OSError) as error:
            print(first_line(error), file=sys.stderr)
            return 2
        except KeyboardInterrupt:
            print("Interrupted.", file=sys.stderr)
            return 130
        return 0

    return run


def first_line(error: BaseException) -> str:
    """What `error` says, without what follows its first line; an operating system's by its file and reason."""
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    if isinstance(error, OSError) and error.filename:
        return f"{error.filename}: {text}"
    return (text.strip().splitlines() or [type(error).__name__])[0]
