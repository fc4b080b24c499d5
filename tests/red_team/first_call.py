"""Child of test_fixtures_load.py: loads kernels of the red team, judges first calls, or looks for symptoms.

python first_call.py load op.name ...          prints {"op.name": "loaded"}
python first_call.py at|right_at op.name ...   prints {"op.name": "right" | what is wrong with the first call}
python first_call.py symptom op.name ...       prints {"op.name": the state a simple gate would give, or ""}
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

import expectations
from moe_routing_bench.bench import clock  # noqa: F401  (as in a worker, there before any kernel is)
from moe_routing_bench.core.accuracy import judge, judge_exact
from moe_routing_bench.core.experts import ExpertWeights
from moe_routing_bench.core.plan import Layout
from moe_routing_bench.ops.implementation import tensors_in
from moe_routing_bench.ops.make_plan.op import reference as make_plan
from moe_routing_bench.ops.registry import Op, all_ops, include
from moe_routing_bench.workloads.workload import make_workload

EQUAL = torch.equal  # a kernel may replace it later


def main(what: str, names: list[str]) -> None:
    torch.set_num_threads(1)
    include(expectations.KERNELS)
    ops = all_ops()
    said = {}
    for label in names:
        op, _, name = label.partition(".")
        if what == "load":
            ops[op].get(name)
            said[label] = "loaded"
        else:
            row = expectations.EXPECTED[op, name]
            said[label] = in_a_fork(
                partial(symptom, ops[op], name, row.at)
                if what == "symptom"
                else partial(first_call, ops[op], name, getattr(row, what), row.settle_seconds)
            )
    print(json.dumps(said))


def in_a_fork(answer_of: Callable[[], str]) -> str:
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            answer = answer_of()
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        os.write(write, answer.encode()[:4096])
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as answers:
        answer = answers.read().decode()
    _, status = os.waitpid(child, 0)
    return answer if status == 0 else f"no answer, status {status}"


def first_call(op: Op, name: str, sizes: Any, settle_seconds: float) -> str:
    args = arguments(op.name, sizes)
    doubled = [double(arg) for arg in args]
    oracle, baseline = op.reference(*doubled), op.reference(*args)
    out = op.get(name)(*args)
    time.sleep(settle_seconds)
    return sentence(op, out, oracle, baseline) or "right"


def sentence(op: Op, out: Any, oracle: torch.Tensor, baseline: torch.Tensor) -> str:
    if op.name == "dispatch":
        return judge_exact(out, baseline).sentence
    if isinstance(out, torch.Tensor) and out.layout is not torch.strided:
        return f"layout {out.layout}"
    return judge(out, oracle, baseline).sentence


def symptom(op: Op, name: str, sizes: Any) -> str:
    """A simple gate without any isolation: the state of the first fault it sees in 60 calls, or nothing."""
    implementation, held = op.get(name), None
    for call in range(60):
        args = arguments(op.name, sizes, seed=call)
        oracle, baseline = op.reference(*map(double, args)), op.reference(*args)
        before = [tensor.clone() for tensor in tensors_in(args)]
        places = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(args)}
        time.sleep(0.35 if call == 40 else 0)
        # what the allocator hands back must not be right by luck
        poison = [torch.full_like(baseline, float("nan")) for _ in range(8)]
        del poison
        try:
            out = timed_sample(implementation, args)
        except NotImplementedError:
            return "UNSUPPORTED"
        except Exception:
            return "RUNTIME_ERROR"
        if type(out) is not torch.Tensor or out.layout is not torch.strided:
            return "WRONG_STRUCTURE"
        if out.shape != baseline.shape or out.dtype != baseline.dtype:
            return "WRONG_SHAPE" if out.shape != baseline.shape else "WRONG_DTYPE"
        copy = out.clone()
        after = list(tensors_in(args))
        if not all(EQUAL(a, b) for a, b in zip(before, after, strict=True)):
            return "MUTATED_INPUT"
        if out.untyped_storage().data_ptr() in places:
            return "WRONG_STRUCTURE"
        if sentence(op, copy, oracle, baseline):
            return "WRONG_VALUE" if bool(copy.isfinite().all()) else "NONFINITE"
        if held is not None and not EQUAL(*held):
            return "WRONG_VALUE"
        held = (out, copy)
        if call == 2:
            try:
                again = implementation(*args)
            except Exception:
                return "RUNTIME_ERROR"
            if not EQUAL(again, copy):
                return "NONDETERMINISTIC"
    return ""


def timed_sample(implementation: Any, args: list[Any]) -> Any:
    return implementation(*args)


def arguments(op: str, sizes: Any, seed: int = 0) -> list[Any]:
    routing = make_workload(sizes.workload, T=sizes.T, E=sizes.E, K=sizes.K, seed=seed).routing
    plan = make_plan(routing, Layout.parse(sizes.layout))
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randn(sizes.T, sizes.D, generator=generator)
    if op == "dispatch":
        return [x_TD, plan]
    if op == "combine":
        return [torch.randn(plan.num_rows, sizes.D, generator=generator), routing.gate_TK, plan]
    weights = ExpertWeights(
        w_in_EDG=torch.randn(sizes.E, sizes.D, 2 * sizes.F, generator=generator) * sizes.D**-0.5,
        w_out_EFD=torch.randn(sizes.E, sizes.F, sizes.D, generator=generator) * sizes.F**-0.5,
    )
    return [x_TD, routing.gate_TK, plan, weights]


def double(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.double()
    return arg.to(dtype=torch.float64) if isinstance(arg, ExpertWeights) else arg


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
