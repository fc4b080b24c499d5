"""Knobs change the time of a kernel and not its result; a tuner sees only those that can matter."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest
import torch

import moe_routing_bench as mrb
from moe_routing_bench.core import cpp
from moe_routing_bench.ops.expert_ffn.op import op
from moe_routing_bench.ops.knobs import Setting, settings, stages

pytestmark = pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))
native = op.get("native")
KNOBS = native.knobs
assert KNOBS is not None
NAMES = [one.name for one in fields(KNOBS)]


def call(tokens: int, *, frozen: bool, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
    E, D, F, K = 4, 96, 160, 2
    random = torch.Generator().manual_seed(tokens)
    w_in, w_out = (torch.randn(size, generator=random).to(dtype) / 8 for size in ((E, D, 2 * F), (E, F, D)))
    weights = mrb.ExpertWeights(w_in_EDG=w_in, w_out_EFD=w_out)
    expert_TK = torch.rand(tokens, E, generator=random).topk(K).indices
    routing = mrb.Routing(expert_TK=expert_TK, gate_TK=torch.rand(tokens, K), num_experts=E)
    x_TD = torch.randn(tokens, D, generator=random).to(dtype)
    plan = mrb.make_plan(routing, mrb.Layout.compact())
    assert native.freeze is not None
    return x_TD, routing.gate_TK, plan, native.freeze(weights) if frozen else weights


def named(setting: Setting) -> str:
    return f"native({','.join(f'{name}={value}' for name, value in setting)})" if setting else "native"


@pytest.mark.parametrize("frozen", [False, True], ids=["plain", "frozen"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_knob_changes_no_result(frozen: bool, dtype: torch.dtype) -> None:
    args = call(300, frozen=frozen, dtype=dtype)
    expected = native.run(*args)
    tried = 0
    for names in stages(KNOBS).values():
        for setting in settings(KNOBS, args, names):
            result = op.get(named(setting)).run(*args)
            if "in_place" in dict(setting):  # another order of sums
                assert torch.allclose(result.float(), expected.float(), rtol=0.02, atol=0.02), setting
            else:
                assert torch.equal(result, expected), setting
            tried += 1
    tiles = cpp.best_level() == "amx" and dtype == torch.bfloat16  # whose shape is given
    assert tried >= (16 if tiles else 19)  # as many as are not pointless here


def test_pointless_settings_are_not_tried() -> None:
    plain, frozen = call(300, frozen=False), call(300, frozen=True)
    assert all("prefetch" not in dict(one) for one in settings(KNOBS, plain, NAMES))
    assert all("in_place" not in dict(one) for one in settings(KNOBS, frozen, NAMES))
    of_one_token = list(settings(KNOBS, call(1, frozen=False), NAMES))
    assert () in of_one_token and all(dict(one).keys() <= {"strip_out"} for one in of_one_token)
    # 96 columns are 3 panels
    assert {dict(one).get("strip_out") for one in settings(KNOBS, frozen, ["strip_out"])} == {None, 1, 2}


def test_others_stay_as_they_are_given() -> None:
    args = call(300, frozen=True)
    found = set(settings(KNOBS, args, ["strip"], given=(("prefetch", 4096), ("strip", 8))))
    assert (("prefetch", 4096),) in found and (("prefetch", 4096), ("strip", 1)) in found
    assert all(dict(one)["prefetch"] == 4096 for one in found)


@pytest.mark.parametrize(
    "spec", ["native(strip=3)", "native(strip=True)", "native(rows=4.0)", "native(depth=4)"]
)
def test_what_was_not_declared_is_refused(spec: str) -> None:
    with pytest.raises(ValueError):
        op.get(spec)


def test_knobs_stand_beside_other_options() -> None:
    level = cpp.best_level()
    both = op.get(f"native(level={level},strip=2)")
    assert both.label == f"native(level={level},strip=2)"
    assert torch.equal(both.run(*(args := call(20, frozen=True))), native.run(*args))
