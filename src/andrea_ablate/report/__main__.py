"""One self-contained page on sweeps: ``python -m andrea_ablate.report SWEEP…``."""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from andrea_ablate.registry import ConfigError
from andrea_ablate.report.page import page
from andrea_ablate.tracking.store import Store, write_atomic


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m andrea_ablate.report", description=__doc__)
    parser.add_argument(
        "sweeps", nargs="+", type=Path, metavar="SWEEP", help="folder of a sweep, e.g. sweeps/norm-1a2b3c4d"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="default: report.html")
    given = parser.parse_args()
    try:
        command = shlex.join(["python", "-m", "andrea_ablate.report", *sys.argv[1:]])
        write_atomic(given.output, page(given.sweeps, Store(given.runs), command))
    except (ConfigError, OSError) as error:
        sys.exit(str(error))
    print(given.output)


if __name__ == "__main__":
    main()
