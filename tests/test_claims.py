"""README and the pages beside it: every measured number is a claim, and has the value of its record."""

from __future__ import annotations

import importlib
import re
from dataclasses import replace
from typing import Any

import pytest

from repository import ROOT

pytestmark = pytest.mark.slow
PAGES = [
    "README.md",
    "docs/index.md",
    "docs/python.md",
    *(
        str(path.relative_to(ROOT))
        for kind in ("howto", "tutorials")
        for path in (ROOT / "docs" / kind).glob("*.md")
    ),
    *(
        f"docs/{name}.md"
        for name in "formats gpu kernels layouts parallel quality routers study/README which_router".split()
    ),
]
COUNTED = (
    "accesses cells comparisons disagreements faults kernels launches layouts records runs servers workers"
)
# 2.2x, 31 %, 1.5 ms, 0.12 s, 1.842 ± 0.077, 40 planted faults
MEASURED = re.compile(
    r"\d[\d.]*(x\b| ?%| (ms|s|GB/s)\b)|± \d[\d.]*"
    rf"|\b\d[\d,]*(\s[a-zA-Z]\w*)?\s({COUNTED.replace(' ', '|')})\b"
)
# tables that quality.py, which_router.py and figures.py write; their tests compare them
WRITTEN = r"<!-- table (?P<name>\w+): begin -->.*?<!-- table (?P=name): end -->"
# sentences with numbers that nobody measured
RULES = {
    "99 %": "the level of an interval",
    "beyond 2 % (3 % for code from outside)": "the rule of bench/verdict.py",
    "A slow-down of 5 %": "which slow-down was planted",
    "one of 3 %": "which slow-down was planted",
    "100 % and 0 if all experts": "the ends of a scale",
    "the 95 % interval": "the level of an interval",
    "A share near 100 %": "the end of a scale",
    "vLLM's 8 and 4 bit kernels": "widths of weights",
    "Above 10^7 records": "advice on when to divide the work",
    "the same 60 cells": "how many were run: measurements/fleet/engines.py",
    "connections close | 5 s |": "notes wait that long: parallel/ranks.py",
    "twice the timeout and 10 s": "the same",
    "transports that differ by over 10 %": "which pairs are counted: parallel/links.py",
    "saves more than 2 % of": "the rule of `mrb parallel place`",
    "within 2 % of the fastest": "the rule of `mrb parallel plan`",
}


@pytest.fixture(scope="module")
def claims() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "measurements")
        yield importlib.import_module("claims")


def test_documents_have_the_numbers_of_the_records(claims: Any) -> None:
    listed = claims.claims()
    assert claims.differences(listed) == [], "run python measurements/claims.py --write"
    homes = (ROOT, ROOT / "measurements")
    assert all(any((home / one.record).exists() for home in homes) for one in listed)


def test_another_record_would_be_noticed(claims: Any) -> None:
    for claim in claims.claims():
        other = tuple(f"{value}1" for value in claim.wanted())
        forged = replace(claim, values=lambda other=other: other)
        assert claims.differences([forged]) and not claims.differences([claim])
        text = (ROOT / claim.document).read_text()
        assert claim.written(text) == text != forged.written(text)


def test_every_number_is_a_claim(claims: Any) -> None:
    listed, without = claims.claims(), []
    for page in PAGES:
        text = (ROOT / page).read_text()
        plain = re.sub(
            rf"^```.*?^```|`[^`\n]*`|\]\([^)]*\)|^    .*?$|{WRITTEN}",
            lambda found: " " * len(found[0]),
            text,
            flags=re.S | re.M,
        )
        patterns = [one.pattern() for one in listed if one.document == page]
        patterns += [re.compile(re.escape(rule)) for rule in RULES]
        spans = [found.span() for pattern in patterns for found in pattern.finditer(text)]
        for found in MEASURED.finditer(plain):
            if not any(begin <= found.start() < end for begin, end in spans):
                without.append(f"{page}: {plain[max(0, found.start() - 40) : found.end()]!r}")
    assert not without, without


def test_readme_shows_what_the_command_printed(claims: Any) -> None:
    rows = claims.rows_of(claims.FLAGSHIP)
    printed = (ROOT / "measurements/cpu/flagship.txt").read_text()
    block = re.search(r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    assert block is not None and rows
    shown = [line for line in block[1].splitlines() if line]
    assert shown and all(line in printed.splitlines() for line in shown)
    assert all(f" {row['median_ms']:.3f} " in printed for row in rows)
