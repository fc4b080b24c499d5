"""The docs site leaves nothing out. That it builds without a warning is a step of .ci/run."""

from __future__ import annotations

import re
import runpy

import moe_routing_bench as mrb
from repository import ROOT, SOURCE

DOCS = ROOT / "docs"


def test_the_reference_names_everything_public() -> None:
    text = (DOCS / "reference" / "library.md").read_text() + (DOCS / "reference" / "routers.md").read_text()
    named = {name.rpartition(".")[2] for name in re.findall(r"auto\w+:: ([\w.]+)", text)}
    missing = set(mrb.__all__) - named
    assert not missing, f"docs/reference does not name {sorted(missing)}"


def test_the_reference_has_every_router_controller_and_operation() -> None:
    text = "".join(path.read_text() for path in (DOCS / "reference").glob("*.md"))
    missing = [op for op in mrb.all_ops() if f"ops.{op}.op" not in text]
    assert not missing, f"docs/reference does not name {missing}"
    conf = runpy.run_path(str(DOCS / "conf.py"))
    source = ["{{facts}} {{routers}} {{controllers}}"]
    conf["fill_routers"](None, "reference/routers", source)
    files = [*mrb.all_routers(), *(path.stem for path in (SOURCE / "controllers").glob("[!_]*.py"))]
    missing = [name for name in files if f".{name}\n" not in source[0]]
    assert not missing, f"docs/conf.py does not name {missing}"


def test_every_page_is_in_the_contents() -> None:
    index = (DOCS / "index.md").read_text()
    pages = {str(path.relative_to(DOCS).with_suffix("")) for path in DOCS.rglob("*.md")}
    sources = {"index", "study/study", "study/slides", "study/summary"}
    missing = sorted(page for page in pages - sources if f"\n{page}\n" not in index)
    assert not missing, f"docs/index.md does not list {missing}"
