"""Router: the base class of every routing rule, and how the rules are found.

A routing rule is a file `routers/<name>.py` that defines one subclass of Router. Listings show the first line
of the file's docstring; the rest gives the formula.
"""

from __future__ import annotations

import importlib
import importlib.util
import pkgutil
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from moe_routing_bench.core.names import no_such
from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.ops.auto import Auto, resolve
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.registry import clear_included, get_op, include, included_folders
from moe_routing_bench.ops.score_topk.op import PLAIN, ScoreRule
from moe_routing_bench.ops.score_topk.op import op as score_topk_op
from moe_routing_bench.ops.topk.op import op as topk_op
from moe_routing_bench.routers.losses import z_loss

GATE_SUMS = {
    "one": "the gates of a token with experts sum to 1",
    "at most one": "the gates of a token sum to 1 or less",
    "any": "the gates of a token are not negative; their sum can be anything",
}
# what a kernel sees of the experts' rows
GROUPS = {
    "uneven": "each expert has a row for each token that chose it: compact, block, or padded with drops",
    "equal": "every expert always has the same number of rows: any layout, padded without waste",
    "dense": "slots mixed from all tokens by a matrix product: equal groups, no dispatch or combine",
}
NO_RULES = {"router", "losses", "groups"}  # files of this folder that are not a routing rule
_included: list[Path] = []
Base = TypeVar("Base")


class Router(nn.Module):
    """Takes tokens and returns Routing or SoftRouting. Subclasses define the class attributes and forward.

    Logits, scores and gates are computed in `dtype`, for any dtype of x, of the weights or of autocast.
    `loss_weights={"switch": 0.01, "z": 1e-3}` computes these losses: their unweighted values are in
    Routing.losses, their weighted sum in Routing.aux_loss. A weight of 0 only measures a loss.

    >>> router = mrb.all_routers()["switch"](D=8, E=4, K=1)
    >>> router(torch.randn(3, 8)).expert_TK.shape
    torch.Size([3, 1])
    """

    causal: ClassVar[bool]  # False: a token's experts can depend on later tokens
    batch_dependent: ClassVar[bool]  # True: a token's experts can depend on any other token
    paper: ClassVar[str]
    gate_sum: str  # a key of GATE_SUMS; an instance may promise more than its class
    fixed_K: ClassVar[int | None] = None  # the only K of the rule; None: any from 1 to E
    loss_names: ClassVar[tuple[str, ...]] = ()  # the losses that loss_weights may name
    experts_per_token: ClassVar[str] = "K"  # in words, for listings
    groups: str = "uneven"  # a key of GROUPS; an option may change it
    controller: ClassVar[str | None] = None  # the balance controller that was published with the rule
    host_sync: ClassVar[str] = ""  # why forward reads device values on the host; empty: it does not
    fused: Implementation | Auto | None = None  # an implementation of score_topk, see fuse
    score_rule: ScoreRule = PLAIN  # what `fused` computes
    product: Callable[..., Tensor] | None = None  # (x_TD, w_DE, b_E) of the projection; None: torch's

    def __init__(
        self,
        D: int,
        E: int,
        K: int,
        *,
        topk: str = "auto",
        dtype: torch.dtype = torch.float32,
        loss_weights: Mapping[str, float] | None = None,
    ):
        super().__init__()
        if D < 1 or E < 1:
            raise ValueError(f"a router needs D >= 1 and E >= 1, not D={D} and E={E}")
        if not 1 <= K <= E:
            raise ValueError(f"K={K} choices per token, but there are E={E} experts")
        if self.fixed_K not in (None, K):
            raise ValueError(f"{type(self).__name__} has K={self.fixed_K} only, not K={K}")
        self.D, self.E, self.K = D, E, K
        self.dtype = dtype
        self.topk = resolve(topk_op, topk)
        self.loss_weights = dict(loss_weights or {})
        if unknown := sorted(set(self.loss_weights) - set(self.loss_names)):
            raise ValueError(
                f"{type(self).__name__} has no loss {', '.join(unknown)}; "
                f"it offers {', '.join(self.loss_names) or 'none'}"
            )

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        for parameter in self.parameters(recurse=False):
            nn.init.normal_(parameter, std=0.02, generator=generator)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Router:
        # to(bfloat16) must not change buffers: a bias would lose steps of 1e-3, a counter would stop at 256
        before = {name: state for name, state in self._buffers.items() if state is not None}
        super()._apply(fn, recurse)
        for name, state in before.items():
            now = self._buffers[name]
            assert now is not None
            if now.dtype != state.dtype:
                self._buffers[name] = state.to(now.device)
        return self

    def widest(self, most: int | None) -> int:
        """The width of expert_TK for a ragged rule: at most `most` experts per token; None: all E."""
        if most is not None and not self.K <= most <= self.E:
            raise ValueError(f"most={most} experts per token must be from K={self.K} to E={self.E}")
        return self.E if most is None else most

    def forward(self, x_TD: Tensor, info: TokenInfo = TokenInfo()) -> Routing | SoftRouting:
        raise NotImplementedError

    def check_shapes(self, x_TD: Tensor, info: TokenInfo) -> None:
        if x_TD.ndim != 2 or x_TD.shape[1] != self.D:
            raise ValueError(f"x_TD has shape {tuple(x_TD.shape)}, but this router reads T x {self.D}")
        T = x_TD.shape[0]
        for name, per_token in (("mask_T", info.mask_T), ("token_id_T", info.token_id_T)):
            if per_token is not None and per_token.shape != (T,):
                raise ValueError(f"{name} has shape {tuple(per_token.shape)}, but there are T={T} tokens")
        if info.num_sequences < 1 or T % info.num_sequences:
            raise ValueError(f"T={T} tokens are not {info.num_sequences} sequences of equal length")

    def prepare(self, x_TD: Tensor, info: TokenInfo) -> Tensor:
        """x in the router's dtype. Masked tokens become zeros, because they may contain anything."""
        self.check_shapes(x_TD, info)
        x_TD = self.in_own_dtype(x_TD)
        return x_TD if info.mask_T is None else torch.where(info.mask_T.bool().unsqueeze(1), x_TD, 0.0)

    def in_own_dtype(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.dtype == self.dtype else tensor.to(self.dtype)

    def project(self, x_TD: Tensor, w_DE: Tensor) -> Tensor:
        w_DE = self.in_own_dtype(w_DE)
        # autocast would round the operands of this product to bfloat16; disabling it takes 8 us
        if not torch.is_autocast_enabled(x_TD.device.type):
            return x_TD @ w_DE if self.product is None else self.product(x_TD, w_DE)
        with torch.autocast(x_TD.device.type, enabled=False):
            return x_TD @ w_DE if self.product is None else self.product(x_TD, w_DE)

    def make_batch_invariant(self, product: Callable[..., Tensor]) -> None:
        """Makes a token's choices and gates have the same bits in every batch. Raises ValueError if the rule
        cannot."""
        if self.batch_dependent:
            raise ValueError(f"{type(self).__name__}: by its rule a token's experts depend on the batch")
        for part in (self.topk, self.fused):
            if isinstance(part, Auto):
                part.batch_invariant = True
            elif part is not None:
                resolve(get_op(part.op), part.label, batch_invariant=True)  # raises
        self.product = product

    def fuse(self, impl: str, rule: ScoreRule) -> None:
        """Takes choices and gates from one call of op score_topk, which computes `rule`.

        `impl` is an implementation of score_topk. Its results are the same up to rounding. The scores of all
        experts are then computed only for losses.
        """
        if not isinstance(self.topk, Auto):
            raise ValueError(
                f"topk={self.topk.label!r} and fused={impl!r}: both choose experts; leave one of them out"
            )
        rule.check(self.E, self.K)
        self.fused, self.score_rule = resolve(score_topk_op, impl), rule

    def choose_fused(self, logits_TE: Tensor, bias_E: Tensor | None = None) -> tuple[Tensor, Tensor]:
        assert self.fused is not None
        gate_TK, expert_TK = self.fused(logits_TE, bias_E, self.K, self.score_rule)
        return gate_TK.to(self.dtype), expert_TK

    def routed(
        self,
        expert_TK: Tensor,
        gate_TK: Tensor,
        logits_TE: Tensor,
        info: TokenInfo,
        losses: Mapping[str, Callable[[], Tensor]] | None = None,
        *,
        ragged: bool = False,
    ) -> Routing:
        """`finish` for choices by logits, which have the loss z."""
        routing = Routing(
            expert_TK=expert_TK, gate_TK=gate_TK, num_experts=self.E, ragged=ragged, logits_TE=logits_TE
        )
        return self.finish(routing, {"z": lambda: z_loss(logits_TE, info.mask_T), **(losses or {})}, info)

    def finish(
        self, routing: Routing, losses: Mapping[str, Callable[[], Tensor]], info: TokenInfo
    ) -> Routing:
        """The routing without masked tokens, with the losses of loss_weights."""
        if not self.loss_weights:
            return routing.masked(info.mask_T)
        value = {name: losses[name]() for name in self.loss_weights}
        weighted = [self.loss_weights[name] * value[name] for name in value]
        return replace(routing.masked(info.mask_T), losses=value, aux_loss=torch.stack(weighted).sum())


def all_routers() -> dict[str, type[Router]]:
    """Every routing rule by name: the files of this folder and of included folders.

    >>> mrb.all_routers()["expert_choice"].causal
    False
    """
    return {name: router_named(name) for name in router_names()}


def router_names() -> list[str]:
    """The names of all rules; no file is loaded."""
    return [*built_in_names(), *_outside()]


@cache
def built_in_names() -> tuple[str, ...]:
    return tuple(modules_beside(__file__, NO_RULES))


def _outside() -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in [path for folder in _included for path in sorted(folder.glob("*.py"))]:
        if path.stem in files or path.stem in built_in_names():
            raise ValueError(f"{path} has the name of a router that exists; rename the file")
        files[path.stem] = path
    return files


def include_routers(folder: Path | str) -> None:
    """Adds the routing rules in `<folder>/<name>.py`."""
    path = Path(folder).resolve()
    if not path.is_dir():
        raise ValueError(f"{folder} is not a folder; it should hold <name>.py files, one router each")
    if path not in _included:
        _included.append(path)


def include_folder(folder: Path | str) -> None:
    """Adds the contents of a folder: implementations in `<folder>/<op>/<name>.py`, new operations in
    `<folder>/<op>/op.py`, routers in `<folder>/routers/<name>.py`. Code is loaded when it is first used.

    >>> mrb.include("examples/add_a_router")
    >>> "cosine" in mrb.all_routers()
    True
    """
    include(folder)
    if (rules := Path(folder) / "routers").is_dir():
        include_routers(rules)


@contextmanager
def without_included() -> Iterator[tuple[Path, ...]]:
    """Inside the context no folder is included. It gives the folders, for a process that loads their code."""
    folders, rules = included_folders(), tuple(_included)
    clear_included()
    _included.clear()
    try:
        yield folders
    finally:
        for folder in folders:
            include(folder)
        _included.extend(rules)


@cache
def _load(path: Path) -> ModuleType:
    name = f"mrb_included_router_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise ValueError(f"{path} could not be loaded: {type(error).__name__}: {error}") from error
    return module


def only_subclass(module: ModuleType, base: type[Base]) -> type[Base]:
    """The one subclass of `base` that a file defines."""
    found = [
        thing
        for thing in vars(module).values()
        if isinstance(thing, type) and issubclass(thing, base) and thing.__module__ == module.__name__
    ]
    if len(found) != 1:
        names = ", ".join(sorted(cls.__name__ for cls in found)) or "none"
        raise ValueError(
            f"{module.__name__} must define exactly one subclass of {base.__name__}; it has {names}"
        )
    return found[0]


def modules_beside(file: str, but: Collection[str]) -> list[str]:
    """The names of the modules beside a file, except those in `but`; no file is loaded."""
    names = [module.name for module in pkgutil.iter_modules([str(Path(file).parent)])]
    return [name for name in names if name not in but and not name.startswith("_")]


def router_named(name: str) -> type[Router]:
    """The rule of that name. If it is from outside, only its own file is loaded."""
    if name in built_in_names():
        package = __name__.rpartition(".")[0]
        return only_subclass(importlib.import_module(f"{package}.{name}"), Router)
    if (path := _outside().get(name)) is not None:
        return only_subclass(_load(path), Router)
    raise no_such("router", name, sorted(router_names()))


def build(name: str, D: int, E: int, K: int, **options: Any) -> Router:
    """Builds a rule by name: build("softmax_topk", 64, 8, 2, loss_weights={"switch": 0.01})."""
    return router_named(name)(D, E, K, **options)
