"""One run: fair by construction, the same after a stop, equal to dense where it must be."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_routing_bench.train.loop import (
    DivergedError,
    Ended,
    Evaluated,
    Event,
    State,
    Stepped,
    clip,
    evaluate,
    learning_rate,
    train,
)
from moe_routing_bench.train.model import Decoder
from moe_routing_bench.train.settings import Rule
from moe_routing_bench.train.stepping import step_times
from moe_routing_bench.train.text import Corpus, synthetic
from moe_routing_bench.train.watching import LayerLoad
from tiny_training import RULES, tiny


@pytest.fixture(scope="module")
def corpus() -> Corpus:
    return synthetic(size=6000)


def copied(state: State) -> State:
    return replace(state, tensors={name: value.clone() for name, value in state.tensors.items()})


def every_second(step: int, seconds: float) -> bool:
    return step % 2 == 0


def followed(events: list[Event]) -> list[Any]:
    """What must be equal: everything but times."""
    steps = [(e.step, e.loss, e.aux, e.norm, e.pairs_per_token) for e in events if isinstance(e, Stepped)]
    evaluations = [(e.step, e.losses, e.layers, e.knowledge) for e in events if isinstance(e, Evaluated)]
    return [*steps, *evaluations]


@pytest.mark.parametrize("rule", RULES)
def test_a_stopped_run_goes_on_to_the_bit(rule: str, corpus: Corpus) -> None:
    run = tiny(rule)
    whole: list[Event] = []
    saved: dict[int, State] = {}
    for event in train(run, corpus, due=every_second):
        if isinstance(event, State):
            saved[event.step] = copied(event)
        whole.append(event)
    assert set(saved) == {2, 4, 6}
    torch.manual_seed(99)  # whatever another process would have drawn
    rest = list(train(run, corpus, saved[2], due=every_second))
    late = [one for one in followed(whole) if one[0] > 2]
    assert followed(rest) == late
    final = next(event for event in reversed(rest) if isinstance(event, State))
    assert all(torch.equal(final.tensors[name], value) for name, value in saved[6].tensors.items())


def test_one_expert_is_the_dense_run_to_the_bit(corpus: Corpus) -> None:
    one = Rule(name="one expert", E=1, K=1, impl="staged")
    dense = Rule(name="dense", kind="dense", times=1)
    runs = [[e for e in train(tiny(r, steps=20), corpus) if isinstance(e, Stepped)] for r in (one, dense)]
    assert [e.loss for e in runs[0]] == [e.loss for e in runs[1]]
    assert [e.norm for e in runs[0]] == [e.norm for e in runs[1]]


def test_runs_of_a_study_begin_alike() -> None:
    """Equal weights wherever shapes are equal, whatever else the models hold."""
    models = {name: Decoder(tiny(name)).state_dict() for name in RULES}
    plain = models["softmax_topk"]
    for name, state in models.items():
        for key, value in state.items():
            key = key.replace("feed_forward.layer.", "feed_forward.").replace(
                "feed_forward.moe.", "feed_forward."
            )
            if key in plain and plain[key].shape == value.shape and "router" not in key:
                assert torch.equal(plain[key], value), (name, key)
    gate = "blocks.0.feed_forward.router.w_DE"
    assert torch.equal(plain[gate], models["sigmoid_bias"][gate])
    other = Decoder(tiny(seed=1)).state_dict()
    assert not torch.equal(plain["embedding.weight"], other["embedding.weight"])


def test_it_learns(corpus: Corpus) -> None:
    losses = [
        e.losses["low"]
        for e in train(tiny(steps=150, learning_rate=1e-2), corpus)
        if isinstance(e, Evaluated)
    ]
    assert losses[0] > 5.4 and losses[-1] < 3.4


def test_what_is_frozen_stays(corpus: Corpus) -> None:
    run = tiny(replace(RULES["softmax_topk"], only="router"))
    before = {name: value.clone() for name, value in Decoder(run).state_dict().items()}
    ended = next(e for e in train(run, corpus) if isinstance(e, Ended))
    changed = {
        name for name, value in ended.model.state_dict().items() if not torch.equal(value, before[name])
    }
    assert changed == {f"blocks.{layer}.feed_forward.router.w_DE" for layer in range(2)}


def test_weights_of_another_run_are_taken(corpus: Corpus) -> None:
    home = next(e for e in train(tiny(), corpus) if isinstance(e, State))
    began = next(e for e in train(tiny("adapters"), corpus, weights=home) if isinstance(e, Evaluated))
    ended = [e for e in train(tiny(), corpus) if isinstance(e, Evaluated)][-1]
    assert began.losses == ended.losses  # adapters begin with nothing to add


def test_what_sees_the_future_is_flagged() -> None:
    with pytest.raises(ValueError, match="sees_future=True"):
        Decoder(tiny(Rule(name="choice", router="expert_choice")))
    Decoder(tiny(Rule(name="choice", router="expert_choice"), sees_future=True))


def test_the_learning_rate_warms_up_and_falls() -> None:
    run = tiny(steps=100, warmup=10, learning_rate=1.0)
    rates = [learning_rate(run, step) for step in range(100)]
    assert rates[0] == 0.1 and max(rates) == 1.0
    assert set(rates[9:81]) == {1.0}
    assert rates[81:] == pytest.approx([(100 - step) / 20 for step in range(81, 100)])


def test_a_gradient_that_is_no_number_ends_the_run(corpus: Corpus) -> None:
    state = next(event for event in train(tiny(), corpus, due=every_second) if isinstance(event, State))
    broken = {
        name: value * math.nan if name == "model:norm.weight" else value
        for name, value in state.tensors.items()
    }
    with pytest.raises(DivergedError):
        list(train(tiny(), corpus, replace(state, tensors=broken)))


def test_losses_are_per_byte_in_every_vocabulary() -> None:
    """A model that gives every token the same probability: log(V) nats a token."""
    text = synthetic(size=20_000).with_vocabulary(300)
    run = tiny(vocabulary=300, batch=8)
    model = Decoder(run)
    torch.nn.init.zeros_(model.embedding.weight)
    token_BN = text.held_out(0, pieces=run.pieces, sequence=run.size.sequence)[:, 1:]
    expected = math.log(300) * token_BN.numel() / int(text.bytes_V[token_BN].sum())
    assert evaluate(model, text, run)["low"] == pytest.approx(expected, rel=1e-5)


def test_every_layer_and_run_hashes_in_its_own_way() -> None:
    seeds = [
        router.seed for seed in (0, 1) for router in Decoder(tiny("hashed", seed=seed)).routers().values()
    ]
    assert len(set(seeds)) == len(seeds) == 4


def test_clipping_is_torchs() -> None:
    torch.manual_seed(0)
    parameters = [torch.randn(5, 3, requires_grad=True), torch.randn(7, requires_grad=True)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    theirs = [parameter.detach().clone().requires_grad_() for parameter in parameters]
    for mine, other in zip(parameters, theirs, strict=True):
        other.grad = mine.grad.clone()  # type: ignore[union-attr]
    assert clip(parameters, 0.5) == pytest.approx(torch.nn.utils.clip_grad_norm_(theirs, 0.5).item())
    for mine, other in zip(parameters, theirs, strict=True):
        assert torch.allclose(mine.grad, other.grad)  # type: ignore[arg-type]


def test_collapse_has_names() -> None:
    even = LayerLoad(
        cv=0, max_violation=0, entropy_bits=3.0, dead_experts=0, experts_per_token=2, drop_rate=None,
        confidence=None, share_E=[1 / 8] * 8,
    )  # fmt: skip
    assert even.collapse() is None
    assert "got no token" in str(replace(even, dead_experts=3).collapse())
    assert "80 %" in str(replace(even, share_E=[0.4] + [0.6 / 7] * 7).collapse())
    assert "bits of 3.00" in str(replace(even, entropy_bits=1.7).collapse())


def test_step_times_of_one_name_do_not_hide_each_other(corpus: Corpus) -> None:
    runs = [(tiny("softmax_topk"), None), (tiny("softmax_topk", learning_rate=1e-3), None)]
    with pytest.raises(ValueError, match="softmax_topk"):
        step_times(runs, corpus, rounds=1)


def test_steps_of_runs_are_timed_in_turns(corpus: Corpus) -> None:
    dense = Rule(name="dense", kind="dense", times=1)
    runs, done = [(tiny("softmax_topk"), None), (tiny(dense), None)], list[int]()
    times = step_times(runs, corpus, rounds=2, on_round=done.append)
    assert {name: len(seconds) for name, seconds in times.seconds.items()} == {"softmax_topk": 2, "dense": 2}
    assert done == [1, 2, 3, 4], "two rounds are not kept"
    for name, parts in times.parts.items():
        assert {len(values) for values in parts.values()} == {2} and name in times.loads
        assert [sum(values) for values in zip(*parts.values(), strict=True)] == pytest.approx(
            times.seconds[name]
        )
