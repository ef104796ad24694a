"""Arms that are put together from their factors' changes are those that Hydra composes, and few are composed."""

from __future__ import annotations

import time
from itertools import product

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf

from andrea_ablate.arms import Arms
from andrea_ablate.composition import ExperimentsFolder, resolved, resource_root
from support import Cli

# What the options of two groups and one value would set, in files that are read in this order.
FILES = {
    "norm=pre": {"model": {"block": {"norm_position": "pre"}}},
    "norm=post": {"model": {"block": {"norm_position": "post"}}},
    "optim=adamw": {"optim": {"type": "adamw", "lr": 0.1, "eps": 1e-8}},
    "optim=sgd": {"optim": {"type": "sgd", "lr": 0.2}},
    "size=nano": {"optim": {"lr": 0.3}},
    "size=tiny": {},
}
BASE = {"model": {"block": {"norm_position": "?"}}, "optim": {}, "seed": 0, "data": {"seed": "${seed}", "n": 1}}


class Composer:
    """Merges FILES in order, then values, and counts; as Hydra does it for conf/."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, overrides: list[str]) -> DictConfig:
        self.calls += 1
        cfg = OmegaConf.create(BASE)
        for name, content in FILES.items():
            if name in overrides:
                cfg = OmegaConf.merge(cfg, OmegaConf.create(content))  # type: ignore[assignment]
        for override in overrides:
            if override not in FILES:
                key, _, value = override.partition("=")
                OmegaConf.update(cfg, key, yaml.safe_load(value))
        assert isinstance(cfg, DictConfig)
        return cfg


def composed_in_full(choices: dict[str, list[str]], compose: Composer) -> list[tuple[list[str], str]]:
    return [(list(part), repr(resolved(compose(list(part))))) for part in product(*choices.values())]


def test_factors_without_a_common_key_are_composed_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("andrea_ablate.arms.declared_by", lambda group, _: {"norm": ["model.block"]}.get(group, []))
    choices = {"norm": ["norm=pre", "norm=post"], "seed": ["seed=0", "seed=1", "seed=2"], "data.n": ["data.n=1"]}
    compose = Composer()
    arms = Arms(choices, compose)
    assert compose.calls == 2  # the first, and norm=post: a seed is only set
    found = [(part, repr(plain)) for part, plain in map(arms.at, arms.points())]
    assert len(found) == 6 and found == composed_in_full(choices, Composer())
    assert arms.references == {"data.seed": ("seed",)} and "'data': {'seed': 2, 'n': 1}" in found[-1][1]


def test_factors_whose_files_set_the_same_key_are_composed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    # size=tiny leaves the learning rate to the optimizer's own file: neither factor shows that on its own.
    sets = {"optim": ["optim.lr", "optim.type", "optim.eps"], "size": ["optim.lr"]}
    monkeypatch.setattr("andrea_ablate.arms.declared_by", lambda group, _: sets.get(group, []))
    choices = {"size": ["size=nano", "size=tiny"], "optim": ["optim=adamw", "optim=sgd"]}
    arms = Arms(choices, Composer())
    found = [(part, repr(plain)) for part, plain in map(arms.at, arms.points())]
    assert found == composed_in_full(choices, Composer())
    assert "'lr': 0.2" in found[-1][1] and "'eps'" not in found[-1][1]


def test_an_option_that_refers_to_what_another_factor_sets_is_composed_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FILES, "norm=own", {"model": {"block": {"norm_position": "post", "width": "${data.n}"}}})
    monkeypatch.setattr("andrea_ablate.arms.declared_by", lambda *_: [])
    choices = {"norm": ["norm=pre", "norm=own"], "data.n": ["data.n=1", "data.n=2"]}
    arms = Arms(choices, Composer())
    found = [(part, repr(plain)) for part, plain in map(arms.at, arms.points())]
    assert found == composed_in_full(choices, Composer()) and "'width': 2" in found[-1][1]


def test_the_caller_may_change_what_it_is_given() -> None:
    arms = Arms({"seed": ["seed=0", "seed=1"]}, Composer())
    for point in arms.points():
        _, plain = arms.at(point)
        plain["model"]["block"].clear()
    assert all(arms.at(point)[1]["model"]["block"] for point in arms.points())


@pytest.mark.slow  # every combination is composed through Hydra as well
@pytest.mark.parametrize(
    "choices",
    [
        ["norm=pre,post", "block=serial,parallel", "optim.lr=1e-3,'1e-4'", "seed=0,3"],
        ["ffn=gelu4x,swiglu", "model.ffn.ratio=2,8/3", "data.seq_len=16,32"],
        ["size=tiny,nano", "optim=adamw,sgd", "optim.lr=1e-3,2e-3"],
        ["stability=[qk_norm],[z_loss,qk_norm],[]", "preset=gpt2,llama3", "norm_type=layernorm,rmsnorm"],
        ["tokenizer=bytes,bpe", "model.vocab_multiple=1,64", "norm=pre,double"],
    ],
)
def test_every_arm_is_what_hydra_composes(choices: list[str]) -> None:
    Plugins.instance().register(ExperimentsFolder)
    GlobalHydra.instance().clear()

    def compose(overrides: list[str]) -> DictConfig:
        with hydra.initialize_config_dir(str(resource_root() / "conf"), version_base="1.3"):
            return hydra.compose("config", overrides)

    values = {}
    for choice in choices:
        key, _, rest = choice.partition("=")
        listed = [part + "]" for part in rest.rstrip("]").split("],")] if rest.startswith("[") else rest.split(",")
        values[key] = [f"{key}={value}" for value in listed]
    arms = Arms(values, compose)
    found = [arms.at(point) for point in arms.points()]
    assert len(found) == len(list(product(*values.values())))
    for part, plain in found:
        assert repr(plain) == repr(resolved(compose(part))), part


@pytest.mark.slow  # a thousand runs, twice
@pytest.mark.parametrize(
    ("few", "many", "arms", "bound"),
    [
        (["norm=pre,post", "seed=range(0,5)"], ["norm=pre,post", "seed=range(0,500)"], 2, 0.004),
        (
            ["norm=pre,post", "optim.lr=1e-3,2e-3", "seed=0,1"],
            ["norm=pre,post", f"optim.lr={','.join(f'{n}e-4' for n in range(1, 51))}", "seed=range(0,10)"],
            100,
            0.004,
        ),
        (
            ["norm=pre,post", "ffn=gelu4x,swiglu", "seed=0,1"],
            [
                "norm=pre,post,double,output,none",
                "ffn=gelu4x,swiglu,relu4x,geglu,silu4x",
                f"optim.lr={','.join(f'{n}e-3' for n in range(1, 11))}",
                "seed=0,1,2,3",
            ],
            250,
            0.015,
        ),
    ],
)
def test_planning_takes_little_for_each_run(cli: Cli, few: list[str], many: list[str], arms: int, bound: float) -> None:
    """In seconds of this process's CPU, which other processes stretch, but a clock on the wall more so."""
    cli("-m", *few, "plan=true")  # imports, and data that is prepared once
    began = time.process_time()
    cli("-m", *few, "plan=true")
    between = time.process_time()
    answer = cli("-m", *many, "plan=true")
    ended = time.process_time()
    assert f"Plan: {arms} arms, 1000 runs, 1000 to train" in answer.out
    assert ((ended - between) - (between - began)) / 1000 < bound
