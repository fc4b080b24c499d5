"""Routing, SoftRouting, ExpertWeights and MoEShape: what they accept, what they refuse, in words."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, replace

import pytest
import torch

from moe_routing_bench import ExpertWeights, MoEShape, Routing, SoftRouting

GOOD = Routing(
    expert_TK=torch.tensor([[0, 2], [3, -1], [-1, -1]]),
    gate_TK=torch.tensor([[0.75, 0.25], [1.0, 0.0], [0.0, 0.0]]),
    num_experts=4,
)


def test_the_routing_example_in_the_docstring() -> None:
    assert GOOD.validate() is GOOD
    assert GOOD.load_E().tolist() == [1, 0, 1, 1]
    assert (GOOD.num_tokens, GOOD.num_choices) == (3, 2)


def test_values_are_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        GOOD.num_experts = 5  # type: ignore[misc]


@pytest.mark.parametrize(
    "change,words",
    [
        ({"expert_TK": GOOD.expert_TK.int()}, "int64"),
        ({"expert_TK": GOOD.expert_TK[0]}, "2-dimensional"),
        ({"gate_TK": GOOD.gate_TK[:, :1]}, "one gate"),
        ({"gate_TK": GOOD.expert_TK}, "floating point"),
        ({"num_experts": 0}, "one expert"),
        ({"ragged": False}, "real expert"),
        ({"gate_TK": torch.full((3, 2), float("nan"))}, "is nan"),
        ({"expert_TK": torch.tensor([[0, 1], [3, 3], [-1, -1]])}, "expert 3 twice"),
    ],
)
def test_a_broken_routing_is_refused_in_words(change: dict, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        replace(GOOD, **change).validate()


def test_masked_tokens_go_nowhere() -> None:
    masked = GOOD.masked(torch.tensor([True, False, True]))
    assert masked.expert_TK.tolist() == [[0, 2], [-1, -1], [-1, -1]]
    assert masked.gate_TK[1].tolist() == [0.0, 0.0]
    assert GOOD.masked(None) is GOOD


def test_moving_keeps_everything() -> None:
    routing = replace(GOOD, losses={"z": torch.tensor(1.0)}, aux_loss=torch.tensor(0.1))
    assert routing.to("meta").expert_TK.device.type == "meta"
    assert routing.to("meta").losses["z"].device.type == "meta"
    assert routing.to("cpu").validate().aux_loss == routing.aux_loss


def test_soft_routing_is_validated() -> None:
    logits = torch.randn(2, 5, 6)
    soft = SoftRouting(
        dispatch_BNS=logits.softmax(1), combine_BNS=logits.softmax(2), num_experts=3
    ).validate()
    assert soft.slots_per_expert == 2
    with pytest.raises(ValueError, match="4 experts"):
        replace(soft, num_experts=4).validate()
    with pytest.raises(ValueError, match="sum to 1"):
        replace(soft, dispatch_BNS=soft.combine_BNS).validate()
    with pytest.raises(ValueError, match="one shape"):
        replace(soft, combine_BNS=soft.combine_BNS[:, :2]).validate()


def weights(**changes) -> ExpertWeights:
    return ExpertWeights(**{"w_in_EDG": torch.rand(2, 3, 8), "w_out_EFD": torch.rand(2, 4, 3), **changes})


def test_expert_weights_are_validated() -> None:
    assert (weights().validate().D, weights().F, weights().num_experts) == (3, 4, 2)
    with pytest.raises(ValueError, match="'tanh'"):
        weights(activation="tanh")
    with pytest.raises(ValueError, match=r"w_out_EFD has shape \(2, 4, 3\)"):
        weights(activation="relu").validate()
    with pytest.raises(ValueError, match="even number"):
        weights(w_in_EDG=torch.rand(2, 3, 7)).validate()
    with pytest.raises(ValueError, match="three dimensions"):
        weights(w_in_EDG=torch.rand(3, 8)).validate()
    with pytest.raises(ValueError, match="b_in_EG"):
        weights(b_in_EG=torch.rand(2, 4)).validate()
    with pytest.raises(ValueError, match="and device"):
        weights(w_out_EFD=torch.rand(2, 4, 3).double()).validate()
    assert weights().to(dtype=torch.bfloat16).w_in_EDG.dtype == torch.bfloat16


def test_a_shape_is_validated() -> None:
    assert MoEShape(T=16, D=2048, F=768, E=128, K=8).num_pairs == 128
    with pytest.raises(ValueError, match="only E=4 experts"):
        MoEShape(T=1, D=1, F=1, E=4, K=5)
    with pytest.raises(ValueError, match="hidden width"):
        MoEShape(T=1, D=1, F=0, E=4, K=1)
    with pytest.raises(ValueError, match="negative"):
        MoEShape(T=-1, D=1, F=1, E=4, K=1)
