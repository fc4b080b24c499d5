"""What a record says of two contenders of one cell: the same words for `mrb results` and `mrb decide`.

A verdict is made once, when the cell is measured, with all that was known then: the correction for the
cell's own comparisons, and for code from outside the baseline in another process. Here it is only read.
"""

from __future__ import annotations

from collections.abc import Mapping

from moe_routing_bench.bench.verdict import Comparison, Verdict
from moe_routing_bench.results.record import Record

OPPOSITE: dict[Verdict, Verdict] = {"FASTER": "SLOWER", "SLOWER": "FASTER"}


def recorded(winner: str, records: Mapping[str, Record]) -> dict[str, Comparison]:
    """Those of a cell's records that were compared with this one when they were measured, and how."""
    comparisons = {name: _recorded(records[winner], one) for name, one in records.items() if name != winner}
    return {name: one for name, one in comparisons.items() if one is not None}


def _recorded(a: Record, b: Record) -> Comparison | None:
    """b against a, if one of them was the baseline of the other."""
    if a.implementation.role == "baseline" and b.comparison is not None:
        return _comparison(b, flipped=False)
    if b.implementation.role == "baseline" and a.comparison is not None:
        return _comparison(a, flipped=True)
    return None


def _comparison(record: Record, *, flipped: bool) -> Comparison | None:
    kept = record.comparison
    assert kept is not None and record.timing is not None
    ratio, low, high, verdict = kept.ratio, kept.low, kept.high, kept.verdict
    if not 0 < low <= ratio <= high:
        return None  # no harness wrote this
    if flipped:
        ratio, low, high = 1 / ratio, 1 / high, 1 / low
        verdict = OPPOSITE.get(verdict, verdict)
    return Comparison(
        ratio=ratio,
        interval=(low, high),
        p_value=kept.p_adjusted,
        p_adjusted=kept.p_adjusted,
        rounds=record.timing.samples.count,
        verdict=verdict,
        reason=kept.reason,
        more_rounds=kept.more_rounds,
        aa_floor=kept.aa_floor,
    )
