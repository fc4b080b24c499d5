"""Records what a model's MoE layers choose while it reads text.

There are two sources. Transformers calls its experts modules with (hidden_states, top_k_index,
top_k_weights), for every router and every experts function. Our routers return a Routing. Hooks read these
and change nothing.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from moe_routing_bench.core.routing import Routing
from moe_routing_bench.models.choosing import at_topk
from moe_routing_bench.routers.router import Router

# in a trace file: a pair is an int32 id and a float32 gate, a token has three int64 labels
PAIR_BYTES, TOKEN_BYTES = 8, 24
OnRouting = Callable[[int, Routing], None]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """B pieces of text of N tokens each, and their places in their documents.

    "Hi! Ho!" as bytes, document 0 in pieces of three:
      token_BN   = [[72, 105, 33], [32, 72, 111]]
      document_B = [0, 0]
      start_B    = [0, 3]                            where in the document a piece begins
    The last byte is in another Pieces: token_BN [[33]], start_B [6].
    """

    token_BN: Tensor
    document_B: Tensor
    start_B: Tensor


@dataclass(frozen=True, kw_only=True)
class ModelTrace:
    """The choices of L layers for the same T tokens, in small dtypes on the CPU.

    Three tokens of document 0 in the layers 1 and 2 of a model, E=4 and K=2:
      names       = {1: "model.layers.1.mlp.experts", 2: "model.layers.2.mlp.experts"}
      expert_TK   = {1: [[3, 0], [3, 1], [2, 0]], 2: [[1, 0], [1, 2], [1, 0]]}   int16, or int32 past 32,767
      gate_TK     = {1: [[.7, .3], ...], 2: ...}                                 float32
      position_T  = [0, 1, 2]
      document_T  = [0, 0, 0]
      num_experts = 4
      score_TE    = {}                               or the scores that were compared, float32
    """

    names: Mapping[int, str]
    expert_TK: Mapping[int, Tensor]
    gate_TK: Mapping[int, Tensor]
    position_T: Tensor
    document_T: Tensor
    num_experts: int
    score_TE: Mapping[int, Tensor] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        return self.position_T.shape[0]

    def routing(self, layer: int) -> Routing:
        return Routing(
            expert_TK=self.expert_TK[layer].to(torch.int64),
            gate_TK=self.gate_TK[layer],
            num_experts=self.num_experts,
            ragged=False,
        )

    def routings(self) -> list[Routing]:
        """Returns the routings of all layers, in the order of `labels`."""
        return [self.routing(layer) for layer in self.names]

    def labels(self) -> dict[str, Tensor]:
        """Returns layer_T, position_T and document_T of all routings in order, as write_trace takes them."""
        T, L = self.num_tokens, len(self.names)
        return {
            "layer_T": torch.tensor([*self.names]).repeat_interleave(T),
            "position_T": self.position_T.repeat(L),
            "document_T": self.document_T.repeat(L),
        }

    def scores(self) -> Tensor | None:
        """Returns score_TE of all routings in order; None if scores were not recorded."""
        return torch.cat([self.score_TE[layer] for layer in self.names]) if self.score_TE else None


def pieces(documents: Sequence[Tensor], *, batch: int, sequence: int) -> Iterator[Pieces]:
    """Cuts documents (1-dimensional token ids) into pieces of `sequence` tokens, `batch` of them together.

    The rest at the end of a document is a shorter piece in its own batch. Nothing is padded or lost.
    """
    if batch < 1 or sequence < 1:
        raise ValueError(f"batch={batch} and sequence={sequence}; both must be at least 1")
    for number, token_T in enumerate(documents):
        whole = token_T.shape[0] // sequence
        for first in range(0, whole, batch):
            last = min(first + batch, whole)
            yield Pieces(
                token_BN=token_T[first * sequence : last * sequence].view(last - first, sequence),
                document_B=torch.full((last - first,), number),
                start_B=sequence * torch.arange(first, last),
            )
        if whole * sequence < token_T.shape[0]:
            yield Pieces(
                token_BN=token_T[whole * sequence :].unsqueeze(0),
                document_B=torch.tensor([number]),
                start_B=torch.tensor([whole * sequence]),
            )


def moe_layers(model: nn.Module) -> dict[int, tuple[str, nn.Module]]:
    """{3: ("model.layers.3.mlp.experts", module), ...}: the modules that show choices, by layer.

    The layer is the number in the module's name if that is different for all of them, else 0, 1, 2, ...
    """
    modules = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, Router) or _is_experts(module)
    ]
    if not modules:
        raise ValueError(
            f"{type(model).__name__} has no MoE layer that can be recorded: neither an experts module of "
            "Transformers 5 nor a router of this library; first convert blocks that hold a list of experts"
        )
    digits = [re.search(r"\d+", name) for name, _ in modules]
    numbers = [int(digit[0]) for digit in digits if digit is not None]
    if len(set(numbers)) < len(modules):
        numbers = [*range(len(modules))]
    return dict(zip(numbers, modules, strict=True))


def some_numbers(numbers: Iterable[int]) -> str:
    """Lists numbers in words: some_numbers(range(48)) is "0, 1, 2, 3, 4, 5, 6, 7, ... 47"."""
    words = [str(number) for number in sorted(numbers)]
    return ", ".join([*words[:8], f"... {words[-1]}"] if len(words) > 9 else words)


def _is_experts(module: nn.Module) -> bool:
    if not isinstance(getattr(module, "num_experts", None), int):
        return False
    # some models, such as DBRX, keep the weights in a separate module inside
    weights = [getattr(module, name, None) for name in ("gate_up_proj", "up_proj")]
    return type(module).__name__.endswith("Experts") or any(
        isinstance(weight, nn.Parameter) and weight.ndim == 3 for weight in weights
    )


@contextmanager
def listening(
    model: nn.Module, on_routing: OnRouting, *, layers: Iterable[int] | None = None
) -> Iterator[dict[int, str]]:
    """Inside `with`, on_routing(layer, routing) is called after each routing by these layers (None: all).

    `with` yields the layers' names. The hooks are removed at its end, after an error too.
    """
    known = moe_layers(model)
    wanted = [*known] if layers is None else sorted(set(layers))
    if missing := [layer for layer in wanted if layer not in known]:
        raise ValueError(
            f"the model has no MoE layer {', '.join(map(str, missing))}; it has {', '.join(map(str, known))}"
        )
    if not wanted:
        raise ValueError("name at least one layer, or leave layers out to record all")
    handles = []
    try:
        for layer in wanted:
            name, module = known[layer]
            handles.append(_hook(layer, name, module, on_routing))
        yield {layer: known[layer][0] for layer in wanted}
    finally:
        for handle in handles:
            handle.remove()


def _hook(layer: int, name: str, module: nn.Module, on_routing: OnRouting) -> Any:
    def after_router(router: nn.Module, arguments: Any, routing: Any) -> None:
        if not isinstance(routing, Routing):
            raise NotImplementedError(f"{name} mixes all tokens in every slot: there are no ids to record")
        on_routing(layer, routing)

    def before_experts(experts: nn.Module, arguments: tuple[Any, ...], keywords: dict[str, Any]) -> None:
        given = [*arguments, *keywords.values()]
        tensors = [value for value in given[1:] if isinstance(value, Tensor)]
        ids = [tensor for tensor in tensors if not tensor.is_floating_point()]
        gates = [tensor for tensor in tensors if tensor.is_floating_point()]
        if len(ids) != 1 or len(gates) != 1 or ids[0].ndim != 2 or ids[0].shape != gates[0].shape:
            raise NotImplementedError(
                f"{name} ({type(experts).__name__}) is not called with (hidden_states, top_k_index, "
                "top_k_weights), so its choices cannot be seen"
            )
        count = int(experts.num_experts)  # type: ignore[arg-type]
        on_routing(layer, Routing(expert_TK=ids[0], gate_TK=gates[0], num_experts=count))

    if isinstance(module, Router):
        return module.register_forward_hook(after_router)
    return module.register_forward_pre_hook(before_experts, with_kwargs=True)


def record_trace(
    model: nn.Module,
    batches: Iterable[Pieces],
    *,
    layers: Iterable[int] | None = None,
    max_tokens: int = 1 << 16,
    max_bytes: int = 4 << 30,
    call: Callable[[nn.Module, Tensor], Any] | None = None,
    on_tokens: Callable[[int], None] = lambda tokens: None,
    scores: bool = False,
) -> ModelTrace:
    """Runs the model over the pieces and keeps what its MoE layers chose for the first max_tokens tokens.

    layers     numbers as in moe_layers; None: all
    max_bytes  limit of the trace file, checked when the first sizes are known
    call       calls the model with token_BN; None: model(token_BN), for Transformers without cache
    on_tokens  is called with the number of tokens kept so far
    scores     also keep the scores that were compared, 4 bytes for each expert, token and layer

    The model runs in evaluation mode, without gradients, and is left as it was. All layers must have the same
    number of experts and of choices; record layers of different sizes one size at a time.
    """
    if max_tokens < 1:
        raise ValueError(f"max_tokens is {max_tokens}; there must be at least one")
    call = call or _call
    modes = [(module, module.training) for module in model.modules()]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    calls: dict[int, list[Routing]] = {}
    kept: dict[int, list[tuple[Tensor, Tensor]]] = {}
    compared: dict[int, Tensor] = {}
    score_TE: dict[int, list[Tensor]] = {}
    where: list[tuple[Tensor, Tensor]] = []
    tokens, num_experts = 0, 0

    def collect(layer: int, routing: Routing) -> None:
        calls.setdefault(layer, []).append(routing)

    def compare(layer: int, given: Tensor, k: int, topk: Callable[[], Any]) -> Any:
        compared[layer] = given
        return topk()

    try:
        model.eval()
        with torch.no_grad(), listening(model, collect, layers=layers) as names, ExitStack() as stack:
            if scores:
                known = moe_layers(model)
                stack.enter_context(at_topk(model, {layer: known[layer] for layer in names}, compare))
            for batch in batches:
                calls.clear()
                compared.clear()
                call(model, batch.token_BN.to(device))
                B, N = batch.token_BN.shape
                routings = {layer: _only(calls.get(layer, []), name, B * N) for layer, name in names.items()}
                if not tokens:
                    num_experts = _check_sizes(routings, max_tokens, max_bytes, scores)
                take = min(B * N, max_tokens - tokens)
                for layer, routing in routings.items():
                    kept.setdefault(layer, []).append(_compact(routing, names[layer], take))
                    if scores:
                        score_TE.setdefault(layer, []).append(
                            _scores(compared.get(layer), names[layer], B * N)[:take]
                        )
                where.append(_where(batch, take))
                tokens += take
                on_tokens(tokens)
                if tokens == max_tokens:
                    break
    finally:
        for module, mode in modes:
            module.training = mode
    if not tokens:
        raise ValueError("there was no text to record; give at least one token")
    return ModelTrace(
        names=names,
        expert_TK={layer: torch.cat([ids for ids, _ in parts]) for layer, parts in kept.items()},
        gate_TK={layer: torch.cat([gates for _, gates in parts]) for layer, parts in kept.items()},
        position_T=torch.cat([position_T for position_T, _ in where]),
        document_T=torch.cat([document_T for _, document_T in where]),
        num_experts=num_experts,
        score_TE={layer: torch.cat(parts) for layer, parts in score_TE.items()},
    )


def _scores(compared: Tensor | None, name: str, tokens: int) -> Tensor:
    if compared is None or compared.numel() != tokens * compared.shape[-1]:
        raise NotImplementedError(
            f"the router before {name} does not choose by torch.topk over all experts, so its scores cannot "
            "be seen; record without scores"
        )
    return compared.detach().reshape(tokens, -1).to("cpu", torch.float32, copy=True)


def _call(model: nn.Module, token_BN: Tensor) -> Any:
    known = inspect.signature(model.forward).parameters
    if "input_ids" not in known:
        return model(token_BN)
    # logits of the whole vocabulary for every token would take more memory than everything else
    saving = {"use_cache": False, "logits_to_keep": 1}
    return model(input_ids=token_BN, **{name: value for name, value in saving.items() if name in known})


def _only(calls: list[Routing], name: str, tokens: int) -> Routing:
    if not calls:
        raise NotImplementedError(
            f"{name} was not called, or its hooks were not; record a model before it is compiled"
        )
    if len(calls) > 1 or calls[0].num_tokens != tokens:
        rows = ", ".join(str(routing.num_tokens) for routing in calls)
        raise NotImplementedError(
            f"{name} was called with {rows} rows for {tokens} tokens, so rows cannot be matched with tokens"
        )
    return calls[0]


def _check_sizes(routings: Mapping[int, Routing], max_tokens: int, max_bytes: int, scores: bool) -> int:
    """Returns the number of experts. Raises if layers differ in size, or if their file would be too large."""
    layers: dict[tuple[int, int], list[int]] = {}
    for layer, routing in routings.items():
        layers.setdefault((routing.num_experts, routing.num_choices), []).append(layer)
    if len(layers) > 1:
        sizes = "; ".join(
            f"E={E} and K={K} in layers {','.join(map(str, these))}" for (E, K), these in layers.items()
        )
        raise ValueError(
            f"the layers differ in size ({sizes}): record each size by itself, naming its layers"
        )
    (E, K), these = next(iter(layers.items()))
    needed = max_tokens * len(these) * (K * PAIR_BYTES + TOKEN_BYTES + (4 * E if scores else 0))
    if needed > max_bytes:
        fit = max_bytes * max_tokens // needed
        raise ValueError(
            f"{max_tokens:,} tokens in {len(these)} layers make {needed:,} bytes, over the limit of "
            f"{max_bytes:,}; record at most {fit:,} tokens or fewer layers"
        )
    return E


def _compact(routing: Routing, name: str, take: int) -> tuple[Tensor, Tensor]:
    expert_TK = routing.expert_TK[:take].cpu()
    outside_TK = (expert_TK < 0) | (expert_TK >= routing.num_experts)
    if bool(outside_TK.any()):
        raise NotImplementedError(
            f"{name} sent some tokens to fewer than {routing.num_choices} experts with weights; a "
            "trace holds K real experts for every token"
        )
    small = torch.int16 if routing.num_experts < 2**15 else torch.int32
    # copies, because a view would keep the whole batch, and the model may write to its tensors again
    return (
        expert_TK.to(small),
        routing.gate_TK[:take].detach().to("cpu", torch.float32, copy=True),
    )


def _where(batch: Pieces, take: int) -> tuple[Tensor, Tensor]:
    N = batch.token_BN.shape[1]
    position_T = (batch.start_B.unsqueeze(1) + torch.arange(N)).flatten()[:take]
    return position_T.clone(), batch.document_B.repeat_interleave(N)[:take].clone()
