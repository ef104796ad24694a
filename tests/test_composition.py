"""From YAML and overrides to a checked configuration: unknown, missing and misplaced keys, numbers as text, paths."""

from __future__ import annotations

import copy
import json
import os
import re
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from andrea_ablate.composition import choice_options, compose, resolved, resource_root, to_run_config, unknown_key
from andrea_ablate.config import RunConfig, to_plain
from andrea_ablate.registry import ConfigError
from andrea_ablate.tracking import config_payload
from support import Compose

CONF = Path(__file__).parents[1] / "conf"


def leaves(node: Any, where: str = "") -> dict[str, Any]:
    if isinstance(node, dict) and node:
        return {k: v for key, item in node.items() for k, v in leaves(item, f"{where}.{key}" if where else key).items()}
    return {where: node}


@pytest.fixture(scope="module")
def composed() -> DictConfig:
    """The tiny configuration as Hydra composes it, before it is checked."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        return hydra.compose("config", ["size=tiny", "logger=none"])


def changed(composed: DictConfig, override: str) -> RunConfig:
    """What to_run_config makes of an override that Hydra lets through."""
    cfg = copy.deepcopy(composed)
    OmegaConf.set_struct(cfg, False)
    key, _, value = override.partition("=")
    if key.startswith("~"):
        parent, _, last = key[1:].rpartition(".")
        del (OmegaConf.select(cfg, parent) if parent else cfg)[last]
    else:
        OmegaConf.update(cfg, key, yaml.safe_load(value), force_add=True)
    return to_run_config(resolved(cfg), "/start")


@pytest.mark.parametrize(
    ("override", "said"),
    [
        # forced in, where nobody would read it
        ("modle.norm.type=rmsnorm", "'modle' is not a setting; did you mean 'model'?"),
        ("model.nrom.type=rmsnorm", "'model.nrom' is not a setting; did you mean '…norm'?"),
        ("model.norm.tpye=rmsnorm", "'model.norm.tpye'…did you mean 'model.norm.type'?"),
        ("model.norm.epz=1", "'model.norm.epz'…did you mean 'model.norm.eps'?"),
        ("model.block.norm_positon=post", "did you mean 'model.block.norm_position'?"),
        ("model.attn.n_kv_head=2", "did you mean 'model.attn.n_kv_heads'?"),
        ("model.stability.qk_nrom.eps=1e-6", "stability=qk_nrom is not one of …; did you mean 'qk_norm'?"),
        ("model.stability.z_loss.alfa=1e-4", "'model.stability.z_loss.alfa'…'model.stability.z_loss.alpha'?"),
        ("optim.momentum=0.9", "'optim.momentum' belongs to optim=muon or optim=sgd, which is not chosen"),
        ("optim.beta=[0.9,0.95]", "did you mean 'optim.betas'?"),
        ("schedule.decay_fraction=0.1", "'schedule.decay_fraction' belongs to schedule=wsd"),
        ("data.path=corpus.txt", "'data.path' belongs to data=bin or data=text"),
        ("data.seqlen=32", "'data.seqlen'…did you mean 'data.seq_len'?"),
        ("data.tokenizer.path=x", "'data.tokenizer.path' belongs to tokenizer=file"),
        ("trainer.token=1", "'trainer.token' is not a setting; did you mean '…tokens'?"),
        ("paths.run=x", "'paths.run' is not a setting; did you mean '…runs'?"),
        ("logger.project=x", "'logger.project' belongs to logger=wandb"),
        # types that are none of the options
        ("model.norm.type=rms", "model.norm.type=rms is not one of …layernorm, …; did you mean 'rmsnorm'?"),
        ("model.block.type=paralel", "did you mean 'parallel'?"),
        ("optim.type=adam", "did you mean 'adamw'?"),
        ("data.tokenizer.type=byte", "did you mean 'bytes'?"),
        ("model.norm.type={a: 1}", "model.norm.type={'a': 1} is not one of"),
        # taken away
        ("~model.block.norm_position", "'model.block.norm_position' is missing; choose …norm=double or …norm=pre"),
        ("~optim.type", "'optim.type' is missing; choose optim=adamw or …optim=muon"),
        ("~model.norm.eps", "'model.norm.eps' is missing; choose norm_type=layernorm or …norm_type=rmsnorm"),
        ("~trainer.tokens", "'trainer.tokens' is missing"),
        ("~model", "'model' is a section with keys"),
        # a value where a section belongs, and no path at all
        ("model.norm=rmsnorm", "model.norm=rmsnorm is not a section with keys; choose …norm_type=layernorm or"),
        ("trainer=fast", "'trainer' is a section with keys; set one of them, as in trainer.KEY=VALUE"),
        ('paths.runs=""', "paths.runs= is empty; give a path"),
    ],
)
def test_what_nobody_reads_or_somebody_needs_is_refused_with_the_way_out(
    composed: DictConfig, override: str, said: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        changed(composed, override)
    found = str(caught.value)
    assert "\n" not in found and all(part in found for part in said.split("…")), found


def test_every_yaml_option_is_known_by_its_own_keys() -> None:
    # Read anew from the files: each key of an option belongs to it, and a letter more belongs to nobody.
    whole = ("size", "preset", "launcher")  # fill no node of their own
    names = {(path.parent.name, path.stem) for path in CONF.glob("*/*.yaml") if path.parent.name not in whole}
    assert {(option.group, option.name) for option in choice_options()} == names
    for option in choice_options():
        content = yaml.safe_load((CONF / option.group / f"{option.name}.yaml").read_text()) or {}
        for key in leaves({k: v for k, v in content.items() if k != "defaults"}):
            assert str(option) in unknown_key(f"{option.node}.{key}", [])
            assert "is not a setting" in unknown_key(f"{option.node}.{key}x", [])


def test_no_key_of_a_default_option_is_lost(composed: DictConfig) -> None:
    content = yaml.safe_load((CONF / "config.yaml").read_text())
    default = {
        group: option for entry in content["defaults"] if isinstance(entry, dict) for group, option in entry.items()
    }
    plain = leaves(to_plain(to_run_config(resolved(composed), "/start")))
    for option in choice_options():
        if default.get(option.group) == option.name and option.group != "logger":
            assert {f"{option.node}.{key}" for key in option.content} <= set(plain)


@pytest.mark.parametrize("text", ["1e-4", "1.0e-4", "1E-4", "0.0001", "'1e-4'", '"0.0001"', "+1e-4"])
@pytest.mark.parametrize("key", ["optim.lr", "model.norm.eps", "model.dropout"])
def test_a_number_is_a_number_however_a_yaml_file_writes_it(composed: DictConfig, key: str, text: str) -> None:
    node = OmegaConf.create(f"v: {text}").v  # as OmegaConf reads it: text where it is quoted
    found = leaves(to_plain(changed(composed, f"{key}={json.dumps(node)}")))[key]
    assert type(found) is float and found == 0.0001


def test_a_whole_number_may_be_written_with_an_exponent(composed: DictConfig) -> None:
    cfg = changed(composed, "trainer.tokens=1.0e+3")
    assert type(cfg.trainer.tokens) is int and cfg.trainer.tokens == 1000


def test_relative_paths_begin_where_the_command_was_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    cfg = compose(["data=text", "data.path=./corpus.txt", "paths.runs=a/../out", "paths.cache='~/c'"])
    assert cfg.data.options["path"] == f"{tmp_path}/corpus.txt"
    assert (cfg.paths.runs, cfg.paths.sweeps) == (f"{tmp_path}/out", f"{tmp_path}/sweeps")
    assert cfg.paths.cache == os.path.expanduser("~/c")
    assert compose(["data=text", "data.path=/x/y.txt"]).data.options["path"] == "/x/y.txt"


def test_the_folder_of_the_start_counts_and_not_the_one_of_now(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tiny: Compose
) -> None:
    plain = {**to_plain(tiny("data=text", "data.path=/x")), "paths": {"runs": "runs", "sweeps": "s", "cache": "/c"}}
    plain["data"]["path"] = "corpus.txt"
    monkeypatch.chdir(tmp_path)
    cfg = to_run_config(resolved(OmegaConf.create(plain)), "/where/it/began")
    assert cfg.data.options["path"] == "/where/it/began/corpus.txt"
    assert (cfg.paths.runs, cfg.paths.cache) == ("/where/it/began/runs", "/c")


def test_the_stored_configuration_is_plain_resolved_and_keeps_its_types(tiny: Compose) -> None:
    payload = config_payload(to_plain(tiny("norm_type=rmsnorm", "seed=3", "stability=[qk_norm]")))
    assert payload["model"]["norm"] == {"type": "rmsnorm", "eps": 1e-5, "bias": False}
    assert payload["data"]["seed"] == 3 and payload["model"]["max_seq_len"] == payload["data"]["seq_len"] == 32
    assert payload["optim"]["betas"] == [0.9, 0.95] and payload["model"]["stability"] == {
        "qk_norm": {"eps": 1e-6, "cast": "t5"}
    }
    for key, value in leaves(payload).items():
        assert isinstance(value, (bool, int, float, str, list, dict, type(None))), key
        assert not re.search(r"\$\{|\?\?\?", str(value)), key


def test_a_vocabulary_left_to_the_tokenizers_file_is_counted(tmp_path: Path, tiny: Compose) -> None:
    import tokenizers

    path = tmp_path / "t.json"
    tokenizers.Tokenizer(tokenizers.models.BPE(vocab={"a": 0, "b": 1, "ab": 2}, merges=[("a", "b")])).save(str(path))
    chosen = ("tokenizer=file", f"data.tokenizer.path={path}")
    cfg = tiny(*chosen)  # three ids and the end of a document
    assert cfg.data.tokenizer["vocab_size"] == cfg.model.vocab_size == 4
    assert tiny(*chosen, "model.vocab_size=9").model.vocab_size == 9


def test_the_yaml_files_are_found_beside_the_package_or_above_it() -> None:
    assert (resource_root() / "conf" / "config.yaml").is_file()
    assert (resource_root() / "experiments" / "norm_ffn.yaml").is_file()


def test_composing_again_begins_afresh(tiny: Compose) -> None:
    first: RunConfig = tiny("norm=post")
    assert tiny().model.block["norm_position"] == "pre" and first.model.block["norm_position"] == "post"


@pytest.mark.parametrize("path", sorted((CONF / "size").glob("*.yaml")), ids=lambda path: path.stem)
def test_what_a_size_says_is_what_comes_out(path: Path) -> None:
    """The top level is merged behind the sizes: a key that it has itself would hide theirs."""
    said = yaml.safe_load(path.read_text())
    said.pop("defaults", None)
    del said["margin"]  # of a sweep, not of its runs
    found = leaves(to_plain(compose([f"size={path.stem}", "logger=none"])))
    for key, value in leaves(said).items():
        assert found[key] == (float(value) if isinstance(value, str) else value), key
