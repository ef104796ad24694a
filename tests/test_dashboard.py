"""The dashboard: what it shows of a sweep under way, and whom it answers."""

from __future__ import annotations

import http.client
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest

from andrea_ablate.dashboard.live import sweeps
from andrea_ablate.dashboard.server import Dashboard, is_loopback
from andrea_ablate.registry import ConfigError
from andrea_ablate.report import compare, save
from andrea_ablate.report.compare import MARGIN_NATS, row_from_record
from andrea_ablate.tracking.plans import Plan, load_plan
from andrea_ablate.tracking.store import Store

EVIL = "norm=<b>pre</b>"


@pytest.fixture
def sweep(tmp_path: Path) -> Store:
    """A sweep of two arms over two seeds; the last run has not begun."""
    store = Store(tmp_path / "runs")
    arms = {"a0": EVIL, "a1": EVIL, "b0": "norm=post", "b1": "norm=post"}
    runs = {run_id: {"arm": arm, "seed": int(run_id[1]), "tokens": 640} for run_id, arm in arms.items()}
    for i, run_id in enumerate(["a0", "a1", "b0"]):
        with store.open(run_id) as writer:
            writer.write_config({"schedule": {"warmup_tokens": 0}})
            writer.log({"step": 1, "train/loss": 5.5})
            writer.update(run_id=run_id, status="finished", tokens=640, train_s=1.0, **{"val/loss": 2.0 + i / 10})
    Plan("planned", ["-m"], str(tmp_path), str(store.root), runs).save(tmp_path / "sweeps")
    return store


@contextmanager
def serving(root: Path, token: str | None = None) -> Iterator[Dashboard]:
    with Dashboard(("127.0.0.1", 0), root / "sweeps", root / "runs", token) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()


def ask(server: Dashboard, path: str, method: str = "GET", **headers: str) -> tuple[int, str, dict[str, str]]:
    line = http.client.HTTPConnection("127.0.0.1", server.server_address[1], timeout=10)
    line.request(method, path, headers=headers)
    answer = line.getresponse()
    return answer.status, answer.read().decode(), dict(answer.headers)


def test_a_sweep_under_way_is_compared_as_far_as_it_is(tmp_path: Path, sweep: Store) -> None:
    with serving(tmp_path) as server:
        status, page, _ = ask(server, "/")
        assert status == 200 and '<a href="/sweep/planned">planned</a>: 3 of 4 runs ended' in page
        status, page, headers = ask(server, "/sweep/planned")
        assert status == 200 and "3 of 4 runs ended" in page
        assert "norm=&lt;b&gt;pre&lt;/b&gt; has the lowest loss" in page and "<b>pre</b>" not in page
        assert '<td data-head="status">missing</td>' in page
        assert "default-src 'none'" in headers["Content-Security-Policy"]
        with sweep.open("b1") as writer:
            writer.log({"step": 1, "train/loss": 5.0})
            writer.update(run_id="b1", status="running")
            assert '<td data-head="status">running</td>' in ask(server, "/sweep/planned")[1]


def test_a_sweep_under_way_is_judged_as_its_command_will(tmp_path: Path, sweep: Store) -> None:
    (folder,) = (tmp_path / "sweeps").iterdir()
    plan = load_plan(folder)
    runs = {run_id: {**run, "design": "d", "lr": 1e-3 * (1 + run["seed"])} for run_id, run in plan.runs.items()}
    replace(plan, margin=0.25, runs=runs).save(folder.parent)
    page = sweeps(folder.parent, sweep.root)["planned"].comparison()
    assert page.margin == 0.25
    assert [(row.design, row.lr) for row in page.rows] == [("d", 1e-3), ("d", 2e-3)] * 2
    replace(plan, margin=None).save(folder.parent)
    assert sweeps(folder.parent, sweep.root)["planned"].comparison().margin == MARGIN_NATS


def test_a_page_knows_when_it_is_old(tmp_path: Path, sweep: Store) -> None:
    with serving(tmp_path) as server:
        _, page, before = ask(server, "/sweep/planned")
        assert f'<meta name="version" content={before["ETag"]}>' in page
        status, text, same = ask(server, "/sweep/planned", "HEAD")
        assert (status, text, same["ETag"]) == (200, "", before["ETag"])
        with sweep.open("b1") as writer:
            writer.log({"step": 1, "train/loss": 5.0})
        assert ask(server, "/sweep/planned", "HEAD")[2]["ETag"] != before["ETag"]
        assert ask(server, "/", "HEAD")[2]["ETag"] != ask(server, "/sweep/planned", "HEAD")[2]["ETag"]


def test_a_complete_sweep_shows_what_its_command_saved(tmp_path: Path, sweep: Store) -> None:
    with sweep.open("b1") as writer:
        writer.update(run_id="b1", status="finished", tokens=640, train_s=1.0, **{"val/loss": 1.5})
    rows = [
        row_from_record(sweep.current(run_id), arm=arm, seed=seed, run_id=run_id)
        for run_id, arm, seed in (("a0", EVIL, 0), ("a1", EVIL, 1), ("b0", "norm=post", 0), ("b1", "norm=post", 1))
    ]
    save(compare(rows, margin=0.25), tmp_path / "sweeps" / "planned")
    with serving(tmp_path) as server:
        page = ask(server, "/sweep/planned")[1]
    assert "norm=post has the lowest loss" in page and "4 of 4 runs ended" in page


@pytest.mark.parametrize("path", ["/sweep/other", "/sweep/..%2f..%2fetc", "/sweep/", "/runs/a0/record.json", "/%00"])
def test_nothing_but_sweeps_is_served(tmp_path: Path, sweep: Store, path: str) -> None:
    with serving(tmp_path) as server:
        status, page, _ = ask(server, path)
    assert status == 404 and "record" not in page.replace("/runs/a0/record.json", "")


def test_a_name_of_somebody_elses_is_not_loopback(tmp_path: Path, sweep: Store) -> None:
    with serving(tmp_path) as server:
        assert ask(server, "/", Host="elsewhere.example")[0] == 403
        assert ask(server, "/", Host="localhost:1")[0] == 200
    assert [is_loopback(host) for host in ("127.0.0.1", "::1", "localhost", "0.0.0.0", "example.org")] == [
        *([True] * 3),
        *([False] * 2),
    ]


def test_beyond_loopback_a_token_is_needed_and_kept(tmp_path: Path, sweep: Store) -> None:
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0 is not loopback.*--token"):
        Dashboard(("0.0.0.0", 0), tmp_path / "sweeps", tmp_path / "runs")
    token = "a b+c"
    with serving(tmp_path, token) as server:
        assert server.url.endswith("?token=a%20b%2Bc")
        assert ask(server, "/")[0] == 403
        assert ask(server, "/?token=wrong")[0] == 403
        status, page, headers = ask(server, f"/?token={quote(token)}", Host="elsewhere.example")
        assert status == 200 and token not in page
        cookie = headers["Set-Cookie"]
        assert "HttpOnly" in cookie and "SameSite=Strict" in cookie
        assert ask(server, "/sweep/planned", Cookie=cookie.split(";")[0])[0] == 200
        assert ask(server, "/sweep/planned", Cookie="andrea_ablate=wrong")[0] == 403


def test_an_empty_folder_is_an_empty_list(tmp_path: Path) -> None:
    with serving(tmp_path) as server:
        assert "No sweeps yet" in ask(server, "/")[1]
