"""The schema of a record: no time without a pass, and one sentence for whatever else a line may hold."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from typing import Any, get_args

import numpy as np
import pytest
from pydantic import ValidationError

from moe_routing_bench.bench.status import Status
from moe_routing_bench.bench.verdict import Verdict, compare
from moe_routing_bench.core.text import one_line
from moe_routing_bench.results.record import (
    MAX_LINE_BYTES,
    VERSION_1,
    ComparisonFacts,
    Record,
    SamplesFile,
    Timing,
    content_hash,
    log_tail,
    parse_record,
)
from moe_routing_bench.workloads.axes import axes_of
from moe_routing_bench.workloads.experiment import Experiment
from repository import ROOT
from sample_records import HASH, SESSION, a_record, document, failed, line


def refusal(given: dict[str, Any] | bytes) -> str:
    with pytest.raises(ValueError) as caught:
        parse_record(given if isinstance(given, bytes) else line(given))
    sentence = str(caught.value)
    assert "\n" not in sentence and "http" not in sentence and len(sentence) < 500
    return sentence


def test_a_record_survives_the_round_trip() -> None:
    record = a_record()
    assert parse_record(record.line()) == record
    assert record.line().count(b"\n") == 1 and len(record.line()) < 4_000
    assert record.created_at == datetime(2026, 11, 15, 2, 47, 34, 123456, tzinfo=UTC)
    assert b'"2026-11-15T02:47:34Z"' in a_record(created_at="2026-11-15T07:47:34+05:00").line()


def old_document() -> dict[str, Any]:
    return json.loads((ROOT / "tests" / "data" / "old_record.jsonl").read_bytes())


def test_a_record_of_version_1_is_read_as_one_of_version_3() -> None:
    """Measured before there were routers, rates and formats."""
    record = parse_record(line(old_document()))
    assert (record.experiment.direction, record.implementation.setting[1:]) == (
        "forward",
        ("softmax_topk", ""),
    )
    assert record.work is not None and record.work.bw_2pass and record.work.tokens_per_second is None
    assert record.implementation.setting == ("compact", "softmax_topk", "")
    assert (record.experiment.store, record.correctness.error) == ("", None)
    assert (record.schema_version, record.engine, record.cell_seconds) == (3, "", None)
    assert parse_record(record.line()) == record and b'"schema_version":3' in record.line()


@pytest.mark.parametrize("cache", ["hot", "weights-cold", "cold"])
def test_records_from_before_roofs_knew_working_sets_are_read_and_their_shares_not_shown(cache: str) -> None:
    whole = document(experiment__cache=cache, work__share_of_roof=0.01)
    assert parse_record(line(whole)).share_of_roof == 0.01
    for name in ("roof_seconds", "roof_busy"):
        del whole["work"][name]
    old = parse_record(line(whole))
    assert (
        old.work is not None and old.work.least_seconds == old.work.floor_seconds and not old.work.roof_busy
    )
    assert old.share_of_roof is None


def version_2() -> dict[str, Any]:
    """The sample record as version 2 wrote it."""
    whole = document(schema_version=2)
    old, implementation, protocol = (whole[part] for part in ("experiment", "implementation", "protocol"))
    settings = {name: implementation.pop(name) for name in ("contract_hash", "layout", "router", "layer")}
    settings |= {name: whole.pop(name) for name in ("included", "excluded")}
    how = {name: old[name] for name in ("device", "cache", "view", "processes", "threads", "seed")}
    where = ("case", "scaled_from", *"TDFEKW", "dtype", "store", "activation", "bias", "shared_F", "heads")
    whole |= {
        "what": {"span": old["span"], "direction": old["direction"], **settings},
        "workload": {"model": whole.pop("model"), **{name: old[name] for name in (*where, "sequences")}},
        "routing": {**whole["routing"], "suite_version": 1, "spec": old["workload"], "seed": old["seed"]},
        "protocol": {name: value for name, value in protocol.items() if name != "all_threads"} | how,
    }
    del whole["experiment"]
    return whole


def test_a_record_of_version_2_is_read_as_one_of_version_3() -> None:
    record, new = parse_record(line(version_2())), a_record()
    unknown = {one.name for one, facts in axes_of(Experiment) if facts.since > 2} - {"workload"}
    assert record == new.model_copy(
        update={
            "experiment": new.experiment.model_copy(
                update={name: None for name in unknown}
                | {"implementations": new.experiment.implementations[1:]}
            )
        }
    )
    assert parse_record(record.line()) == record
    ranks = {**version_2(), "what": {**version_2()["what"], "span": "parallel"}}
    ranks |= {"workload": {**ranks["workload"], "W": 2}, "protocol": {**ranks["protocol"], "threads": 4}}
    shared = parse_record(line(ranks))
    assert (shared.experiment.threads, shared.protocol.all_threads) == (2, 4)


@pytest.mark.parametrize("part", ["what", "workload", "implementation", "work", "correctness", ""])
def test_version_2_must_have_what_version_1_may_lack(part: str) -> None:
    for name in VERSION_1[part]:
        whole = version_2()
        del (whole[part] if part else whole)[name]
        assert name in refusal(whole)
        assert parse_record(line({**whole, "schema_version": 1})) is not None


@pytest.mark.parametrize("part", ["what", "workload", "protocol", "routing", "implementation"])
def test_a_wrong_part_of_version_2_is_refused(part: str) -> None:
    assert refusal({**version_2(), part: 7}) and refusal({**version_2(), "experiment": {}})
    assert refusal({**version_2(), part: {**version_2()[part], "brand_new": 7}})


@pytest.mark.parametrize("version", [True, 1.0, "1", None, [1], 0, -1])
def test_only_version_1_is_migrated(version: Any) -> None:
    assert "schema_version" in refusal({**old_document(), "schema_version": version})


def test_a_wrong_record_of_version_1_is_refused() -> None:
    assert "timing" in refusal({**old_document(), "timing": 7})
    assert "brand_new" in refusal({**old_document(), "brand_new": 7})
    assert "what" in refusal({**old_document(), "what": []})
    endless = line(old_document()).replace(b'"stages": {}', b'"stages": ' + b"[" * 9_000)
    assert "not JSON" in refusal(endless)


@pytest.mark.parametrize("direction", ["forward", "backward", "train"])
def test_directions(direction: str) -> None:
    assert a_record(experiment__direction=direction).experiment.direction == direction


FAILED = [status for status in Status if status is not Status.PASSED]


@pytest.mark.parametrize("status", FAILED)
def test_no_time_without_a_pass(status: Status) -> None:
    assert parse_record(line(failed(status))).timing is None
    whole = document()
    for part in ("timing", "comparison"):
        assert f"status {status} must have no timing" in refusal({**failed(status), part: whole[part]})
    # nor when a record is built in Python
    parts = dict(parse_record(line(failed(status))))
    with pytest.raises(ValidationError, match="no timing"):
        Record(**{**parts, "timing": a_record().timing})


def test_a_pass_has_a_time_and_a_failure_a_reason() -> None:
    for part in ("timing", "routing", "work"):
        assert "timing, routing and work" in refusal(document(**{"comparison": None, part: None}))
    assert "its reason" in refusal({**failed("OOM", correctness__reason="")})
    assert parse_record(line(failed("CRASHED", routing=None, work=None))).work is None


def test_the_baseline_is_not_compared_with_itself() -> None:
    assert "not compared" in refusal(document(implementation__role="baseline"))
    assert a_record(implementation__role="baseline", comparison=None).comparison is None
    assert a_record(implementation__role="twin").comparison is not None


def test_a_frozen_record_stays_as_it_is() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        a_record().suite = "other"  # type: ignore[misc]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (
            {"work__share_of_roof": 1.01},
            "work.share_of_roof",
        ),
        ({"experiment__T": "32"}, "experiment.T"),
        ({"experiment__T": True}, "experiment.T"),
        ({"experiment__T": -1}, "experiment.T"),
        ({"experiment__T": 2**63}, "experiment.T"),
        ({"experiment__direction": "sideways"}, "experiment.direction"),
        ({"implementation__router": None}, "implementation.router"),
        ({"implementation__layer": "a\x1b[2J"}, "implementation.layer"),
        ({"work__tokens_per_second": -1.0}, "work.tokens_per_second"),
        ({"experiment__span": "x" * 301}, "experiment.span"),
        ({"experiment__span": "a\x1b[2J"}, "experiment.span"),
        ({"cell_key": "0" * 63}, "cell_key"),
        ({"cell_key": "0" * 64 + "\n"}, "cell_key"),
        ({"correctness__status": "FINE"}, "correctness.status"),
        ({"created_at": "2026-11-15T02:47:34"}, "created_at"),
        ({"created_at": "9999-12-31T23:59:59-12:00"}, "created_at"),
        ({"unheard_of": 1}, "unheard_of"),
        ({"timing__median": 0.02}, "must ascend"),
        ({"timing__least": 0.0}, "least"),
        ({"timing__mean": 5.0}, "mean"),
        ({"timing__samples__file": "../../etc/passwd"}, "timing.samples.file"),
        ({"timing__samples__file": "session=../samples.f64"}, "timing.samples.file"),
        ({"timing__samples__file": "session=other/samples.f64"}, "own session"),
        ({"timing__samples__offset": 4}, "timing.samples.offset"),
        ({"comparison__low": 0.95}, "comparison"),
        ({"record_id": "other-000001"}, "record_id"),
        ({"log_tail": "x" * 2001}, "log_tail"),
        ({"schema_version": 4}, "newer version"),
        ({"schema_version": 0}, "schema_version"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], words: str) -> None:
    assert words in refusal(document(**changes))


def test_a_newer_record_is_told_even_if_its_fields_are_unknown() -> None:
    assert "newer version" in refusal(document(schema_version=7, brand_new={"a": 1}))


def test_lines_that_are_no_json() -> None:
    assert "not JSON" in refusal(b"")
    assert "not JSON" in refusal(b"\xff\xfe")
    assert "not JSON" in refusal(b"[" * 60_000)
    assert "over 65,536 bytes" in refusal(b" " * (MAX_LINE_BYTES + 1))
    for number in ("NaN", "Infinity", "-Infinity", "1e999"):
        refusal(line(document(peak_rss_bytes=777)).replace(b"0.0115", number.encode()))


def test_of_a_key_given_twice_the_last_counts() -> None:
    twice = line(failed("OOM")).replace(b'"status": "OOM"', b'"status": "PASSED", "status": "OOM"')
    assert parse_record(twice).correctness.status is Status.OOM
    # and cannot smuggle a time past the rule
    given = line(document()).replace(b'"status": "PASSED"', b'"status": "PASSED", "status": "OOM"')
    assert "no timing" in refusal(given)


def test_timing_of_samples() -> None:
    samples = [0.010, 0.011, 0.012, 0.013]
    ref = SamplesFile(file=f"session={SESSION}/samples.f64", offset=0, count=4, sha256=HASH)
    timing = Timing.of(samples, 0.5, ref, {"route": 0.001})
    assert timing.median == pytest.approx(0.0115) and timing.least == 0.010 and timing.most == 0.013
    assert timing.std == pytest.approx(np.std(samples, ddof=1)) and timing.stages == {"route": 0.001}
    assert Timing.of([0.1] * 7, 0.5, ref, {}).std == pytest.approx(0, abs=1e-12)
    rng = np.random.default_rng(0)
    for _ in range(200):
        Timing.of(rng.lognormal(-9, 1e-9, size=rng.integers(1, 50)), 0.1, ref, {})
    for bad in ([], [0.0], [np.nan], [0.1, -0.1]):
        with pytest.raises(ValueError, match="one sample"):
            Timing.of(bad, 0.5, ref, {})


def test_a_comparison_is_taken_over_as_it_was_found() -> None:
    rng = np.random.default_rng(0)
    a = 0.01 * rng.lognormal(0, 0.01, 40)
    compared = compare(a, 1.1 * a * rng.lognormal(0, 0.01, 40), aa_floor=0.003)
    part = ComparisonFacts.of("eager_loop", compared, 0.003)
    assert (part.verdict, part.ratio, part.low, part.high) == ("SLOWER", compared.ratio, *compared.interval)
    assert get_args(ComparisonFacts.model_fields["verdict"].annotation) == get_args(Verdict)


def test_any_text_can_be_made_to_fit() -> None:
    nasty = "a\x00b\x1b[31m\r\n\ud800" + "x" * 5_000
    record = a_record(correctness__reason=one_line(nasty), log_tail=log_tail(nasty[::-1]))
    assert "\n" not in record.correctness.reason and record.correctness.reason.endswith("...")


def test_a_content_hash_does_not_depend_on_order() -> None:
    assert content_hash({"a": 1, "b": [2]}) == content_hash({"b": [2], "a": 1}) != content_hash({"a": 1})
    with pytest.raises(ValueError, match="JSON"):
        content_hash({"a": float("nan")})


def test_every_status_says_what_it_means() -> None:
    assert all(status.meaning and status == status.value for status in Status)
    assert Status("OOM") is Status.OOM and len(Status) == 15
