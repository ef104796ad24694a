"""``python -m andrea_ablate.ops``: build the compiled library and say what was built."""

from __future__ import annotations

import argparse
import sys

from andrea_ablate.ops.build import build
from andrea_ablate.ops.library import folder, loaded
from andrea_ablate.registry import ConfigError


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m andrea_ablate.ops", description=__doc__)
    parser.add_argument("--force", action="store_true", help="build again, even if these sources are built")
    parser.add_argument("--cuda", action="store_true", help="with CUDA, even if this torch could not use it")
    parser.add_argument("--optional", action="store_true", help="exit with 0 where nothing can be built")
    parser.add_argument("--kernels", action="store_true", help="list registers and spills of each CUDA kernel")
    arguments = parser.parse_args()
    try:
        built = build(arguments.force, arguments.cuda)
    except ConfigError as error:
        print(f"ops: {error}", file=sys.stderr)
        print("ops: the reference path runs without the library", file=sys.stderr)
        return 0 if arguments.optional else 1
    what = "cpu and cuda (sm_80, sm_90, PTX)" if built["cuda"] else f"cpu only ({built['why_no_cuda']})"
    print(f"ops: {what}, {folder()}")
    if arguments.kernels:
        for name, use in sorted(built["kernels"].items()):
            print(f"  {use['registers']:4d} registers {use['spilled_bytes']:4d} bytes spilled  {name}")
    if loaded().path is None:
        print(f"ops: {loaded().reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
