"""The page's figures as a W&B report: ``python -m andrea_ablate.report SWEEP… --wandb``.

W&B draws its panels from the runs that it has: a run set per arm, chosen by run id, because a run that a sweep reused
stands in the group of an earlier one. What W&B has no panel for, paired differences, is a table.
"""

from __future__ import annotations

import importlib
import json
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from andrea_ablate.registry import ConfigError
from andrea_ablate.report.compare.comparison import markdown_table
from andrea_ablate.report.contents import Contents
from andrea_ablate.report.figures import COSTS, CURVES, command
from andrea_ablate.report.parts import LOSS, Figure, StoredRun
from andrea_ablate.tracking.store import Store, write_atomic
from andrea_ablate.tracking.wandb import POSITIONS, SPIKES, WandbLogger

SAVE_S = 60.0  # longest wait for W&B to take the report
_COST_KEYS = {"params": "params", "flops_per_token": "flops_per_token", "tokens_per_s": "train_s"}


class Workspaces:
    """The optional package that writes W&B reports, and the project that the runs are in.

    Raises: ConfigError without the package, and for runs that no report can show.
    """

    def __init__(self, sweeps: Sequence[Contents]) -> None:
        try:
            self.wr: Any = importlib.import_module("wandb_workspaces.reports.v2")
            self.expr: Any = importlib.import_module("wandb_workspaces.expr")
        except ImportError:
            raise ConfigError(
                "report: --wandb needs the wandb-workspaces package; run `pip install wandb-workspaces` or leave "
                "--wandb out"
            ) from None
        self.sweeps = sweeps
        nodes = [run.config.get("logger", {}) for sweep in sweeps for run in sweep.runs.values()]
        places = sorted({(node["project"], node["entity"] or "") for node in nodes if node.get("type") == "wandb"})
        if len(places) != 1:
            where = ", ".join("/".join(filter(None, reversed(place))) for place in places)
            raise ConfigError(
                f"report: --wandb shows runs of one W&B project and these {len(nodes)} runs are in "
                f"{where or 'none'}; give sweeps that were trained with logger=wandb into one project"
            )
        self.project, self.entity = places[0]

    def report(self) -> Any:
        """The report, not yet saved."""
        title = ", ".join(sweep.name for sweep in self.sweeps)[:128]
        blocks = [block for sweep in self.sweeps for block in self._sweep(sweep)]
        return self.wr.Report(project=self.project, entity=self.entity, title=title, blocks=blocks, width="fluid")

    def _sweep(self, sweep: Contents) -> Iterator[Any]:
        wr = self.wr
        yield wr.H1(text=sweep.name)
        yield wr.MarkdownBlock(text=sweep.comparison.to_markdown())
        for figure in sweep.figures:
            yield wr.H2(text=figure.title)
            yield wr.P(text=figure.caption)
            if panels := self._panels(figure):
                yield wr.PanelGrid(runsets=self._run_sets(sweep, figure.arms), panels=panels)
            elif figure.kind == "forest":
                yield wr.MarkdownBlock(text=_forest(figure.views[0]))
            else:
                yield wr.P(text="W&B has no panel for this figure; it is in the page.")
        arms = tuple(arm.arm for arm in sweep.comparison.arms)
        for title, chart, key in self._tables(sweep.runs):
            yield wr.H2(text=title)
            panels = [chart, wr.WeavePanelSummaryTable(table_name=key, layout=wr.Layout(w=24, h=10))]
            yield wr.PanelGrid(runsets=self._run_sets(sweep, arms, grouped=False), panels=panels)
        yield wr.H2(text="Commands")
        commands = [*(command(sweep.comparison, arm, sweep.runs) for arm in arms), *sweep.commands]
        yield wr.MarkdownBlock(text="\n".join(["```sh", *commands, "```"]))

    def _run_sets(self, sweep: Contents, arms: Sequence[str], grouped: bool = True) -> list[Any]:
        """A run set per arm; a line of a grouped one is the mean of its seeds."""
        sets = []
        for arm in arms:
            ids = [row.run_id for row in sweep.comparison.rows if row.arm == arm and row.run_id in sweep.runs]
            chosen = self.expr.And(self.expr.Metric("ID").isin(ids))
            # All runs of an arm have this in common, and no tuning, name or earlier sweep divides them.
            sets.append(self.wr.Runset(name=arm, filters=chosen, groupby=["JobType"] if grouped else []))
        return sets

    def _panels(self, figure: Figure) -> list[Any]:
        """W&B's panels for a figure of the page, empty where it has none."""
        wr, loss = self.wr, self.wr.SummaryMetric("val/loss")
        if figure.id == "curves":
            names = {view["name"] for view in figure.views}
            return [
                wr.LinePlot(
                    title=words,
                    x="step",
                    y=[key],
                    title_x="step",
                    title_y=LOSS,
                    groupby_aggfunc="mean",
                    groupby_rangefunc="minmax",
                    ignore_outliers=False,
                    point_visualization_method="bucketing-gorilla",  # the one that keeps spikes
                    layout=wr.Layout(w=12, h=10),
                )
                for key, words in CURVES.items()
                if words in names
            ]
        if figure.id == "rates":
            rate = wr.Config("optim.lr")
            return [wr.ScatterPlot(title=figure.title, x=rate, y=loss, log_x=True, layout=wr.Layout(w=24, h=10))]
        if figure.id == "costs":
            shown = {view["name"] for view in figure.views}
            keys = [_COST_KEYS[name] for name, words in COSTS if words in shown]
            return [
                wr.ScatterPlot(title=key, x=wr.SummaryMetric(key), y=loss, layout=wr.Layout(w=8, h=8)) for key in keys
            ]
        return []

    def _tables(self, runs: Mapping[str, StoredRun]) -> Iterator[tuple[str, Any, str]]:
        """Title, custom chart and key of each table that the mirror wrote for these runs."""
        wr, wide = self.wr, self.wr.Layout(w=24, h=10)
        for title, key, preset, fields, there in (
            (
                "Loss spikes",
                SPIKES,
                "scatter",
                {"x": "start", "y": "height"},
                any(run.spikes for run in runs.values()),
            ),
            (
                "Loss by position",
                POSITIONS,
                "line",
                {"x": "from", "y": "loss", "stroke": "length"},
                any("/loss_from_" in name for run in runs.values() for name in run.record),
            ),
        ):
            if there:
                query = {"summaryTable": {"tableKey": key}}
                chart = wr.CustomChart(
                    query=query,
                    chart_name=f"wandb/{preset}/v0",
                    chart_fields=fields,
                    chart_strings={"title": title},
                    layout=wide,
                )
                yield title, chart, key


def _forest(content: Mapping[str, Any]) -> str:
    """The figure of effects as a table."""
    lines = []
    for row in content["rows"]:
        mean, low, high, p = (
            "-" if row[key] is None else format(row[key], form)
            for key, form in (("mean", "+.4f"), ("low", "+.4f"), ("high", "+.4f"), ("p_holm", ".3g"))
        )
        lines.append((row["name"], mean, f"[{low}, {high}]", str(row["n"]), p))
    return "\n".join(markdown_table(("arm", content["x"], "95 % interval", "seeds", "p, Holm"), lines))


def publish(sweeps: Sequence[Contents], store: Store, spec: Path) -> str:
    """Save the report in W&B, or without an API key its spec in a file.

    Args:
        store: holds their runs. spec: the file.
    Returns: one sentence: where the report is, or how it gets there later.
    Raises: ConfigError as `Workspaces`, and where W&B does not take it (the spec is written then).
    """
    made = Workspaces(sweeps)
    account = WandbLogger(project=made.project, entity=made.entity or None)
    if account.mode == "online":
        if account.secret:
            os.environ["WANDB_API_KEY"] = account.secret  # W&B's own search would end in a question at the terminal
        try:
            return f"the report is at {_saved(made)}"
        except Exception as error:
            _write(made, spec)
            reason = (str(error).strip() or type(error).__name__).splitlines()[0].replace(account.secret or "\0", "***")
            raise ConfigError(
                f"report: W&B did not take the report ({reason[:300]}); its spec is in {spec}, and the same command "
                "tries again"
            ) from None
    _write(made, spec)
    return (
        f"no W&B API key is known, so the report's spec is in {spec}; later, `wandb login`, send the runs with "
        f"`wandb sync {store.root}/*/wandb/offline-run-*` and repeat this command"
    )


def _saved(made: Workspaces) -> str:
    """The address of the report, saved. A thread does it, so that a server that hangs does not hang the command."""
    done: list[Any] = []

    def save() -> None:
        try:
            if not made.entity:
                made.entity = importlib.import_module("wandb").Api().default_entity or ""
            done.append(made.report().save().url)
        except BaseException as error:
            done.append(error)

    thread = threading.Thread(target=save, name="andrea_ablate-report", daemon=True)
    thread.start()
    thread.join(SAVE_S)
    if not done:
        raise TimeoutError(f"no answer within {SAVE_S:g} s")
    if isinstance(done[0], BaseException):
        raise done[0]
    return str(done[0])


def _write(made: Workspaces, path: Path) -> None:
    report = made.report()
    spec = json.loads(report._to_model().spec.model_dump_json(by_alias=True, exclude_none=True))
    head = {"entity": made.entity, "project": made.project, "title": report.title}
    write_atomic(path, json.dumps({**head, "spec": spec}, indent=1, ensure_ascii=False, allow_nan=False) + "\n")
