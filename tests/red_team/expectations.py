"""What the benchmark must say about each kernel of the red team, and in which cell.

README.md beside this file says how to use the table.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

KERNELS = Path(__file__).parent / "kernels"
MARKER = ".red_team_may_write_here"  # two kernels write files only below a folder that holds this one

STATES = frozenset(
    "PASSED WRONG_SHAPE WRONG_DTYPE WRONG_VALUE WRONG_STRUCTURE NONFINITE NONDETERMINISTIC MUTATED_INPUT "
    "UNSUPPORTED RUNTIME_ERROR OOM TIMEOUT NO_TIME CRASHED SUSPECT".split()
)


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """A cell: float32, these sizes. T is no power of two, see combine.detects_benchmark_by_shape."""

    T: int = 48
    D: int = 32
    F: int = 48
    E: int = 8
    K: int = 2
    layout: str = "compact"
    workload: str = "uniform"


@dataclass(frozen=True, kw_only=True)
class Expectation:
    """One row of the table.

    ("combine", "returns_wrong_results(how=above_256)"): Expectation(
        states={"WRONG_VALUE"}, what="zero beyond token 256", trap=11, at=Sizes(T=320), right_at=Sizes())
      in the cell `at` it must end in one of the states; in the cell `right_at` it must be PASSED.
    """

    states: frozenset[str]
    what: str  # what it tries
    trap: int | None = None  # number in section 5 of the harness research
    contained: bool = False  # PASSED is fine, because nobody is harmed: must_hold says what to check then
    must_hold: str = ""
    at: Sizes = Sizes()
    right_at: Sizes | None = None
    needs: str = ""  # what a run needs besides sizes, in words
    # the first call in a fresh process: right by the judge, wrong (or raises) but harmless, or not to be made
    first_call: Literal["right", "wrong", "dangerous"] = "right"
    settle_seconds: float = 0.0  # how long to wait until the first result is right

    def __post_init__(self) -> None:
        assert self.states and self.states <= STATES, self.states - STATES
        assert self.contained == ("PASSED" in self.states) == bool(self.must_hold), self.what


def _row(states: str, what: str, trap: int | None = None, **rest: object) -> Expectation:
    holds = bool(rest.get("must_hold"))
    names = frozenset(states.split()) | ({"PASSED"} if holds else frozenset())
    return Expectation(states=names, what=what, trap=trap, contained=holds, **rest)  # type: ignore[arg-type]


_HONEST_TIME = "its median is no less than 0.8 of the same computation's without the trick"
_OTHERS = "the median and the state of an honest implementation in the same run are as without it"
_WRONG = "WRONG_VALUE SUSPECT"
_LAZY = "WRONG_STRUCTURE SUSPECT"
_DEAD = "the cell is recorded within its time limit; the next cell runs in a new worker"

EXPECTED: dict[tuple[str, str], Expectation] = {
    # wrong in the open
    ("combine", "returns_wrong_results(how=dtype)"): _row(
        "WRONG_DTYPE", "another dtype", 17, first_call="wrong"
    ),
    ("combine", "returns_wrong_results(how=shape)"): _row(
        "WRONG_SHAPE", "one token too many", first_call="wrong"
    ),
    ("combine", "returns_wrong_results(how=broadcasts)"): _row(
        "WRONG_SHAPE", "a shape that broadcasting hides", first_call="wrong"
    ),
    ("combine", "returns_wrong_results(how=tuple)"): _row(
        "WRONG_STRUCTURE", "a tuple, not a tensor", first_call="wrong"
    ),
    ("combine", "returns_wrong_results(how=sparse)"): _row(
        "WRONG_STRUCTURE RUNTIME_ERROR", "a sparse tensor of the right shape", 17, first_call="wrong"
    ),
    ("combine", "returns_wrong_results(how=nan)"): _row(
        "NONFINITE", "one NaN at the end", 12, first_call="wrong"
    ),
    ("combine", "returns_wrong_results(how=bfloat16)"): _row(
        "WRONG_VALUE", "less precision, for a loose tolerance", 12, first_call="wrong"
    ),
    ("combine", "returns_wrong_results(how=above_256)"): _row(
        "WRONG_VALUE", "zero beyond token 256", 11, at=Sizes(T=320), right_at=Sizes()
    ),
    ("combine", "returns_wrong_results(how=at_192)"): _row(
        "WRONG_VALUE", "wrong at T = 192 only", 11, at=Sizes(T=192), right_at=Sizes(T=191)
    ),
    ("combine", "detects_benchmark_by_shape"): _row(
        "WRONG_VALUE", "skips choices if T is a power of two", 11, at=Sizes(T=128), right_at=Sizes(T=127)
    ),
    ("combine", "detects_timing_by_stack"): _row(
        "WRONG_VALUE SUSPECT NONDETERMINISTIC",
        "zeros if a name on the stack says timing",
        6,
        needs="outputs of timed calls are judged",
    ),
    ("combine", "nondeterministic"): _row("NONDETERMINISTIC", "other bits each time, within tolerance"),
    ("combine", "raises_at_random"): _row(
        "RUNTIME_ERROR", "raises in one call of four", 29, needs="50 calls or more", first_call="wrong"
    ),
    ("combine", "wrong_at_random"): _row(
        "WRONG_VALUE SUSPECT NONDETERMINISTIC",
        "after 40 calls, zeros in one call of two",
        6,
        needs="20 judged outputs of timed calls after the 40th, or it may slip through: 2^-20",
    ),
    # results without work
    ("combine", "returns_first_result"): _row(_WRONG, "one result for ever", 7),
    ("combine", "memoises(by=checksum)"): _row(
        _WRONG, "remembers by four numbers of each input", 7, must_hold=_HONEST_TIME
    ),
    ("combine", "memoises(by=hash)"): _row(
        "SUSPECT", "remembers by a hash of all inputs", 7, must_hold=_HONEST_TIME
    ),
    ("combine", "memoises(by=address)"): _row(
        f"{_WRONG} NONDETERMINISTIC", "remembers by address", 7, must_hold=_HONEST_TIME
    ),
    ("combine", "works_in_unsupported"): _row(
        "SUSPECT", "computes where no clock looks", 17, must_hold=_HONEST_TIME
    ),
    ("combine", "unsupported_changes_its_mind"): _row(
        "UNSUPPORTED RUNTIME_ERROR SUSPECT",
        "refuses after 30 questions",
        29,
        must_hold="unsupported() is asked fewer than 31 times, or the refusal is the state",
    ),
    ("combine", "precomputes_in_background"): _row(
        f"{_WRONG} MUTATED_INPUT CRASHED RUNTIME_ERROR",
        "a thread computes waiting inputs before the clock starts",
        7,
        must_hold=f"{_HONEST_TIME}; a thread that outlives the call is the sign",
        at=Sizes(T=512, D=256),
    ),
    ("combine", "fixes_the_dice"): _row(
        f"{_WRONG} MUTATED_INPUT", "makes fresh inputs all alike, then remembers", 7, must_hold=_HONEST_TIME
    ),
    ("combine", "honest_until_checked(then=zeros)"): _row(
        _WRONG, "zeros after 12 calls", 6, needs="13 calls or more"
    ),
    ("combine", "honest_until_checked(then=unwritten)"): _row(
        f"{_WRONG} NONFINITE", "unwritten memory after 12 calls", 10, needs="13 calls or more"
    ),
    ("combine", "stale_memory"): _row(
        f"{_WRONG} NONFINITE NONDETERMINISTIC", "lives on what the allocator hands back", 10
    ),
    ("combine", "zeros_after_a_while"): _row(
        _WRONG, "zeros 0.3 s after its first call", 6, needs="timed calls later than that, one of them judged"
    ),
    ("combine", "half_the_work_after_the_check"): _row(
        _WRONG, "after 40 calls half the tokens are old", 6, needs="a judged call after the 40th"
    ),
    # inputs
    ("combine", "mutates(what=rows)"): _row("MUTATED_INPUT", "y_RD as scratch memory", 10),
    ("combine", "mutates(what=gate)"): _row("MUTATED_INPUT", "changes one gate", 10),
    ("combine", "mutates(what=plan)"): _row("MUTATED_INPUT", "makes the plan cheaper in place", 10),
    ("combine", "mutates(what=plan_field)"): _row(
        "MUTATED_INPUT WRONG_VALUE", "another tensor in the frozen plan", 10
    ),
    ("combine", "mutates(what=storage)"): _row("MUTATED_INPUT WRONG_VALUE", "other memory through .data", 10),
    ("combine", "mutates_and_patches_hashes"): _row(
        "MUTATED_INPUT WRONG_VALUE SUSPECT", "changes an input and breaks hashlib", 10
    ),
    ("combine", "mutates(what=restored)"): _row(
        "MUTATED_INPUT WRONG_VALUE",
        "changes an input and restores it",
        10,
        must_hold="the inputs are the same after the call",
    ),
    ("combine", "mutates(what=result_inside)"): _row("MUTATED_INPUT", "the result lies in y_RD's memory", 10),
    ("dispatch", "returns_its_input"): _row(
        "MUTATED_INPUT WRONG_STRUCTURE SUSPECT",
        "returns x_TD where order allows it: zero bytes moved",
        10,
        at=Sizes(K=1, workload="one_expert"),
        right_at=Sizes(),
    ),
    ("combine", "reuses_its_buffer"): _row(
        f"{_WRONG} NONDETERMINISTIC WRONG_STRUCTURE",
        "one buffer for all results, unsaid",
        10,
        needs="a result is kept over the next call on other inputs and judged after it",
    ),
    ("dispatch", "nan_in_padding"): _row(
        "NONFINITE WRONG_VALUE",
        "NaN in rows without a pair",
        10,
        at=Sizes(layout="block(16)"),
        first_call="wrong",
    ),
    ("dispatch", "unwritten_padding"): _row(
        "NONFINITE WRONG_VALUE NONDETERMINISTIC",
        "unwritten memory in rows without a pair",
        10,
        at=Sizes(layout="block(16)"),
        needs="freed memory is poisoned, or the zeros of fresh pages make it right",
        right_at=Sizes(),
    ),
    ("expert_ffn", "drops_tokens_under_skew"): _row(
        "WRONG_VALUE",
        "a hidden capacity of twice the mean load",
        20,
        at=Sizes(E=16, workload="lognormal(maxvio=4)"),
        right_at=Sizes(E=16, workload="balanced"),
    ),
    ("expert_ffn", "empties_weights"): _row(
        "MUTATED_INPUT WRONG_VALUE", "zeroes the weights, so that zeros become right", 10
    ),
    # results that come later
    ("combine", "lazy_by_dispatch"): _row(f"{_LAZY} RUNTIME_ERROR", "computes at first use", 8),
    ("combine", "lazy_by_function"): _row(_LAZY, "computes at first use and hides its type", 8),
    ("combine", "fills_later"): _row(
        f"{_WRONG} NONFINITE NONDETERMINISTIC", "a thread fills the result 20 ms later", 8, settle_seconds=0.5
    ),
    ("combine", "fills_later(delay=0.0)"): _row(
        f"{_WRONG} NONFINITE NONDETERMINISTIC",
        "a thread fills the result during the return",
        8,
        at=Sizes(T=512, D=256),
        needs="the output is copied as soon as the clock stops; a thread that outlives the call is the sign",
        settle_seconds=0.5,
    ),
    # clocks, judges, messages
    ("combine", "patches_time"): _row("SUSPECT", "slows the time module's clocks", 9, must_hold=_HONEST_TIME),
    ("combine", "patches_clock"): _row(
        "SUSPECT", "replaces the benchmark's clock", 9, must_hold=_HONEST_TIME
    ),
    ("combine", "patches_clock_code"): _row(
        "SUSPECT", "new bytecode in the clock's span", 9, must_hold=_HONEST_TIME
    ),
    ("combine", "patches_clock_in_c"): _row(
        "SUSPECT CRASHED", "overwrites the timer's C function", 9, must_hold=_HONEST_TIME
    ),
    ("combine", "patches_serialiser"): _row(
        "SUSPECT CRASHED", "a tenth of every float that leaves the worker", 9, must_hold=_HONEST_TIME
    ),
    ("combine", "answers_nonsense"): _row(
        "SUSPECT",
        "answers the parent itself, with nonsense",
        9,
        needs="10 calls or more",
        first_call="dangerous",
    ),
    ("combine", "patches_the_judge"): _row("WRONG_VALUE", "every check says yes", 9, first_call="wrong"),
    ("combine", "sleeps_in_warm_up"): _row(
        "SUSPECT", "sleeps in its first eight calls", 19, must_hold=f"{_HONEST_TIME}, nor more than twice it"
    ),
    ("combine", "writes_results_file"): _row(
        "SUSPECT",
        "a tenth of every median in records.jsonl, and a forged line",
        9,
        must_hold="no changed or forged line is accepted: what is read afterwards is the parent's own",
        needs=f"a file {MARKER} in the folder of results, which should hold a record already",
    ),
    ("combine", "writes_garbage_everywhere"): _row(
        "SUSPECT CRASHED RUNTIME_ERROR",
        "garbage on stdout and in every pipe",
        9,
        must_hold="nothing it wrote is taken for a message; the numbers are its own",
        needs=f"to also try regular files: {MARKER} in their folder",
        first_call="dangerous",
    ),
    # harm to others
    ("combine", "slows_its_neighbours"): _row(
        "SUSPECT",
        "makes the others sleep",
        18,
        must_hold=_OTHERS,
        needs="an honest implementation in the same run",
    ),
    ("combine", "spoils_its_neighbours"): _row(
        "SUSPECT",
        "makes the others wrong",
        18,
        must_hold=_OTHERS,
        needs="an honest implementation in the same run",
    ),
    ("combine", "changes_global_settings"): _row(
        "SUSPECT", "float64 by default and eight threads for all", 17, must_hold=_OTHERS
    ),
    ("combine", "leaks_threads"): _row(
        "SUSPECT TIMEOUT NO_TIME", "four busy threads for 120 s", 5, must_hold=_OTHERS, first_call="dangerous"
    ),
    ("combine", "leaks_memory"): _row(
        "OOM SUSPECT CRASHED",
        "16 MiB more at each call, up to 6 GiB",
        must_hold="the memory is free again when the cell ends",
    ),
    ("combine", "allocates_until_oom"): _row(
        "OOM", "256 MiB at a time until stopped", 29, first_call="dangerous"
    ),
    # ends that are no result; _DEAD must hold for each
    ("combine", "loops_forever"): _row(
        "TIMEOUT", "never returns and ignores SIGTERM", 29, needs=_DEAD, first_call="dangerous"
    ),
    ("combine", "honest_until_checked(then=hang)"): _row(
        "TIMEOUT", "30 calls, then it hangs", 29, needs=_DEAD
    ),
    ("combine", "segfaults"): _row("CRASHED", "reads address zero", 29, needs=_DEAD, first_call="dangerous"),
    ("combine", "ends_its_process(how=kill)"): _row(
        "CRASHED", "SIGKILL to itself", 29, needs=_DEAD, first_call="dangerous"
    ),
    ("combine", "ends_its_process(how=exit)"): _row(
        "CRASHED", "exit code 0, no word", 29, needs=_DEAD, first_call="dangerous"
    ),
    ("combine", "honest_until_checked(then=exit)"): _row(
        "CRASHED", "30 calls, then exit code 0", 29, needs=_DEAD
    ),
    ("combine", "ends_its_process(how=system_exit)"): _row(
        "RUNTIME_ERROR CRASHED",
        "SystemExit passes `except Exception`",
        29,
        needs=_DEAD,
        first_call="dangerous",
    ),
    ("combine", "ends_its_process(how=keyboard_interrupt)"): _row(
        "RUNTIME_ERROR CRASHED",
        "pretends that the user pressed Ctrl-C",
        29,
        needs=_DEAD,
        first_call="dangerous",
    ),
    ("combine", "ends_its_process(how=fork)"): _row(
        "CRASHED", "a child of its own session holds the pipes", 29, needs=_DEAD, first_call="dangerous"
    ),
    ("combine", "raises_on_import"): _row(
        "RUNTIME_ERROR CRASHED", "raises while loaded", 29, needs=_DEAD, first_call="dangerous"
    ),
    ("combine", "exits_on_import"): _row(
        "CRASHED", "ends whoever loads it", 29, needs=f"{_DEAD}; the parent lives", first_call="dangerous"
    ),
}
BREAK_ON_IMPORT = frozenset({("combine", "raises_on_import"), ("combine", "exits_on_import")})
