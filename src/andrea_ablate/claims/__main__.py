"""The lecture's claims as experiments: ``python -m andrea_ablate.claims list | show ID | run [ID …] | report``."""

from __future__ import annotations

import argparse
import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from andrea_ablate.claims import errata
from andrea_ablate.claims.claim import KINDS, MACHINES, RULES, SCALES, Claim, Finding, Verdict
from andrea_ablate.claims.ledger import TOPICS, claim_of, ledger
from andrea_ablate.claims.report import PAGE, markdown, number, sentence, verdict_of
from andrea_ablate.claims.results import firmest, read
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking.store import Store, write_atomic


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 done, 1 a measurement failed or a verdict is now another one, 2 wrong command, 130 interrupted."""
    given = _parser().parse_args(argv)
    try:
        return {"list": _list, "show": _show, "run": _run, "report": _report}[given.what](given)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Interrupted; results and finished runs are kept, and a run that was begun goes on where it stopped.")
        return 130


def _list(given: argparse.Namespace) -> int:
    chosen = _chosen(given)
    for claim in chosen:
        verdict = verdict_of(claim, firmest(claim))
        print(f"{claim.id:<24} {claim.kind:<11} {'/'.join(claim.scale):<6} {verdict:<16} {claim.statement}")
    print(f"{len(chosen)} of {len(ledger())} claims")
    return 0


def _show(given: argparse.Namespace) -> int:
    claim = claim_of(given.id)
    print(f"{claim.id}: {claim.statement}\n")
    rules = "; ".join(f"{code} ({RULES[code]})" for code in claim.rule)
    for name, text in (
        ("where", claim.where),
        ("topic", f"{TOPICS[claim.topic]} (claims/topics/{claim.topic}.yaml and .py)"),
        ("kind", claim.kind),
        ("measured", claim.measurement),
        ("expected", claim.expected),
        ("rule", rules),
        ("applied to", claim.criterion),
        ("margin", ", ".join(f"{key} {value:g}" for key, value in claim.margin.items())),
        ("scale", "; ".join(f"{code} ({SCALES[code]})" for code in claim.scale)),
        ("citation", claim.citation),
    ):
        if text:
            print(f"{name:<11} {text}")
    if not any(read(claim, at) for at in claim.scale):
        print(f"\n{verdict_of(claim, None)}: {sentence(claim, None)}")
    for at in claim.scale:
        if result := read(claim, at):
            print(f"\n{result.verdict} at {at}, {result.date}, commit {result.commit}, {result.cpu_s:g} s")
            print(result.command)
            m = result.measurement
            for form, findings in (
                ("as worded", m.worded),
                ("corrected", m.corrected),
                ("control, must fail", m.controls),
                ("reported", m.reported),
            ):
                for finding in findings:
                    print(f"  {form:<19} {_line(finding)}")
            if m.run_ids:
                print(f"  runs {' '.join(m.run_ids)}")
    return 0


def _line(finding: Finding) -> str:
    text = number(finding)
    return f"{text}: {finding.verdict} ({finding.why})" if finding.verdict is Verdict.SUPPORTED else text


def _run(given: argparse.Namespace) -> int:
    from andrea_ablate.claims.probes.trained import baseline
    from andrea_ablate.claims.run import plan, run

    if given.jobs < 1:
        raise ConfigError(f"--jobs={given.jobs} must be at least 1")
    claims = [claim_of(name) for name in given.ids] or _chosen(given)
    budget_s = math.inf if given.budget is None else _seconds(given.budget)
    planned = plan(claims, given.scale, budget_s, given.again, Store(Path(baseline().paths.runs)))
    for what, ids in (
        (f"no scale at hand with --scale {given.scale}", planned.beyond),
        ("no measurement written yet", planned.unwritten),
        ("measured, and the code is the same", planned.current),
        (f"beyond the budget of {given.budget}", planned.later),
    ):
        if ids:
            print(f"{len(ids)} claims, {what}: {' '.join(ids)}")
    print(f"{len(planned.now)} to measure, about {planned.seconds:.0f} s of CPU time", flush=True)
    trouble = run(planned.now, lambda line: print(line, flush=True), given.jobs)
    for line in trouble:
        print(line, file=sys.stderr)
    return 1 if trouble else 0


def _report(given: argparse.Namespace) -> int:
    for page, text in ((PAGE, markdown()), (errata.PAGE, errata.markdown())):
        write_atomic(page, text)
        print(page)
    return 0


def _chosen(given: argparse.Namespace) -> list[Claim]:
    kind, topic = getattr(given, "kind", None), getattr(given, "topic", None)
    scale = given.scale if given.what == "list" else None
    return [
        claim
        for claim in ledger().values()
        if kind in (None, claim.kind) and topic in (None, claim.topic) and (scale is None or scale in claim.scale)
    ]


def _seconds(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([smh])", text)
    if not found:
        raise ConfigError(f"--budget={text} must be a number with its unit, such as 90s, 10m or 2h")
    return float(found[1]) * {"s": 1, "m": 60, "h": 3600}[found[2]]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m andrea_ablate.claims", description=__doc__)
    commands = parser.add_subparsers(dest="what", required=True)
    listed = commands.add_parser("list", help="the claims, one line each")
    shown = commands.add_parser("show", help="one claim: rule, margin, and all that was measured")
    shown.add_argument("id")
    done = commands.add_parser("run", help="measure what was not measured yet, or by other code")
    done.add_argument("ids", nargs="*", metavar="ID", help="claims; without any, all")
    done.add_argument("--scale", choices=list(MACHINES), default="cpu", help="what is at hand (default: cpu)")
    done.add_argument("--budget", help="plan no more CPU time than this, as 10m (default: measure all)")
    done.add_argument("--jobs", type=int, default=1, help="claims at once, as processes that share the cores")
    done.add_argument("--again", action="store_true", help="measure what is current too")
    for command in (listed, done):
        command.add_argument("--kind", choices=KINDS)
        command.add_argument("--topic", choices=list(TOPICS))
    listed.add_argument("--scale", choices=list(SCALES))
    commands.add_parser("report", help=f"write {PAGE} and {errata.PAGE} from the stored results")
    return parser


if __name__ == "__main__":
    sys.exit(main())
