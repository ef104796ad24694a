"""Arms of equal budget: sizes against an exhaustive search over counts of built models, and what the command does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from andrea_ablate.config import ModelConfig, RunConfig, SweepConfig, model_dims
from andrea_ablate.matching import match_model, mismatch, unmatched
from andrea_ablate.model import TransformerLM
from andrea_ablate.parameters import MATMUL_ROLES, named_params
from andrea_ablate.registry import ConfigError
from support import Cli, Compose


def built(cfg: RunConfig, match: str) -> int:
    """The count of a built model without windows: parameters, or six FLOPs per weight and key."""
    with torch.device("meta"):
        model = TransformerLM(cfg.model)
    found = [(param.role, parameter.numel()) for _, parameter, param in named_params(model)]
    if match == "params":
        return sum(n for _, n in found)
    if match == "nonembedding":
        return sum(n for role, n in found if role not in ("embedding", "head", "position"))
    dims = model_dims(cfg.model)
    scores = dims.n_layers * 2 * dims.n_heads * dims.d_head * cfg.data.seq_len
    return 6 * (sum(n for role, n in found if role in MATMUL_ROLES) + scores)


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
@pytest.mark.parametrize("match", ["params", "nonembedding", "flops"])
@pytest.mark.parametrize(
    "choices",
    [
        ["ffn=swiglu"],
        ["ffn=swiglu", "model.ffn.multiple=1", "attn=gqa2"],
        ["norm=double", "norm_type=rmsnorm", "model.ffn.multiple=3"],
        ["pos=learned", "model.linear_bias=true"],
        ["model.d_model=36", "model.n_heads=6"],
        ["model.n_layers=7"],  # too deep: the smallest size is the nearest
    ],
)
def test_the_size_is_the_best_of_all(tiny: Compose, match: str, choices: list[str]) -> None:
    baseline, arm = tiny(), tiny(*choices)
    model, override = match_model(arm, baseline, SweepConfig(match, "d_ff", [], 0.03))
    target, step = built(baseline, match), arm.model.ffn["multiple"]

    def at(d_ff: int) -> RunConfig:
        ratio = f"{d_ff}/{arm.model.d_model}"
        return replace(arm, model=replace(arm.model, ffn={**arm.model.ffn, "ratio": ratio}))

    first, second = built(at(step), match), built(at(2 * step), match)  # a count is affine in d_ff
    away = {n * step: abs(first + (n - 1) * (second - first) - target) for n in range(1, 300)}
    found = model_dims(model).d_ff
    assert found == min(away, key=lambda d_ff: (away[d_ff], d_ff))
    assert mismatch(replace(arm, model=model), baseline, match) == pytest.approx(built(at(found), match) / target - 1)
    assert tiny(*choices, *([override] if override else [])).model == model
    assert match_model(replace(arm, model=model), baseline, SweepConfig(match, "d_ff", [], 0.03)) == (model, None)


def test_layers_can_give_way(tiny: Compose) -> None:
    # By hand: a layer has 4 D^2 + 2 D F + 2 * 2 D; 7 narrow ones come nearest to 2 of width 32.
    baseline, arm = tiny(), tiny("model.ffn.ratio=1/2")
    layer = 4 * 32**2 + 2 * 32 * 16 + 4 * 32
    target = 2 * (4 * 32**2 + 2 * 32 * 128 + 4 * 32)
    best = min(range(1, 20), key=lambda n: abs(n * layer - target))
    model, override = match_model(arm, baseline, SweepConfig("nonembedding", "n_layers", [], 0.03))
    assert (model.n_layers, override) == (best, f"model.n_layers={best}") and model.ffn == arm.model.ffn


def test_a_whole_ratio_is_the_one_that_is_written_by_hand(tiny: Compose) -> None:
    model, override = match_model(tiny("model.ffn.ratio=3"), tiny(), SweepConfig("params", "d_ff", [], 0.03))
    assert override == "model.ffn.ratio=4" and model == tiny().model


def test_an_arm_that_cannot_be_counted_is_left_to_training_and_a_baseline_is_refused(tiny: Compose) -> None:
    bad = replace(tiny(), model=replace(tiny().model, n_heads=3))
    settings = SweepConfig("params", "d_ff", [], 0.03)
    assert match_model(bad, tiny(), settings) == (bad.model, None)
    assert unmatched({"a": tiny(), "b": bad}, settings, 0.02) is None
    with pytest.raises(ConfigError, match=r"match=params takes its count from the first arm, but model\.n_heads=3"):
        match_model(tiny(), bad, settings)


def test_what_stays_apart_is_named(tiny: Compose) -> None:
    deep = tiny("model.n_layers=7")
    model, _ = match_model(deep, tiny(), SweepConfig("params", "d_ff", [], 0.03))
    assert model_dims(model).d_ff == 1
    arms = {"first": tiny(), "deep": replace(deep, model=model)}
    said = unmatched(arms, SweepConfig("params", "d_ff", [], 0.03), 0.02)
    residual = built(arms["deep"], "params") / built(tiny(), "params") - 1
    assert said is not None and f"'deep' {100 * residual:+.1f} %" in said and "'first'" not in said
    assert "no d_ff comes within 2 %" in said and "model.ffn.multiple" in said


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["match=parms"], "match=parms is not one of none, params, nonembedding, flops; did you mean 'params'?"),
        (["match_knob=d_model"], "match_knob=d_model is not one of d_ff, n_layers"),
        (["margin=0"], "margin=0.0 must be a positive number of nats, such as 0.03"),
        (["match=params,flops"], "match takes one value; sweep over a setting of the runs"),
        (["match=params", "model.ffn.ratio=2,4"], "match=params would set model.ffn.ratio, which is swept here"),
    ],
)
def test_what_cannot_be_meant_is_refused(tmp_path: Path, cli: Cli, arguments: list[str], said: str) -> None:
    answer = cli("-m", *arguments)
    assert answer.status == 2 and said in answer.err and not (tmp_path / "runs").exists()


def test_a_wrong_setting_of_a_sweep_is_refused_in_a_single_run_too(tmp_path: Path, cli: Cli) -> None:
    answer = cli("match=parms")
    assert answer.status == 2 and "match=parms is not one of" in answer.err and not (tmp_path / "runs").exists()


@pytest.mark.slow  # takes long for what it holds: `make test` is to stay short
def test_a_matched_sweep_trains_records_and_compares_the_resized_design(tmp_path: Path, cli: Cli) -> None:
    command = ("-m", "attn=mha,mqa", "seed=0", "trainer.tokens=256")
    matched = cli(*command, "match=params", "model.ffn.multiple=8")
    assert matched.status == 0, matched
    # By hand: mha 4 D^2, mqa (1 of 4 kv heads) 2.5 D^2, so d_ff may grow by 1.5 D / 2 = 24, to 152, with nothing left.
    assert "+0.00 %, d_ff 128" in matched.out and "+0.00 %, d_ff 152" in matched.out
    assert "parameters differ" not in matched.out
    folders = {path.parent for path in tmp_path.glob("runs/*/record.json")}
    by_arm: dict[str, list[Any]] = {}
    for folder in folders:
        record = json.loads((folder / "record.json").read_text())
        model: ModelConfig = yaml.safe_load((folder / "config.yaml").read_text())["model"]
        assert record["status"] == "finished" and record["params"] == 41344
        by_arm.setdefault(record["name"].split()[0], []).append(model["ffn"]["ratio"])  # type: ignore[index]
    assert by_arm == {"attn=mha": [4], "attn=mqa": ["19/4"]}
    by_hand = cli("attn=mqa", "seed=0", "trainer.tokens=256", "model.ffn.multiple=8", "model.ffn.ratio=19/4")
    assert by_hand.status == 0 and "1 run, none to train" in by_hand.out

    apart = cli(*command, "match=params", "model.ffn.multiple=64")
    assert apart.status == 0 and "no d_ff comes within 2 %" in " ".join(apart.out.split())
    assert "parameters differ from the baseline's" in " ".join(apart.out.split())
