"""The page of a results folder: what is in it, what is not compared, and that records stay text."""

from __future__ import annotations

import base64
import hashlib
import json
import re
import shutil
import sys
import tarfile
from html.parser import HTMLParser
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from command_line import mrb
from many_runs import fill
from moe_routing_bench.report import page as page_of
from moe_routing_bench.report.drawing import Picture, figure, inline
from moe_routing_bench.report.finding import results_folders
from moe_routing_bench.report.markdown import markdown
from moe_routing_bench.report.page import HERE, make_page, plain, render
from moe_routing_bench.report.reading import Material, read
from moe_routing_bench.report.tables import ranking, regret_table
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.read import command_of
from repository import ROOT
from sample_runs import OTHER_MACHINE, add_cell, make_run

torch.set_num_threads(1)
MEASUREMENTS = ROOT / "measurements"
HOSTILE = (
    "<script>alert(1)</script>",
    '"><svg onload=alert(1)>',
    "</script></style><style>*{display:none}</style>",
    "x\u202eright to left\u2066",
    "$\\frac{1}{0}$ ${broken",
    "`*_[link](http://example.com)| @someone",
    "&lt;b&gt; &amp;",
    "w" * 300,
)


def material_of(*paths: Path) -> Material:
    with results_folders(paths) as found:
        return read(found)


def html_of(*paths: Path) -> str:
    return render(make_page(material_of(*paths), "mrb results report x"))


class Elements(HTMLParser):
    """Every element with its attributes, and the text outside of scripts and styles."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.words = ""
        self._open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        while self._open and self._open.pop() != tag:
            pass

    def handle_data(self, data: str) -> None:
        if not self._open or self._open[-1] not in ("script", "style"):
            self.words += data


def test_the_records_of_this_project_make_a_page(tmp_path: Path) -> None:
    timed = [MEASUREMENTS / "records" / f"{topic}.tar.xz" for topic in ("layouts", "pack", "training")]
    made = mrb("results", "report", *timed, MEASUREMENTS / "training" / "chain", "-o", tmp_path / "r.html")
    assert "137 records" in made.stdout
    html = (tmp_path / "r.html").read_text()
    titles = re.findall(r"<h3>(.*?)</h3>", html)
    assert {"One choice everywhere", "Roofline", "Layouts", "Time and memory", "Every case"} <= set(titles)
    assert not {"Stages", "Routers"} & set(titles), "sections without data are left out"
    answer, rest = html.split("</header>")
    assert answer.count("<figure") == 1 and "<h3>" not in answer, "the first screen: sentences and one chart"
    assert "faster than" in answer and "Study chain" in answer
    shown, evidence = rest.split('<details id="evidence">')
    for title in ("Machine, versions and commits", "Rounds and noise", "Checks that failed"):
        assert f"<h3>{title}" in evidence and f"<h3>{title}" not in shown


def test_every_chart_has_a_finding_and_a_table() -> None:
    topics = ("default", "layouts", "soft", "pack", "skew")
    page = make_page(material_of(*(MEASUREMENTS / "records" / f"{topic}.tar.xz" for topic in topics)), "")
    kinds = {one.name.partition("-")[0] for one in page.pictures}
    assert kinds >= {"leads", "winners", "memory", "layouts", "stages", "bandwidth", "roofline", "routers"}
    for one in page.pictures:
        assert one.title and one.table is not None and one.table.rows, one.name


def test_the_answer_is_that_of_the_contests() -> None:
    material = material_of(MEASUREMENTS / "records" / "default.tar.xz")
    page = make_page(material, "")
    cells = {cell.anchor: cell.contest for cell in material.chapters[0].cells}
    assert page.chart is not None and page.chart.table is not None
    table = page.chart.table
    assert set(table.links) <= set(cells) and len(table.links) == 6, (
        "a case that was measured twice counts once"
    )
    for row, link in zip(table.rows, table.links, strict=True):
        contest = cells[link]
        values = dict(zip(table.head, row, strict=True))
        assert contest is not None
        assert (values["winner"], values["than the next"]) == (contest.winner, contest.second)
        low, high = contest.lead.interval
        lead = f"{contest.lead.ratio:.2f} ({low:.2f} to {high:.2f})"
        assert values["times faster (99 % interval)"] == lead
        assert (values["certain"] == "yes") is not bool(contest.ties)


def test_a_case_links_to_its_records_and_its_command(tmp_path: Path) -> None:
    html = html_of(make_run(tmp_path / "r", {"a": 1.0, "b": 0.5}))
    page = Elements(html)
    ids = {attributes["id"] for _, attributes in page.found if "id" in attributes}
    links = [a.get("href") or a["xlink:href"] for tag, a in page.found if tag == "a"]
    assert links and {str(link)[1:] for link in links} <= ids
    (cell,) = material_of(tmp_path / "r").chapters[0].cells
    assert f"#{cell.anchor}" in links and (command := command_of(cell.first)) in page.words and command
    assert cell.first.repro not in page.words  # anybody may have written it
    rows = json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])["rows"]  # type: ignore[index]
    assert any(cell.first.record_id in line for lines in rows for line in lines)


def test_figures_and_markdown_without_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    soft = MEASUREMENTS / "records" / "soft.tar.xz"
    found = mrb("results", "report", soft, "--markdown", "--figures", "figures")
    assert "| case | fastest |" in found.stdout and "3 figures" in found.stderr
    files = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert len(files) == 9 and {Path(name).suffix for name in files} == {".svg", ".pdf", ".png"}
    assert not (tmp_path / "report.html").exists()


def test_the_numbers_are_those_of_the_records() -> None:
    material = material_of(MEASUREMENTS / "records" / "layouts.tar.xz")
    cells = material.chapters[0].cells
    assert len(cells) == 6
    for cell in cells:
        table = ranking(cell)
        for record, row in zip(cell.passed, table.rows, strict=True):
            values = dict(zip(table.head, row, strict=True))
            assert record.timing is not None
            assert float(values["ms"].replace(",", "")) == pytest.approx(1e3 * record.timing.median, rel=1e-3)
            if record.comparison is not None:
                assert values["ratio"] == f"{record.comparison.ratio:.3f}"
                assert values["verdict"] == record.comparison.verdict


def test_what_drops_pairs_wins_nothing() -> None:
    for cell in material_of(MEASUREMENTS / "records" / "layouts.tar.xz").chapters[0].cells:
        assert cell.contest is not None
        dropping = {
            cell.names[r.record_id] for r in cell.passed if r.routing is not None and r.routing.dropped_pairs
        }
        assert dropping and not dropping & set(cell.contest.ratios)


def test_a_faster_router_is_no_winner() -> None:
    material = material_of(MEASUREMENTS / "records" / "soft.tar.xz")
    (group,) = material.chapters[0].groups
    assert not group.decides and regret_table(group) is None
    titles = [section.title for section in make_page(material, "").chapters[0][1]]
    assert "Routers" in titles and "Stages" in titles
    assert not [title for title in titles if title.startswith("Winners")]
    assert make_page(material, "").chart is None


def test_unlike_machines_are_chapters_of_their_own(tmp_path: Path) -> None:
    times = {"a": 1.0, "b": 0.5}
    with Session.start(tmp_path / "r") as session:
        add_cell(session, times)
        add_cell(session, times, environment=OTHER_MACHINE)
        add_cell(session, times, experiment__threads=2, seed=1)
    material = material_of(tmp_path / "r")
    assert [len(chapter.cells) for chapter in material.chapters] == [1, 1, 1]
    assert len({chapter.title for chapter in material.chapters}) == 3
    assert "Nothing is compared across chapters" in html_of(tmp_path / "r").replace("\n", " ")


def test_of_two_runs_of_a_question_the_newer_counts(tmp_path: Path) -> None:
    make_run(tmp_path / "old", {"a": 1.0, "b": 0.5}, created_at="2026-11-14T00:00:00Z")
    make_run(tmp_path / "new", {"a": 1.0, "b": 2.0}, created_at="2026-11-15T00:00:00Z")
    for order in (("old", "new"), ("new", "old")):
        material = material_of(*(tmp_path / name for name in order))
        (cell,) = material.chapters[0].cells
        assert material.older == 1 and cell.contest is not None and cell.contest.winner == "a"


def test_cells_are_sorted_by_number(tmp_path: Path) -> None:
    names = [f"case-{n}" for n in (128, 2, 16)]
    with Session.start(tmp_path / "run") as session:
        for T, name in [(16, one) for one in names] + [(T, "same") for T in (1000, 128, 2, 16)]:
            add_cell(session, {"a": 1.0, "b": 0.5}, experiment__T=T, experiment__case=name)
    (group,) = material_of(tmp_path / "run").chapters[0].groups
    of = [(cell.first.experiment.T, cell.first.experiment.case) for cell in group.cells]
    assert [case for _, case in of if case != "same"] == ["case-2", "case-16", "case-128"]
    assert [T for T, case in of if case == "same"] == [2, 16, 128, 1000]


def test_ties_are_those_of_the_decisions(tmp_path: Path) -> None:
    from moe_routing_bench.results.decisions import decide

    make_run(tmp_path / "r", {"a": 1.0, "b": 0.8, "c": 0.801, "d": 0.9})
    (cell,) = material_of(tmp_path / "r").chapters[0].cells
    (answer,) = decide(tmp_path / "r").answers
    assert cell.contest is not None
    assert (cell.contest.winner, cell.contest.ties) == (answer.contests[0].winner, answer.contests[0].ties)


def hostile_run(folder: Path) -> Path:
    """Whatever a record lets anybody write, in every field that a page shows."""
    environment = {
        "machine": {"name": HOSTILE[0], "torch": HOSTILE[1], "python": HOSTILE[2], "cpu": "z" * 100_000},
        "settings": {"X": HOSTILE[2]},
    }
    with Session.start(folder) as session:
        for place, text in enumerate(HOSTILE):
            for T in (1, 16):
                add_cell(
                    session,
                    {text: 1.0, f"other {text}"[:300]: 0.5, "broken": "OOM"},
                    environment=environment, seed=place, experiment__case=text, model=text,
                    experiment__T=T, repro=f"mrb bench {text}", experiment__workload=text,
                    protocol__stop_reason=text, each={"broken": {"correctness__reason": text}},
                )  # fmt: skip
    return folder


def test_records_cannot_become_markup(tmp_path: Path) -> None:
    html = html_of(hostile_run(tmp_path / "r"))
    page = Elements(html)
    tags = [tag for tag, _ in page.found]
    assert tags.count("script") == 2 and tags.count("style") == 1
    for tag, attributes in page.found:
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
        assert tag not in ("iframe", "object", "embed", "link", "base", "form", "b-")
        for name in ("href", "src", "xlink:href"):
            target = attributes.get(name) or "#"
            assert target.startswith(("#", "data:image/png")), target
    assert "\u202e" not in html and "\u2066" not in html, "nothing turns the direction of the text"
    assert "\\u202eright to left" in page.words
    for text in HOSTILE[:3]:
        assert text in page.words, "it is shown as text"
    assert "z" * 5_000 not in html, "huge strings are cut"
    assert json.loads(re.search(r'id="data">(.*?)</script>', html, re.S)[1])["rows"]  # type: ignore[index]


def test_markdown_keeps_records_as_text(tmp_path: Path) -> None:
    text = markdown(material_of(hostile_run(tmp_path / "r")))
    assert "<script" not in text and "\u202e" not in text
    assert "](http" not in text and "http://" not in text and "@someone" not in text
    assert len([line for line in text.splitlines() if line.startswith("|")]) == 2 + 2 * len(HOSTILE)


def test_a_page_asks_nothing_of_the_network(tmp_path: Path) -> None:
    html = html_of(make_run(tmp_path / "r", {"a": 1.0, "b": 0.5}))
    assert not re.findall(r"https?://(?!www\.w3\.org/)", html)
    script = (HERE / "page.js").read_text()
    assert len(script.encode()) < 30_000 and f"<script>{script}</script>" in html
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in html and "default-src 'none'" in html


def test_text_for_a_page() -> None:
    assert plain("a\u202eb\x00") == "a\\u202eb\\u0000"
    assert plain("x" * 5_000).endswith("and 1,000 more letters")
    assert plain(3) == 3


def test_figures_follow_the_colours_of_the_page() -> None:
    page = make_page(material_of(MEASUREMENTS / "records" / "soft.tar.xz"), "")
    svg = inline(page.pictures[0])
    assert svg.startswith("<svg viewBox=") and "var(--ink)" in svg and "#0b0b0c" not in svg


def test_a_drawing_in_a_page_loses_digits_of_places_but_no_word() -> None:
    made = figure(2, 2)
    made.text(0.123456, 0.5, "1.23456 Many Large")
    svg = inline(Picture(name="a", title="", caption="", figure=made))
    assert ">1.23456 Many Large<" in svg and not re.search(r'"[^"<>]*\.\d{3}', svg)


def test_packed_folders_and_folders_of_folders(tmp_path: Path) -> None:
    make_run(tmp_path / "all" / "first", {"a": 1.0, "b": 0.5})
    make_run(tmp_path / "second", {"a": 1.0, "b": 0.7}, seed=5)
    with tarfile.open(tmp_path / "all" / "second.tar.xz", "w:xz") as tar:
        tar.add(tmp_path / "second", ".")
    with results_folders([tmp_path / "all"]) as found:
        assert [Path(one.name).name for one in found] == ["first", "second.tar.xz"]
        material = read(found)
        unpacked = found[1].folder
    assert material.records.records == 6 and not unpacked.exists()


def test_an_archive_cannot_write_elsewhere(tmp_path: Path) -> None:
    make_run(tmp_path / "r", {"a": 1.0, "b": 0.5})
    with tarfile.open(tmp_path / "bad.tar", "w") as tar:
        tar.add(tmp_path / "r", "")
        for name in ("../escaped.txt", "/tmp/escaped.txt", "session=x/../../escaped.txt", "run.py"):
            tar.addfile(tarfile.TarInfo(name))
        link = tarfile.TarInfo("session=link/records.jsonl")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    with results_folders([tmp_path / "bad.tar"]) as found:
        inside = {path.name for path in found[0].folder.rglob("*") if path.is_file()}
        assert {"records.jsonl", "samples.f64"} <= inside and not {"run.py", "escaped.txt"} & inside
        assert not list(found[0].folder.parent.glob("escaped.txt"))


@pytest.mark.parametrize("given", ["missing", "empty", "no-archive.tar"])
def test_a_path_without_results_is_said(tmp_path: Path, given: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "no-archive.tar").write_bytes(b"not an archive")
    ran = mrb("results", "report", tmp_path / given, "-o", tmp_path / "r.html", code=2)
    assert len(ran.stderr.strip().splitlines()) == 1 and given in ran.stderr
    assert not (tmp_path / "r.html").exists()


def test_a_broken_study_is_a_sentence(tmp_path: Path) -> None:
    shutil.copytree(MEASUREMENTS / "training" / "chain", tmp_path / "s")
    (tmp_path / "s" / "times.json").write_text('{"seconds": 3}')
    (study,) = material_of(tmp_path / "s").studies
    assert study.pareto is None and "do not match" in study.why


def test_what_is_missing_names_its_install_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = make_page(material_of(make_run(tmp_path / "r", {"a": 1.0, "b": 0.5})), "")
    page_of._environment.cache_clear()
    for name in ("jinja2", "markupsafe"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(NotImplementedError, match=r"pip install 'moe-routing-bench\[report\]'"):
        render(made)


@pytest.mark.slow
def test_two_thousand_records_fit_three_megabytes(tmp_path: Path) -> None:
    assert fill(tmp_path / "r", 2_000) >= 2_000
    assert len(html_of(tmp_path / "r").encode()) < 3_000_000


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_a_hundred_thousand_records_have_exact_tables(tmp_path: Path) -> None:
    """The winners and losses of every cell, against a few lines of numpy over the same samples."""
    count = fill(tmp_path / "r", 100_000)
    material = material_of(tmp_path / "r")
    assert material.records.records == count
    cells = material.chapters[0].cells
    losses: dict[str, list[float]] = {}
    for cell in cells:
        ratios = {
            cell.names[r.record_id]: 1.0 if r.comparison is None else r.comparison.ratio for r in cell.passed
        }
        assert cell.contest is not None and cell.contest.winner == min(ratios, key=ratios.__getitem__)
        for name, ratio in ratios.items():
            losses.setdefault(name, []).append(ratio / min(ratios.values()) - 1)
    (group,) = material.chapters[0].groups
    table = regret_table(group)
    assert table is not None
    rows: dict[str, Any] = {row[0]: row for row in table.rows}
    worst = max(losses["hf"])
    assert rows["hf"][3] == f"{100 * worst:.1f} %"
    html = render(make_page(material, "mrb results report r"))
    assert len(html.encode()) < 10_000_000 and "cells are not listed here" in html


def test_plotly_shows_hostile_names_as_text(tmp_path: Path) -> None:
    pytest.importorskip("plotly")
    make_run(tmp_path / "r", {name: 1.0 + place for place, name in enumerate(HOSTILE[:3])})
    mrb(
        "results",
        "report",
        tmp_path / "r",
        "-o",
        tmp_path / "page.html",
        "--plotly",
        tmp_path / "explore.html",
    )
    text = (tmp_path / "explore.html").read_text()
    assert "Plotly.newPlot" in text and "src=" not in text.partition("Plotly.newPlot")[2]
    assert not [name for name in HOSTILE[:3] if name in text]


def test_without_plotly_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "plotly.graph_objects", None)
    make_run(tmp_path / "r", {"staged": 1.0, "native": 0.5})
    page = tmp_path / "page.html"
    ran = mrb("results", "report", tmp_path / "r", "-o", page, "--plotly", tmp_path / "explore.html", code=2)
    assert "[interactive]" in ran.stderr and not (tmp_path / "explore.html").exists()


def test_comparisons_with_clear_winners_open_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    tied, clear = SimpleNamespace(ties=("staged",)), SimpleNamespace(ties=())

    def group(span: str, *contests: SimpleNamespace) -> SimpleNamespace:
        return SimpleNamespace(span=span, decided=[(None, contest) for contest in contests])

    op, layer = group("dispatch", clear, clear, clear), group("layer", clear, clear)
    even = group("layer", tied, tied, tied)
    monkeypatch.setattr(page_of, "decided", lambda one: one.decided)
    material: Any = SimpleNamespace(chapters=[SimpleNamespace(groups=[op, even, layer])])
    assert [one for _, one in page_of._answered(material)] == [layer, even, op]
