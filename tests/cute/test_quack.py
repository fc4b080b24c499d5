"""grouped_gemm.quack_varlen, expert_ffn.quack_gated and rms_norm.quack_rows: the kit through QuACK's
references, and the calls that a GPU would get, held to QuACK's signatures and rules."""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_routing_bench import ExpertWeights, Layout, RoutingPlan, all_ops
from moe_routing_bench.conformance.cases import KitCell
from moe_routing_bench.conformance.check import cells, check
from moe_routing_bench.core.frozen import Frozen
from moe_routing_bench.ops import quack_calls, targets
from moe_routing_bench.ops.expert_ffn import quack_gated
from moe_routing_bench.ops.rms_norm import quack_rows
from tiny_layers import MAKE_PLAN, routing_of

FFN, GEMM = all_ops()["expert_ffn"], all_ops()["grouped_gemm"]
GATED, VARLEN = FFN.get("quack_gated"), GEMM.get("quack_varlen")
CELLS = cells(specs="quack_*", dtypes=["bfloat16", "float16"])
T, K, E, D, F = 12, 2, 5, 16, 24


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_conforms(cell: KitCell) -> None:
    outcome = check(cell)
    if outcome.status == "unsupported":
        pytest.skip(outcome.sentences[0])
    assert outcome.status == "passed", "\n".join(outcome.sentences)


def layer(layout: str = "compact", **fields: Any) -> tuple[Tensor, Tensor, RoutingPlan, ExpertWeights]:
    plan = MAKE_PLAN(routing_of(T, K, E, absent=0.2), Layout.parse(layout))
    weights = ExpertWeights(
        w_in_EDG=torch.randn(E, 2 * F, D).bfloat16().transpose(1, 2),
        w_out_EFD=torch.randn(E, F, D).bfloat16(),
    )
    return torch.randn(T, D).bfloat16(), torch.rand(T, K), plan, replace(weights, **fields)


def test_frozen_weights_are_stored_once_as_quack_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    x_TD, gate_TK, plan, stored = layer()
    input_first = replace(stored, w_in_EDG=stored.w_in_EDG.contiguous())
    assert GATED.freeze is not None and not GATED.reads_plain  # so the benchmark freezes them
    frozen = GATED.freeze(input_first)
    with torch.no_grad():
        expected = GATED(x_TD, gate_TK, plan, input_first)
        given: list[Tensor] = []
        plain = quack_calls.gemm_gated
        spied = lambda a, b, *more, **options: given.append(b) or plain(a, b, *more, **options)  # noqa: E731
        monkeypatch.setattr(quack_calls, "gemm_gated", spied)
        assert torch.equal(GATED(x_TD, gate_TK, plan, frozen), expected)
        GATED(x_TD, gate_TK, plan, input_first)
    panels = frozen.w_in_EDG.panels.data_ptr()  # type: ignore[attr-defined]
    assert given[0].data_ptr() == panels  # no copy; plain weights are copied
    assert given[1].data_ptr() != input_first.w_in_EDG.data_ptr()
    for name in ("w_in_EDG", "w_out_EFD"):
        packed, before = getattr(frozen, name), getattr(input_first, name)
        assert torch.equal(packed.plain(), before) and packed.shape == before.shape
        assert packed.panels.data_ptr() != before.data_ptr()  # later writes to the original cannot reach it
    assert "native" in str(GATED.why_not(x_TD, gate_TK, plan, _frozen_for_native(frozen)))


def _frozen_for_native(weights: ExpertWeights) -> ExpertWeights:
    w_in = weights.w_in_EDG
    return replace(weights, w_in_EDG=Frozen(w_in.panels, replace(w_in.form, kernel="native")))  # type: ignore[attr-defined]


def one_target(reason: str | None, *words: str) -> None:
    assert reason is not None and all(word in reason for word in words), reason


def test_reasons() -> None:
    x_TD, gate_TK, plan, weights = layer()
    assert GATED.why_not(x_TD, gate_TK, plan, weights) is None
    one_target(GATED.why_not(x_TD.float(), gate_TK, plan, weights), "TF32", "triton_fused")
    one_target(GATED.why_not(x_TD.double(), gate_TK, plan, weights), "float64")
    one_target(GATED.why_not(x_TD, gate_TK, plan, replace(weights, activation="swiglu_oai")), "clamp")
    one_target(GATED.why_not(x_TD, gate_TK, plan, replace(weights, activation="geglu")), "tanh")
    biased = replace(weights, b_out_ED=torch.zeros(E, D).bfloat16())
    one_target(GATED.why_not(x_TD, gate_TK, plan, biased), "biases")
    narrow = ExpertWeights(w_in_EDG=weights.w_in_EDG[:, :12], w_out_EFD=weights.w_out_EFD[:, :, :12])
    one_target(GATED.why_not(x_TD[:, :12], gate_TK, plan, narrow), "multiples of 8", "12 x 48")
    one_target(VARLEN.why_not(x_TD, weights.w_in_EDG.half(), plan, None), "float16")


@pytest.mark.parametrize(
    "name,words",
    [
        ("sm_80", ["sm_80", "not implemented yet", "triton_fused"]),
        ("gfx942", ["gfx942", "triton_fused"]),
        ("sm_120", ["sm_120"]),
    ],
)
def test_other_architectures_are_told_what_to_use(
    name: str, words: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quack_calls, "ON_CPU", False)
    with targets.as_if(targets.Target.named(name)):
        one_target(GATED.why_not(*layer()), *words)
    for ours in quack_calls.TARGETS:
        with targets.as_if(targets.Target.named(ours)):
            assert GATED.why_not(*layer()) is None


def test_weights_of_transformers_are_not_copied() -> None:
    _, _, _, weights = layer()
    stored = quack_gated.output_first(weights.w_in_EDG)
    assert stored.data_ptr() == weights.w_in_EDG.data_ptr() and stored.stride() == weights.w_in_EDG.stride()
    input_first = weights.w_in_EDG.contiguous()
    copied = quack_gated.output_first(input_first)
    assert copied.stride(1) == 1 and torch.equal(copied, input_first)
    assert quack_calls.as_stored(weights.w_out_EFD).data_ptr() == weights.w_out_EFD.data_ptr()


class Kernels:
    """In the place of QuACK's functions: a call is bound to the real signature, held to the rules its kernels
    assert, and answered by the reference."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.calls: list[str] = []
        on_cpu = {
            "gemm": lambda a, b, **named: quack_calls.quack.gemm_ref(a, b, **named),
            "gemm_gated": lambda a, b, **named: quack_calls.quack.gemm_gated_ref(a, b, **named),
            "gemm_dgated": self.dgated,
        }
        for name, reference in on_cpu.items():
            real = inspect.signature(getattr(quack_calls.quack, name))
            monkeypatch.setattr(quack_calls.quack, name, self.bound(name, real, reference))
        real = inspect.signature(quack_calls.scaled.__call__)
        monkeypatch.setattr(quack_calls, "scaled", self.bound("scaled", real, self.scaled))
        monkeypatch.setattr(quack_calls, "ON_CPU", False)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))

    def bound(self, name: str, real: inspect.Signature, reference: Any) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            real.bind(*args, **named)
            self.rules(*args[:2], named)
            self.calls.append(name)
            assert named.pop("tuned") is False
            return reference(*args, **named)

        return call

    def rules(self, a: Tensor, b: Tensor, named: dict[str, Any]) -> None:
        spans_m, spans_k = named.get("cu_seqlens_m"), named.get("cu_seqlens_k")
        assert (spans_m is None) != (spans_k is None)
        assert (spans_k if spans_m is None else spans_m).dtype == torch.int32
        if (index := named.get("A_idx")) is not None:
            assert index.dtype == torch.int32
        if spans_m is not None:
            assert a.stride(-1) == 1 and 1 in b.stride()[1:]
        else:
            assert a.stride(0) == 1 and b.stride(-1) == 1
        for operand in (a, b):
            assert operand.data_ptr() % 16 == 0
            assert all(
                s == 1 or s % 8 == 0 for s, n in zip(operand.stride(), operand.shape, strict=True) if n > 1
            )
        if named.get("concat_layout") == ("B",):
            assert b.shape[1 if b.stride(-1) == 1 else 2] == 2 * F, (
                "gate and up are the side that is not dense"
            )

    @staticmethod
    def scaled(a: Tensor, b: Tensor, *, cu_seqlens_m: Tensor, score: Tensor) -> dict[str, Tensor]:
        y_RD = quack_calls.quack.gemm_ref(a.float(), b.float(), cu_seqlens_m=cu_seqlens_m)
        return {"D": (y_RD * score.unsqueeze(1)).to(a.dtype)}

    @staticmethod
    def dgated(
        a: Tensor, b: Tensor, pre: Tensor, activation: str, *, colvec_scale: Tensor, colvec_reduce: bool,
        cu_seqlens_m: Tensor, A_idx: Tensor | None, config: Any, dynamic_scheduler: bool,
    ) -> tuple[Tensor, ...]:  # fmt: skip
        # by hand: what QuACK's docstring of dgated_mod says of scale, postact and the reduced column
        assert colvec_reduce and not dynamic_scheduler and config.device_capacity == 9
        rows = (a if A_idx is None else a[A_idx]).float()
        g = quack_calls.quack.gemm_ref(rows, b.float(), cu_seqlens_m=cu_seqlens_m)
        gate, up = pre[:, ::2].float(), pre[:, 1::2].float()
        sigmoid, scaled = torch.sigmoid(gate), g * colvec_scale.unsqueeze(1)
        h = gate * sigmoid * up
        dgate = scaled * up * (sigmoid + gate * sigmoid * (1 - sigmoid))
        dpre = torch.stack((dgate, scaled * gate * sigmoid), dim=2).flatten(1)
        return dpre.to(a.dtype), (h * colvec_scale.unsqueeze(1)).to(a.dtype), (h * g).sum(1)


@pytest.mark.parametrize("output_first", [True, False])
@pytest.mark.parametrize("layout", ["compact", "padded(capacity=4)", "block(8)"])
def test_what_a_gpu_is_asked_is_what_quack_takes(
    layout: str, output_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    x_TD, gate_TK, plan, weights = layer(layout)
    if not output_first:
        weights = replace(weights, w_in_EDG=weights.w_in_EDG.contiguous())

    def leaves() -> list[Tensor]:
        return [
            t.detach().clone().requires_grad_() for t in (x_TD, gate_TK, weights.w_in_EDG, weights.w_out_EFD)
        ]

    def gradients(run: Any, given: list[Tensor]) -> list[Tensor]:
        used = ExpertWeights(w_in_EDG=given[2], w_out_EFD=given[3])
        y_TD = run(given[0], given[1], plan, used)
        return [y_TD, *torch.autograd.grad(y_TD, given, torch.ones_like(y_TD))]

    wide = [t.detach().double().requires_grad_() for t in leaves()]
    want = gradients(FFN.reference, wide)
    kernels = Kernels(monkeypatch)
    got = gradients(GATED.run, leaves())
    assert kernels.calls == ["gemm_gated", "scaled", "gemm_dgated", "gemm", "gemm", "gemm"]
    for ours, oracle in zip(got, want, strict=True):
        assert (ours.double() - oracle).abs().max() < 0.03 * oracle.abs().max()


def test_a_plain_product_asks_what_quack_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    _, _, plan, weights = layer("block(8)")
    kernels = Kernels(monkeypatch)
    x_RD = torch.randn(plan.num_rows, D).bfloat16().requires_grad_()
    w_EDF = weights.w_out_EFD.transpose(1, 2).detach().requires_grad_()
    y_RF = VARLEN.run(x_RD, w_EDF, plan, None)
    torch.autograd.grad(y_RF, (x_RD, w_EDF), torch.ones_like(y_RF))
    assert kernels.calls == ["gemm", "gemm", "gemm"]


def test_rms_norm_asks_what_quack_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = inspect.signature(quack_calls.rmsnorm), []

    def kernel(*args: Any, **named: Any) -> Tensor:
        given = real.bind(*args, **named).arguments
        x, weight = given["x"], given["weight"]
        assert x.stride(-1) == weight.stride(0) == 1 and x.data_ptr() % 16 == 0
        asked.append(given["eps"])
        return quack_calls.rmsnorm_ref(x, weight, eps=given["eps"])

    monkeypatch.setattr(quack_calls, "rmsnorm", kernel)
    monkeypatch.setattr(quack_calls, "ON_CPU", False)
    x_TD, norm_D = torch.randn(T, 2 * D)[:, ::2], torch.randn(2 * D)[::2]
    y_TD = quack_rows.run(x_TD, norm_D, 0.5)
    assert asked == [0.5]
    assert torch.allclose(y_TD, all_ops()["rms_norm"].reference(x_TD, norm_D, 0.5), atol=1e-5)
