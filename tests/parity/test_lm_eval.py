"""lm-eval scores a trained run that was exported, and finds what the run's own record says of the same text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from andrea_ablate.convert.__main__ import main
from andrea_ablate.data import prepare
from andrea_ablate.generate import load
from andrea_ablate.tracking.store import Store
from support import Cli

REASON = "lm-eval, which no lock file has, is not installed: pip install lm-eval accelerate"
pytestmark = pytest.mark.slow  # imports transformers and datasets

WINDOW, KEPT = 32, 512  # size=tiny: tokens of a window, and of the validation


def write_task(folder: Path, name: str, documents: list[dict[str, Any]], **task: Any) -> str:
    """A task of lm-eval that reads documents from a file beside it."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(document) + "\n" for document in documents))
    files = {"data_files": {"test": str(folder / f"{name}.jsonl")}, "cache_dir": str(folder / "cache")}
    plain = {"task": name, "dataset_path": "json", "dataset_kwargs": files, "test_split": "test", **task}
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(plain))
    return name


def test_an_exported_run_is_scored_as_its_record_says(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    pytest.importorskip("accelerate", reason=REASON)
    lm_eval = pytest.importorskip("lm_eval", reason=REASON)
    from lm_eval.tasks import TaskManager

    text = tmp_path / "text.txt"
    text.write_text("".join(f"{i} times {i} is {i * i}, and {i} more is {i * i + i}.\n" for i in range(300)))
    answer = cli("preset=llama3", "data=text", f"data.path={text}", f"paths.runs={tmp_path}/runs")
    assert answer.status == 0, answer.err
    store = Store(tmp_path / "runs")
    name = store.ids()[0]
    assert main([str(store.path(name)), str(tmp_path / "hf"), "--to", "llama"]) == 0
    model, cfg = load(store, name)
    held_out = bytes(prepare(cfg.data, Path(cfg.paths.cache)).val[: KEPT + 1].tolist())
    assert (cfg.data.seq_len, cfg.data.val_tokens, cfg.model.max_seq_len) == (WINDOW, KEPT, WINDOW)

    tasks = tmp_path / "tasks"
    tasks.mkdir()
    sums = [(f"{i} times {i} is", [f" {i * i}", f" {i * i + 1}"]) for i in range(2, 9)]  # a space is the answer's
    names = [
        # The first byte is what the first prediction follows, so the windows are those of the validation.
        write_task(
            *(tasks, "held_out", [{"text": held_out[1:].decode()}]),
            output_type="loglikelihood_rolling",
            doc_to_text="",
            doc_to_target="{{text}}",
            metric_list=[{"metric": "bits_per_byte"}, {"metric": "byte_perplexity"}],
        ),
        write_task(
            *(tasks, "squares", [{"stem": stem, "answers": answers, "gold": 0} for stem, answers in sums]),
            output_type="multiple_choice",
            doc_to_text="{{stem}}",
            doc_to_choice="answers",
            doc_to_target="gold",
            target_delimiter="",
            metric_list=[{"metric": "acc"}],
        ),
    ]
    found = lm_eval.simple_evaluate(
        "hf",
        {"pretrained": str(tmp_path / "hf"), "dtype": "float32", "prefix_token_id": held_out[0]},
        names,
        device="cpu",
        batch_size=4,
        bootstrap_iters=0,
        task_manager=TaskManager(include_path=str(tasks), include_defaults=False),
    )
    recorded = [row for row in store.metrics(name) if "val/bpb" in row][-1]["val/bpb"]
    held = found["results"]["held_out"]
    assert held["bits_per_byte,none"] == pytest.approx(recorded, rel=1e-5)
    assert held["byte_perplexity,none"] == pytest.approx(2**recorded, rel=1e-5)

    right = 0
    for (stem, answers), sample in zip(sums, found["samples"]["squares"], strict=True):
        likelihoods = [likelihood(model, stem, given) for given in answers]
        assert [pair[0] for pair in sample["filtered_resps"]] == pytest.approx(likelihoods, abs=1e-4)
        right += likelihoods[0] > likelihoods[1]
    assert found["results"]["squares"]["acc,none"] == pytest.approx(right / len(sums))


@torch.no_grad()
def likelihood(model: Any, before: str, after: str) -> float:
    """``ln p(after | before)`` in bytes."""
    ids = torch.tensor([list((before + after).encode())])
    nats = model(ids[:, :-1]).log_softmax(-1).gather(-1, ids[:, 1:, None]).flatten()
    return float(nats[len(before.encode()) - 1 :].sum())
