"""Traces of a model: the model is left as it was, and file and replay hold what was chosen."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_routing_bench.core.load import LoadStatistics
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.models.tracing import listening, moe_layers, pieces, record_trace
from moe_routing_bench.moe.layer import MoE
from moe_routing_bench.workloads.trace import read_trace, write_trace
from moe_routing_bench.workloads.workload import make_workload

pytest.importorskip("transformers")

import tiny_models

pytestmark = pytest.mark.slow

# where their MoE layers stand; the first layer of DeepSeek is dense
MODELS = {
    "qwen3_moe": [0, 1, 2],
    "mixtral": [0, 1, 2],
    "olmoe": [0, 1, 2],
    "gpt_oss": [0, 1, 2],
    "deepseek_v3": [1, 2],
}


def made(name: str) -> Any:
    return tiny_models.make(name, num_hidden_layers=3, num_experts_per_tok=3, vocab_size=256)


def texts(*lengths: int) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [torch.randint(256, (length,), generator=draw) for length in lengths]


def hooks_of(model: nn.Module) -> int:
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())


class Own(nn.Module):
    """Two of our layers behind an embedding."""

    def __init__(self, *layers: MoE):
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.blocks = nn.ModuleList(layers or (MoE(D=16, F=8, E=8, K=3), MoE(D=16, F=8, E=8, K=3)))

    def forward(self, token_BN: Tensor) -> Tensor:
        x = self.embed(token_BN)
        for block in self.blocks:
            x = x + block(x)[0]
        return x


@pytest.mark.parametrize("name", MODELS)
def test_results_stay_the_same_and_choices_are_the_routers_own(name: str) -> None:
    model, numbers = made(name), MODELS[name]
    token_BN = texts(24)[0].view(2, 12)
    # what the model's routers return, seen without record_trace's hooks
    returned: list[tuple[Tensor, ...]] = []
    experts = [module for _, module in moe_layers(model).values()]
    blocks = [block for block in model.modules() if any(child in experts for child in block.children())]
    assert len(blocks) == len(experts) == len(numbers)
    handles = [
        module.register_forward_hook(lambda module, given, result: returned.append((given[0], *result)))
        for block in blocks
        for child, module in block.named_children()
        if child in ("gate", "router") and name != "deepseek_v3"
    ]
    with torch.no_grad():
        before = model(token_BN).logits
        routings: list[tuple[int, Routing]] = []
        returned.clear()
        with listening(model, lambda layer, routing: routings.append((layer, routing))):
            during = model(token_BN).logits
        for handle in handles:
            handle.remove()
        after = model(token_BN).logits
    assert torch.equal(before, during) and torch.equal(before, after)
    assert [layer for layer, _ in routings] == numbers and hooks_of(model) == 0
    for place, (_, routing) in enumerate(routings):
        assert routing.expert_TK.shape == (24, 3) and routing.num_experts == 8
        if name != "deepseek_v3":
            _, _, gate_TK, expert_TK = returned[place]
            assert torch.equal(routing.expert_TK, expert_TK) and torch.equal(routing.gate_TK, gate_TK)
        replace(routing, ragged=False).validate()


def test_every_experts_function_of_transformers_is_seen() -> None:
    model, token_BN = made("qwen3_moe"), texts(24)[0].view(2, 12)
    chosen = {}
    for name in ("eager", "grouped_mm", "batched_mm"):
        model.set_experts_implementation(name)
        one = record_trace(model, pieces([token_BN.flatten()], batch=2, sequence=12))
        chosen[name] = torch.cat([*one.expert_TK.values()])
    assert torch.equal(chosen["eager"], chosen["grouped_mm"])
    assert torch.equal(chosen["eager"], chosen["batched_mm"])


def test_labels_and_order() -> None:
    model = made("deepseek_v3")
    documents = texts(11, 7)
    trace = record_trace(model, pieces(documents, batch=2, sequence=4))
    assert trace.position_T.tolist() == [*range(11), *range(7)]
    assert trace.document_T.tolist() == [0] * 11 + [1] * 7
    assert trace.names == {n: f"model.layers.{n}.mlp.experts" for n in (1, 2)}
    labels = trace.labels()
    assert labels["layer_T"].tolist() == [1] * 18 + [2] * 18
    assert labels["position_T"].tolist() == trace.position_T.tolist() * 2
    assert trace.expert_TK[1].dtype == torch.int16 and trace.gate_TK[1].dtype == torch.float32
    # each token alone: piece by piece the rows are those of one call with the same context
    routings: list[Routing] = []
    with torch.no_grad(), listening(model, lambda layer, routing: routings.append(routing), layers=[2]):
        model(documents[1][4:].unsqueeze(0))
    assert torch.equal(trace.routing(2).expert_TK[15:], routings[0].expert_TK)


@torch.no_grad()  # as record_trace runs it: with gradients other kernels run
def test_our_own_layers_are_seen_and_left_as_they_were() -> None:
    model = Own()
    model.blocks[1].eval()
    model.blocks[0].train()
    modes = [module.training for module in model.modules()]
    token_BN = texts(12)[0].view(1, 12)
    before = model(token_BN)
    trace = record_trace(model, pieces([token_BN[0]], batch=1, sequence=12), layers=[1])
    assert [module.training for module in model.modules()] == modes and hooks_of(model) == 0
    assert trace.names == {1: "blocks.1.router"}
    assert torch.equal(model(token_BN), before)
    x = model.embed(token_BN)
    routing = model.blocks[1].router((x + model.blocks[0](x)[0]).view(12, 16))
    assert torch.equal(trace.routing(1).expert_TK, routing.expert_TK)
    assert torch.equal(trace.gate_TK[1], routing.gate_TK)


def test_hooks_go_after_an_error() -> None:
    model = made("qwen3_moe").train()

    def call(model: nn.Module, token_BN: Tensor) -> None:
        model(token_BN)
        raise KeyError("in the middle")

    with pytest.raises(KeyError, match="in the middle"):
        record_trace(model, pieces(texts(8), batch=1, sequence=4), call=call)
    assert hooks_of(model) == 0 and all(module.training for module in model.modules())

    def fail(layer: int, routing: Routing) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError), listening(model, fail):
        model(texts(4)[0].unsqueeze(0))
    assert hooks_of(model) == 0


def test_memory_is_bounded() -> None:
    model, counts, seen = made("qwen3_moe"), [], 0

    def counted() -> Any:
        nonlocal seen
        for one in pieces(texts(1000), batch=2, sequence=5):
            seen += 1
            yield one

    trace = record_trace(model, counted(), max_tokens=23, on_tokens=counts.append)
    assert trace.num_tokens == 23 and counts == [10, 20, 23] and seen == 3
    assert trace.expert_TK[0].shape == (23, 3)
    # no view that would keep a whole batch
    assert trace.gate_TK[0].untyped_storage().nbytes() == 23 * 3 * 4
    with pytest.raises(ValueError, match=r"144,000 bytes.* 694 tokens"):
        record_trace(model, pieces(texts(9), batch=1, sequence=9), max_tokens=1000, max_bytes=100_000)


class Chatty(Own):
    def forward(self, token_BN: Tensor) -> Tensor:
        super().forward(token_BN)
        return super().forward(token_BN)


class Silent(Own):
    def forward(self, token_BN: Tensor) -> Tensor:
        return self.embed(token_BN)


REFUSED = {
    "no MoE layer": (lambda: nn.Linear(2, 2), {}, ValueError, "no MoE layer that can be recorded"),
    "other layer": (Own, {"layers": [5]}, ValueError, "no MoE layer 5; it has 0, 1"),
    "no layers": (Own, {"layers": []}, ValueError, "at least one layer"),
    "called twice": (Chatty, {}, NotImplementedError, "with 8, 8 rows for 8 tokens"),
    "never called": (Silent, {}, NotImplementedError, "blocks.0.router was not called"),
    "no tokens wanted": (Own, {"max_tokens": 0}, ValueError, "at least one"),
    "two sizes": (
        lambda: Own(MoE(D=16, F=8, E=8, K=2), MoE(D=16, F=8, E=4, K=2), MoE(D=16, F=8, E=8, K=2)),
        {},
        ValueError,
        "E=8 and K=2 in layers 0,2; E=4 and K=2 in layers 1",
    ),
    "soft": (
        lambda: Own(MoE(D=16, F=8, E=4, K=1, router="soft_moe")),
        {},
        NotImplementedError,
        "mixes all tokens",
    ),
}


@pytest.mark.parametrize(("make", "options", "error", "sentence"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_recorded_says_why(make, options, error, sentence) -> None:
    model = make()
    with pytest.raises(error, match=sentence) as caught:
        record_trace(model, pieces(texts(8), batch=1, sequence=8), **options)
    assert "\n" not in str(caught.value) and hooks_of(model) == 0


def test_absent_experts_and_unknown_calls_are_refused() -> None:
    class OddExperts(nn.Module):
        num_experts = 4

        def forward(self, *given: Tensor) -> Tensor:
            return given[0]

    class Odd(nn.Module):
        def __init__(self, *given: Tensor):
            super().__init__()
            self.experts, self.given = OddExperts(), given

        def forward(self, token_BN: Tensor) -> Tensor:
            return self.experts(torch.zeros(2, 3), *self.given)

    ids, gates = torch.tensor([[0, 4], [1, 2]]), torch.ones(2, 2)
    for given, sentence in (
        ((ids, gates), "fewer than 2 experts with weights"),
        ((ids - 1, gates), "fewer than 2"),
        ((), "its choices cannot be seen"),
        ((ids, gates[:1]), "its choices cannot be seen"),
    ):
        with pytest.raises(NotImplementedError, match=sentence):
            record_trace(Odd(*given), pieces(texts(2), batch=1, sequence=2))
    assert record_trace(Odd(gates, ids.clamp(max=3)), pieces(texts(2), batch=1, sequence=2)).num_tokens == 2


def test_a_router_in_training_is_recorded_as_in_use() -> None:
    model = Own(MoE(D=16, F=8, E=8, K=3, router="noisy_topk")).train()
    trace = record_trace(model, pieces(texts(64), batch=1, sequence=64))
    with torch.no_grad():
        quiet = model.eval().blocks[0].router(model.embed(texts(64)[0]))
    assert torch.equal(trace.routing(0).expert_TK, quiet.expert_TK)


def test_a_trace_does_not_change_later() -> None:
    class ReusedExperts(nn.Module):
        num_experts = 4

        def forward(self, x_TD: Tensor, ids: Tensor, gates: Tensor) -> Tensor:
            return x_TD

    class Reused(nn.Module):
        """One buffer for the gates of all calls."""

        def __init__(self) -> None:
            super().__init__()
            self.experts, self.gates = ReusedExperts(), torch.zeros(2, 2)

        def forward(self, token_BN: Tensor) -> Tensor:
            self.gates += 1
            return self.experts(torch.zeros(2, 3), torch.tensor([[0, 1], [2, 3]]), self.gates)

    trace = record_trace(Reused(), pieces(texts(6), batch=1, sequence=2))
    assert trace.gate_TK[0][:, 0].tolist() == [1, 1, 2, 2, 3, 3]


def test_pieces_lose_and_repeat_nothing() -> None:
    documents = texts(0, 1, 8, 13)
    for batch, sequence in ((1, 1), (3, 4), (2, 5), (9, 50)):
        back: list[list[int]] = [[] for _ in documents]
        for one in pieces(documents, batch=batch, sequence=sequence):
            B, N = one.token_BN.shape
            assert 1 <= B <= batch and 1 <= N <= sequence
            for tokens, number, start in zip(one.token_BN, one.document_B, one.start_B, strict=True):
                assert start == len(back[number])
                back[number] += tokens.tolist()
        assert back == [document.tolist() for document in documents]
    with pytest.raises(ValueError, match="at least 1"):
        next(pieces(documents, batch=0, sequence=1))
    with pytest.raises(ValueError, match="no text"):
        record_trace(Own(), pieces(texts(0), batch=1, sequence=1))


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    trace = record_trace(made("qwen3_moe"), pieces(texts(40, 25), batch=2, sequence=16))
    path = tmp_path / "a, b=(1).safetensors"
    write_trace(path, *trace.routings(), source="a test", documents=["one", "two"], **trace.labels())
    return path


def test_replay_has_exactly_the_recorded_statistics(recorded: Path) -> None:
    trace = read_trace(recorded)
    assert trace.documents == ("one", "two")
    for layer in (0, 1, 2):
        for document, tokens in ((None, 65), (0, 40), (1, 25)):
            part = trace.part(layer=layer, document=document)
            assert part.routing.num_tokens == tokens and part.layer_T.unique().tolist() == [layer]
            more = "" if document is None else f",document={document}"
            name = f"trace({recorded},layer={layer}{more})"
            for seed in (0, 1):
                replayed = make_workload(name, T=tokens, E=8, K=3, seed=seed)
                assert replayed.name == name == make_workload(replayed.name, T=1, E=8, K=3).name
                assert replayed.statistics().to_dict() == LoadStatistics.of(part.routing).to_dict()
                assert torch.equal(replayed.routing.load_E(), part.routing.load_E())
                # from another token on, ids and gates of one token still together
                shifts = [
                    shift
                    for shift in range(tokens)
                    if torch.equal(replayed.routing.expert_TK, part.routing.expert_TK.roll(-shift, 0))
                    and torch.equal(replayed.routing.gate_TK, part.routing.gate_TK.roll(-shift, 0))
                ]
                assert len(shifts) == 1
    everything = make_workload(f"trace({recorded})", T=195, E=8, K=3)
    assert everything.statistics().to_dict() == LoadStatistics.of(trace.routing).to_dict()
