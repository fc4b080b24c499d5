"""Tables of outcomes: readable in a terminal of 80 columns, names that say which is which, one ranking."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from moe_routing_bench.bench.outcome import CellOutcome
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.report import console as terminal
from moe_routing_bench.report.outcome_tables import outcome_document, per_second, show_outcome, show_summary
from moe_routing_bench.workloads.experiment import ImplementationRef
from sample_outcomes import an_outcome

STAGED, EAGER = ImplementationRef(name="staged"), ImplementationRef(name="eager_loop")


def routed(*routers: str, spec: str = "staged", layer: str = "") -> tuple[ImplementationRef, ...]:
    return tuple(ImplementationRef(name=spec, router=router, layer=layer) for router in routers)


def rows_of(text: str, head: str) -> list[list[str]]:
    """The table under the line that begins with head, its cells: two spaces stand between them."""
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.startswith(head))
    end = next((number for number in range(start, len(lines)) if not lines[number]), len(lines))
    return [re.split(r"\s{2,}", line.strip()) for line in lines[start:end]]


def test_a_cell_shows_rates_after_its_time(capsys: pytest.CaptureFixture[str]) -> None:
    show_outcome(an_outcome(0.01, 0.02, implementations=(STAGED, EAGER)))
    head, best, worse = rows_of(capsys.readouterr().out, "implementation")
    assert head == [
        "implementation", "ms", "tokens/s", "GB/s", "TFLOP/s", "ratio", "99 % interval", "verdict",
        "peak MiB",
    ]  # fmt: skip
    assert best == ["staged", "10.000", "10.0 k", "0.010", "0.00040", "1", "baseline", "300"]
    assert worse[:5] == ["eager_loop", "20.000", "5.00 k", "0.0050", "0.00020"] and "SLOWER" in worse


def test_packing_shows_both_conventions_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    implementation = ImplementationRef(name="index_select+gather_sum")
    show_outcome(
        an_outcome(1e-5, implementations=(implementation,), span="pack", cost=Cost(activation_bytes=1000))
    )
    text = capsys.readouterr().out
    assert re.search(r"bw_2pass +bw_strict\n", text) and "TFLOP/s" not in text
    assert rows_of(text, "implementation")[1][2:5] == ["10.0 M", "10.2", "15.4"]


@pytest.fixture
def terminal_of(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], Console]:
    def made(columns: int) -> Console:
        shown = Console(width=columns, force_terminal=True, record=True, color_system=None)
        for module in (terminal,):
            monkeypatch.setattr(module, "console", lambda **_: shown)
        return shown

    return made


LONG = "staged(combine=native,dispatch=native,grouped_gemm=native)"
LAYOUTS = ("compact", "padded(capacity_factor=1.25,drop=position)")
BOTH = tuple(
    ImplementationRef(name=spec, layout=layout) for spec in (LONG, "eager_loop") for layout in LAYOUTS
)


@pytest.mark.parametrize("columns", [80, 100])
def test_a_table_is_readable_in_few_columns(columns: int, terminal_of: Callable[[int], Console]) -> None:
    shown = terminal_of(columns)
    outcome = an_outcome(0.01, 0.02, 1.23456, 0.0099, implementations=BOTH)
    show_outcome(outcome)
    show_summary([outcome, an_outcome(0.01, "OOM", implementations=(STAGED, EAGER), T=4)])
    text = shown.export_text()
    assert max(map(len, text.splitlines())) <= columns
    assert "…" not in text
    # every row is one line, and the legend says which it is
    (row, *_) = [line for line in text.splitlines() if "1234.560" in line and "99 %" not in line]
    assert re.search(r"^ *4 +1234\.560 +81\.0 .*3\.2e-06 +123\.\d+ +123\.\d+ to 123\.\d+ +SLOWER", row)
    assert re.search(r"^4  eager_loop @ compact *$", text, re.M)
    assert f"{LONG} @ {LAYOUTS[1]}" in re.sub(r" *\n +", " ", text)


def test_a_pipe_has_numbered_rows_too(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = an_outcome(0.01, 0.02, 1.23456, 0.0099, implementations=BOTH)
    show_outcome(outcome)
    assert f"  {LONG} @ {LAYOUTS[1]}\n" in capsys.readouterr().out  # no name is wrapped in a pipe
    monkeypatch.setenv("COLUMNS", "300")
    show_outcome(outcome)
    names = [row[0] for row in rows_of(capsys.readouterr().out, "implementation")[1:]]
    assert f"{LONG} @ {LAYOUTS[1]}" in names


def test_what_was_not_timed_is_grouped_by_reason(capsys: pytest.CaptureFixture[str]) -> None:
    specs = ("staged", "triton_fused", "triton_decode", "eager_loop")
    made = an_outcome(
        0.01,
        "UNSUPPORTED",
        "UNSUPPORTED",
        "OOM",
        implementations=tuple(ImplementationRef(name=s) for s in specs),
    )
    why = "needs triton, which is not installed"
    reasons = ("", f"expert_ffn.triton_fused: {why}", f"expert_ffn.triton_decode: {why}", "too much")
    outcomes = tuple(replace(one, reason=text) for one, text in zip(made.outcomes, reasons, strict=True))
    show_outcome(replace(made, outcomes=outcomes))
    lines = capsys.readouterr().out.splitlines()
    start = lines.index("Not timed")
    assert lines[start + 1 : start + 3] == [
        f"  UNSUPPORTED  triton_fused, triton_decode: {why}",
        "  OOM          eager_loop: too much",
    ]


def test_what_only_had_its_trial_is_in_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    specs = ("staged", "eager_loop", "hf_batched_mm")
    implementations = tuple(ImplementationRef(name=s) for s in specs)
    made = an_outcome(0.01, 0.02, "NO_TIME", implementations=implementations)
    slow = replace(made.outcomes[2], trial_ms="~1,400")
    show_outcome(replace(made, outcomes=(*made.outcomes[:2], slow, *made.outcomes[3:])))
    row = rows_of(capsys.readouterr().out, "implementation")[-1]
    assert row[:2] == ["hf_batched_mm", "~1,400"] and row[-1] == "NO_TIME"


def test_names_say_what_differs(capsys: pytest.CaptureFixture[str]) -> None:
    show_outcome(an_outcome(0.01, 0.02, implementations=routed("softmax_topk", "switch")))
    text = capsys.readouterr().out
    assert [row[0] for row in rows_of(text, "implementation")[1:]] == [
        "staged, softmax_topk",
        "staged, switch",
    ]
    assert [row[0] for row in rows_of(text, "router")[1:]] == ["softmax_topk", "switch"]
    both = (*routed("switch"), *routed("switch", layer="chain(iterations=2)"))
    show_outcome(an_outcome(0.01, 0.02, implementations=both, direction="train"))
    text = capsys.readouterr().out
    assert "layer train, T=100" in text and "switch" not in text
    names = [row[0] for row in rows_of(text, "implementation")[1:]]
    assert names == ["staged, moe", "staged, chain(iterations=2)"]


def summary(capsys: pytest.CaptureFixture[str], *outcomes: CellOutcome) -> tuple[str, list[list[str]]]:
    show_summary(outcomes)
    text = capsys.readouterr().out
    lines = text.splitlines()
    return lines[1], [re.split(r"\s{2,}", line.strip()) for line in lines[2 : lines.index("", 2)]]


def test_one_ranking_over_cells(capsys: pytest.CaptureFixture[str]) -> None:
    about, rows = summary(
        capsys,
        an_outcome(0.01, 0.02, implementations=routed("softmax_topk", "switch")),
        an_outcome(0.02, 0.03, implementations=routed("softmax_topk", "switch"), T=400),
        an_outcome(0.003, 0.006, implementations=routed("softmax_topk", "switch"), direction="train"),
    )
    assert about == "3 cells: layer, moe, compact, staged, D=64, F=32, E=8, K=2, float32, zipf(1.2)"
    assert rows[0] == [
        "direction", "router", "T", "ms", "tokens/s", "ratio", "99 % interval", "verdict",
    ]  # fmt: skip
    assert [row[:5] for row in rows[1:]] == [
        ["forward", "softmax_topk", "400", "20.000", "20.0 k"],
        ["forward", "switch", "400", "30.000", "13.3 k"],
        ["forward", "softmax_topk", "100", "10.000", "10.0 k"],
        ["forward", "switch", "100", "20.000", "5.00 k"],
        ["train", "softmax_topk", "100", "3.000", "33.3 k"],
        ["train", "switch", "100", "6.000", "16.7 k"],
    ]
    # each against the baseline of its own cell
    assert [row[5] for row in rows[1:]] == ["1", "1.500", "1", "2.000", "1", "2.000"]
    assert rows[1][-1] == "baseline" and rows[2][-1] == "SLOWER"


def test_only_what_varies_is_a_column(capsys: pytest.CaptureFixture[str]) -> None:
    cells = [
        an_outcome(0.01, 0.02, implementations=(STAGED, EAGER), workload=name) for name in ("uniform", "zipf")
    ]
    about, rows = summary(capsys, *cells)
    assert about == "2 cells: layer, forward, moe, compact, T=100, D=64, F=32, E=8, K=2, float32"
    assert rows[0][:3] == ["implementation", "workload", "ms"] and len(rows) == 5
    sizes = [an_outcome(0.01, implementations=(STAGED,), **{letter: 4}) for letter in "EK"]
    assert summary(capsys, *sizes)[1][0][:3] == ["E", "K", "ms"]
    # nothing else tells them apart
    assert summary(capsys, cells[0], cells[0])[1][0][:3] == ["implementation", "case", "ms"]


def test_cells_without_a_time_have_no_ranking(capsys: pytest.CaptureFixture[str]) -> None:
    show_summary(
        [an_outcome("OOM", implementations=(STAGED,)), an_outcome("CRASHED", implementations=(STAGED,))]
    )
    assert "Nothing was timed in any of the cells" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("rate", "words"),
    [(0.0, "0.0"), (0.5, "0.50"), (1.0, "1.00"), (12.34, "12.3"), (999.4, "999"), (999.6, "1.00 k"),
     (12_345, "12.3 k"), (4.56e6, "4.56 M"), (9.996e6, "10.0 M"), (7.8e12, "7,800 G")],
)  # fmt: skip
def test_rates_have_three_digits(rate: float, words: str) -> None:
    assert per_second(rate) == words


def test_json_has_direction_router_layer_and_rates() -> None:
    implementations = (*routed("switch", layer="chain(iterations=2)"), EAGER)
    document = json.loads(
        json.dumps(
            outcome_document(an_outcome(0.01, "OOM", implementations=implementations, direction="train")),
            default=str,
        )
    )
    assert document["direction"] == "train"
    timed, failed = document["implementations"]
    assert (timed["router"], timed["layer"]) == ("switch", "chain(iterations=2)")
    assert timed["tokens_per_second"] == pytest.approx(1e4)
    assert timed["flops_per_second"] == pytest.approx(4e8)
    assert timed["bytes_per_second"] == pytest.approx(1e7)
    assert failed["tokens_per_second"] is None and failed["router"] == ""
