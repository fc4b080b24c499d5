"""Kernels from outside that attack the clock itself, by class: what the benchmark may say about each.

A kernel that may be PASSED gains nothing: its time is that of honest work. tests/red_team/README.md has the
same classes in words.
"""

from __future__ import annotations

from pathlib import Path

OUTSIDE = Path(__file__).parent / "outside"

_WRONG = "WRONG_VALUE NONFINITE SUSPECT NONDETERMINISTIC CRASHED"
_HARMLESS = "PASSED RUNTIME_ERROR NO_TIME TIMEOUT"
# honest in trial and kit, and cheats in the timed process; as kernel(cheat=False) it never does, and passes
ONLY_WHERE_TIMED = (
    "combine.fills_when_woken", "combine.works_only_when_kept", "combine.hides_its_memory",
    "combine.predicts_the_stream", "combine.table_from_the_seed", "combine.works_in_judged_rounds",
    "expert_ffn.reads_a_table", "expert_ffn.guesses_the_routing", "combine.remembers_across_runs",
    "combine.remembers_the_plan", "combine.remembers_its_neighbour", "combine.skips_what_is_overwritten",
    "combine.bfloat16_after_the_check", "combine.drops_the_smallest_gates", "combine.one_row_is_old",
    "combine.restores_before_the_print", "combine.thread_before_main", "combine.calls_the_kernel_itself",
)  # fmt: skip

# class: {op.kernel: states}
CLASSES: dict[str, dict[str, str]] = {
    "before the clock": {
        "combine.prepares_from_the_stack": f"{_HARMLESS} {_WRONG}",
        "combine.prepares_from_gc": f"{_HARMLESS} {_WRONG}",
        "combine.prepares_at_finalizers": f"{_HARMLESS} {_WRONG}",
        "combine.prepares_by_timer": f"{_HARMLESS} {_WRONG}",
        "combine.prepares_when_asked": f"{_HARMLESS} {_WRONG}",
        "combine.prepares_from_old_slots": f"{_HARMLESS} {_WRONG}",
    },
    "after the clock": {
        "combine.fills_at_detach": _WRONG,
        "combine.fills_by_mode": f"{_WRONG} WRONG_STRUCTURE",
        "combine.fills_at_the_next_request": _WRONG,
        "combine.fills_in_a_child": _WRONG,
        "combine.fills_when_woken": _WRONG,
        "combine.answers_before_it_works": f"{_WRONG} RUNTIME_ERROR",
        "combine.memory_that_waits": _WRONG,
        "combine.wakes_itself": _WRONG,
    },
    "frames and modules": {
        "combine.works_only_when_kept": _WRONG,
        "combine.clock_lies_mostly": "PASSED SUSPECT",
        "combine.clock_hides_under_the_pipe": "PASSED SUSPECT",
        "combine.replaces_the_server": _WRONG,
        "combine.hides_its_memory": _WRONG,
    },
    "predicting": {
        "combine.predicts_the_stream": f"PASSED {_WRONG}",
        "combine.table_from_the_seed": f"PASSED {_WRONG}",
        "combine.works_in_judged_rounds": _WRONG,
        "expert_ffn.reads_a_table": _WRONG,
        "expert_ffn.guesses_the_routing": _WRONG,
    },
    "remembering": {
        "combine.remembers_across_runs": f"PASSED {_WRONG}",
        "combine.remembers_the_plan": f"PASSED {_WRONG}",
        "combine.remembers_by_a_sample": f"PASSED {_WRONG}",
        "combine.remembers_its_neighbour": f"PASSED {_WRONG}",
        "combine.skips_what_is_overwritten": _WRONG,
        "expert_ffn.remembers_weights": f"PASSED {_WRONG}",
    },
    "harming rivals": {
        "combine.timer_burns_the_core": "PASSED SUSPECT",
        "combine.daemon_burns_the_core": "SUSPECT",
        "combine.harms_its_rivals(how=kill)": "PASSED",
        "combine.harms_its_rivals(how=stop)": "PASSED",
        "combine.harms_its_rivals(how=slow)": "PASSED",
        "combine.harms_its_rivals(how=move)": "PASSED",
        "combine.fills_the_memory": "SUSPECT OOM",
        "combine.daemon_while_loading": "SUSPECT",
        "combine.daemon_in_the_trial": "SUSPECT",
        "combine.starves_its_rivals(how=prlimit)": "PASSED",
        "combine.starves_its_rivals(how=renice)": "PASSED",
    },
    # a grant would be a wrong result
    "beyond its tree": {
        "combine.asks_the_kernel(how=tracer)": "PASSED",
        "combine.asks_the_kernel(how=is_traced_by_its_child)": "SUSPECT",
        "combine.asks_the_kernel(how=set_uid)": "SUSPECT",
        "combine.asks_the_kernel(how=file_that_signals)": "PASSED",
        "combine.asks_the_kernel(how=kernel_threads)": "PASSED",
        "combine.asks_the_kernel(how=clock)": "PASSED",
        "combine.asks_the_kernel(how=memory)": "PASSED",
        "combine.asks_the_kernel(how=network)": "PASSED",
        "combine.sibling_by_clone": "SUSPECT",
        "combine.sibling_by_clone(untraced=True)": "PASSED",
        "combine.calls_the_kernel_itself": f"{_WRONG} UNSUPPORTED",
    },
    "more cores": {
        "combine.second_thread_in_the_call": "PASSED SUSPECT",
        "combine.thread_before_main": "PASSED SUSPECT UNSUPPORTED",
        "combine.child_in_the_call": "SUSPECT",
    },
    "precision": {
        "expert_ffn.int8_in_groups": "WRONG_VALUE",
        "combine.bfloat16_after_the_check": _WRONG,
        "combine.drops_the_smallest_gates": _WRONG,
        "combine.one_row_is_old": _WRONG,
    },
    "files and pipes": {
        "combine.fifo_as_log": "PASSED",
        "combine.log_is_a_link": "RUNTIME_ERROR",
        "combine.fifo_as_result": "WRONG_STRUCTURE",
        "combine.result_is_a_link": "WRONG_STRUCTURE",
        "combine.result_is_a_device": "WRONG_STRUCTURE",
        "combine.half_a_message": "TIMEOUT NO_TIME SUSPECT",
        "combine.endless_message": "SUSPECT",
        "combine.answers_ahead": f"{_WRONG} RUNTIME_ERROR",
        "combine.points_elsewhere": "SUSPECT",
        "combine.shrinks_the_slots": "PASSED",
        "expert_ffn.writes_the_shared_weights": f"PASSED CRASHED MUTATED_INPUT {_WRONG}",
    },
    "identity": {
        "combine.says_it_is_built_in": "PASSED",
        "combine.describes_another": "PASSED",
        "combine.restores_before_the_print": "MUTATED_INPUT",
        "combine.passes_its_own_kit": _WRONG,
        "combine.skips_the_kit": "SUSPECT",
        "combine.supports_no_hard_case": "UNSUPPORTED",
        "combine.right_for_one_size": "WRONG_VALUE",
    },
}
CLASSES["control"] = {f"{name}(cheat=False)": "PASSED" for name in ONLY_WHERE_TIMED}
