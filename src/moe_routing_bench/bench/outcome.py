"""The outcome of a measured cell: frozen values that the runner makes, for records and tables."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal, TypeAlias, cast

from pydantic import TypeAdapter, ValidationError

from moe_routing_bench.bench.identity import Identity
from moe_routing_bench.bench.noise import NoiseDuring
from moe_routing_bench.bench.spans.span import span_named
from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import Comparison
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.text import first_problem
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

MAX_OUTCOME_BYTES = 256 << 20
Direction: TypeAlias = Literal["forward", "backward", "train"]


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Rates from the median time of an implementation; None if it was not timed or has no such work.

    A combine of 16 tokens, D=32, K=2 in 25 us: Rates(tokens_per_second=6.4e5, flops_per_second=8.2e7, ...).
    """

    tokens_per_second: float | None = None
    flops_per_second: float | None = None  # only useful operations
    bytes_per_second: float | None = None  # bytes of the cost: each tensor once
    bw_2pass: float | None = None  # only for the span pack: the two conventions of cost.pack_bytes
    bw_strict: float | None = None


@dataclass(frozen=True, kw_only=True)
class Wire:
    """Bytes that ranks send one another in a call, and the least there must be: Wire(sent=8, least=6)."""

    sent: int
    least: int


@dataclass(frozen=True, kw_only=True)
class Operation:
    """What torch.profiler saw of an operation in one call, on average: Operation(calls=4, self_seconds=0.009,
    seconds=0.01, ...). seconds: with all operations inside it; memory_bytes: allocated less freed."""

    calls: float
    self_seconds: float
    seconds: float
    device_seconds: float
    memory_bytes: float


@dataclass(frozen=True, kw_only=True)
class ImplementationOutcome:
    """One implementation in one cell. samples and comparison are empty unless status is PASSED.

    ImplementationOutcome(implementation=ImplementationRef(name="index_add"), label="index_add",
    status=Status.PASSED,
                   samples=(0.00103, 0.00101, ...), ...): seconds per call, one for each round.
    """

    implementation: ImplementationRef
    label: str
    status: Status
    reason: str = ""
    runs: str = ""  # what really ran, if that is more than the label
    origin: str = ""
    role: str = "candidate"  # baseline, candidate, twin or beside (see series.py)
    beside: ImplementationRef | None = None  # with that role: whose baseline it is
    held: str = ""  # what held its process between turns, if it has one of its own
    deterministic: bool = True
    host_sync: str = ""
    checks: tuple[str, ...] = ()
    max_error: float | None = None
    max_bound: float | None = None
    error: float | None = None  # root mean square, relative to that of the right result
    checked_timed_calls: int = 0
    first_call: float | None = None
    calls_per_sample: int = 1
    samples: tuple[float, ...] = ()
    trial_ms: str = ""  # about what a call took in its trial, if there was no time for rounds
    stages: Mapping[str, float] = field(default_factory=dict)
    clock: str = ""  # on a device: graph, events or profiler
    launch_seconds: float | None = None  # on a device: of the host, for a call; the median
    profile: Mapping[str, Operation] = field(default_factory=dict)  # by name, if it was profiled
    comparison: Comparison | None = None
    cost: Cost = field(default_factory=Cost)
    floor_seconds: float | None = None  # nothing honest is below it
    roof_seconds: float | None = None  # the least time as well as it is known
    roof_busy: bool = False  # it is from roofs of a busy machine
    load: Mapping[str, int | float | None] = field(default_factory=dict)
    wire: Wire | None = None  # on several ranks
    peak_rss_bytes: int | None = None
    log_tail: str = ""

    @property
    def share_of_roof(self) -> float | None:
        if not self.samples or self.roof_seconds is None:
            return None
        return min(1.0, self.roof_seconds / median(self.samples))

    def __post_init__(self) -> None:
        assert (self.status is Status.PASSED) == bool(self.samples), "a time without a pass, or the reverse"


@dataclass(frozen=True, kw_only=True)
class CellOutcome:
    """The result of one cell. Implementations come in the requested order, then the further copies of the
    baseline.

    notes: what a reader must know, in sentences: a baseline that was replaced, a busy machine.
    environment: what the machine it ran on was, as environment_document gives it; None if that is this one.
    suite: of its records; empty: that of the sweep.
    """

    experiment: Experiment
    identity: Identity
    outcomes: tuple[ImplementationOutcome, ...]
    rounds: int = 0
    rounds_by_process: tuple[int, ...] = ()
    stop_reason: str = ""
    aa_floor: float | None = None
    routing_checksum: str = ""
    weather: NoiseDuring | None = None
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    environment: Mapping[str, Any] | None = None
    engine: str = "local"
    suite: str = ""

    @property
    def direction(self) -> Direction:
        return cast(Direction, self.experiment.direction)

    def rates(self, one: ImplementationOutcome) -> Rates:
        if not one.samples:
            return Rates()
        case, seconds = self.experiment, median(one.samples)
        forward = self.direction == "forward"  # the conventions only count the forward pass
        return Rates(
            tokens_per_second=case.T / seconds,
            flops_per_second=one.cost.useful_flops / seconds or None,
            bytes_per_second=one.cost.bytes / seconds or None,
            **(span_named(self.experiment.span).bandwidths(case, seconds) if forward else {}),
        )

    @property
    def implementations(self) -> tuple[ImplementationOutcome, ...]:
        """The outcomes without the further copies of the baseline."""
        return tuple(o for o in self.outcomes if o.role in ("baseline", "candidate"))

    @property
    def baseline(self) -> ImplementationOutcome | None:
        return next((o for o in self.outcomes if o.role == "baseline"), None)

    def against(self, one: ImplementationOutcome) -> ImplementationOutcome | None:
        """Returns what its ratio compares with, timed by the same clock: the baseline, or the copy of it that
        ran beside."""
        apart = (
            other for other in self.outcomes if other.beside == one.implementation and other.role == "beside"
        )
        return None if one.comparison is None else next(apart, self.baseline)

    @property
    def twin(self) -> ImplementationOutcome | None:
        return next((o for o in self.outcomes if o.role == "twin"), None)

    def to_json(self) -> str:
        """Writes it for another machine. Infinite numbers become null."""
        return _OUTCOME.dump_json(self).decode()

    @staticmethod
    def from_json(text: str | bytes) -> CellOutcome:
        """Reads it. ValueError, with a sentence, if it is no outcome that names the machine it ran on."""
        if len(text) > MAX_OUTCOME_BYTES:
            raise ValueError(f"this is not an outcome: it has over {MAX_OUTCOME_BYTES:,} bytes")
        try:
            outcome = _OUTCOME.validate_json(text)
        except ValidationError as error:
            raise ValueError(f"this is not an outcome: {first_problem(error)}") from None
        machine = (outcome.environment or {}).get("machine")
        if not (isinstance(machine, dict) and isinstance(machine.get("name"), str)):
            raise ValueError("this is not an outcome: it does not name the machine it was measured on")
        asked = set(outcome.experiment.implementations)
        if asked - outcome.identity.sources.keys() or asked - outcome.identity.contracts.keys():
            raise ValueError("this is not an outcome: an implementation of its cell has no hash")
        if not {one.implementation for one in outcome.outcomes} <= asked or outcome.weather is None:
            raise ValueError(
                "this is not an outcome: it is not that of its cell, or says nothing of the noise"
            )
        return outcome


_OUTCOME = TypeAdapter(CellOutcome)
