"""Which commit measured: of our own checkout, never of somebody else's, and never an error."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_routing_bench.bench.commit import source_version
from moe_routing_bench.core.machine import this_machine
from moe_routing_bench.fleet.host import environment_document

NOTHING = {"commit": "", "dirty": False}


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in [name for name in os.environ if name.startswith("GIT_")]:
        monkeypatch.delenv(name)
    source_version.cache_clear()
    yield
    source_version.cache_clear()


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com", "-c", "commit.gpgsign=false")
    ran = subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True)
    return ran.stdout.strip()


@pytest.fixture
def package(tmp_path: Path) -> Path:
    home = tmp_path / "checkout" / "src" / "package"
    home.mkdir(parents=True)
    (home / "__init__.py").write_text("x = 1\n")
    git(tmp_path / "checkout", "init", "--quiet")
    git(home, "add", "-A")
    git(home, "commit", "--quiet", "-m", "first")
    return home


def seen(package: Path) -> dict[str, object]:
    source_version.cache_clear()
    return source_version(package)


def test_a_commit_and_whether_it_is_what_lies_there(package: Path) -> None:
    commit = git(package, "rev-parse", "HEAD")
    assert seen(package) == {"commit": commit, "dirty": False}
    (package.parent.parent / "notes.txt").write_text("of no concern to the package")
    assert seen(package) == {"commit": commit, "dirty": False}
    (package / "kernel.py").write_text("new")
    assert seen(package) == {"commit": commit, "dirty": True}
    (package / "kernel.py").unlink()
    (package / "__init__.py").write_text("x = 2\n")
    assert seen(package) == {"commit": commit, "dirty": True}


def test_an_installed_copy_in_somebody_elses_checkout_has_no_commit(package: Path) -> None:
    installed = package.parent / "venv" / "package"
    installed.mkdir(parents=True)
    (installed / "__init__.py").write_text("")
    assert seen(installed) == NOTHING


def test_no_checkout_no_git_no_commits_are_no_error(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert seen(tmp_path) == seen(tmp_path / "absent") == NOTHING
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "--quiet")
    assert seen(empty) == NOTHING
    monkeypatch.setenv("PATH", str(tmp_path))
    assert seen(package) == NOTHING


def test_a_slow_git_is_not_waited_for(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr("moe_routing_bench.bench.commit.MAX_SECONDS", 0.2)
    assert seen(package) == NOTHING


def test_a_hook_of_another_repository_does_not_lead_astray(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    git(other, "init", "--quiet")
    commit = git(package, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(other / ".git"))
    assert seen(package)["commit"] == commit


def test_it_is_asked_once_and_is_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    document = environment_document(this_machine())
    source = document["source"]
    assert isinstance(source, dict) and set(source) == {"commit", "dirty"}
    assert re.fullmatch("[0-9a-f]{40}|", source["commit"])
    monkeypatch.setattr("subprocess.run", lambda *_, **__: pytest.fail("asked again"))
    assert environment_document(this_machine()) == document
