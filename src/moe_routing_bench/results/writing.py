"""Writes the outcome of a cell into records."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import numpy as np

from moe_routing_bench.bench.identity import package_version
from moe_routing_bench.bench.measure import WARM_SAMPLES
from moe_routing_bench.bench.outcome import CellOutcome, ImplementationOutcome
from moe_routing_bench.bench.repro import repro_command
from moe_routing_bench.bench.spans.span import all_threads, span_named
from moe_routing_bench.core.published import MODELS
from moe_routing_bench.core.text import one_line
from moe_routing_bench.results import record as schema
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.record import Record, log_tail
from moe_routing_bench.workloads.axes import values_of
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef
from moe_routing_bench.workloads.workload import SUITE_VERSION


def record_outcome(outcome: CellOutcome, session: Session, *, suite: str, environment: str) -> list[Record]:
    """Writes the raw samples and records of one cell. They are on disk when it returns."""
    now, suite = datetime.now(UTC), outcome.suite or suite
    records = [_record(one, outcome, session, suite, environment, now) for one in outcome.outcomes]
    session.append(records)
    return records


def _record(
    one: ImplementationOutcome,
    outcome: CellOutcome,
    session: Session,
    suite: str,
    environment: str,
    now: datetime,
) -> Record:
    experiment, weather = outcome.experiment, outcome.weather
    span = span_named(experiment.span)
    assert weather is not None
    timing = comparison = None
    if one.samples:
        samples = np.asarray(one.samples)
        kept = session.put_samples(samples)
        timing = schema.Timing.of(
            samples, one.first_call or 0.0, kept, one.stages, one.clock, one.launch_seconds
        )
    if one.comparison is not None and outcome.baseline is not None:
        comparison = schema.ComparisonFacts.of(
            outcome.baseline.label, one.comparison, one.comparison.aa_floor
        )
    group = experiment.case.partition("/")[0]
    return Record(
        schema_version=3,
        record_id=session.new_record_id(),
        cell_key=outcome.identity.key,
        session=session.id,
        suite=suite,
        suite_version=SUITE_VERSION,
        created_at=now,
        harness_version=package_version(),
        harness_hash=outcome.identity.harness,
        model=group if group in MODELS else "",
        included=span.included,
        excluded=span.excluded,
        experiment=_experiment(experiment, one.implementation),
        routing=_routing(one, outcome),
        implementation=schema.ImplementationFacts(
            label=one_line(one.label, 300),
            spec=one_line(one.implementation.text, 300),
            origin=one_line(one.origin, 300),
            source_hash=outcome.identity.sources[one.implementation],
            role=one.role,  # type: ignore[arg-type]
            deterministic=one.deterministic,
            host_sync=one_line(one.host_sync),
            runs=one_line(one.runs),
            contract_hash=outcome.identity.contracts[one.implementation],
            layout=one.implementation.layout,
            router=one_line(one.implementation.router, 300),
            layer=one_line(one.implementation.layer, 300),
        ),
        protocol=schema.Protocol(
            all_threads=all_threads(experiment),
            rounds=outcome.rounds,
            calls_per_sample=one.calls_per_sample,
            warmup_calls=WARM_SAMPLES * one.calls_per_sample,
            stop_reason=outcome.stop_reason,
            fresh_inputs="every call",
            held=one.held,
        ),
        timing=timing,
        comparison=comparison,
        work=_work(one, outcome) if one.load else None,
        correctness=schema.Correctness(
            status=one.status,
            reason=one_line(one.reason),
            checks=one.checks,
            max_error=_finite(one.max_error),
            max_bound=_finite(one.max_bound),
            error=_finite(one.error),
            checked_timed_calls=one.checked_timed_calls,
        ),
        peak_rss_bytes=one.peak_rss_bytes,
        weather=schema.Weather(
            load_before=weather.load_before,
            load_after=weather.load_after,
            steal_percent=weather.steal_percent,
            throttled=None if weather.throttles is None else weather.throttles > 0,
        ),
        engine=outcome.engine,
        cell_seconds=outcome.seconds,
        environment=environment,
        repro=repro_command(experiment, one.implementation),
        log_tail=log_tail(one.log_tail),
        profile={
            one_line(name, 300): schema.Operation(**vars(operation))
            for name, operation in [*one.profile.items()][: schema.MAX_OPERATIONS]
        },
    )


def _experiment(experiment: Experiment, implementation: ImplementationRef) -> schema.RecordedExperiment:
    """Returns the experiment with only the baseline and this implementation."""
    known = {name: _in_lines(value) for name, value in values_of(experiment).items()}
    chosen = dict.fromkeys((experiment.implementations[0], implementation))
    known["implementations"] = tuple(
        schema.RecordedImplementation(**{name: _in_lines(value) for name, value in vars(one).items()})
        for one in chosen
    )
    return schema.RecordedExperiment(**known)


def _in_lines(value: Any) -> Any:
    """Returns text in the form of records: short and in one line."""
    if isinstance(value, tuple):
        return tuple(map(_in_lines, value))
    return one_line(value, 300) if isinstance(value, str) else value


def _routing(one: ImplementationOutcome, outcome: CellOutcome) -> schema.RoutingFacts | None:
    if not one.load:
        return None
    return schema.RoutingFacts(checksum=outcome.routing_checksum, **one.load)  # type: ignore[arg-type]


def _work(one: ImplementationOutcome, outcome: CellOutcome) -> schema.WorkFacts:
    return schema.WorkFacts(
        useful_flops=one.cost.useful_flops,
        executed_flops=one.cost.executed_flops,
        weight_bytes=one.cost.weight_bytes,
        activation_bytes=one.cost.activation_bytes,
        floor_seconds=one.floor_seconds,
        share_of_roof=one.share_of_roof,
        roof_seconds=one.roof_seconds,
        roof_busy=one.roof_busy,
        **vars(outcome.rates(one)),
        wire_bytes=None if one.wire is None else one.wire.sent,
        least_wire_bytes=None if one.wire is None else one.wire.least,
    )


def _finite(value: float | None) -> float | None:
    return value if value is not None and value < 1e30 else None
