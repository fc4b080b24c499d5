"""The schema of one line of results: Record and its parts. parse_record reads lines that anybody may have
written.

A record holds its experiment, the way it was measured, and the results. The schema refuses a time without a
passed check.

Files are never changed: lines of older versions stay as they are and are migrated each time they are read.
Version 2 (November 2026) has all fields that were added to version 1 over time, and also `engine` and
`cell_seconds`; all records of a cell have the same `created_at`. Version 3 has the whole experiment in one
part. An axis that an older record does not have is None.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self, get_type_hints

import numpy as np
from numpy.typing import ArrayLike
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    create_model,
    model_validator,
)

from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.text import encodable, one_line
from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

if TYPE_CHECKING:  # it imports scipy.stats, which takes longer than most queries
    from moe_routing_bench.bench.verdict import Comparison as Compared

SCHEMA_VERSION = 3
MAY_BE_OLD = re.compile(rb'"schema_version"\s*:\s*[12]\b')
# for each part of a record: the fields that version 1 may lack, and the value they have then
VERSION_1: dict[str, dict[str, Any]] = {
    "": {"engine": "", "cell_seconds": None},
    "what": {"router": "", "layer": ""},
    "workload": {"store": ""},
    "implementation": {"runs": ""},
    "work": dict.fromkeys(
        ("tokens_per_second", "flops_per_second", "bytes_per_second", "wire_bytes", "least_wire_bytes")
    ),
    "correctness": {"error": None},
}


def newest(line: bytes) -> bytes | str:
    """Migrates a line of version 1 or 2 to version 3 and returns any other line unchanged. It checks nothing
    else."""
    if not MAY_BE_OLD.search(line):
        return line
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return line
    version = record.get("schema_version") if isinstance(record, dict) else None
    if type(version) is not int or version not in (1, 2):  # not True, not 1.0
        return line
    for part, missing in VERSION_1.items() if version == 1 else ():
        if isinstance(inside := record.get(part) if part else record, dict):
            inside |= {name: value for name, value in missing.items() if name not in inside}
    _to_version_3(record)
    return json.dumps({**record, "schema_version": SCHEMA_VERSION})


def _to_version_3(record: dict[str, Any]) -> None:
    """Moves fields to their place in version 3. A field that cannot be moved stays, and the schema refuses
    it."""
    if "experiment" in record:
        return
    what, workload, protocol, implementation = (
        part if isinstance(part := record.get(name), dict) else {}
        for name in ("what", "workload", "protocol", "implementation")
    )
    experiment: dict[str, Any] = {}
    if isinstance(routing := record.get("routing"), dict):
        routing.pop("suite_version", None)
        routing.pop("seed", None)
        if "spec" in routing:
            experiment["workload"] = routing.pop("spec")
    _move(what, experiment, "span", "direction")
    _move(what, implementation, "contract_hash", *SETTING)
    _move(what, record, "included", "excluded")
    _move(workload, record, "model")
    _move(workload, experiment, *workload)
    _move(protocol, experiment, "seed", *(one.name for one, _ in axes_of(Experiment, "how")))
    threads, ranks = experiment.get("threads"), experiment.get("W")
    protocol["all_threads"] = threads
    if experiment.get("span") == "parallel" and type(threads) is type(ranks) is int and ranks > 0:
        experiment["threads"] = threads // ranks
    if isinstance(spec := implementation.get("spec"), str):
        own = {**asdict(ImplementationRef.read(spec)), **{name: implementation.get(name) for name in SETTING}}
        experiment["implementations"] = [own]
    record["experiment"] = experiment
    for name in ("what", "workload"):
        if record.get(name) == {}:
            del record[name]


def _move(source: dict[str, Any], target: dict[str, Any], *names: str) -> None:
    for name in names:
        if name in source and name not in target:
            target[name] = source.pop(name)


MAX_LINE_BYTES = 64 * 1024
MAX_LOG = 2_000
MAX_OPERATIONS = 32
DEFAULT_ROUTER = "softmax_topk"
# suites of records that `mrb tune layer` and `mrb tune op` write: races of a search, and of the best settings
TUNING, RANKED = "tune", "tune-ranked"
SETTING = ("layout", "router", "layer")
SESSION = r"[0-9A-Za-z][0-9A-Za-z_-]{0,63}"


def _in_utc(at: datetime) -> datetime:
    if not 2000 <= at.year < 9999:  # the first and last day of the calendar have no UTC time
        raise ValueError("must be a year from 2000 to 9998")
    return at.astimezone(UTC)


# one line without control characters, because terminals and tables show it
Name = Annotated[str, Field(max_length=300, pattern=r"^[^\x00-\x1f\x7f]*$")]
Sentence = Annotated[str, Field(max_length=2_000, pattern=r"^[^\x00-\x1f\x7f]*$")]
Log = Annotated[str, Field(max_length=MAX_LOG, pattern=r"^[^\x00-\x08\x0b-\x1f\x7f]*$")]  # tabs, newlines
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
SessionId = Annotated[str, Field(pattern=rf"^{SESSION}$")]
Count = Annotated[int, Field(ge=0, le=2**62)]
Size = Annotated[int, Field(ge=0, le=2**40)]
Seconds = Annotated[float, Field(ge=0, le=1e7)]
Amount = Annotated[float, Field(ge=0, le=1e30)]
Share = Annotated[float, Field(ge=0, le=1)]
Moment = Annotated[AwareDatetime, AfterValidator(_in_utc)]


class RecordPart(BaseModel):
    """The base of every part of a record. It refuses unknown fields, infinite numbers and wrong types."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, allow_inf_nan=False, hide_input_in_errors=True
    )


class RecordedImplementation(RecordPart):
    """An ImplementationRef in a record."""

    name: Name
    layout: Name
    router: Name
    layer: Name
    frozen: bool


# how a record checks the types of axes
CHECKED: dict[Any, Any] = {
    str: Name,
    int: Size,
    float: Amount,
    tuple[str, ...]: Annotated[tuple[Name, ...], Field(max_length=64)],
    tuple[ImplementationRef, ...]: Annotated[tuple[RecordedImplementation, ...], Field(max_length=64)],
}


def _recorded_experiment() -> type[RecordPart]:
    """Makes a part with every axis of an experiment. Axes that version 2 did not have may be missing."""
    types = {**get_type_hints(Experiment), "seed": Count}
    shape: dict[str, Any] = {}
    for one, facts in axes_of(Experiment):
        kind = CHECKED.get(types[one.name], types[one.name])
        kind = kind if facts.choices is None else Literal[tuple(facts.choices)]
        shape[one.name] = (kind | None, None) if facts.since > 2 else (kind, ...)
    return create_model("RecordedExperiment", __base__=RecordPart, __module__=__name__, **shape)


# the experiment of a record: the fields of an Experiment; an old record lacks some of them. Its
# implementations are the baseline and the record's own; `experiment_of` (remeasure.py) joins the records of a
# cell
if TYPE_CHECKING:
    RecordedExperiment = Experiment
else:
    RecordedExperiment = _recorded_experiment()


class RoutingFacts(RecordPart):
    """The routing that the workload produced, in the fields of LoadStatistics: checksum=<sha256 of the ids>,
    max_over_mean=2.5, ... Without a plan the last three are None."""

    checksum: Hash
    active_experts: Size
    zero_experts: Size
    max_over_mean: Amount
    max_violation: Amount
    max_violation_rank: Amount
    cv: Amount
    gini: Share
    entropy_bits: Amount
    dropped_pairs: Count | None
    padded_rows: Count | None
    tile_efficiency: Share | None


class ImplementationFacts(RecordPart):
    """label="staged(dispatch=index_select)", spec="staged", origin="built in", role="candidate", ..."""

    label: Name
    spec: Name
    origin: Name
    source_hash: Hash
    # twin: a copy of the baseline, for the noise floor; beside: a baseline in the process of code from
    # outside
    role: Literal["baseline", "twin", "beside", "candidate"]
    deterministic: bool
    host_sync: Sentence  # why it must read device values on the host; "" if it does not
    runs: Sentence  # what ran, if the label does not say it: topk.sort + make_plan.native + ...
    contract_hash: Hash
    layout: Name
    router: Name  # the router with its options: "switch"; "" if the span has none
    layer: Name  # "chain(iterations=2)"; "" is the plain one

    @property
    def setting(self) -> tuple[str, str, str]:
        """Layout, router and layer, for comparing. Records from before the router was a choice have the
        default."""
        return self.layout, self.router or DEFAULT_ROUTER, self.layer

    @property
    def title(self) -> str:
        """staged | compact, and with a router and a layer: staged | compact | switch | chain(iterations=2)"""
        return " | ".join(filter(None, (self.label, self.layout, self.router, self.layer)))

    @property
    def frozen(self) -> bool:
        """Did it pack its weights once before timing, although it can also read them unpacked?"""
        return self.label.startswith("frozen(")


class Protocol(RecordPart):
    """How it was measured: rounds=40, calls_per_sample=3, stop_reason="budget", ...

    all_threads: the threads of all ranks together
    held: what kept the process of code from outside still between its turns; "" if it shares one with others
    """

    all_threads: Size
    rounds: Count
    calls_per_sample: Count
    warmup_calls: Count
    stop_reason: Sentence
    fresh_inputs: Name
    held: Name = ""


class SamplesFile(RecordPart):
    """The place of raw samples: file="session=20261115T024734123-1f3a9c02/samples.f64", offset=320 (bytes),
    count=40 (little-endian float64, seconds per call), sha256 of these bytes."""

    file: Annotated[str, Field(pattern=rf"^session={SESSION}/samples\.f64$")]
    offset: Annotated[int, Field(ge=0, le=2**50, multiple_of=8)]
    count: Annotated[int, Field(ge=1, le=10_000_000)]
    sha256: Hash


class Timing(RecordPart):
    """Seconds per call. Samples of 10, 11, 12 and 13 ms have median=0.0115, least=0.010, most=0.013, ...

    stages: seconds of each stage, {"route": 0.001, "dispatch": 0.004}; empty if they were not timed
    separately.
    clock, launch: on a device, what took the time (graph, events, profiler), and the host's seconds to launch
    a call. They were added during version 3.
    """

    median: Seconds
    mean: Seconds
    std: Seconds
    least: Seconds
    most: Seconds
    p05: Seconds
    p25: Seconds
    p75: Seconds
    p95: Seconds
    first_call: Seconds
    samples: SamplesFile
    stages: Annotated[dict[Name, Seconds], Field(max_length=64)]
    clock: Name = ""
    launch: Seconds | None = None

    @classmethod
    def of(
        cls, samples: ArrayLike, first_call: float, kept: SamplesFile, stages: Mapping[str, float],
        clock: str = "", launch: float | None = None,
    ) -> Timing:  # fmt: skip
        seconds = np.asarray(samples, dtype=np.float64).ravel()
        if not seconds.size or not np.isfinite(seconds).all() or seconds.min() <= 0:
            raise ValueError("a timing needs at least one sample, and samples must be positive and finite")
        p05, p25, p50, p75, p95 = (float(q) for q in np.quantile(seconds, (0.05, 0.25, 0.5, 0.75, 0.95)))
        return cls(
            median=p50,
            mean=float(seconds.mean()),
            std=float(seconds.std(ddof=1)) if seconds.size > 1 else 0.0,
            least=float(seconds.min()),
            most=float(seconds.max()),
            p05=p05, p25=p25, p75=p75, p95=p95,
            first_call=first_call, samples=kept, stages=dict(stages), clock=clock, launch=launch,
        )  # fmt: skip

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        ascending = (self.least, self.p05, self.p25, self.median, self.p75, self.p95, self.most)
        slack = 1e-9 * self.most
        if self.least <= 0:
            raise ValueError("least must be above zero")
        if any(low > high + slack for low, high in pairwise(ascending)):
            raise ValueError("least, p05, p25, median, p75, p95 and most must ascend")
        if not self.least - slack <= self.mean <= self.most + slack:
            raise ValueError("the mean must lie between least and most")
        return self


class Operation(RecordPart):
    """bench.outcome.Operation"""

    calls: Amount
    self_seconds: Seconds
    seconds: Seconds
    device_seconds: Seconds
    memory_bytes: Annotated[float, Field(ge=-1e30, le=1e30)]


class ComparisonFacts(RecordPart):
    """The comparison with the baseline of the cell: ratio=1.05, low=1.035, high=1.059, verdict="SLOWER",
    ..."""

    baseline: Name
    ratio: Amount
    low: Amount
    high: Amount
    p_adjusted: Share
    verdict: Literal["FASTER", "SLOWER", "SAME", "TOO_FEW_ROUNDS", "UNDECIDED"]
    reason: Sentence
    more_rounds: Count | None
    aa_floor: Amount

    @classmethod
    def of(cls, baseline: str, compared: Compared, aa_floor: float) -> ComparisonFacts:
        return cls(
            baseline=baseline,
            ratio=compared.ratio,
            low=compared.interval[0],
            high=compared.interval[1],
            p_adjusted=compared.p_adjusted,
            verdict=compared.verdict,
            reason=one_line(compared.reason),
            more_rounds=compared.more_rounds,
            aa_floor=aa_floor,
        )

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        if not 0 < self.low <= self.high:
            raise ValueError("low must be above zero and at most high")
        if not self.low * (1 - 1e-9) <= self.ratio <= self.high * (1 + 1e-9):
            raise ValueError("the ratio must lie between low and high")
        return self


class WorkFacts(RecordPart):
    """The numbers of cost.Cost, the lower bound of the time, the share of a measured roof, and
    bench.outcome.Rates.

    The last two fields were added during version 2. Without them share_of_roof refers to floor_seconds.
    """

    useful_flops: Count
    executed_flops: Count
    weight_bytes: Count
    activation_bytes: Count
    floor_seconds: Seconds | None
    share_of_roof: Share | None
    bw_2pass: Amount | None
    bw_strict: Amount | None
    tokens_per_second: Amount | None
    flops_per_second: Amount | None  # useful ones
    bytes_per_second: Amount | None
    wire_bytes: Count | None  # on several ranks: bytes sent, and the smallest possible number
    least_wire_bytes: Count | None
    roof_seconds: Seconds | None = None  # the best known lower bound of the time
    roof_busy: bool = False  # the roofs were measured while other processes were busy

    @property
    def least_seconds(self) -> float | None:
        """The lower bound of the time that share_of_roof refers to."""
        return self.floor_seconds if self.roof_seconds is None else self.roof_seconds


class Correctness(RecordPart):
    """status=WRONG_VALUE, reason="error 0.3 above the bound 0.01", checks=("shape", "value"), ..."""

    # a file holds text; Python code may pass Status.PASSED or "PASSED"
    status: Annotated[Status, Field(strict=False)]
    reason: Sentence
    checks: Annotated[tuple[Name, ...], Field(max_length=64)]
    max_error: Amount | None
    max_bound: Amount | None
    error: Amount | None  # root mean square of the error divided by that of the correct result
    checked_timed_calls: Count


class Weather(RecordPart):
    load_before: Annotated[float, Field(ge=0, le=1e6)]
    load_after: Annotated[float, Field(ge=0, le=1e6)]
    steal_percent: Annotated[float, Field(ge=0, le=100)]
    throttled: bool | None


class Record(RecordPart):
    """The result of one implementation in one cell; `tests/sample_records.py` builds a complete one.

    record_id = "20261115T024734123-1f3a9c02-000007", session = "20261115T024734123-1f3a9c02"
    cell_key  = hash of everything that could change the result: contract, workload, source, versions, machine
    engine    = "local" or "ray": what ran the cell; "" if that is not known
    routing and work are None if the worker died before it reported them.
    """

    schema_version: Literal[3]
    record_id: Annotated[str, Field(pattern=rf"^{SESSION}-[0-9]{{6,9}}$")]
    cell_key: Hash
    session: SessionId
    suite: Name
    suite_version: Count
    created_at: Moment
    harness_version: Name
    harness_hash: Hash
    model: Name
    included: Annotated[tuple[Name, ...], Field(max_length=64)]
    excluded: Annotated[tuple[Name, ...], Field(max_length=64)]
    experiment: RecordedExperiment
    routing: RoutingFacts | None
    implementation: ImplementationFacts
    protocol: Protocol
    timing: Timing | None
    comparison: ComparisonFacts | None
    work: WorkFacts | None
    correctness: Correctness
    peak_rss_bytes: Count | None
    weather: Weather
    engine: Name
    cell_seconds: Seconds | None  # of the whole cell with all its implementations
    environment: Hash
    repro: Annotated[str, Field(max_length=4_000, pattern=r"^[^\x00-\x1f\x7f]*$")]
    log_tail: Log
    # the longest operations, by name; empty if it was not profiled
    profile: Annotated[dict[Name, Operation], Field(max_length=MAX_OPERATIONS)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_time_without_a_pass(self) -> Self:
        status, passed = self.correctness.status, self.correctness.status is Status.PASSED
        known = (self.timing, self.routing, self.work, self.experiment.workload)
        if passed and None in known:
            raise ValueError("a record with status PASSED must have timing, routing and work")
        if not passed and (self.timing is not None or self.comparison is not None):
            raise ValueError(f"a record with status {status} must have no timing and no comparison")
        if not passed and not self.correctness.reason:
            raise ValueError(f"a record with status {status} must give its reason")
        if self.comparison is not None and self.implementation.role == "baseline":
            raise ValueError("the baseline is not compared with itself")
        if self.record_id.rpartition("-")[0] != self.session:
            raise ValueError("record_id must begin with the session")
        if self.timing is not None and self.timing.samples.file != f"session={self.session}/samples.f64":
            raise ValueError("timing.samples.file must be that of the record's own session")
        return self

    @property
    def share_of_roof(self) -> float | None:
        """None in old records, because their roofs ignored caches and the arithmetic of stored formats."""
        return None if self.work is None or self.work.roof_seconds is None else self.work.share_of_roof

    def line(self) -> bytes:
        """Returns the stored form: JSON in one line that ends with a newline."""
        line = self.model_dump_json().encode() + b"\n"
        if len(line) > MAX_LINE_BYTES:
            raise ValueError(f"the record has {len(line):,} bytes, over the limit of {MAX_LINE_BYTES:,}")
        return line


def parse_record(line: bytes) -> Record:
    """Reads a record. A ValueError says in one sentence what is wrong. If a key occurs twice, the last
    counts."""
    if len(line) > MAX_LINE_BYTES:
        raise ValueError(f"the line has over {MAX_LINE_BYTES:,} bytes, which no record has")
    try:
        return Record.model_validate_json(newest(line))
    except ValidationError as error:
        raise ValueError(_sentence(error)) from None


def _sentence(error: ValidationError) -> str:
    errors = error.errors(include_url=False, include_context=False)
    versions = [e for e in errors if e["loc"] == ("schema_version",)]
    if versions and isinstance(given := versions[0]["input"], int) and given > SCHEMA_VERSION:
        return f"the record has schema_version {given}, made by a newer version; update moe-routing-bench"
    unknown = [e for e in errors if e["type"] == "extra_forbidden"]  # why others are missing in old records
    first = (versions or unknown or errors)[0]
    message = one_line(first["msg"], 200).removeprefix("Value error, ").rstrip(". ")
    if first["type"] == "json_invalid":
        return f"the line is not JSON: {message.removeprefix('Invalid JSON: ')}"
    place = one_line(".".join(str(part) for part in first["loc"]), 100)
    return f"the field {place} is wrong: {message}" if place else f"the record is wrong: {message}"


def log_tail(text: str) -> str:
    """Returns the end of a worker's output in the form of `Record.log_tail`."""
    return re.sub(r"[\x00-\x08\x0b-\x1f\x7f]", "", encodable(text[-MAX_LOG:]))


def canonical_json(document: object) -> str:
    """Returns JSON with sorted keys and without spaces. It refuses NaN."""
    return json.dumps(document, sort_keys=True, separators=(",", ":"), allow_nan=False)


def content_hash(document: object) -> str:
    """Returns the sha256 of a JSON document, for environments and cell keys."""
    return hashlib.sha256(canonical_json(document).encode()).hexdigest()
