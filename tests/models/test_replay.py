"""Replay: recorded choices with live gates, for several families, strict about what does not fit."""

from __future__ import annotations

from dataclasses import replace as changed
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing
from moe_routing_bench.models.tracing import ModelTrace, listening, moe_layers, pieces, record_trace
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.workloads.trace import read_trace, write_trace

pytest.importorskip("transformers")

import moe_routing_bench.models.transformers as plugin
import tiny_models

pytestmark = pytest.mark.slow
FAMILIES = ("qwen3_moe", "mixtral", "olmoe", "deepseek_v3", "gpt_oss")


def heard(model: Any, call: Any) -> tuple[Any, dict[int, list[Routing]]]:
    """What a call answers, and the routings of every layer in it."""
    calls: dict[int, list[Routing]] = {}
    with (
        torch.no_grad(),
        listening(model, lambda layer, routing: calls.setdefault(layer, []).append(routing)),
    ):
        return call(), calls


def as_trace(calls: dict[int, list[Routing]], where: list[tuple[int, int]] | None = None) -> ModelTrace:
    """The calls one after another; `where` is (document, position) of every row, one document if left out."""
    expert_TK = {layer: torch.cat([one.expert_TK for one in some]) for layer, some in calls.items()}
    T = next(iter(expert_TK.values())).shape[0]
    where = where or [(0, t) for t in range(T)]
    return ModelTrace(
        names={layer: str(layer) for layer in calls},
        expert_TK=expert_TK,
        gate_TK={layer: torch.cat([one.gate_TK.float() for one in some]) for layer, some in calls.items()},
        position_T=torch.tensor([position for _, position in where]),
        document_T=torch.tensor([document for document, _ in where]),
        num_experts=next(iter(calls.values()))[0].num_experts,
    )


def own_trace(model: Any, ids: Tensor) -> ModelTrace:
    B, N = ids.shape
    _, calls = heard(model, lambda: model(input_ids=ids, use_cache=False))
    return as_trace(calls, [(b, n) for b in range(B) for n in range(N)])


def other_trace(trace: ModelTrace, seed: int = 0) -> ModelTrace:
    """Any distinct experts."""
    draw = torch.Generator().manual_seed(seed)
    E = trace.num_experts
    expert_TK = {
        layer: torch.rand(ids.shape[0], E, generator=draw).argsort(1)[:, : ids.shape[1]]
        for layer, ids in trace.expert_TK.items()
    }
    return changed(trace, expert_TK=expert_TK)


def left_alone(model: nn.Module) -> bool:
    return not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("name", [*FAMILIES, "nemotron_h"])
@pytest.mark.parametrize("experts", ["eager", "moe_routing_bench"])
def test_its_own_trace_changes_nothing(name: str, experts: str) -> None:
    model, ids = tiny_models.make(name), tiny_models.tokens()
    model.set_experts_implementation(experts)
    trace = own_trace(model, ids)
    logits, gradients = tiny_models.gradients(model, ids)
    for options in ({}, {"documents": [0, 1]}):
        with plugin.replay(model, trace, **options):
            again, gradients_again = tiny_models.gradients(model, ids)
        assert torch.equal(logits, again) and gradients.keys() == gradients_again.keys()
        assert all(torch.equal(gradients[path], gradients_again[path]) for path in gradients)
    assert left_alone(model)


def gates_by_hand(name: str, router: Any, logits_TE: Tensor, masked_TE: Tensor) -> Tensor:
    """The gates of all experts, 0 outside the mask, from the family's own formula."""
    if name in ("qwen3_moe", "mixtral", "olmoe"):
        gate_TE = torch.where(masked_TE, F.softmax(logits_TE.float(), dim=-1), 0.0)
        return gate_TE if name == "olmoe" else gate_TE / gate_TE.sum(1, keepdim=True)
    if name == "deepseek_v3":
        gate_TE = torch.where(masked_TE, logits_TE.sigmoid(), 0.0)
        return gate_TE / gate_TE.sum(1, keepdim=True) * router.routed_scaling_factor
    return F.softmax(torch.where(masked_TE, logits_TE, -torch.inf), dim=-1)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_are_those_of_a_masked_top_k(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_models.make(name).double(), tiny_models.tokens()
    trace = other_trace(own_trace(model, ids))
    live = tiny_models.gradients(model, ids)[0]
    with plugin.replay(model, trace):
        logits, gradients = tiny_models.gradients(model, ids)
    assert (logits - live).abs().max() > 0.1
    for layer, (path, _) in moe_layers(model).items():
        block = model.get_submodule(path.rpartition(".")[0])
        router = block.router if name == "gpt_oss" else block.gate

        def masked(x: Tensor, router: Any = router, expert_TK: Tensor = trace.expert_TK[layer]) -> Any:
            logits_TE = F.linear(x.reshape(-1, x.shape[-1]), router.weight, getattr(router, "bias", None))
            mask_TE = torch.zeros_like(logits_TE).scatter(1, expert_TK, 1).bool()
            return logits_TE, gates_by_hand(name, router, logits_TE, mask_TE).gather(1, expert_TK), expert_TK

        monkeypatch.setattr(router, "forward", masked)
    wanted_logits, wanted = tiny_models.gradients(model, ids)
    routers = [path for path in wanted if path.endswith(("gate.weight", "router.weight"))]
    assert routers and all(wanted[path].abs().max() > 1e-4 for path in routers)
    # softmax in float32 is the model's own
    torch.testing.assert_close(logits, wanted_logits, rtol=1e-5, atol=1e-5)
    assert gradients.keys() == wanted.keys()
    for path in wanted:
        torch.testing.assert_close(gradients[path], wanted[path], rtol=1e-4, atol=1e-6, msg=path)


def test_replay_removes_what_bfloat16_changed(tmp_path: Path) -> None:
    from moe_routing_bench.workloads.trace_diff import diff

    model = tiny_models.make("qwen3_moe", num_experts=64, num_experts_per_tok=4, num_hidden_layers=3)
    documents = [tiny_models.tokens(1, 64, seed)[0] for seed in range(6)]
    traces = {}
    exact = record_trace(model, pieces(documents, batch=2, sequence=32), scores=True)
    half = model.bfloat16()
    kept = record_trace(half, pieces(documents, batch=2, sequence=32))
    with plugin.replay(half, exact):
        replayed = record_trace(half, pieces(documents, batch=2, sequence=32))
    for name, trace in (("exact", exact), ("half", kept), ("replayed", replayed)):
        write_trace(
            tmp_path / name, *trace.routings(), source=name, score_TE=trace.scores(), **trace.labels()
        )
        traces[name] = read_trace(tmp_path / name)
    before, after = diff(traces["exact"], traces["half"]), diff(traces["exact"], traces["replayed"])
    assert before.whole.choices > 0.001 and after.whole.choices == 0
    # rounding flips near ties
    assert before.whole.margin is not None and before.whole.usual is not None
    assert 0 < before.whole.margin < before.whole.usual
    with plugin.replay(half, traces["exact"]):  # a file that was read
        again = record_trace(half, pieces(documents, batch=2, sequence=32))
    assert all(torch.equal(again.expert_TK[layer], exact.expert_TK[layer]) for layer in exact.names)


@pytest.mark.parametrize("name", FAMILIES)
def test_generation_step_by_step(name: str) -> None:
    model, ids = tiny_models.make(name), tiny_models.tokens(1, 7)
    options = {
        "max_new_tokens": 6,
        "do_sample": False,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    out, calls = heard(model, lambda: model.generate(ids, **options))
    assert [one.num_tokens for one in next(iter(calls.values()))] == [7, 1, 1, 1, 1, 1]
    trace = as_trace(calls)
    with plugin.replay(model, trace):
        again = model.generate(ids, **options)
    assert torch.equal(out.sequences, again.sequences)
    assert all(torch.equal(a, b) for a, b in zip(out.logits, again.logits, strict=True))
    # the sequence at once, as a trainer reads it: 13 tokens, of which the last has no row
    _, calls = heard(model, lambda: replayed(model, trace, out.sequences, missing="live"))
    assert all(torch.equal(calls[layer][0].expert_TK[:12], trace.expert_TK[layer]) for layer in calls)
    with pytest.raises(ValueError, match="place 12"):
        replayed(model, trace, out.sequences)
    forced = other_trace(trace)
    with plugin.replay(model, forced):
        _, calls = heard(model, lambda: model.generate(ids, **options))
    assert all(torch.equal(torch.cat([c.expert_TK for c in calls[n]]), forced.expert_TK[n]) for n in calls)


def replayed(model: Any, trace: ModelTrace, ids: Tensor, **options: Any) -> Any:
    with plugin.replay(model, trace, **options):
        return model(input_ids=ids, use_cache=False)


def test_documents_in_a_batch_step_by_step() -> None:
    model, ids = tiny_models.make("qwen3_moe"), tiny_models.tokens(2, 5)
    calls: dict[int, list[Routing]] = {}
    where = [[(b, n) for n in range(9)] for b in (4, 0)]
    draw = torch.Generator().manual_seed(0)
    for layer in moe_layers(model):
        ids_TK = torch.rand(18, 8, generator=draw).argsort(1)[:, :2]
        calls[layer] = [Routing(expert_TK=ids_TK, gate_TK=torch.ones(18, 2), num_experts=8)]
    trace = as_trace(calls, where[0] + where[1])
    with plugin.replay(model, trace, documents=[0, 4]):
        _, steps = heard(model, lambda: model.generate(ids, max_new_tokens=5, do_sample=False))
    for layer, some in steps.items():
        assert [one.num_tokens for one in some] == [10, 2, 2, 2, 2]
        by_document = {4: trace.expert_TK[layer][:9], 0: trace.expert_TK[layer][9:]}
        assert torch.equal(some[0].expert_TK, torch.cat([by_document[0][:5], by_document[4][:5]]))
        for step in range(1, 5):
            assert torch.equal(some[step].expert_TK, torch.stack([by_document[d][4 + step] for d in (0, 4)]))
    # of different lengths, the shorter one padded on the right
    short = changed(
        trace,
        **{
            field: {layer: rows[:-2] for layer, rows in getattr(trace, field).items()}
            for field in ("expert_TK", "gate_TK")
        },
        position_T=trace.position_T[:-2],
        document_T=trace.document_T[:-2],
    )
    padded = tiny_models.tokens(2, 9)
    _, calls = heard(model, lambda: replayed(model, short, padded, documents=[4, 0], missing="live"))
    assert all(
        torch.equal(some[0].expert_TK[:16], trace.expert_TK[layer][:16]) for layer, some in calls.items()
    )
    with pytest.raises(ValueError, match="place 7 of sequence 1"):
        replayed(model, short, padded, documents=[4, 0])


def test_what_does_not_fit_is_refused() -> None:
    model, ids = tiny_models.make("qwen3_moe"), tiny_models.tokens()
    trace = own_trace(model, ids)
    for wrong, given, options, sentence in (
        (
            trace,
            ids[:, :-1],
            {},
            "called with 12 tokens, but 14 were recorded for the trace; replay all of them",
        ),
        (
            trace,
            tiny_models.tokens(2, 8),
            {},
            r"mlp.experts was called with 16 tokens from place 0 on, but the trace",
        ),
        (
            trace,
            tiny_models.tokens(3, 7),
            {"documents": [0, 1]},
            "21 tokens for 2 documents; give each sequence",
        ),
        (trace, ids, {"documents": [0, 7]}, "no document 7; it has 0, 1"),
        (trace, ids, {"documents": []}, "documents is empty"),
        (trace, ids, {"missing": "skip"}, "missing is 'skip'"),
        (changed(trace, num_experts=16), ids, {}, "has 8 experts, the trace 16: it is of another model"),
        (
            changed(trace, names={0: "0"}),
            ids,
            {},
            "trace has the layers 0, the model MoE layers 0, 1; record all",
        ),
        (
            changed(trace, expert_TK={n: e[:, :1] for n, e in trace.expert_TK.items()}),
            ids,
            {},
            "takes 2 experts for each token, the trace has 1",
        ),
    ):
        with pytest.raises(ValueError, match=sentence) as caught:
            replayed(model, wrong, given, **options)
        assert "\n" not in str(caught.value) and left_alone(model)
    with pytest.raises(ValueError, match="0 tokens, but 14"), plugin.replay(model, trace):
        pass


def test_an_error_inside_leaves_the_model_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_models.make("mixtral"), tiny_models.tokens()
    trace = other_trace(own_trace(model, ids))
    before = model(input_ids=ids).logits
    with pytest.raises(ZeroDivisionError), plugin.replay(model, trace):
        raise ZeroDivisionError
    with monkeypatch.context() as patch, pytest.raises(ZeroDivisionError), plugin.replay(model, trace):
        patch.setattr(moe_layers(model)[1][1], "forward", lambda *_: 1 // 0)
        model(input_ids=ids)
    assert left_alone(model) and torch.equal(model(input_ids=ids).logits, before)
    scores = torch.rand(14, 8)
    assert torch.equal(scores.topk(2).indices, scores.argsort(descending=True)[:, :2])


def test_gradient_checkpointing_runs_the_same_choices_again() -> None:
    model, ids = tiny_models.make("qwen3_moe"), tiny_models.tokens()
    trace = other_trace(own_trace(model, ids))
    model.train()
    with plugin.replay(model, trace):
        _, wanted = tiny_models.gradients(model, ids)
    new = hasattr(model, "activation_checkpointing_enable")  # Transformers 5.23
    enable = model.activation_checkpointing_enable if new else model.gradient_checkpointing_enable
    for reentrant in (False, True):
        enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        with plugin.replay(model, trace):
            _, found = tiny_models.gradients(model, ids)
        assert all(torch.allclose(wanted[path], found[path], rtol=1e-5, atol=1e-7) for path in wanted)
        with pytest.raises(ValueError, match=r"call backward\(\) inside"), plugin.replay(model, trace):
            model(input_ids=ids, use_cache=False)
        model.disable_input_require_grads()
    with pytest.raises(NotImplementedError, match="after 2 calls"), plugin.replay(model, trace):
        one, two = (model(input_ids=some, use_cache=False).logits.sum() for some in ids.split(1))
        (one + two).backward()


def test_what_cannot_be_replayed_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny_models.make("qwen3_moe"), tiny_models.tokens()
    trace = own_trace(model, ids)

    def sorts(x: Tensor, router: Any) -> Any:
        logits_TE = F.linear(x.reshape(-1, x.shape[-1]), router.weight)
        ids_TK = logits_TE.argsort(descending=True)[:, :2]
        return logits_TE, logits_TE.softmax(1).gather(1, ids_TK), ids_TK

    for router in (model.model.layers[0].mlp.gate, model.model.layers[1].mlp.gate):
        monkeypatch.setattr(router, "forward", lambda x, router=router: sorts(x, router))
    with pytest.raises(NotImplementedError, match=r"torch\.topk"):
        replayed(model, trace, ids)
    with pytest.raises(NotImplementedError, match="scores"):
        record_trace(model, pieces([ids[0]], batch=1, sequence=7), scores=True)
    with pytest.raises(NotImplementedError, match=r"torch\.compile"):
        replayed(torch.compile(model, backend="eager"), trace, ids)
    with pytest.raises(NotImplementedError, match="this library"):
        replayed(nn.Sequential(MoE(D=8, F=8, E=8, K=2)), changed(trace, names={0: "0"}), ids)


def test_an_expert_whose_group_is_ruled_out_has_no_gate() -> None:
    """DeepSeek-V2 makes its gates of scores that are 0 outside the best groups."""
    model, ids = tiny_models.make("deepseek_v2"), tiny_models.tokens()
    trace = own_trace(model, ids)
    assert torch.equal(replayed(model, trace, ids).logits, model(input_ids=ids, use_cache=False).logits)
    with pytest.raises(NotImplementedError, match="no gate"):
        replayed(model, other_trace(trace), ids)


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_those_that_were_compared(name: str) -> None:
    model = tiny_models.make(name)
    trace = record_trace(model, pieces([tiny_models.tokens()[0]], batch=1, sequence=7), scores=True)
    for layer, score_TE in trace.score_TE.items():
        assert score_TE.shape == (7, 8) and score_TE.dtype == torch.float32
        best_TK = score_TE.topk(2)[1].sort()[0]
        assert torch.equal(trace.expert_TK[layer].long().sort()[0], best_TK)
        # two of four groups
        assert int((score_TE[0] == -torch.inf).sum()) == (4 if name == "deepseek_v3" else 0)
    plain = record_trace(model, pieces([tiny_models.tokens()[0]], batch=1, sequence=7))
    assert plain.scores() is None and plain.score_TE == {}
    with pytest.raises(ValueError, match="the limit"):
        record_trace(
            model, pieces([tiny_models.tokens()[0]], batch=1, sequence=7), scores=True, max_bytes=1000
        )
