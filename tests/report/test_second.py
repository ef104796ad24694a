"""One sweep under two rules: what changes between them is said."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from andrea_ablate.report import RunRow, compare
from andrea_ablate.report.compare import Comparison, rules_table, save_rules
from support import Cli


def comparison(*gains: float) -> Comparison:
    start = [4.0, 4.1, 4.2, 4.3, 4.4]
    rows = [RunRow("base", seed, "finished", val_loss=loss) for seed, loss in enumerate(start)]
    for i, gain in enumerate(gains):
        rows += [RunRow(f"arm{i}", s, "finished", val_loss=loss - gain - s / 1000) for s, loss in enumerate(start)]
    return compare(rows)


def said(found: dict[str, Comparison], folder: Path) -> tuple[str, str]:
    console = Console(width=120, file=io.StringIO(), color_system=None)
    console.print(rules_table(found))
    save_rules(found, folder)
    return " ".join(console.file.getvalue().split()), (folder / "rules.md").read_text()  # type: ignore[attr-defined]


def test_verdicts_stand_beside_each_other_and_the_change_is_named(tmp_path: Path) -> None:
    found = {"params": comparison(0.1, 0.2), "flops": comparison(-0.1, 0.3)}
    printed, text = said(found, tmp_path)
    sentence = "Between match=params and match=flops the verdict changes for 'arm0' (supported, then contradicted)."
    assert printed.endswith(sentence) and text.endswith(f"\n{sentence}\n")
    assert text.startswith(
        "| arm | difference, match=params | verdict, match=params | difference, match=flops | verdict, match=flops |\n"
    )
    assert "| arm0 | -0.1020 [-0.1040, -0.1000] | supported | +0.0980 [+0.0960, +0.1000] | contradicted |" in text
    assert "base |" not in text


def test_no_change_is_said_too(tmp_path: Path) -> None:
    printed, _ = said({"none": comparison(0.1), "flops": comparison(0.2)}, tmp_path)
    assert printed.endswith("Under match=none and match=flops every verdict is the same.")


@pytest.mark.slow  # three runs, each of two plans
def test_a_sweep_is_repeated_under_the_second_rule(tmp_path: Path, cli: Cli) -> None:
    # A table of positions has parameters and no FLOPs: under the second rule its arm keeps its size.
    answer = cli("-m", "pos=rope,learned", "match=params", "match_also=flops", "trainer.tokens=256")
    assert answer.status == 0, answer
    assert "params to first" in " ".join(answer.out.split()) and "flops to first" in " ".join(answer.out.split())
    assert "2 arms, 2 runs, 2 to train" in answer.out and "2 arms, 2 runs, 1 to train" in answer.out
    assert "every verdict is the same" in " ".join(answer.out.split())
    assert len(list(tmp_path.glob("runs/*/record.json"))) == 3 and len(list(tmp_path.glob("sweeps/*/rules.md"))) == 1
