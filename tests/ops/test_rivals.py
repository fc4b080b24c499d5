"""Other libraries' GPU layers: each call fits the recorded signature, and gives the right result by the
library's own rules, here in plain torch."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import silu

import tiny_layers
from moe_routing_bench import all_ops
from moe_routing_bench.bench.sources import Code
from moe_routing_bench.core.experts import activate
from moe_routing_bench.core.frozen import Frozen
from moe_routing_bench.ops.expert_ffn import (
    flashinfer_cutlass,
    gpt_oss_triton,
    scatter_moe,
    sonic_moe,
    vllm_triton,
)
from moe_routing_bench.ops.targets import Target, as_if
from rival_signatures import DATA, NAMES, signature
from tiny_layers import Arguments

LIBRARY = {
    flashinfer_cutlass: "flashinfer", gpt_oss_triton: "triton_kernels", scatter_moe: "scattermoe",
    sonic_moe: "sonicmoe", vllm_triton: "vllm",
}  # fmt: skip
RECORDED = {
    name: one for package in json.loads(DATA.read_text()).values() for name, one in package["names"].items()
}
E, D, F, K = 8, 16, 24, 2
Calls = list[str]
every_rival = pytest.mark.parametrize("rival", LIBRARY, ids=lambda rival: rival.__name__.rpartition(".")[2])


def arguments(rival: ModuleType, *, dtype: torch.dtype = torch.float32, **more: Any) -> Arguments:
    torch.manual_seed(0)
    oai = rival is gpt_oss_triton
    given = {"activation": "swiglu_oai" if oai else "swiglu", "bias": oai or rival is scatter_moe, **more}
    return tiny_layers.arguments(9, K, E, D, F, dtype=dtype, **given)


def whole(x_TD: Tensor, id_TK: Tensor, gate_TK: Tensor, w_in_EGD: Tensor, w_out_EDF: Tensor) -> Tensor:
    """A layer of libraries that take matrices output first, gate before up."""
    assert id_TK.dtype == torch.int32 and gate_TK.dtype == torch.float32
    assert w_in_EGD.is_contiguous() and w_out_EDF.is_contiguous() and x_TD.is_contiguous()
    pre_TKG = torch.einsum("td,tkgd->tkg", x_TD, w_in_EGD[id_TK.long()])
    gate_TKF, up_TKF = pre_TKG.chunk(2, dim=-1)
    y_TKD = torch.einsum("tkf,tkdf->tkd", silu(gate_TKF) * up_TKF, w_out_EDF[id_TK.long()])
    return (gate_TK.unsqueeze(-1) * y_TKD).sum(1)


def sonic(
    x: Tensor, router_scores: Tensor, token_indices: Tensor, expert_indices: Tensor, w1: Tensor, b1: None,
    w2: Tensor, b2: None, E: int, stream_id: int, activation_type: str, is_inference_mode_enabled: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    assert b1 is None and b2 is None and activation_type == "SWIGLU" and stream_id == 7
    assert torch.equal(token_indices, token_indices.sort().values) and w1.shape == (2 * F, D, E)
    w_EGD, w_EDF = w1.permute(2, 0, 1), w2.permute(2, 0, 1)
    w_halves = torch.cat([w_EGD[:, 0::2], w_EGD[:, 1::2]], dim=1)
    ids, scores = expert_indices.view(-1, K), router_scores.view(-1, K)
    return whole(x, ids, scores, w_halves, w_EDF), torch.bincount(expert_indices, minlength=E)


def flashinfer(
    input: Tensor, token_selected_experts: Tensor, token_final_scales: Tensor, fc1_expert_weights: Tensor,
    fc2_expert_weights: Tensor, output_dtype: torch.dtype, quant_scales: None, output: Tensor,
) -> list[Tensor]:  # fmt: skip
    assert output_dtype == input.dtype and quant_scales is None
    up, gate = fc1_expert_weights.chunk(2, dim=1)
    w_in = torch.cat([gate, up], dim=1)
    return [output.copy_(whole(input, token_selected_experts, token_final_scales, w_in, fc2_expert_weights))]


def vllm(hidden_states: Tensor, w1: Tensor, w2: Tensor, topk_weights: Tensor, topk_ids: Tensor) -> Tensor:
    return whole(hidden_states, topk_ids, topk_weights, w1, w2)


def scatter(
    inputs: Tensor, expert_weights: Tensor, k: int, sorted_expert_idxs: Tensor, sorted_scattered_idxs: Tensor,
    expert_offsets: Tensor, expert_biases: Tensor | None = None, gates: Tensor | None = None,
    grouped_in: bool = False, grouped_out: bool = False,
) -> Tensor:  # fmt: skip
    counts = torch.bincount(sorted_expert_idxs, minlength=E)
    assert torch.equal(expert_offsets, counts.cumsum(0))
    rows = inputs if grouped_in else inputs[sorted_scattered_idxs // k]
    out = torch.einsum("rd,rdf->rf", rows, expert_weights[sorted_expert_idxs])
    out = out if expert_biases is None else out + expert_biases[sorted_expert_idxs]
    if grouped_out:
        return out
    assert gates is not None
    in_order = torch.empty_like(out).index_copy(0, sorted_scattered_idxs, out)
    return (gates.unsqueeze(1) @ in_order.view(*gates.shape, -1)).squeeze(1)


def triton_matmul(
    a: Tensor, b: Tensor, bias: Tensor | None, a_ragged_metadata: Tensor, gather_indx: Tensor | None = None,
    scatter_indx: Tensor | None = None, gammas: Tensor | None = None, fused_activation: Any = None,
) -> Tensor:  # fmt: skip
    assert bias is None or bias.dtype == torch.float32
    expert_R = torch.repeat_interleave(torch.arange(E), a_ragged_metadata)
    out = torch.einsum("rd,rdf->rf", a if gather_indx is None else a[gather_indx], b[expert_R])
    out = out if bias is None else out + bias[expert_R]
    if fused_activation is not None:
        specs, numbers = fused_activation["specs"], fused_activation["fn_args"]
        assert specs["reduction_n"] == 2 and dict(zip(specs["fn_arg_names"], numbers, strict=True)) == {
            "alpha": 1.702, "limit": 7.0
        }  # fmt: skip
        out = activate(torch.cat([out[:, 0::2], out[:, 1::2]], dim=1), "swiglu_oai")
    out = out if gammas is None else out * gammas.unsqueeze(1)
    return out if scatter_indx is None else torch.empty_like(out).index_copy(0, scatter_indx.long(), out)


STAND_INS: dict[str, Callable[..., Any]] = {
    "fused_experts": vllm,
    "cutlass_fused_moe": flashinfer,
    "parallel_linear": scatter,
    "moe_general_routing_inputs": sonic,
    "matmul": triton_matmul,
    "reduce": lambda x, dim: (x.sum(dim), None),
    "make_ragged_tensor_metadata": lambda slice_sizes, n_total_rows: slice_sizes,
    "FnSpecs": dict,
    "FusedActivation": dict,
}


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Puts the libraries' names into modules, with the recorded signatures. Returns what was called."""
    made: Calls = []

    def stand_in(name: str, recorded: str) -> Callable[..., Any]:
        fits = inspect.signature(eval(f"lambda {recorded}: None"))

        def called(*args: Any, **options: Any) -> Any:
            made.append(name)
            return STAND_INS[name](**fits.bind(*args, **options).arguments)  # TypeError if it does not fit

        return called

    for full, recorded in RECORDED.items():
        module, _, name = full.rpartition(".")
        words = module.split(".")
        for end in range(1, len(words) + 1):
            inner = ".".join(words[:end])
            if inner not in sys.modules:
                monkeypatch.setitem(sys.modules, inner, ModuleType(inner))
        one: Any = (
            SimpleNamespace(**{word: word for word in recorded}) if isinstance(recorded, list) else None
        )
        one = stand_in(name, recorded) if recorded and one is None else one
        monkeypatch.setattr(sys.modules[module], name, one, raising=False)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=7))
    return made


@every_rival
def test_its_call_fits_and_its_result_is_right(rival: ModuleType, calls: Calls) -> None:
    x_TD, gate_TK, plan, weights = arguments(rival)
    frozen = rival.freeze(weights) if hasattr(rival, "freeze") else weights
    for given in (weights, frozen):
        calls.clear()
        tiny_layers.assert_right(rival.run(x_TD, gate_TK, plan, given), x_TD, gate_TK, plan, weights)
        own = {name.rpartition(".")[2] for name in RECORDED if name.startswith(f"{LIBRARY[rival]}.")}
        assert set(calls) == own & STAND_INS.keys()
    if isinstance(frozen.w_in_EDG, Frozen):
        assert torch.equal(frozen.w_in_EDG.plain(), weights.w_in_EDG)
        assert torch.equal(frozen.w_out_EFD.plain(), weights.w_out_EFD)


def test_every_recorded_name_is_imported_by_a_rival() -> None:
    assert sorted(RECORDED) == sorted(NAMES)
    text = "\n".join(inspect.getsource(rival) for rival in LIBRARY)
    for full in NAMES:
        module, _, name = full.rpartition(".")
        assert any(
            line.startswith(f"from {module} import ") and name in line.split(" import ")[1].split(", ")
            for line in map(str.strip, text.splitlines())
        ), full


@every_rival
def test_without_its_library_and_without_a_gpu_it_says_so(
    rival: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    name, op = rival.__name__.rpartition(".")[2], all_ops()["expert_ffn"]
    real = importlib.util.find_spec
    for there in (False, True):
        monkeypatch.setattr(op, "_ready", SimpleNamespace())
        found = {LIBRARY[rival]: there or None}
        monkeypatch.setattr(
            importlib.util,
            "find_spec",
            lambda name, found=found: found[name] if name in found else real(name),
        )
        reason = str(op.why_not(name, *arguments(rival, dtype=torch.bfloat16)))
        assert reason == "it runs on a GPU" if there else f"needs {LIBRARY[rival]}; pip install" in reason
    assert LIBRARY[rival] in Code.of([Path(str(rival.__file__))]).versions


@every_rival
def test_what_it_cannot_compute_is_said(rival: ModuleType) -> None:
    def reason(*, target: str = "sm_90a", **more: Any) -> str:
        with as_if(Target.named(target)):
            return str(rival.unsupported(*arguments(rival, **{"dtype": torch.bfloat16, **more})))

    assert reason() == "None"
    assert "float32" in reason(dtype=torch.float32)
    assert "choices" in reason(absent=0.4) and "choices" in reason(layout="block(4)")
    if rival is not scatter_moe:
        assert "not geglu" in reason(activation="geglu")
        x_TD, gate_TK, plan, weights = arguments(rival, dtype=torch.bfloat16)
        with as_if(Target.named("sm_90a")):
            other = next(one for one in (sonic_moe, flashinfer_cutlass) if one is not rival)
            assert "frozen for" in rival.unsupported(x_TD, gate_TK, plan, other.freeze(weights))
    if rival in (sonic_moe, flashinfer_cutlass, vllm_triton):
        assert "biases" in reason(bias=True)
    if rival in (sonic_moe, flashinfer_cutlass):
        assert "gfx942" in reason(target="gfx942")
    odd = replace(arguments(rival, dtype=torch.bfloat16)[3], w_out_EFD=torch.zeros(E, 5, D).bfloat16())
    with as_if(Target.named("sm_90a")):
        assert "16 bytes" in rival.unsupported(*arguments(rival, dtype=torch.bfloat16)[:3], odd)


def test_a_signature_is_read_from_source(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib/__init__.py").write_text(
        "import nothing\n@nothing.api\ndef f(x: int, y: str = 'a', *, z=None, w): pass\n"
        "class C:\n    a: int\n    b: int = 3\nclass D(Enum):\n    ONE = 1\nalias = f\n"
    )
    read = {name: signature(tmp_path, f"lib.{name}") for name in ("f", "C", "D", "alias")}
    assert read == {"f": "x, y=..., *, z=..., w", "C": "a, b=...", "D": ["ONE"], "alias": ""}
    with pytest.raises(ValueError):
        signature(tmp_path, "lib.absent")
