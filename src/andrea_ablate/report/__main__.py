"""A report on sweeps: ``python -m andrea_ablate.report SWEEP…``.

Writes one self-contained page, into the folder of the first sweep unless told otherwise, and beside it the same as
Markdown with its figures as SVG and PNG.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path

from andrea_ablate.command import command
from andrea_ablate.report import images
from andrea_ablate.report.contents import read
from andrea_ablate.report.markdown import markdown
from andrea_ablate.report.page import page
from andrea_ablate.tracking.store import Store, write_atomic


@command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m andrea_ablate.report", description=__doc__)
    parser.add_argument(
        "sweeps", nargs="+", type=Path, metavar="SWEEP", help="folder of a sweep, e.g. sweeps/norm-1a2b3c4d"
    )
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    parser.add_argument("-o", "--output", type=Path, help="the page (default: report.html in the first SWEEP)")
    parser.add_argument("--wandb", action="store_true", help="also as a W&B report; without an API key, its spec")
    given = parser.parse_args()
    made_by, store = shlex.join(["python", "-m", "andrea_ablate.report", *sys.argv[1:]]), Store(given.runs)
    sweeps = [read(folder, store, made_by) for folder in given.sweeps]
    output = given.output or given.sweeps[0] / "report.html"
    figures = output.with_name(f"{output.stem}_figures")
    write_atomic(output, page(sweeps))
    made = images.write_images(sweeps, figures)
    links = {key: [(shows, f"{figures.name}/{name}") for shows, name in found] for key, found in made.items()}
    write_atomic(output.with_suffix(".md"), markdown(sweeps, links))
    print(output)
    print(output.with_suffix(".md"))
    if made:
        print(f"{figures}/")
    if said := images.missing():
        print(said)
    if given.wandb:
        from andrea_ablate.report.wandb import publish

        print(publish(sweeps, store, output.with_suffix(".wandb.json")))


if __name__ == "__main__":
    sys.exit(main())
