"""llama.cpp's mul_mat_id as one graph: gate, up, activation, down, gates, sum; CPU, no backward.

Its libraries are part of the package llama-cpp-python, which pip compiles for this processor in a few
minutes:

    pip install --no-deps llama-cpp-python==0.3.36

Weights have a dtype, or a format of GGUF: store=q8_0_a8, q4_k_a8, mxfp4_a8. With a format it rounds rows to 8
bits in blocks of 32 (256 for q4_k). The weights get the memory that llama.cpp itself would choose: repacked
for blocks of columns if it has such code for the format on this processor, else block by block as in the
file.

A pair without a row is computed by some expert with a gate of zero. Rows are float32 inside. Plain weights
are copied at every call, which takes longer than the call itself: freeze them.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_routing_bench.core import cpp
from moe_routing_bench.core.experts import ExpertWeights, QuantisedExperts
from moe_routing_bench.core.frozen import Frozen, held_by, holder_of
from moe_routing_bench.core.plan import RoutingPlan
from moe_routing_bench.formats.ggml import Q4_K, Q8_0
from moe_routing_bench.formats.int8 import rounded_rows
from moe_routing_bench.formats.mxfp4 import MXFP4
from moe_routing_bench.formats.named import INT8_ROWS
from moe_routing_bench.formats.stored import Stored, from_nibbles, nibbles
from moe_routing_bench.ops.expert_ffn.op import by_expert, check_sizes
from moe_routing_bench.ops.ggml_calls import ACTIVATIONS, INSTALL, KINDS, loaded

FORWARD_ONLY = True
CONFIGS: tuple[dict[str, Any], ...] = ({}, {"store": "q8_0_a8"}, {"store": "q4_k_a8"}, {"store": "mxfp4_a8"})
NEEDS = {"llama_cpp": INSTALL}
KEPT_GRAPHS = 4  # of one layer, for different tokens and choices; each has memory for intermediate results


class _Layer:
    """The weights of a layer in ggml's memory, and its graphs for each T and K. Depths are whole blocks:
    zeros follow the F columns of the first product and the numbers of x."""

    def __init__(self, kind: object, parts: list[Tensor], weights: ExpertWeights):
        block, E, self.D = KINDS[kind].block, weights.num_experts, weights.D
        depth_D, depth_F = (-(-width // block) * block for width in (self.D, weights.F))
        ggml, self.size, self.activation = loaded(), (E, depth_D, depth_F), weights.activation
        sizes = ((depth_D, depth_F), (depth_D, depth_F), (depth_F, self.D))
        self.matrices = [
            self._placed(_where(kind, *size, E), (kind, *size, E), part)
            for size, part in zip(sizes, parts, strict=True)
        ]
        b_in_EG, b_out_ED = weights.b_in_EG, weights.b_out_ED
        biases = (*((None, None) if b_in_EG is None else b_in_EG.chunk(2, dim=-1)), b_out_ED)
        self.biases = [
            b if b is None else self._placed(ggml.memory, (torch.float32, columns, E), b.detach().float())
            for b, (_, columns) in zip(biases, sizes, strict=True)
        ]
        self.graphs: OrderedDict[tuple[int, int], _Graph] = OrderedDict()

    def _placed(self, where: int, tensor: tuple[Any, ...], value: Tensor) -> int:
        """A tensor in a memory of ggml: the value, then columns of zeros."""
        ggml, (*_, columns, E) = loaded(), tensor
        context = ggml.context()
        made = ggml.tensor(context, *tensor)
        buffer = ggml.place(context, where)
        weakref.finalize(self, _release, (ggml.free_buffer, buffer), (ggml.free, context))
        if not buffer:
            raise MemoryError("no memory for the weights of llama.cpp")
        whole = value.new_zeros(E, columns, *value.shape[2:])
        whole[:, : value.shape[1]] = value
        assert whole.nbytes == ggml.bytes(made)
        ggml.set(made, whole.data_ptr(), 0, whole.nbytes)
        return made

    def graph(self, T: int, K: int) -> _Graph:
        if (T, K) not in self.graphs:
            self.graphs[T, K] = _Graph(self, T, K)
            while len(self.graphs) > KEPT_GRAPHS:
                self.graphs.popitem(last=False)
        self.graphs.move_to_end((T, K))
        return self.graphs[T, K]


class _Graph:
    """The computation of one call. Its tensors are in ggml's memory, and the next call overwrites them."""

    def __init__(self, layer: _Layer, T: int, K: int):
        ggml, D = loaded(), layer.D
        context = ggml.context()
        x, ids = (
            ggml.tensor(context, torch.float32, layer.size[1], 1, T),
            ggml.tensor(context, torch.int32, K, T),
        )
        gate = ggml.tensor(context, torch.float32, 1, K, T)
        for tensor in (x, ids, gate):
            ggml.mark["input"](tensor)

        def product(i: int, rows: int) -> int:
            made = ggml.mul_mat_id(context, layer.matrices[i], rows, ids)
            return made if layer.biases[i] is None else ggml.add_id(context, made, layer.biases[i], ids)

        hidden = ggml.activation(layer.activation)(context, product(0, x), product(1, x))
        weighed = ggml.mul(context, product(2, hidden), gate)
        parts = [ggml.view(context, weighed, D, T, 4 * D * K, 4 * D * k) for k in range(K)]
        total = ggml.contiguous(context, parts[0]) if K == 1 else parts[0]
        for part in parts[1:]:
            total = ggml.add(context, total, part)
        ggml.mark["output"](total)
        self.graph = ggml.graph(context)
        ggml.expand(self.graph, total)
        allocator = ggml.allocator(ggml.memory)
        weakref.finalize(self, _release, (ggml.free_allocator, allocator), (ggml.free, context))
        if not ggml.allocate(allocator, self.graph):
            raise MemoryError("no memory for the intermediate results of llama.cpp")
        self.x_TD = ggml.as_torch(x, torch.float32, T, layer.size[1])
        self.expert_TK = ggml.as_torch(ids, torch.int32, T, K)
        self.gate_TK = ggml.as_torch(gate, torch.float32, T, K)
        self.y_TD = ggml.as_torch(total, torch.float32, T, D)


def _where(kind: object, depth: int, columns: int, E: int) -> int:
    """The memory that llama.cpp would choose: the first of its own that supports such a product."""
    ggml = loaded()
    for own in ggml.own_memory:
        context = ggml.context()
        trial = ggml.tensor(context, kind, depth, columns, E)
        buffer = ggml.place(context, own)  # it is not written to, so it takes no memory
        rows = ggml.tensor(context, torch.float32, depth, 1, 1), ggml.tensor(context, torch.int32, 1, 1)
        fits = buffer and ggml.supports(ggml.device, ggml.mul_mat_id(context, trial, *rows))
        _release((ggml.free_buffer, buffer), (ggml.free, context))
        if fits:
            return own
    return ggml.memory


def _release(*calls: tuple[Callable[..., None], int | None]) -> None:
    for free, what in calls:
        if what is not None:
            free(what)


def _format(store: str) -> str:
    return store.removesuffix(INT8_ROWS)


def stored(weights: ExpertWeights, *, store: str) -> ExpertWeights:
    """The weights it computes with, exact in float64."""
    return QuantisedExperts.of(weights, _format(store)).dequantised()


def plain(x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, store: str) -> Tensor:
    """The reference with rows rounded to 8 bits in blocks, as it multiplies them."""
    block = KINDS[_format(store)].rows

    def rounded(x_RK: Tensor) -> Tensor:
        K = x_RK.shape[-1]
        return rounded_rows(pad(x_RK, (0, -K % block)).unflatten(-1, (-1, block))).flatten(-2)[..., :K]

    return by_expert(x_TD, gate_TK, plan, weights, rounded=rounded)


def freeze(weights: ExpertWeights, *, store: str | None = None) -> ExpertWeights:
    if store is not None:
        experts = QuantisedExperts.of(weights, _format(store))
        return freeze_stored(experts, weights.w_in_EDG.dtype, store=store)
    w_in, w_out = (w.detach().transpose(1, 2) for w in (weights.w_in_EDG, weights.w_out_EFD))
    layer = _Layer(weights.w_in_EDG.dtype, [*w_in.chunk(2, dim=1), w_out], weights)
    return held_by(layer, weights, "llama_cpp")


def freeze_stored(
    experts: QuantisedExperts, dtype: torch.dtype, *, store: str | None = None
) -> ExpertWeights:
    """freeze for weights that a checkpoint stores in the format: no weight is rounded."""
    own = experts.validate().store
    if store is not None and _format(store) != own:
        raise ValueError(f"these weights are stored as {own}, not as {_format(store)}")
    if reason := _why_not_store(own + INT8_ROWS):
        raise NotImplementedError(f"cannot freeze weights for expert_ffn.llama_cpp: {reason}")
    parts = [*_blocks(experts.w_in).chunk(2, dim=1), _blocks(experts.w_out)]
    b_in_EG, b_out_ED = (None if b is None else b.to(dtype) for b in (experts.b_in_EG, experts.b_out_ED))
    described = replace(experts.described(dtype), b_in_EG=b_in_EG, b_out_ED=b_out_ED)
    return held_by(_Layer(own, parts, described), described, "llama_cpp", own + INT8_ROWS)


def _blocks(stored: Stored) -> Tensor:
    """Experts x columns x bytes, as in a GGUF file."""
    if isinstance(stored, (Q8_0, Q4_K)):
        return stored.block_ENbB.flatten(2)
    assert isinstance(stored, MXFP4)
    # a block is the exponent and 16 bytes: weights 0-15 in the lower halves, 16-31 in the upper ones
    pair_ENgi = torch.stack(from_nibbles(stored.block_ENgB).chunk(2, dim=-1), dim=-1).flatten(-2)
    return torch.cat((stored.exponent_ENg.unsqueeze(-1), nibbles(pair_ENgi)), dim=-1).flatten(2)


def _why_not_store(store: str) -> str | None:
    known = [str(config["store"]) for config in CONFIGS if config]
    return None if store in known else f"it stores weights as {', '.join(known)}, not as {store}"


def unsupported(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, store: str | None = None
) -> str | None:
    try:
        loaded()
    except NotImplementedError as reason:
        return str(reason)
    if store is not None and (reason_too := _why_not_store(store)):
        return reason_too
    if x_TD.dtype not in KINDS or weights.w_in_EDG.dtype != x_TD.dtype:
        given = f"{x_TD.dtype} with {weights.w_in_EDG.dtype}"
        return f"it takes float32, bfloat16 or float16 throughout, not {given}"
    if weights.activation not in ACTIVATIONS:
        return f"its experts are {', '.join(ACTIVATIONS)}, not {weights.activation}"
    w_in = weights.w_in_EDG
    if isinstance(w_in, Frozen):
        if (w_in.form.kernel, w_in.form.store) != ("llama_cpp", store):
            return f"these weights are frozen for {w_in.form.label}"
        w_in = w_in.panels
    return cpp.why_not_plain(x_TD, gate_TK, plan.pair_R, w_in) or cpp.why_not_cast(x_TD.dtype)


def _some_expert(expert_TK: Tensor, E: int) -> Tensor:
    """Replaces each absent expert (-1) by one that the token does not have: [1, -1, -1] of 4 -> [1, 0, 2].
    The code for repacked weights would lose rows of a token with the same expert twice."""
    absent_TK = expert_TK < 0
    taken_TE = torch.zeros(len(expert_TK), E + 1, dtype=torch.int8)
    taken_TE.scatter_(1, expert_TK.masked_fill(absent_TK, E), 1)
    free_TE = taken_TE[:, :E].argsort(dim=1, stable=True)
    rank_TK = (absent_TK.cumsum(1) - 1).clamp(min=0)
    return torch.where(absent_TK, free_TE.gather(1, rank_TK), expert_TK)


def run(
    x_TD: Tensor, gate_TK: Tensor, plan: RoutingPlan, weights: ExpertWeights, *, store: str | None = None
) -> Tensor:
    check_sizes(x_TD, gate_TK, plan, weights)
    if not gate_TK.numel():
        return torch.zeros_like(x_TD)
    frozen = weights if isinstance(weights.w_in_EDG, Frozen) else freeze(weights, store=store)
    layer: _Layer = holder_of(frozen)
    expert_TK = plan.expert_TK()
    if not plan.filled:
        gate_TK = torch.where(expert_TK >= 0, gate_TK, 0)
        expert_TK = _some_expert(expert_TK, weights.num_experts)
    ggml, D = loaded(), weights.D
    with ggml.lock:
        graph = layer.graph(*gate_TK.shape)
        graph.x_TD[:, :D].copy_(x_TD)
        graph.x_TD[:, D:] = 0
        graph.expert_TK.copy_(expert_TK)
        graph.gate_TK.copy_(gate_TK)
        ggml.threads(ggml.backend, torch.get_num_threads())
        if ggml.compute(ggml.backend, graph.graph) != 0:
            raise MemoryError("no memory for the workspace of llama.cpp")
        y_TD = graph.y_TD.to(x_TD.dtype, copy=True)
    # rounding rows to 8 bits turns NaN and infinity into numbers, so they are added again
    return y_TD if store is None else y_TD.add_((x_TD * 0).sum(dim=1, keepdim=True))
