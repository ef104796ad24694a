"""``python -m andrea_ablate.bench step|ops``: prints one JSON."""

from __future__ import annotations

import argparse
import json
import sys

from andrea_ablate.command import command


@command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m andrea_ablate.bench", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    step = commands.add_parser("step", help="a training step against its matrix products and a bare loop")
    step.add_argument("overrides", nargs="*", help="as for python -m andrea_ablate, e.g. size=andrea_12m")
    step.add_argument("--rounds", type=int, default=5)
    step.add_argument("--steps", type=int, default=20, help="per round and loop")
    ops = commands.add_parser("ops", help="each fused operation against torch's own")
    ops.add_argument("names", nargs="*", help="operations; all of them by default")
    ops.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    ops.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    ops.add_argument("--widths", nargs="+", type=int, default=[128, 384, 768, 1024, 2048, 4096, 8192])
    ops.add_argument("--rows", type=int, default=4096)
    ops.add_argument("--rounds", type=int, default=15)
    ops.add_argument("--without", nargs="+", default=[], help="rivals to leave out; compile takes long to start")
    given = parser.parse_args()
    # Each half imports what it needs alone: the operations are measured where Hydra and Lightning are not installed.
    if given.what == "step":
        from andrea_ablate.bench.step import bench_step
        from andrea_ablate.cli import composed

        result = bench_step(composed(given.overrides), given.rounds, given.steps)
    else:
        from andrea_ablate.bench.ops import bench_ops

        result = bench_ops(
            given.names, given.device, given.dtypes, given.widths, given.rows, given.rounds, without=given.without
        )
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    sys.exit(main())
