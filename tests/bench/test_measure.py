"""The measuring loop with a host that plays a script: every branch, without a process."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from moe_routing_bench.bench import budget as budget_file
from moe_routing_bench.bench import measure as loop
from moe_routing_bench.bench.budget import Budget
from moe_routing_bench.bench.hosts.host import Host, Judged, Reading, Turn
from moe_routing_bench.bench.hosts.messages import Described
from moe_routing_bench.bench.measure import WARM_SAMPLES, BaselineError, measure
from moe_routing_bench.bench.runner import _deciding_seconds
from moe_routing_bench.bench.series import Measured, Series, fewest_rounds
from moe_routing_bench.bench.setup import GATE_CALLS, Numbers, Setup, Trial
from moe_routing_bench.bench.status import ImplementationError, Status
from moe_routing_bench.bench.trial import SAMPLE_SECONDS, calibrate
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

BASE, MINE, OTHER = (ImplementationRef(name=name) for name in ("base", "mine", "other"))
FIRST, TWIN = Series("baseline", BASE), Series("twin", BASE)
ONE, TWO = Series("candidate", MINE), Series("candidate", OTHER)
BESIDE = Series("beside", BASE, MINE)
Script = Callable[[Turn], Reading | None]


class Clock:
    now = 1000.0

    def perf_counter(self) -> float:
        return self.now


class FakeHost:
    """Every call takes 10 ms, unless the script says otherwise or raises."""

    def __init__(self, clock: Clock, script: Script = lambda turn: None, runs: str = "child"):
        self.time, self.script, self.clock = clock, script, runs
        self.turns: list[Turn] = []
        self.judged: list[Turn] = []
        self.finished: list[Series] = []
        self.ended, self.hurt, self.weights = 0, "", None

    def prepare(self, series: Series) -> bool:
        return False

    def sample(self, turn: Turn) -> Reading:
        self.turns.append(turn)
        reading = self.script(turn) or Reading(seconds=0.01, calls=turn.calls)
        self.time.now += reading.seconds * reading.calls
        return reading

    def judge(self, turn: Turn) -> Judged:
        if turn.keep is not None:
            self.judged.append(turn)
        return Judged(results=int(turn.keep is not None))

    def finish(self, series: Series) -> str:
        self.finished.append(series)
        return ""

    def check_weights(self) -> None:
        if self.weights is not None:
            raise self.weights

    def harm(self) -> str:
        return self.hurt

    def end(self) -> None:
        self.ended, self.hurt = self.ended + 1, ""

    def rounds(self) -> list[list[Turn]]:
        """Its turns without warm-ups and last checks, by round: those of one share their first number."""
        first = Counter(turn.first for turn in self.turns if not turn.stages)
        numbers = [number for number, turns in first.items() if turns > 1 and number]
        return [[turn for turn in self.turns if turn.first == number] for number in numbers]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    for file in (loop, budget_file):
        monkeypatch.setattr(file, "time", made)
    monkeypatch.setattr(loop, "server_harm", lambda: "")
    return made


def setup_of(
    *implementations: ImplementationRef,
    outside: tuple[ImplementationRef, ...] = (),
    slow: float = 0.0,
    **how: object,
) -> Setup:
    how = {"min_rounds": 8, "max_rounds": 8, "checked": 3, "target": 0.5, "max_seconds": 60.0, **how}
    experiment = Experiment(span="combine", T=8, D=8, F=8, E=4, K=2, implementations=implementations, **how)  # type: ignore[arg-type]
    trials = {
        one: Trial(status=Status.PASSED, about=Described(label=one.name), calls=4, call_seconds=0.01)
        for one in implementations
    }
    if slow:
        last = implementations[-1]
        trials[last] = replace(trials[last], call_seconds=slow, calls=1)
    judge = SimpleNamespace(oracle_seconds=0.0, knows=lambda *call: True)
    return Setup(
        experiment=experiment, judge=judge, cores=(), trials=trials,  # type: ignore[arg-type]
        budget=Budget(float(experiment.max_seconds)), outside=frozenset(outside),
    )  # fmt: skip


def measured_of(setup: Setup, shared: Host) -> Measured:
    return measure(setup, shared, setup.experiment.implementations, lambda done, now: None)


def once(series: Series, failure: ImplementationError, after: int) -> Script:
    """Raises in the sample after so many others of the series."""
    seen = Counter[Series]()

    def script(turn: Turn) -> Reading | None:
        seen[turn.series] += 1
        if turn.series == series and seen[series] == after + 1:
            raise failure
        return None

    return script


def lengths(measured: Measured) -> dict[Series, int]:
    return {series: len(seen.seconds) for series, seen in measured.samples.items()}


WRONG = ImplementationError(Status.WRONG_VALUE, "wrong")


def test_calibration_doubles_until_a_sample_is_long_enough(clock: Clock) -> None:
    samples = iter([share * SAMPLE_SECONDS for share in (0.1, 0.1, 0.2, 9.0, 4.0, 2.0)])
    host = FakeHost(clock, lambda turn: Reading(seconds=next(samples) / turn.calls, calls=turn.calls))
    calls, seconds = calibrate(host, ONE, Numbers(), 256)
    # two calls took nine times as long once: an interruption, and not believed
    assert [turn.calls for turn in host.turns] == [1, 1, 2, 2, 4, 4]
    assert (calls, seconds) == (4, pytest.approx(2.0 * SAMPLE_SECONDS / 4))
    numbers = [number for turn in host.turns for number in range(turn.first, turn.first + turn.calls)]
    assert len(set(numbers)) == len(numbers), "every call has inputs of its own"


@pytest.mark.parametrize("most", [1, 100])
def test_calibration_ends(clock: Clock, most: int) -> None:
    host = FakeHost(clock, lambda turn: Reading(seconds=1e-12, calls=turn.calls))
    assert calibrate(host, ONE, Numbers(), most)[0] == most


def test_all_take_their_turn_on_the_same_inputs_in_a_new_order(clock: Clock) -> None:
    host = FakeHost(clock)
    measured = measured_of(setup_of(BASE, MINE, OTHER), host)
    assert lengths(measured) == dict.fromkeys((FIRST, ONE, TWO, TWIN), 8)
    rounds = host.rounds()
    assert len(rounds) == 8 and all(len({turn.step for turn in turns}) == 1 for turns in rounds)
    assert all({turn.series for turn in turns} == {FIRST, ONE, TWO, TWIN} for turns in rounds)
    assert len({tuple(turn.series for turn in turns) for turns in rounds}) > 1
    assert [turn.series for turn in host.turns[: 4 * WARM_SAMPLES : WARM_SAMPLES]] == [FIRST, ONE, TWO, TWIN]
    assert "rounds: 8" in measured.stop_reason and measured.rounds_by_process == [8]


def test_results_of_random_rounds_are_judged_and_one_at_the_end_but_never_the_twins(clock: Clock) -> None:
    host = FakeHost(clock)
    measured = measured_of(setup_of(BASE, MINE), host)
    assert {series: seen.checked for series, seen in measured.samples.items()} == {FIRST: 3, ONE: 3, TWIN: 0}
    in_rounds = [turn for turn in host.judged if turn.first]
    assert len({(turn.first, turn.keep) for turn in in_rounds}) == 2, "one oracle serves all"
    assert host.finished == [FIRST, ONE]


@pytest.mark.parametrize(("calls", "outside", "known"), [(1, (), True), (4, (), False), (1, (MINE,), False)])
def test_long_calls_of_our_own_code_are_judged_on_inputs_of_their_trials(
    clock: Clock,
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
    outside: tuple[ImplementationRef, ...],
    known: bool,
) -> None:
    host, setup = FakeHost(clock), setup_of(BASE, MINE, outside=outside)
    monkeypatch.setattr(
        loop, "hosts_for", lambda setup, shared, isolation, lineup: dict.fromkeys(lineup, host)
    )
    setup.trials = {one: replace(trial, calls=calls) for one, trial in setup.trials.items()}
    setup.judge.oracle_seconds = 5.0
    measured = measured_of(setup, host)
    assert measured.samples[FIRST].checked == measured.samples[ONE].checked == 3
    in_rounds = host.judged[:-2]
    assert {(turn.first, turn.step) in GATE_CALLS for turn in in_rounds} == {known}
    assert len({turn.first for turn in in_rounds}) == 2, "no timed call twice"
    assert (setup.all_judging_seconds([BASE, MINE]) == 0.0) == known


def test_of_what_reuses_its_output_the_last_call_is_judged(clock: Clock) -> None:
    host, setup = FakeHost(clock), setup_of(BASE, MINE)
    about = Described(label="mine", reuses_output=True)
    setup.trials[MINE] = replace(setup.trials[MINE], about=about)
    measured_of(setup, host)
    assert {turn.keep for turn in host.judged if turn.series == ONE} == {3}


def test_who_fails_leaves_and_the_others_go_on_in_a_new_process(clock: Clock) -> None:
    host = FakeHost(clock, once(ONE, WRONG, after=WARM_SAMPLES + 3))
    measured = measured_of(setup_of(BASE, MINE, OTHER), host)
    assert measured.failed == {MINE: WRONG} and lengths(measured) == dict.fromkeys((FIRST, TWO, TWIN), 8)
    assert host.ended == 1
    in_rounds = {turn.first for turns in host.rounds() for turn in turns}
    warm_ups = [turn for turn in host.turns if turn.first and turn.first not in in_rounds]
    assert len(warm_ups) == WARM_SAMPLES * (4 + 3)


def test_a_process_that_was_harmed_in_a_trial_is_not_used(clock: Clock) -> None:
    host = FakeHost(clock)
    host.hurt = "ended"
    assert set(lengths(measured_of(setup_of(BASE, MINE), host)).values()) == {8} and host.ended == 1


def test_a_baseline_that_fails_ends_the_rounds(clock: Clock) -> None:
    for series in (FIRST, TWIN):
        host = FakeHost(clock, once(series, WRONG, after=4))
        with pytest.raises(BaselineError) as blame:
            measured_of(setup_of(BASE, MINE), host)
        assert blame.value.implementations == [BASE] and host.ended == 1
    over = ImplementationError(Status.NO_TIME, "over")
    with pytest.raises(BaselineError) as blame:
        measured_of(setup_of(BASE, MINE), FakeHost(clock, once(FIRST, over, after=4)))
    assert list(blame.value.implementations) == [BASE, MINE], "nobody else will have time either"


@pytest.fixture
def pair(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> tuple[FakeHost, FakeHost]:
    """Hosts of our own code, and of `mine` from outside with the baseline beside it."""
    shared, isolated = FakeHost(clock), FakeHost(clock, runs="parent")

    def hosts_for(setup: Setup, shared: Host, isolation: object, lineup: list[Series]) -> dict[Series, Host]:
        return {
            series: isolated if MINE in (series.owner, series.implementation) else shared for series in lineup
        }

    monkeypatch.setattr(loop, "hosts_for", hosts_for)
    return shared, isolated


def test_code_from_outside_is_compared_with_the_baseline_beside_it(pair: tuple[FakeHost, FakeHost]) -> None:
    shared, isolated = pair
    measured = measured_of(setup_of(BASE, OTHER, MINE, outside=(MINE,)), shared)
    assert lengths(measured) == dict.fromkeys((FIRST, TWO, ONE, TWIN, BESIDE), 8)
    assert measured.partner(ONE) == BESIDE and measured.partner(TWO) == FIRST
    assert measured.samples[ONE].isolated and not measured.samples[TWO].isolated
    assert all({turn.series for turn in turns} == {ONE, BESIDE} for turns in isolated.rounds())


def test_a_pair_are_neighbours_in_every_round(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeHost(clock)
    monkeypatch.setattr(
        loop, "hosts_for", lambda setup, shared, isolation, lineup: dict.fromkeys(lineup, host)
    )
    measured_of(setup_of(BASE, OTHER, MINE, outside=(MINE,)), host)
    for turns in host.rounds():
        order = [turn.series for turn in turns]
        assert abs(order.index(ONE) - order.index(BESIDE)) == 1


@pytest.mark.parametrize(
    ("series", "failure"),
    [(BESIDE, WRONG), (BESIDE, ImplementationError(Status.WRONG_VALUE, "wrong", ONE)), (ONE, WRONG)],
)
def test_code_from_outside_answers_for_the_baseline_beside_it(
    pair: tuple[FakeHost, FakeHost], series: Series, failure: ImplementationError
) -> None:
    shared, isolated = pair
    isolated.script = once(series, failure, after=4)
    measured = measured_of(setup_of(BASE, OTHER, MINE, outside=(MINE,)), shared)
    blamed = measured.failed[MINE].status
    assert blamed is (Status.SUSPECT if series == BESIDE and failure.series is None else Status.WRONG_VALUE)
    assert lengths(measured) == dict.fromkeys((FIRST, TWO, TWIN), 8) and isolated.ended and not shared.ended


def test_harm_is_blamed_on_the_code_from_outside_that_ran_last(pair: tuple[FakeHost, FakeHost]) -> None:
    shared, isolated = pair

    def kills(turn: Turn) -> Reading | None:
        shared.hurt = "ended" if turn.series == ONE and len(isolated.turns) > 8 else ""
        return None

    isolated.script = kills
    measured = measured_of(setup_of(BASE, OTHER, MINE, outside=(MINE,)), shared)
    assert measured.failed[MINE].status is Status.SUSPECT and "ended" in measured.failed[MINE].reason
    assert lengths(measured) == dict.fromkeys((FIRST, TWO, TWIN), 8) and shared.ended == 1


@pytest.mark.parametrize(
    ("grown", "process", "status"), [(2**28, 2**28, Status.SUSPECT), (2**28, 0, None), (0, 2**28, None)]
)
def test_a_leak_is_what_grows_with_the_process(
    clock: Clock, grown: int, process: int, status: object
) -> None:
    """In a shared process one may fill what another freed."""
    turns = Counter[Series]()

    def script(turn: Turn) -> Reading:
        turns[turn.series] += 1
        now = 2**30 + process * turns[turn.series]
        mine = grown if turn.series == ONE else 0
        return Reading(seconds=0.01, calls=turn.calls, rss_before=now - mine, rss_after=now)

    failed = measured_of(setup_of(BASE, MINE), FakeHost(clock, script)).failed
    assert (failed[MINE].status if failed else None) is status


def test_what_first_calls_keep_is_no_leak(clock: Clock) -> None:
    turns = Counter[Series]()

    def script(turn: Turn) -> Reading:
        turns[turn.series] += 1
        kept = 2**31 if turns[turn.series] <= WARM_SAMPLES else 0
        return Reading(seconds=0.01, calls=turn.calls, rss_before=2**30, rss_after=2**30 + kept)

    assert not measured_of(setup_of(BASE, MINE), FakeHost(clock, script)).failed


def test_threads_and_files_are_watched_after_every_turn(clock: Clock) -> None:
    def threads(turn: Turn) -> Reading | None:
        return Reading(seconds=0.01, calls=turn.calls, new_threads=1) if turn.series == ONE else None

    assert measured_of(setup_of(BASE, MINE), FakeHost(clock, threads)).failed[MINE].status is Status.SUSPECT
    setup, host = setup_of(BASE, MINE), FakeHost(clock)
    setup.watch = lambda: "touched" if host.turns[-1].series == ONE else None
    assert measured_of(setup, host).failed[MINE].reason == "touched"


def test_who_is_much_slower_leaves_early_with_its_samples_and_does_not_return(clock: Clock) -> None:
    def script(turn: Turn) -> Reading | None:
        return Reading(seconds=0.1, calls=1) if turn.series == TWO else None

    how = {"min_rounds": 20, "max_rounds": 20, "processes": 2}
    host = FakeHost(clock, script)
    measured = measured_of(setup_of(BASE, MINE, OTHER, slow=0.1, **how), host)
    assert lengths(measured) == {FIRST: 40, ONE: 40, TWO: 10, TWIN: 40}
    assert measured.rounds_by_process == [20, 20] and host.finished.count(TWO) == 1
    assert measured.against(TWO) == measured.samples[FIRST].seconds[:10]
    everybody = measured_of(
        setup_of(BASE, MINE, OTHER, slow=0.1, **{**how, "all": True}), FakeHost(clock, script)
    )
    assert set(lengths(everybody).values()) == {40}


def test_who_has_no_time_for_a_few_rounds_leaves_no_process(pair: tuple[FakeHost, FakeHost]) -> None:
    shared, isolated = pair
    isolated.script = lambda turn: Reading(seconds=20.0 if turn.series == ONE else 0.01, calls=1)
    measured = measured_of(setup_of(BASE, OTHER, MINE, outside=(MINE,)), shared)
    assert measured.failed[MINE].status is Status.NO_TIME and isolated.ended
    assert lengths(measured) == dict.fromkeys((FIRST, TWO, TWIN), 5)


def test_who_must_leave_for_want_of_time_keeps_its_place(clock: Clock) -> None:
    """Six rounds are too few for a verdict, but they rank."""
    turns = Counter[Series]()

    def late_after_six(turn: Turn) -> Reading | None:
        turns[turn.series] += 1
        clock.now += 100.0 if min(turns.values()) == WARM_SAMPLES + 6 and len(turns) == 4 else 0.0
        return None

    setup = setup_of(BASE, MINE, OTHER, min_rounds=20, max_rounds=20)
    measured = measured_of(setup, FakeHost(clock, late_after_six))
    assert lengths(measured) == dict.fromkeys((FIRST, ONE, TWO, TWIN), 6) and not measured.failed
    assert measured.stop_reason.startswith("time") and all(
        s.checked for s in measured.samples.values() if s is not measured.samples[TWIN]
    )


class SlowJudging(FakeHost):
    """A call takes a second, and the right result of a round five."""

    known: int | None = None

    def sample(self, turn: Turn) -> Reading:
        self.turns.append(turn)
        self.time.now += 1.0
        return Reading(seconds=1.0, calls=1)

    def judge(self, turn: Turn) -> int:
        if turn.keep is not None and turn.first not in (0, self.known):
            self.known, self.time.now = turn.first, self.time.now + 5.0
        return super().judge(turn)


SIX = tuple(ImplementationRef(name=name) for name in ("base", "mine", "other", "a", "b", "c"))


def slow_setup(*implementations: ImplementationRef, **how: object) -> Setup:
    setup = setup_of(*implementations, min_rounds=20, max_rounds=200, target=0.01, **how)
    setup.judge.oracle_seconds = 5.0
    setup.judge.knows = lambda number, step, one: number == 0  # the last check's
    setup.trials = {
        one: replace(trial, calls=1, call_seconds=1.0, about=Described(label=one.name))
        for one, trial in setup.trials.items()
    }
    return setup


@pytest.mark.parametrize("implementations", [SIX[:2], SIX[:3], SIX])
def test_the_time_that_is_shared_out_is_what_the_rounds_that_decide_take(
    clock: Clock, implementations: tuple[ImplementationRef, ...]
) -> None:
    setup = slow_setup(*implementations)
    needed = _deciding_seconds(setup, list(implementations))
    setup.budget.leave(needed)
    began = clock.now
    rounds = set(lengths(measured_of(setup, SlowJudging(clock))).values())
    assert rounds >= {setup.deciding_rounds(len(implementations))} and len(rounds) == 1
    assert clock.now - began <= needed


def test_an_oracle_does_not_make_rounds_look_long(clock: Clock) -> None:
    """Six rounds in 18 s of 40 were seen, and then "too few rounds"."""
    setup, host = slow_setup(BASE, MINE, max_seconds=50.0), SlowJudging(clock)
    began = clock.now
    rounds = lengths(measured_of(setup, host))[ONE]
    assert rounds >= fewest_rounds(2) and 45.0 - 2 * 3.0 < clock.now - began <= 50.0


@pytest.mark.parametrize(
    ("slowest", "seconds", "its", "others"), [(5.0, 90.0, 5, 12), (5.0, 200.0, 20, 20), (2.0, 45.0, 6, 6)]
)
def test_the_slowest_leaves_early_only_if_that_brings_a_verdict_for_others(
    clock: Clock, slowest: float, seconds: float, its: int, others: int
) -> None:
    """In 45 s nobody could be decided, so all have the same rounds."""

    def script(turn: Turn) -> Reading:
        return Reading(seconds=slowest if turn.series == TWO else 1.0, calls=1)

    setup = slow_setup(BASE, MINE, OTHER, max_seconds=seconds)
    setup.judge.oracle_seconds, setup.trials[OTHER] = 0.0, replace(setup.trials[OTHER], call_seconds=slowest)
    samples = lengths(measured_of(setup, FakeHost(clock, script)))
    assert (samples[TWO], samples[ONE]) == (its, others)


def test_two_that_take_all_the_time_get_none(clock: Clock) -> None:
    host = FakeHost(clock, lambda turn: Reading(seconds=30.0, calls=1))
    with pytest.raises(BaselineError) as blame:
        measured_of(setup_of(BASE, MINE), host)
    assert blame.value.failure.status is Status.NO_TIME and list(blame.value.implementations) == [BASE, MINE]


def test_changed_weights_are_blamed_on_all_who_share_the_process(pair: tuple[FakeHost, FakeHost]) -> None:
    shared, _ = pair
    shared.weights = ImplementationError(Status.MUTATED_INPUT, "weights")
    with pytest.raises(BaselineError) as blame:
        measured_of(setup_of(BASE, OTHER, MINE, outside=(MINE,)), shared)
    assert (
        list(blame.value.implementations) == [BASE, OTHER]
        and "one of base, other" in blame.value.failure.reason
    )


def test_stages_are_timed_after_the_round_where_the_host_has_a_clock(pair: tuple[FakeHost, FakeHost]) -> None:
    shared, isolated = pair
    shared.script = lambda turn: Reading(seconds=1.0, stages={"route": 0.4}) if turn.stages else None
    measured = measured_of(setup_of(BASE, OTHER, MINE, outside=(MINE,), stages=True), shared)
    assert measured.samples[TWO].stage_medians() == {"route": 0.4} and len(measured.samples[TWO].stages) == 8
    assert not measured.samples[ONE].stages and not any(turn.stages for turn in isolated.turns)
