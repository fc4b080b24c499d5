"""KTransformers' kernel for bfloat16 experts, in a pool of pinned threads of its own; x86, no backward.

    pip install --no-deps kt-kernel==0.7.2 gguf     its extension does not link torch, whatever it pins
    mrb check --op expert_ffn --impl kt --include-path examples/kt_kernel
    mrb bench layer --tokens 16 --impl native,kt --include-path examples/kt_kernel

Its threads spin for 50 ms after a call. In the package it would be timed in one process with others and slow
them; from a folder it has a process of its own, which stands still unless it is its turn.

It has AMX, AVX-512 and AVX2 inside and takes the best the processor has. Widths are padded to whole tiles
of 32. A pair without an expert is id -1. Plain weights are packed at every call: freeze them. Packed ones
live inside its C++ object, of which there is one for each number of choices, beside the originals.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.frozen import Form, Frozen
from moe_routing_bench.ops.expert_ffn.op import check_sizes
from moe_routing_bench.plan import RoutingPlan

FORWARD_ONLY = True
NEEDS = {name: "pip install --no-deps kt-kernel==0.7.2 gguf" for name in ("kt_kernel", "gguf")}
COLUMNS = 32
MOST_TOKENS = 1024  # of one call; its buffers are made for so many


@cache
def _kernels() -> Any:
    """Its extension. Loading it makes this thread flush denormals to zero, which is undone."""
    flushed = bool(torch.tensor(2.0**-126) / 2 == 0)
    from kt_kernel import kt_kernel_ext

    torch.set_flush_denormal(flushed)
    return kt_kernel_ext


@cache
def _pool(threads: int) -> Any:
    kt = _kernels()
    config = kt.WorkerPoolConfig()
    config.subpool_count, config.subpool_numa_map, config.subpool_thread_count = 1, [0], [threads]
    return kt.CPUInfer(config)


class _Packed:
    """The weights of a layer, output-first as it wants them, and its objects by number of choices."""

    def __init__(self, weights: ExpertWeights):
        more_D, more_F = -weights.D % COLUMNS, -weights.F % COLUMNS
        gate_EFD, up_EFD = weights.w_in_EDG.detach().transpose(1, 2).chunk(2, dim=1)
        parts = (pad(w, (0, more_D, 0, more_F)) for w in (gate_EFD, up_EFD))
        down = pad(weights.w_out_EFD.detach().transpose(1, 2), (0, more_F, 0, more_D))
        self.parts = [part.contiguous() for part in (*parts, down)]
        self.by_K: dict[int, Any] = {}

    def for_K(self, K: int) -> Any:
        if K not in self.by_K:
            kt = _kernels()
            E, F, D = self.parts[0].shape
            config = kt.moe.MOEConfig(E, K, D, F)
            pool = _pool(torch.get_num_threads())
            config.layer_idx, config.pool, config.max_len = 0, pool.backend_, MOST_TOKENS
            for name, part in zip(("gate_projs", "up_projs", "down_projs"), self.parts, strict=True):
                setattr(config, name, [[one.data_ptr() for one in part]])
            made, order_E = kt.moe.AMXBF16_MOE(config), torch.arange(E)
            pool.submit(made.load_weights_task(order_E.data_ptr()))
            pool.sync()
            self.by_K[K] = made
        return self.by_K[K]


def freeze(weights: ExpertWeights) -> ExpertWeights:
    inside = torch.empty(0, dtype=weights.w_in_EDG.dtype)
    inside.kt = _Packed(weights)  # type: ignore[attr-defined]

    def frozen(w_EKN: Tensor) -> Frozen:
        E, depth, columns = w_EKN.shape
        return Frozen(inside, Form(kernel="kt", size=(E, depth, columns), dtype=w_EKN.dtype))

    return replace(weights, w_in_EDG=frozen(weights.w_in_EDG), w_out_EFD=frozen(weights.w_out_EFD))


def unsupported(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> str | None:
    if x_TD.device.type != "cpu":
        return "it runs on a CPU"
    if x_TD.dtype != torch.bfloat16 or weights.w_in_EDG.dtype != torch.bfloat16:
        return f"it computes in bfloat16, not {x_TD.dtype} with {weights.w_in_EDG.dtype}"
    if weights.activation != "swiglu":
        return f"its experts are swiglu, not {weights.activation}"
    if weights.b_in_EG is not None or weights.b_out_ED is not None:
        return "its experts have no biases"
    w_in = weights.w_in_EDG
    if isinstance(w_in, Frozen) and w_in.form.kernel != "kt":
        return f"these weights are frozen for {w_in.form.label}"
    return None


def run(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights) -> Tensor:
    check_sizes(x_TD, gate_TK, plan, weights)
    if not gate_TK.numel():
        return torch.zeros_like(x_TD)
    packed = weights.w_in_EDG.panels.kt if isinstance(weights.w_in_EDG, Frozen) else _Packed(weights)  # type: ignore[attr-defined]
    (T, D), K = x_TD.shape, plan.num_choices
    x_TD = pad(x_TD, (0, -D % COLUMNS)).contiguous()
    y_TD = torch.empty_like(x_TD)
    expert_TK, gate_TK = plan.expert_TK().contiguous(), gate_TK.float().contiguous()
    made, pool = packed.for_K(K), _pool(torch.get_num_threads())
    for first in range(0, T, MOST_TOKENS):
        count = torch.tensor([min(MOST_TOKENS, T - first)], dtype=torch.int32)
        given = (part[first:].data_ptr() for part in (expert_TK, gate_TK, x_TD, y_TD))
        pool.submit(made.forward_task(count.data_ptr(), K, *given, False))
        pool.sync()
    return y_TD[:, :D].contiguous() if D % COLUMNS else y_TD
