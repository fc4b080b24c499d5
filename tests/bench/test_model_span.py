"""The span model: what is built agrees with the oracle, wherever in a text; a wrong layer is seen."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.utils.flop_counter import FlopCounterMode

from moe_routing_bench.bench.calls import Result, named_tensors
from moe_routing_bench.bench.inputs import Inputs
from moe_routing_bench.bench.judging import Judge
from moe_routing_bench.bench.spans.block import attention_of, past_of
from moe_routing_bench.bench.spans.block import span as block_span
from moe_routing_bench.bench.spans.model import IMPLEMENTATIONS, span
from moe_routing_bench.bench.status import Status
from moe_routing_bench.core import cpp
from moe_routing_bench.workloads.cases import cases
from moe_routing_bench.workloads.experiment import Experiment, ImplementationRef

pytest.importorskip("transformers")
pytestmark = pytest.mark.slow
SIZES: dict[str, Any] = {"D": 64, "F": 32, "E": 8, "K": 2, "layers": 3}
DECODE = Experiment(case="own/decode", span="model", T=2, **SIZES, sequences=2, context=9)
PLACES = {
    "a prompt": replace(DECODE, T=12, sequences=1, context=0),
    "two prompts": replace(DECODE, T=12, context=0),
    "a token of each": DECODE,
    "the first token": replace(DECODE, T=1, sequences=1, context=1),
    "a prompt after a context": replace(DECODE, T=6, context=9),
}
OURS = ImplementationRef(name="ours")
FROZEN = replace(OURS, frozen=True)
WHOLE = ImplementationRef(name="ours(attention=ours,linears=True)", frozen=True)


def arguments(inputs: Inputs, number: int = 3) -> dict[str, Any]:
    return span.arguments(span.call(OURS, inputs, number, 1))


def judged(experiment: Experiment, given: Inputs, implementation: ImplementationRef, folder: Path) -> Status:
    with torch.no_grad():
        out = span.built(implementation, given).run(*arguments(given).values())
        save_file(named_tensors(Result(out=out)), folder / "out.safetensors")
        return Judge(span, Inputs(experiment)).judge(folder / "out.safetensors", 3, 1, implementation).status


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("place", PLACES)
def test_every_implementation_is_right_in_every_place(place: str, dtype: str, tmp_path: Path) -> None:
    experiment = replace(PLACES[place], dtype=dtype)
    inputs, tried = Inputs(experiment), 0
    for name in IMPLEMENTATIONS:
        one = span.settled(ImplementationRef.read(name), experiment)
        with torch.no_grad():
            reason = span.why_not(one, inputs, arguments(inputs))
        if reason is not None:
            masked = place == "a prompt after a context" and "attention=ours" in name
            assert masked or cpp.why_not() is not None, reason
            continue
        assert judged(experiment, inputs, one, tmp_path) is Status.PASSED
        tried += 1
    assert tried >= 3


@pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))
@pytest.mark.parametrize("store", ["int8", "int4_g32"])
def test_stored_experts_are_right_and_other_formats_are_refused(store: str, tmp_path: Path) -> None:
    experiment = replace(DECODE, dtype="bfloat16", store=store)
    inputs, names = Inputs(experiment), span.stored_names(experiment)
    for name in names:
        one = span.settled(ImplementationRef.read(name), experiment)
        assert judged(experiment, inputs, one, tmp_path) is Status.PASSED, name
    assert len(set(map(span.label, names))) == len(names)
    assert span.facts(OURS, inputs)[0].weight_bytes < span.facts(OURS, Inputs(DECODE))[0].weight_bytes
    other = ImplementationRef(name="ours(impl=native(store=q8_0))")
    assert span.why_not(other, inputs, arguments(inputs)) is not None
    assert span.why_not(ImplementationRef(name=names[-1]), Inputs(DECODE), arguments(inputs)) is not None


def test_a_wrong_layer_and_a_wrong_key_are_seen(tmp_path: Path) -> None:
    inputs = Inputs(replace(DECODE, dtype="float32"))
    right = ImplementationRef(name="transformers")
    model = span.built(right, inputs).owner
    assert judged(inputs.experiment, inputs, right, tmp_path) is Status.PASSED
    with torch.no_grad():
        model.model.layers[1].mlp.experts.down_proj.mul_(1.01)
    assert judged(inputs.experiment, inputs, right, tmp_path) is Status.WRONG_VALUE
    other = Inputs(replace(DECODE, dtype="float32", context=10))
    assert judged(inputs.experiment, other, right, tmp_path) is Status.WRONG_VALUE


def test_a_call_leaves_no_token_behind() -> None:
    inputs = Inputs(DECODE)
    built, args = span.built(OURS, inputs), arguments(inputs)
    with torch.no_grad():
        first = built.run(*args.values())
        parts = dict(span.stages(OURS, inputs, args))
        for run in parts.values():
            run()
        assert torch.equal(first, built.run(*args.values()))
    assert list(parts) == ["attention", "experts", "norms", "lm_head"]


def test_each_layer_has_memory_of_its_own_and_implementations_share_it() -> None:
    inputs = Inputs(DECODE)
    models = [span.built(one, inputs).owner for one in (ImplementationRef(name="transformers"), OURS)]
    first, second = (
        [layer.mlp.experts.down_proj.data_ptr() for layer in model.model.layers] for model in models
    )
    assert first == second and len(set(first)) == 3
    assert models[0].config._experts_implementation != models[1].config._experts_implementation


@pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))
def test_each_layer_has_frozen_and_stored_experts_of_its_own() -> None:
    stored = replace(DECODE, store="int8")
    for case, names in ((DECODE, ("frozen(ours)",)), (stored, span.stored_names(stored)[2:])):
        inputs = Inputs(case)
        for name in names:
            model = span.built(span.settled(ImplementationRef.read(name), case), inputs).owner
            panels = [layer.mlp.experts.down_proj.panels.data_ptr() for layer in model.model.layers]
            assert len(set(panels)) == 3, name


@pytest.mark.skipif(cpp.why_not() is not None, reason=str(cpp.why_not()))
def test_what_runs_is_named() -> None:
    inputs = Inputs(DECODE)
    runs = [span.built(one, inputs).runs for one in (OURS, FROZEN, WHOLE)]
    assert "native" in runs[0] and "packed" not in runs[0]
    assert "packed once" in runs[1] and "13 dense matrices packed" in runs[2]
    plain = span.built(WHOLE, Inputs(replace(DECODE, dtype="float32"))).runs
    assert "0 dense matrices packed" in plain  # PyTorch is faster there


def test_every_router_chooses_as_the_workload_says() -> None:
    inputs, chosen = Inputs(replace(DECODE, T=24, context=0)), []
    model = copy.deepcopy(span.built(ImplementationRef(name="transformers"), inputs).owner)
    for layer in model.model.layers:
        layer.mlp.gate.register_forward_hook(lambda m, a, out: chosen.append(out[2]))
    with torch.no_grad():
        model(inputs_embeds=span.arguments(span.call(OURS, inputs, 5, 1))["x_BND"])
    assert len(chosen) == 3
    for expert_TK in chosen:
        assert torch.equal(expert_TK.sort().values, inputs.workload(1).routing.expert_TK.sort().values)


def test_operations_of_a_model_are_those_torch_counts() -> None:
    inputs = Inputs(replace(DECODE, dtype="float32", workload="balanced"))
    one = ImplementationRef(name="transformers(attention=eager,experts=eager)")
    run, args = span.built(one, inputs).run, arguments(inputs)
    with FlopCounterMode(display=False) as counted, torch.no_grad():
        run(*args.values())
    cost, _ = span.facts(one, inputs)
    case = inputs.experiment
    gates = case.layers * 2 * case.shape.num_pairs * case.D
    assert counted.get_total_flops() == cost.useful_flops - gates
    assert past_of(case) == 8 and cost.weight_bytes > 3 * span_bytes(case)


def span_bytes(case: Experiment) -> int:
    a = attention_of(case)
    return 4 * case.D * a.head_dim * (2 * a.heads + 2 * a.kv_heads)


def test_other_spans_have_one_layer_and_no_context() -> None:
    with pytest.raises(ValueError):
        replace(DECODE, span="block")
    with pytest.raises(ValueError):
        past_of(replace(DECODE, T=40))
    block = Inputs(replace(DECODE, span="block", layers=1))
    args = block_span.arguments(block_span.call(OURS, block, 0, 0))
    assert block_span.why_not(OURS, block, args) is not None


def test_the_suite_has_the_attention_of_olmoe() -> None:
    for case in cases("whole-model"):
        assert attention_of(case).heads == attention_of(case).kv_heads == 16 and case.layers == 4
