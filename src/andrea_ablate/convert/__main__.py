"""``python -m andrea_ablate.convert``: Hugging Face weights in and out.

python -m andrea_ablate.convert HF_FOLDER FOLDER            theirs to ours: config.yaml and model.safetensors
python -m andrea_ablate.convert FOLDER HF_FOLDER --to llama   ours (a run's folder, or one as above) to theirs
python -m andrea_ablate.convert --list                      the families
"""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from andrea_ablate.command import command
from andrea_ablate.convert.families import FAMILIES
from andrea_ablate.convert.folder import read_hf, read_ours, tokenizer_from, write_hf, write_ours
from andrea_ablate.convert.tokenizer import write_tokenizer

log = logging.getLogger("andrea_ablate")


@command
def main(argv: Sequence[str] | None = None) -> None:
    logging.basicConfig(format="%(message)s", level=logging.WARNING)
    parser = argparse.ArgumentParser(
        prog="python -m andrea_ablate.convert", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("source", type=Path, nargs="?")
    parser.add_argument("target", type=Path, nargs="?")
    parser.add_argument("--to", metavar="FAMILY", help="write a Hugging Face folder of this family")
    parser.add_argument("--list", action="store_true", help="print the families and their classes")
    given = parser.parse_args(argv)
    if given.list:
        print("\n".join(f"{name:<12} {family.architecture}" for name, family in FAMILIES.items()))
        return
    if given.target is None:
        parser.error("give a source and a target folder")
    tokenizer = tokenizer_from(given.source)
    if given.to:
        config, weights = read_ours(given.source)
        write_hf(given.target, config, weights, given.to, tokenizer.end if tokenizer else None)
    else:
        config, weights = read_hf(given.source)
        write_ours(given.target, config, weights)
    if tokenizer is not None and tokenizer.to_json() is None:
        log.warning("tokenizer=%s has no tokenizer.json, so none is written", tokenizer.identity["type"])
    elif tokenizer is not None:
        write_tokenizer(given.target, tokenizer, config.max_seq_len)
    print(f"{given.target}: {sum(t.numel() for t in weights.values()):,} parameters")


if __name__ == "__main__":
    sys.exit(main())
