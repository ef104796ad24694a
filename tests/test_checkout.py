"""Which commit runs: of a checkout, of one with changes, of none."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from andrea_ablate.checkout import commit


def git(root: Path, *words: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@example.org")
    done = subprocess.run(["git", "-C", root, *names, *words], capture_output=True, text=True, check=True)
    return done.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Iterator[Path]:
    root = tmp_path / "checkout"
    (root / "src").mkdir(parents=True)
    (root / "src" / "code.py").write_text("x = 1\n")
    (root / "notes.md").write_text("first\n")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-qm", "first")
    commit.cache_clear()
    yield root
    commit.cache_clear()


def test_commit_of_a_checkout_and_whether_its_sources_are_those_of_the_commit(checkout: Path) -> None:
    head = git(checkout, "rev-parse", "HEAD")[:12]
    (checkout / "notes.md").write_text("second\n")
    (checkout / "src" / "new.py").write_text("not tracked\n")
    assert commit(checkout) == head
    (checkout / "src" / "code.py").write_text("x = 2\n")
    assert commit(checkout) == head  # what this process began with
    commit.cache_clear()
    assert commit(checkout) == f"{head}+"


def test_commit_of_a_work_tree(checkout: Path, tmp_path: Path) -> None:
    git(checkout, "worktree", "add", "-q", str(tmp_path / "beside"))
    assert commit(tmp_path / "beside") == git(checkout, "rev-parse", "HEAD")[:12]


def test_another_repository_that_git_was_told_of_is_not_asked(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GIT_DIR", str(tmp_path / "nowhere"))
    assert commit(checkout) is not None


@pytest.mark.parametrize("made", [[], [".git"]], ids=["no repository", "one without a commit"])
def test_without_a_commit_there_is_none(tmp_path: Path, made: list[str]) -> None:
    for _ in made:
        git(tmp_path, "init", "-q")
    assert commit(tmp_path) is None


def test_without_git_there_is_none(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(checkout))
    assert commit(checkout) is None
