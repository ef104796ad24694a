"""The pages of the documentation: one per section of the lecture, and what the verdicts say for a model of one's own.

``python -m andrea_ablate.claims.site`` writes them to docs/; `make docs` builds the site of them. Everything in
them comes from the ledger, the stored results and the docstrings of the code that was measured.
"""

from __future__ import annotations

import inspect
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

from andrea_ablate.choices import class_of, describe, registries
from andrea_ablate.claims.claim import RULES, Claim, Finding, Verdict
from andrea_ablate.claims.intervals import svg
from andrea_ablate.claims.ledger import TOPICS, Measure, ledger, measures_of
from andrea_ablate.claims.report import number, sentence, verdict_of
from andrea_ablate.claims.results import Result, codes, firmest, uses
from andrea_ablate.composition import choice_options, resource_root
from andrea_ablate.tracking.store import write_atomic
from andrea_ablate.yamltext import load_yaml

FOLDER = Path("docs")
SECTIONS = {
    "L1": "The residual stream",
    "L2": "Layer normalisation",
    "L3": "Pre-norm and post-norm",
    "L4": "The block's equation",
    "L5": "The MLP and its width",
    "L6": "GELU",
    "L7": "From block to model",
    "L8": "Parameters",
    "S0": "Recap",
    "S1": "From the original Transformer to today's",
    "S2": "Where the norm sits",
    "S3": "LayerNorm, RMSNorm and biases",
    "S4": "FFN and activation",
    "S5": "Serial or parallel blocks",
    "S6": "Position encoding",
    "S7": "Sizes and shapes",
    "S8": "Regularisation",
    "S9": "Stability tricks",
    "S10": "Attention for inference",
    "S.sum": "Summary",
}
# How a verdict reads in a sentence about choosing, in the order of the page.
HEADINGS = {
    Verdict.SUPPORTED: "What the results support",
    Verdict.MISSTATED: "What holds in another form than the one claimed",
    Verdict.CONTRADICTED: "What the results speak against",
    Verdict.NO_EFFECT: "What makes no difference beyond the margin",
    Verdict.INCONCLUSIVE: "What was measured and is not decided",
    Verdict.UNVERIFIABLE: "What no checked source decides",
    Verdict.OUT_OF_SCALE: "What takes a larger machine",
    Verdict.NOT_MEASURED: "What nobody measured here yet",
}
DECISIVE = ("training", "systems", "init", "identity", "arithmetic", "convention")  # what tells most, first
REACH = {
    "CFG": "what published models do",
    "C0": "exact, whatever is trained",
    "C1": "at toy size, on a CPU",
    "G1": "at 12M to 120M parameters",
    "GD": "at full scale",
}

# What a verdict that reaches so far does not say.
LIMITS = {
    "CFG": "what is common, not what is better",
    "C0": "it holds for a model of any size, and says nothing about losses",
    "C1": "how a design begins to learn; a difference there may grow, vanish or turn round at the size of your model",
    "G1": "near the sizes of the lesson, for the tokens that were trained",
    "GD": "at the size and the tokens that were trained",
}


def main() -> int:
    for name, text in pages().items():
        write_atomic(FOLDER / name, text)
    print(f"{len(pages())} pages in {FOLDER}")
    return 0


def pages() -> dict[str, str]:
    """File name -> Markdown, in the order of the documents."""
    found = [(claim, firmest(claim)) for claim in ledger().values()]
    written = {
        f"lecture/{_file(section)}": _section(section, [(c, r) for c, r in found if section in sections_of(c)])
        for section in SECTIONS
    }
    return {"index.md": _index(found), "lecture/choose.md": _choose(found), **written}


def sections_of(claim: Claim) -> list[str]:
    """The sections that it stands in: S9 for S9.2."""
    names = (name.strip() for name in claim.source.split(","))
    return list(dict.fromkeys(name if name == "S.sum" else name.split(".")[0] for name in names))


def _file(section: str) -> str:
    """Files in the order of the sections: the names of pages are sorted by letters."""
    return "summary.md" if section == "S.sum" else f"{section[0].lower()}{int(section[1:]):02}.md"


def _title(section: str) -> str:
    number = "" if section == "S.sum" else f" {section[1:]}"
    return f"{'Lesson' if section[0] == 'L' else 'Lecture'}{number}: {SECTIONS[section]}"


def _index(found: Sequence[tuple[Claim, Result | None]]) -> str:
    lines = ["# The lecture, claim by claim", "", "| section | claims | verdicts |", "| --- | --- | --- |"]
    for section in SECTIONS:
        verdicts = [verdict_of(claim, result) for claim, result in found if section in sections_of(claim)]
        counts = ", ".join(f"{verdicts.count(word)} {word}" for word in Verdict if word in verdicts)
        lines.append(f"| [{_title(section)}](lecture/{_file(section)}) | {len(verdicts)} | {counts} |")
    return "\n".join(
        [*lines, "", "[Choose for your model](lecture/choose.md): what the verdicts support, and what they do not.", ""]
    )


def _section(section: str, found: Sequence[tuple[Claim, Result | None]]) -> str:
    lines = [f"# {_title(section)}", ""]
    for claim, result in found:
        lines += _claim(claim, result)
    return "\n".join(lines)


def _claim(claim: Claim, result: Result | None) -> list[str]:
    """Claim, formula and code, experiment, verdict."""
    verdict = verdict_of(claim, result)
    lines = [f"## {claim.statement} {{ #{claim.id} }}", "", f"**{verdict}** · `{claim.id}` · {claim.source}", ""]
    lines += [f"- *Measured*: {_cell(claim.measurement)}", f"- *Rule*: {_rule(claim)}"]
    lines += [f"- *Expected*: {_cell(claim.expected)}"]
    if claim.citation:
        lines.append(f"- *Source*: {claim.citation}")
    lines += [f"- *Code*: {line}" for line in code_lines(claim)]
    lines += [
        f"- *Experiment*: `python -m andrea_ablate experiments={name}` (`experiments/{name}.yaml`)"
        for name in experiments().get(claim.id, ())
    ]
    lines.append("")
    if result is None:
        reason = sentence(claim, None)
        return [*lines, f"{reason[0].upper()}{reason[1:]}.", ""]
    lines += ["| | what | value | |", "| --- | --- | --- | --- |"]
    made = result.measurement
    for form, findings in (
        ("as worded", made.worded),
        ("corrected", made.corrected),
        ("control, must fail", made.controls),
        ("reported", made.reported),
    ):
        lines += [f"| {form} | {' | '.join(map(_cell, _row(finding)))} |" for finding in findings]
    deciding = (*made.worded, *made.corrected)
    for unit in dict.fromkeys(finding.unit for finding in deciding):
        if drawn := svg([finding for finding in deciding if finding.unit == unit]):
            lines += ["", drawn]
    runs = f", runs {' '.join(made.run_ids)}" if made.run_ids else ""
    lines += ["", f"`{result.command}`: {REACH[result.at]}; {result.date}, commit {result.commit}{runs}.", ""]
    return lines


@lru_cache
def experiments() -> dict[str, list[str]]:
    """Claim -> the experiments that bear its id as a tag, whose sweep shows it at whatever size is asked for."""
    found: dict[str, list[str]] = {}
    for path in sorted((resource_root() / "experiments").glob("*.yaml")):
        for tag in load_yaml(path.read_text(encoding="utf-8")).get("tags", ()):
            found.setdefault(tag, []).append(path.stem)
    return found


def _rule(claim: Claim) -> str:
    told = "; ".join(f"{code} ({RULES[code]})" for code in claim.rule)
    margin = ", ".join(f"{key} {value:g}" for key, value in claim.margin.items())
    return _cell(told + (f". {claim.criterion}" if claim.criterion else "") + (f". Bounds: {margin}" if margin else ""))


def _row(finding: Finding) -> tuple[str, str, str]:
    """What, how much (with its interval), and what the rule says."""
    shown = number(replace(finding, name="", verdict=None)).strip()
    return finding.name, shown, f"{finding.verdict}: {finding.why}" if finding.verdict else ""


def code_lines(claim: Claim) -> list[str]:
    """Where the code stands that was measured, each class with its formula: ``file:line `Class`: formula``."""
    parts: dict[str, Any] = {}
    for measure in measures_of(claim).values():
        for item in map(inspect.unwrap, (*uses(measure), *_chosen(measure))):
            if item.__module__.split(".")[1] not in _NO_PART:
                parts[item.__qualname__] = item
    return [f"{_place(item)} `{name}`: {_cell(describe(item)[0])}" for name, item in sorted(parts.items())]


# What a measurement is written with; the rest is what it measures.
_NO_PART = ("claims", "composition", "config", "parameters", "registry", "analysis")


def _chosen(measure: Measure) -> Iterator[Any]:
    """The classes of the options that a measurement's code names, as ``pos=rope``."""
    ours = [item for item in uses(measure) if item.__module__.startswith("andrea_ablate.claims.")]
    named = {text for item in ours for code in codes(item) for text in _texts(code.co_consts)}
    for option in choice_options():
        if (
            option.group in registries()
            and {f"{option.group}={option.name}", f"{option.group}=[{option.name}]"} & named
        ):
            yield class_of(option)


def _texts(consts: Iterable[Any]) -> Iterator[str]:
    for const in consts:
        if isinstance(const, tuple):
            yield from _texts(const)
        elif isinstance(const, str):
            yield const


def _place(item: Any) -> str:
    path = Path(inspect.getsourcefile(item) or "").resolve()
    root = resource_root().resolve()
    shown = path.relative_to(root) if path.is_relative_to(root) else Path(*path.parts[-3:])
    return f"`{shown}:{inspect.getsourcelines(item)[1]}`"


def _choose(found: Sequence[tuple[Claim, Result | None]]) -> str:
    reached = Counter(result.at for _, result in found if result)
    without = [claim for claim, result in found if result is None]
    lines = [
        "# Choose for your model",
        "",
        f"What the {len(found)} claims say about a choice, by topic, and how far that reaches:",
        "",
        *(f"- {reached[at]} reach so far: {words}; {LIMITS[at]}." for at, words in REACH.items() if reached[at]),
        f"- {len(without)} are not measured here: nothing below speaks for them or against them.",
        "",
        "An interval that holds two answers is not decided; it does not say that there is no difference. What makes no "
        "difference beyond the margin does so at the size at which it was measured.",
        "",
    ]
    for topic, title in TOPICS.items():
        lines += [f"## {title}", ""]
        own = [(claim, result, verdict_of(claim, result)) for claim, result in found if claim.topic == topic]
        own.sort(key=lambda row: DECISIVE.index(row[0].kind))
        for verdict, heading in HEADINGS.items():
            if of_it := [advice(claim, result) for claim, result, word in own if word is verdict]:
                lines += [f"**{heading}**", "", *(f"- {line}" for line in of_it), ""]
    return "\n".join(lines)


def advice(claim: Claim, result: Result | None) -> str:
    """One sentence on choosing, made of the claim and of what decided it, and where it is measured."""
    link = f"[`{claim.id}`]({_file(sections_of(claim)[0])}#{claim.id})"
    said = f"“{claim.statement.rstrip('.')}” ({link})"
    if result is None:
        return f"{said}: {sentence(claim, None)}."
    made = result.measurement
    deciding = made.worded
    if result.verdict is Verdict.MISSTATED:
        deciding = made.corrected
    elif result.verdict is not Verdict.SUPPORTED:
        deciding = tuple(f for f in made.worded if f.verdict is result.verdict) or made.worded
    shown = "; ".join(number(finding) for finding in deciding[:3])
    more = f" and {len(deciding) - 3} more" if len(deciding) > 3 else ""
    form = "in the corrected form " if result.verdict is Verdict.MISSTATED else ""
    return _cell(f"{said}: {form}{shown}{more}; {REACH[result.at]}.")


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.exit(main())
