"""What measuring a cell gave: frozen values on their way from the runner to records and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moe_routing_bench.bench.cell import Cell
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.subject import Subject
from moe_routing_bench.bench.verdict import Comparison
from moe_routing_bench.bench.weather import WeatherSpan
from moe_routing_bench.cost import Cost


@dataclass(frozen=True, kw_only=True)
class SubjectOutcome:
    """One implementation in one cell. samples and comparison are empty unless status is PASSED.

    SubjectOutcome(subject=Subject(spec="index_add"), label="index_add", status=Status.PASSED,
                   samples=(0.00103, 0.00101, ...), ...): seconds per call, one for each round.
    """

    subject: Subject
    label: str
    status: Status
    reason: str = ""
    runs: str = ""  # what really ran, if that is more than the label
    origin: str = ""
    role: str = "candidate"  # baseline, candidate, twin or beside (see rounds.py)
    source_hash: str = ""
    deterministic: bool = True
    host_sync: str = ""
    checks: tuple[str, ...] = ()
    max_error: float | None = None
    max_bound: float | None = None
    checked_timed_calls: int = 0
    first_call: float | None = None
    calls_per_sample: int = 1
    samples: tuple[float, ...] = ()
    stages: Mapping[str, float] = field(default_factory=dict)
    comparison: Comparison | None = None
    cost: Cost = field(default_factory=Cost)
    floor_seconds: float | None = None
    load: Mapping[str, int | float | None] = field(default_factory=dict)
    peak_rss_bytes: int | None = None
    log_tail: str = ""

    def __post_init__(self) -> None:
        assert (self.status is Status.PASSED) == bool(self.samples), "a time without a pass, or the reverse"


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """One cell, measured: its subjects in the order asked for, then the further copies of the baseline.

    notes: what a reader must know, in sentences: a baseline that was replaced, a busy machine.
    """

    cell: Cell
    key: str
    outcomes: tuple[SubjectOutcome, ...]
    rounds: int = 0
    rounds_by_process: tuple[int, ...] = ()
    stop_reason: str = ""
    aa_floor: float | None = None
    routing_checksum: str = ""
    weather: WeatherSpan | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def subjects(self) -> tuple[SubjectOutcome, ...]:
        """Without the further copies of the baseline."""
        return tuple(o for o in self.outcomes if o.role in ("baseline", "candidate"))

    @property
    def baseline(self) -> SubjectOutcome | None:
        return next((o for o in self.outcomes if o.role == "baseline"), None)

    @property
    def twin(self) -> SubjectOutcome | None:
        return next((o for o in self.outcomes if o.role == "twin"), None)
