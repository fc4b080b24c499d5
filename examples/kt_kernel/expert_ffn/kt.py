"""KTransformers' kernels for experts, in a pool of pinned threads of their own; x86, no backward.

    pip install --no-deps kt-kernel==0.7.2 gguf     its extension does not link torch, whatever it pins
    mrb check --op expert_ffn --impl kt --include-path examples/kt_kernel
    mrb bench layer --tokens 16 --impl native,kt --include-path examples/kt_kernel
    mrb bench expert_ffn --store mxfp4 --impl 'native,kt(store=mxfp4)' --include-path examples/kt_kernel

Weights are bfloat16, or stored: store=int8_a8, int4_g32_a8 (rows are rounded to 8 bits too), mxfp4 and
fp8_block. It takes codes as they are, with bfloat16 scales; int8 it rounds itself, from the stored numbers in
bfloat16.

Its threads spin for 50 ms after a call. In the package it would be timed in one process with others and slow
them; from a folder it has a process of its own, which stands still unless it is its turn.

It has AMX, AVX-512 and AVX2 inside and takes the best the processor has. Widths are padded to whole tiles
of 32; those of stored weights must be whole steps of its kernels. A pair without an expert is id -1. Plain
weights are packed at every call: freeze them. Packed ones live inside its C++ object, of which there is one
for each number of choices, beside the originals.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_routing_bench.core.experts import ExpertWeights, QuantisedExperts
from moe_routing_bench.core.frozen import Frozen, held_by, holder_of
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.formats.fp8_block import FP8Block
from moe_routing_bench.formats.mxfp4 import MXFP4
from moe_routing_bench.formats.named import INT8_ROWS
from moe_routing_bench.ops.expert_ffn.op import check_sizes, op, with_int8_rows

FORWARD_ONLY = True
NEEDS = {name: "pip install --no-deps kt-kernel==0.7.2 gguf" for name in ("kt_kernel", "gguf")}
COLUMNS = 32
MAX_TOKENS = 1024  # of one call; its buffers are made for so many
# its class for what is stored, bits, group, and the step of its kernels: it crashes at other widths
CLASSES: dict[str | None, tuple[str, int, int, int]] = {
    None: ("AMXBF16_MOE", 16, 1, COLUMNS),
    "int8_a8": ("AMXInt8_MOE", 16, 1, 64),
    "int4_g32_a8": ("AMXInt4_KGroup_MOE", 4, 32, 64),
    "mxfp4": ("AMXFP4_KGroup_MOE", 4, 32, 32),
    "fp8_block": ("AMXFP8_MOE", 8, 128, 128),
}
CONFIGS = tuple({"store": store} if store else {} for store in CLASSES)


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

    def __init__(
        self, parts: list[Tensor], scales: list[Tensor], sizes: tuple[int, int, int], store: str | None
    ):
        self.parts, self.scales = ([one.contiguous() for one in given] for given in (parts, scales))
        self.sizes, self.store = sizes, store
        self.by_K: dict[int, Any] = {}

    def for_K(self, K: int) -> Any:
        if K not in self.by_K:
            kt, (E, D, F), (name, bits, group, _) = _kernels(), self.sizes, CLASSES[self.store]
            config = kt.moe.MOEConfig(E, K, D, F)
            pool = _pool(torch.get_num_threads())
            config.layer_idx, config.pool, config.max_len = 0, pool.backend_, MAX_TOKENS
            for matrix, part in zip(("gate", "up", "down"), self.parts, strict=True):
                if self.store == "int8_a8":  # addresses of single experts mean codes of its own there
                    setattr(config, f"{matrix}_proj", part.data_ptr())
                else:
                    setattr(config, f"{matrix}_projs", [[one.data_ptr() for one in part]])
            if self.scales:
                for matrix, scale in zip(("gate", "up", "down"), self.scales, strict=True):
                    setattr(config, f"{matrix}_scales", [[one.data_ptr() for one in scale]])
                config.quant_config.bits, config.quant_config.group_size = bits, group
                config.quant_config.zero_point = False
            made, order_E = getattr(kt.moe, name)(config), torch.arange(E)
            pool.submit(made.load_weights_task(order_E.data_ptr()))
            pool.sync()
            self.by_K[K] = made
        return self.by_K[K]


def freeze(weights: ExpertWeights, *, store: str | None = None) -> ExpertWeights:
    if store is not None:
        experts = QuantisedExperts.of(weights, _format(store))
        return freeze_stored(experts, weights.w_in_EDG.dtype, store=store)
    return held_by(_plain_parts(weights, None), weights, "kt")


def freeze_stored(experts: QuantisedExperts, dtype: torch.dtype, *, store: str) -> ExpertWeights:
    """Of weights that are stored so already."""
    if experts.store != _format(store):
        raise ValueError(f"these weights are stored as {experts.store}, not as {_format(store)}")
    described = experts.described(dtype)
    if store == "int8_a8":
        return held_by(_plain_parts(experts.dequantised(torch.bfloat16), store), described, "kt", store)
    (gate_up, scale_in), (down, scale_out) = (_codes(stored) for stored in (experts.w_in, experts.w_out))
    parts, scales = [*gate_up.chunk(2, dim=1), down], [*scale_in.chunk(2, dim=1), scale_out]
    sizes = described.num_experts, described.D, described.F
    return held_by(_Packed(parts, scales, sizes, store), described, "kt", store)


def _codes(stored: Any) -> tuple[Tensor, Tensor]:
    """Experts x columns x bytes, and scales as it wants them."""
    if isinstance(stored, FP8Block):
        return stored.code_ENK.view(torch.uint8), stored.scale_Enk.float()
    if isinstance(stored, MXFP4):
        return stored.block_ENgB.flatten(2), torch.exp2(stored.exponent_ENg.float() - 127).bfloat16()
    return stored.code_ENH, stored.scale_ENg.bfloat16()


def _plain_parts(weights: ExpertWeights, store: str | None) -> _Packed:
    more_D, more_F = -weights.D % COLUMNS, -weights.F % COLUMNS
    gate_EFD, up_EFD = weights.w_in_EDG.detach().transpose(1, 2).chunk(2, dim=1)
    parts = [pad(w, (0, more_D, 0, more_F)) for w in (gate_EFD, up_EFD)]
    parts.append(pad(weights.w_out_EFD.detach().transpose(1, 2), (0, more_F, 0, more_D)))
    return _Packed(parts, [], (weights.num_experts, weights.D + more_D, weights.F + more_F), store)


def _format(store: str) -> str:
    return store.removesuffix(INT8_ROWS)


def stored(weights: ExpertWeights, *, store: str) -> ExpertWeights:
    """The weights it computes with, exact in float64."""
    return QuantisedExperts.of(weights, _format(store)).dequantised()


def plain(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, store: str) -> Tensor:
    reference = with_int8_rows if store.endswith(INT8_ROWS) else op.reference
    return reference(x_TD, gate_TK, plan, weights)


def unsupported(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, store: str | None = None
) -> str | None:
    if store not in CLASSES:
        return f"it stores weights as {', '.join(name for name in CLASSES if name)}, not as {store}"
    if x_TD.device.type != "cpu":
        return "it runs on a CPU"
    if x_TD.dtype != torch.bfloat16 or weights.w_in_EDG.dtype != torch.bfloat16:
        return f"it computes in bfloat16, not {x_TD.dtype} with {weights.w_in_EDG.dtype}"
    if weights.activation != "swiglu":
        return f"its experts are swiglu, not {weights.activation}"
    if weights.b_in_EG is not None or weights.b_out_ED is not None:
        return "its experts have no biases"
    step = CLASSES[store][3]
    if store and (weights.D % step or weights.F % step):
        return f"widths are multiples of {step} with {store}, not {weights.D} and {weights.F}"
    if store == "int4_g32_a8" and weights.num_experts % 8:
        return (
            f"it crashes unless the number of experts is a multiple of 8, and there are {weights.num_experts}"
        )
    w_in = weights.w_in_EDG
    if isinstance(w_in, Frozen) and (w_in.form.kernel, w_in.form.store) != ("kt", store):
        return f"these weights are frozen for {w_in.form.label}"
    return None


def run(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, store: str | None = None
) -> Tensor:
    check_sizes(x_TD, gate_TK, plan, weights)
    if not gate_TK.numel():
        return torch.zeros_like(x_TD)
    frozen = weights if isinstance(weights.w_in_EDG, Frozen) else freeze(weights, store=store)
    packed: _Packed = holder_of(frozen)
    (T, D), K = x_TD.shape, plan.num_choices
    x_TD = pad(x_TD, (0, -D % COLUMNS)).contiguous()
    y_TD = torch.empty_like(x_TD)
    expert_TK, gate_TK = plan.expert_TK().contiguous(), gate_TK.float().contiguous()
    made, pool = packed.for_K(K), _pool(torch.get_num_threads())
    for first in range(0, T, MAX_TOKENS):
        count = torch.tensor([min(MAX_TOKENS, T - first)], dtype=torch.int32)
        given = (part[first:].data_ptr() for part in (expert_TK, gate_TK, x_TD, y_TD))
        pool.submit(made.forward_task(count.data_ptr(), K, *given, False))
        pool.sync()
    return y_TD[:, :D].contiguous() if D % COLUMNS else y_TD
