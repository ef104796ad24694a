"""Do the steps around a spike again: ``python -m andrea_ablate.replay RUN STEP [key=value …]``.

Writes what happened inside them, layer by layer, to spikes/step-STEP.json in the run's folder, and says whether the
losses are the recorded ones to the last bit.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from andrea_ablate.command import command
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking.store import Store, encode, write_atomic
from andrea_ablate.yamltext import load_yaml


@command
def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m andrea_ablate.replay", description=__doc__)
    parser.add_argument("run", help="id of a run, or the beginning of it")
    parser.add_argument("step", type=int)
    parser.add_argument("changes", nargs="*", metavar="key=value", help="settings to change, e.g. optim.lr=1e-3")
    parser.add_argument("--runs", type=Path, default=Path("runs"), help="folder of the runs (default: runs)")
    parser.add_argument("--before", type=int, default=64, help="steps before STEP (default: 64)")
    parser.add_argument("--after", type=int, default=8, help="steps after STEP (default: 8)")
    parser.add_argument("--exchange", action="store_true", help="give STEP another batch than its own")
    given = parser.parse_args()
    from andrea_ablate.training.replay import replay  # after the arguments are known to be right: it takes seconds

    pairs = [change.partition("=") for change in given.changes]
    for key, equals, _ in pairs:
        if not equals:
            raise ConfigError(f"replay: '{key}' is not key=value, such as optim.lr=1e-3")
    store = Store(given.runs)
    capsule = replay(
        store,
        given.run,
        given.step,
        {key: load_yaml(value) for key, _, value in pairs},
        before=given.before,
        after=given.after,
        exchanged=[given.step] if given.exchange else [],
    )
    suffix = "" if capsule["identical"] is not None else "-changed"
    path = store.path(capsule["run_id"]) / "spikes" / f"step-{given.step:08d}{suffix}.json"
    write_atomic(path, json.dumps(encode(capsule), allow_nan=False) + "\n")
    for row in capsule["steps"]:
        mark = " <-" if row["step"] == given.step else ""
        print(f"step {row['step']:6d}  loss {row['train/loss']:9.4f}  grad norm {row['train/grad_norm']:9.3f}{mark}")
    said = {True: "the recorded losses to the last bit", False: "NOT the recorded losses", None: "with changes"}
    print(f"{said[capsule['identical']]}; {path}")


if __name__ == "__main__":
    sys.exit(main())
