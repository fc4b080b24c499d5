"""Every span in every direction: what is built agrees with plain torch, gradients too; what errs is seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from moe_routing_bench.bench.calls import Caller, Result, named_tensors
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.judging import Judge, Judgement
from moe_routing_bench.bench.spans.span import span_named, span_names
from moe_routing_bench.bench.status import Status
from moe_routing_bench.core.names import parse_spec
from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.routers.router import all_routers
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

pytestmark = pytest.mark.slow

SHAPE = MoEShape(T=24, D=32, F=16, E=8, K=2)
KINDS = (
    "moe",
    "chain(iterations=2)",
    "perft(kind=R)",
    "perft(kind=E)",
    "perft(kind=D,num_adapters=2)",
    "perft(kind=S)",
)
# rows without a pair get a gradient of NaN from above, which a kernel must ignore
LAYOUTS = ("compact", "padded(capacity_factor=1.0)", "block(8)")


def result_of(
    implementation: ImplementationRef, span: str, direction: str, dtype: str = "float32"
) -> tuple[Judge, Result] | str:
    """What a worker would compute for call 3, and the judge of it; a reason if it cannot."""
    case = Experiment(case="own/x", span=span, **vars(SHAPE), dtype=dtype, direction=direction, shared_F=16)
    inputs, this = Inputs(case), span_named(span)
    call = this.call(implementation, inputs, 3, 1)
    args = this.arguments(call)
    with torch.set_grad_enabled(direction != "forward"):
        if (reason := this.why_not(implementation, inputs, args)) is not None:
            return reason
    caller = Caller(this, this.built(implementation, inputs), direction)
    with torch.no_grad():
        return Judge(this, inputs), caller.result(caller.ready(call, args)(), args)


def judged(judge: Judge, result: Result, implementation: ImplementationRef, folder: Path) -> Judgement:
    save_file(named_tensors(result), folder / "out.safetensors")
    return judge.judge(folder / "out.safetensors", 3, 1, implementation)


def agrees(
    implementation: ImplementationRef, span: str, direction: str, folder: Path, dtype: str = "float32"
) -> bool:
    """True if it ran; what ran must be right."""
    made = result_of(implementation, span, direction, dtype)
    if isinstance(made, str):
        return False
    finding = judged(*made, implementation, folder)
    assert finding.status is Status.PASSED, finding.reason
    assert bool(made[1].gradients) == (direction != "forward")
    return True


@pytest.mark.parametrize("direction", ["backward", pytest.param("train", marks=pytest.mark.nightly)])
@pytest.mark.parametrize(
    "span",
    [
        name
        for name in span_names()
        if span_named(name).differentiable and name not in ("block", "decoder", "model")
    ],
)
def test_every_implementation_has_right_gradients_or_says_it_has_none(span, direction, tmp_path):
    implementations = [
        ImplementationRef(name=spec, layout=layout)
        for spec in span_named(span).all_names()
        for layout in LAYOUTS
    ]
    assert any([agrees(implementation, span, direction, tmp_path) for implementation in implementations])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", ["forward", "train"])
@pytest.mark.parametrize("router", list(all_routers()))
def test_every_router_in_a_layer(router, direction, dtype, tmp_path):
    assert agrees(ImplementationRef(name="staged", router=router), "layer", direction, tmp_path, dtype)


@pytest.mark.parametrize("direction", ["forward", "train"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_layer(kind, direction, tmp_path):
    implementation = ImplementationRef(name="staged", router="softmax_topk", layer=kind)
    assert agrees(implementation, "layer", direction, tmp_path)
    made = result_of(implementation, "layer", direction)
    frozen = kind.startswith("perft") and direction == "train"
    if frozen and not isinstance(made, str):
        trained = set(made[1].gradients) - {"x_TD"}
        assert trained and all(name.startswith(("adapters.", "router.")) for name in trained)


def test_a_chain_whose_choices_cannot_be_shared_says_so(tmp_path):
    reason = result_of(ImplementationRef(name="staged", layer="chain(iterations=3)"), "layer", "forward")
    assert isinstance(reason, str) and "equally" in reason


def with_gradient(name: str, change: Callable[[Tensor], Tensor | None]) -> Callable[[Result], Result]:
    return lambda r: replace(r, gradients={**r.gradients, name: change(r.gradients[name])})


@pytest.mark.parametrize(
    ("change", "status"),
    [
        (lambda r: replace(r, out=r.out * 1.01), Status.WRONG_VALUE),
        (lambda r: replace(r, out=(r.out, r.out)), Status.WRONG_STRUCTURE),
        (with_gradient("x_TD", lambda g: g * 1.01), Status.WRONG_VALUE),
        (with_gradient("x_TD", lambda g: g / 0), Status.NONFINITE),
        (with_gradient("x_TD", lambda g: g.double()), Status.WRONG_DTYPE),
        (with_gradient("gate_TK", lambda g: g[:, :1]), Status.WRONG_SHAPE),
        (with_gradient("w_in_EDG", lambda g: None), Status.WRONG_VALUE),
    ],
)
def test_a_wrong_gradient_is_seen(change, status, tmp_path):
    implementation = ImplementationRef(name="staged")
    made = result_of(implementation, "expert_ffn", "train")
    assert not isinstance(made, str)
    judge, result = made
    assert judged(judge, change(result), implementation, tmp_path).status is status


def test_soft_moe_costs_its_mixing_and_its_write_back():
    case = Experiment(case="own/x", span="layer", **vars(SHAPE), dtype="float32")
    inputs, layer = Inputs(case), span_named("layer")
    cost, load = layer.facts(ImplementationRef(name="staged", router="soft_moe"), inputs)
    T, D, F, E = SHAPE.T, SHAPE.D, SHAPE.F, SHAPE.E
    experts = 2 * 3 * D * F * E + 2 * D * E  # a slot for each expert, and its gate
    assert cost.useful_flops == experts + 2 * T * D * E + 2 * 2 * T * E * D
    assert load["max_over_mean"] == 1.0 and load["active_experts"] == E


def test_a_rule_with_one_choice_has_a_workload_of_its_own():
    case = Experiment(case="own/x", span="layer", **vars(SHAPE), dtype="float32")
    inputs, layer = Inputs(case), span_named("layer")
    _, load = layer.facts(ImplementationRef(name="staged", router="switch"), inputs)
    assert load == inputs.workload(0, 1).statistics(inputs.plan(0, "compact", 1)).to_dict()


def test_options_of_rules_are_read():
    assert parse_spec("top_p(p=0.8,most=4)") == ("top_p", {"p": 0.8, "most": 4})
    assert parse_spec("softmax_topk(order=topk_then_softmax, bias=True)") == (
        "softmax_topk", {"order": "topk_then_softmax", "bias": True},
    )  # fmt: skip
    assert parse_spec("switch(loss_weights={'switch': 0.01, 'z': 0.001})")[1] == {
        "loss_weights": {"switch": 0.01, "z": 0.001}
    }
    with pytest.raises(ValueError, match="option=value"):
        parse_spec("top_p(0.8)")
