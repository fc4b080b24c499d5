"""Documents are short, their links and files exist, and the version is the same everywhere."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path

import pytest

import first_hour
from repository import ROOT, SOURCE

DOCUMENTS = [
    "README.md",
    "DESIGN.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md")),
]
START = ("docs/index.md", "docs/python.md", "docs/tutorials/", "docs/howto/")
MAX_WORDS = {
    ("README.md",): 900,
    ("DESIGN.md",): 2_000,
    ("CONTRIBUTING.md",): 1_500,
    ("CHANGELOG.md",): 1_800,
    START: 5_500,
    ("",): 25_000,
}
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


def words_in(text: str) -> int:
    """Everything between spaces that has a letter or a digit: prose, tables and code."""
    return len(re.findall(r"\S*[^\W_]\S*", text))


@pytest.mark.parametrize(("starts", "most"), MAX_WORDS.items(), ids=lambda one: str(one))
def test_documents_are_short(starts: tuple[str, ...], most: int) -> None:
    words = {one: words_in(text_of(one)) for one in DOCUMENTS if one.startswith(starts)}
    assert 0 < sum(words.values()) <= most, words


def test_words_are_counted() -> None:
    assert words_in("| `mrb list` | 2.2x faster |\n|---|---|") == 4


def test_links_lead_somewhere() -> None:
    """Pages that another one includes have no links to files: they are read in two places."""
    broken = []
    for document in (*DOCUMENTS, "SECURITY.md", "CODE_OF_CONDUCT.md"):
        plain = re.sub(r"^```.*?^```|`[^`\n]*`", "", text_of(document), flags=re.S | re.M)
        for link in re.findall(r"\]\(([^)\s#]+)[^)]*\)", plain):
            if not link.startswith("http") and not ((ROOT / document).parent / link).exists():
                broken.append(f"{document}: {link}")
    assert not broken, broken


def test_documents_name_only_files_that_exist() -> None:
    folders = r"src|tests|examples|measurements|docs|\.ci|" + "|".join(path.name for path in SOURCE.iterdir())
    homes, found, missing = (ROOT, SOURCE, ROOT / "measurements"), 0, []
    for document in DOCUMENTS:
        named = re.findall(rf"[`(/ ]((?:{folders})/[\w./-]*\w/?)[`) ]", text_of(document))
        found += len(named)
        missing += [(document, path) for path in named if not any((home / path).exists() for home in homes)]
    assert found > 100 and not missing, missing


def test_the_version_is_the_same_everywhere() -> None:
    version = tomllib.loads(text_of("pyproject.toml"))["project"]["version"]
    assert f"\nversion: {version}\n" in text_of("CITATION.cff")
    released = re.findall(r"^## (\d\S+) - \d{4}-\d\d-\d\d$", text_of("CHANGELOG.md"), re.M)
    assert released[0] == version


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issue_forms_are_forms(form: Path) -> None:
    read = pytest.importorskip("yaml").safe_load(form.read_text())
    if "body" in read:
        assert {"name", "description"} <= set(read)
        assert all(part["type"] and part["attributes"] for part in read["body"])
    else:
        assert read == {"blank_issues_enabled": True}


def test_other_settings_can_be_read() -> None:
    yaml = pytest.importorskip("yaml")
    assert json.loads(text_of(".devcontainer/devcontainer.json"))["postCreateCommand"]
    assert yaml.safe_load(text_of(".readthedocs.yaml"))["sphinx"]["configuration"] == "docs/conf.py"
    hooks = yaml.safe_load(text_of(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    assert [hook["entry"].split()[:2] for hook in hooks] == [["ruff", "check"], ["ruff", "format"]]


def test_the_first_hour_has_each_command_of_the_pages() -> None:
    """But for pip, which that script runs itself."""
    rows = json.loads((ROOT / "measurements" / "first_hour.json").read_text())
    ran = {(row["page"], row["command"]) for row in rows}
    wrong = ran.symmetric_difference(first_hour.lines())
    assert not [one for one in wrong if not re.match(r"(\w+=\w+ )?pip ", one[1])]


@pytest.mark.parametrize("page", [one for one in DOCUMENTS if one.startswith("docs/tutorials/")])
def test_a_tutorial_says_how_long_it_takes(page: str) -> None:
    """measurements/first_hour.json has the seconds of each command, by tests/first_hour.py."""
    rows = json.loads((ROOT / "measurements" / "first_hour.json").read_text())
    minutes = max(1, round(sum(row.get("seconds", 0) for row in rows if row["page"] == page) / 60))
    assert f"take about {minutes} minute{'s' * (minutes > 1)} on two cores" in text_of(page)
