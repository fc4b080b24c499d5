"""Whole runs in a results folder, as a sweep leaves them, with times made up for them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.results.folder import Session
from moe_routing_bench.results.record import ComparisonFacts, Timing, content_hash, parse_record
from sample_records import document, failed, line, with_times

ENVIRONMENT = {
    "machine": {"name": "xeon-2-cores", "torch": "2.13.0+cpu", "python": "3.12.3"},
    "settings": {"OMP_NUM_THREADS": "1"},
}
OTHER_MACHINE = {**ENVIRONMENT, "machine": {**ENVIRONMENT["machine"], "name": "laptop"}}
OTHER_TORCH = {**ENVIRONMENT, "machine": {**ENVIRONMENT["machine"], "torch": "2.14.0"}}
ROUNDS = 40
FLOOR = 0.004

Given = float | str | list[float]


def add_cell(
    session: Session,
    implementations: Mapping[str, Given],
    *,
    environment: Mapping[str, Any] = ENVIRONMENT,
    drift: float = 1.0,
    seed: int = 0,
    twin: bool = True,
    floor: float = FLOOR,
    layouts: Mapping[str, str] | None = None,
    sources: Mapping[str, str] | None = None,
    each: Mapping[str, Mapping[str, Any]] | None = None,
    **changes: Any,
) -> None:
    """A cell as the runner records it. An implementation is a factor on 10 ms, its samples, or its failed
    status; the first that passed is the baseline. All share the noise of a round. each: changes by
    implementation."""
    rng = np.random.default_rng(seed)
    shared = 0.010 * drift * rng.lognormal(0, 0.03, ROUNDS)
    env = session.put_environment(environment)
    key = content_hash([sorted(implementations), repr(changes), repr(each), repr(sources), env])
    base_name, base = "", shared
    records = []
    names = list(implementations)
    if twin:
        names.append(next(n for n, c in implementations.items() if not isinstance(c, str)))
    for place, name in enumerate(names):
        given = implementations[name]
        common: dict[str, Any] = {
            "session": session.id,
            "record_id": session.new_record_id(),
            "cell_key": key,
            "environment": env,
            "implementation__label": name,
            "implementation__spec": name,
            "implementation__source_hash": content_hash((sources or {}).get(name, name)),
            "implementation__layout": (layouts or {}).get(name, "compact"),
            "experiment__implementations": [
                {"name": one, "layout": "compact", "router": "", "layer": "", "frozen": False}
                for one in dict.fromkeys((names[0], name))
            ],
            "repro": "what the file says is not shown",
            **changes,
            **(each or {}).get(name, {}),
        }
        if isinstance(given, str):
            records.append(parse_record(line(failed(given, **common))))
            continue
        own = rng.lognormal(0, 0.005, ROUNDS)
        samples = np.asarray(given) if isinstance(given, list) else given * shared * own
        role = "twin" if place == len(implementations) else "candidate" if base_name else "baseline"
        whole = document(**common, implementation__role=role, comparison=None)
        timing = Timing.of(samples, 0.2, session.put_samples(samples), {})
        whole = with_times(whole, timing)
        if role == "baseline":
            base_name, base = name, samples
        elif len(samples) == len(base) >= 5:
            found = ComparisonFacts.of(base_name, compare(base, samples, aa_floor=floor), floor)
            whole["comparison"] = json.loads(found.model_dump_json())
        records.append(parse_record(line(whole)))
    session.append(records)


def make_run(folder: Path, implementations: Mapping[str, Given], **options: Any) -> Path:
    with Session.start(folder) as session:
        add_cell(session, implementations, **options)
    return folder
