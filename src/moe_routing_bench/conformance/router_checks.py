"""Checks one router against its contract and says in sentences what it breaks.

It checks validity, gate sums, dtypes, gradients (also against slopes in float64, and with equal tokens or
equal scores), empty and one-token batches, masks, losses and the order of tokens. The leak test checks the
flags `causal` and `batch_dependent`, which promise which tokens may influence which: it changes tokens and
compares the others.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import gradcheck
from torch.func import functional_call

from moe_routing_bench.core.routing import Routing, SoftRouting, TokenInfo
from moe_routing_bench.routers.router import GATE_SUMS, GROUPS, Router, router_named

D, E, K, T = 16, 8, 2, 32
Make = Callable[..., Router]


def check_router(router: str | type[Router], **options: Any) -> list[str]:
    """Returns what is wrong with a router (a name or a class, with options), in sentences; empty if
    nothing."""
    rule = router_named(router) if isinstance(router, str) else router
    declared = ("causal", "batch_dependent", "paper", "gate_sum")
    if missing := [name for name in declared if not hasattr(rule, name)]:
        return [f"it does not declare {', '.join(missing)}"]
    weights = dict.fromkeys(rule.loss_names, 0.5)

    def make(**more: Any) -> Router:
        return rule(D, E, rule.fixed_K or K, **{"loss_weights": weights, **options, **more})

    wrong: list[str] = []
    with torch.random.fork_rng(devices=[]):
        for check in CHECKS:
            torch.manual_seed(0)
            try:
                wrong += check(make)
            except Exception as error:  # anything a router raises is reported
                wrong.append(f"checking {check.__name__[1:]}: it raised {type(error).__name__}: {error}")
    return list(dict.fromkeys(wrong))


def _declarations(make: Make) -> Iterator[str]:
    router = make()
    if not isinstance(router.causal, bool) or not isinstance(router.batch_dependent, bool):
        yield "causal and batch_dependent must be True or False"
    if not router.causal and not router.batch_dependent:
        yield "causal=False needs batch_dependent=True: later tokens are other tokens"
    if "arXiv:" not in router.paper:
        yield "it names no paper (arXiv:...)"
    if router.gate_sum not in GATE_SUMS:
        yield f"gate_sum {router.gate_sum!r} is none of {', '.join(map(repr, GATE_SUMS))}"
    if not isinstance(router.experts_per_token, str) or not router.experts_per_token:
        yield "experts_per_token must say in words how many experts a token gets"
    if router.groups not in GROUPS:
        yield f"groups {router.groups!r} is none of {', '.join(map(repr, GROUPS))}"


def _groups(make: Make) -> Iterator[str]:
    router, (x_TD, info) = make(), _tokens()
    for training in (True, False):
        routing = _run(router, x_TD, info, training=training)
        dense = isinstance(routing, SoftRouting)
        if dense != (router.groups == "dense"):
            yield f"groups is {router.groups!r}, but it returns a {type(routing).__name__}"
        elif isinstance(routing, Routing) and router.groups == "equal":
            load = routing.load_E().tolist()
            if min(load) != max(load):
                mode = "training" if training else "eval"
                yield f"groups is 'equal', but in {mode} experts get from {min(load)} to {max(load)} tokens"


def _validity(make: Make) -> Iterator[str]:
    for training in (True, False):
        for num_tokens, num_sequences in ((T, 1), (T, 2), (1, 1), (0, 1)):
            x_TD, info = _tokens(num_tokens, num_sequences)
            kept_TD = x_TD.clone()
            routing = _run(make(), x_TD, info, training=training)
            if not torch.equal(x_TD, kept_TD):
                yield "it overwrites x"
            if any(rows.shape[0] != num_tokens for rows in _rows(routing)):
                yield f"it does not return one row per token for T={num_tokens}"
            routing.validate()
            yield from _gate_sum(make(), routing, torch.ones(num_tokens, dtype=torch.bool))
            yield from _finite_losses(routing, f"T={num_tokens}", zero=num_tokens == 0)
    x_TD, info = _tokens()
    for router in (make(), make().to(torch.bfloat16)):
        if (got := _gates(_run(router, x_TD.bfloat16(), info, training=True)).dtype) != torch.float32:
            yield f"its gates are {got} for bfloat16 x; they must be float32"
        for training in (True, False):
            rounded, widened = (
                _rows(_run(router, x, info, training=training))
                for x in (x_TD.bfloat16(), x_TD.bfloat16().float())
            )
            if not _same(rounded, widened):
                yield "bfloat16 x is not routed as its float32 copy is: something is computed before widening"
    if (got := _gates(_run(make(dtype=torch.float64), x_TD, info, training=True)).dtype) != torch.float64:
        yield f"its gates are {got} with dtype=torch.float64"


def _gate_sum(router: Router, routing: Routing | SoftRouting, keep_T: Tensor) -> Iterator[str]:
    gates = _gates(routing)[keep_T].double()
    goes_T = torch.ones(gates.shape[0], dtype=torch.bool)
    if isinstance(routing, Routing):
        goes_T = routing.chosen_TK()[keep_T].any(1)
    total_T = gates.sum(1)[goes_T]
    if not bool(gates.isfinite().all()) or bool((gates < 0).any()):
        yield "a gate is negative or not finite"
    elif router.gate_sum == "one" and bool(((total_T - 1).abs() > 1e-5).any()):
        yield f"gate_sum is 'one', but gates sum to {total_T[(total_T - 1).abs().argmax()].item():.6g}"
    elif router.gate_sum == "at most one" and bool((total_T > 1 + 1e-5).any()):
        yield f"gate_sum is 'at most one', but gates sum to {total_T.max().item():.6g}"


def _finite_losses(routing: Routing | SoftRouting, where: str, *, zero: bool) -> Iterator[str]:
    for name, loss in routing.losses.items():
        if loss.ndim or not bool(loss.isfinite()):
            yield f"the {name} loss is not a finite scalar for {where}"
        elif zero and loss.item() != 0:
            yield f"the {name} loss is {loss.item():.6g} for {where}; without tokens it must be 0"


def _gradients(make: Make) -> Iterator[str]:
    for num_tokens in (T, 1, 0):
        router, (x_TD, info) = make(), _tokens(num_tokens)
        x_TD.requires_grad_()
        yield from _backward(router, x_TD, info, f"T={num_tokens}")
        for name, parameter in router.named_parameters():
            if parameter.grad is None:
                yield f"parameter {name} gets no gradient in training"


def _backward(router: Router, x_TD: Tensor, info: TokenInfo, where: str) -> Iterator[str]:
    routing = router.train()(x_TD, info)
    if isinstance(routing, SoftRouting):
        weights = torch.cat([routing.dispatch_BNS, routing.combine_BNS])
    else:
        weights = routing.gate_TK[routing.chosen_TK()]
    total = (weights * torch.randn_like(weights)).sum()
    if routing.aux_loss is not None:
        total = total + routing.aux_loss
    if not total.requires_grad:
        if any(True for _ in router.parameters()):
            yield "it has parameters, but its gates carry no gradient"
        return
    total.backward()
    for name, leaf in (("x", x_TD), *router.named_parameters()):
        if leaf.grad is not None and not bool(leaf.grad.isfinite().all()):
            yield f"the gradient of {name} is not finite for {where}"


def _extremes(make: Make) -> Iterator[str]:
    """Checks where derivatives tend to be 0 / 0: equal logits, equal tokens, one expert far ahead."""
    _, info = _tokens()
    flat, same, sure = make(), make(), make()
    with torch.no_grad():
        for parameter in flat.parameters():
            parameter.zero_()
        for parameter in sure.parameters():
            if parameter.ndim == 2:  # with x > 0, logits 640 apart
                parameter.fill_(-5.0)[:, 0] = 5.0
    one_D, ones_TD = 4 * torch.randn(D), torch.full((T, D), 4.0)
    for router, x_TD, where in (
        (flat, 4 * torch.randn(T, D), "weights of 0"),
        (same, one_D.repeat(T, 1), "a batch of equal tokens"),
        (sure, ones_TD, "one expert that all prefer"),
    ):
        routing = _run(router, x_TD, info, training=True)
        routing.validate()
        yield from _gate_sum(router, routing, torch.ones(T, dtype=torch.bool))
        yield from _finite_losses(routing, where, zero=False)
        yield from _backward(router, x_TD.requires_grad_(), info, where)


def _slopes(make: Make) -> Iterator[str]:
    for training in (True, False):
        if not _gradient_is_slope(make(dtype=torch.float64).double().train(training)):
            mode = "training" if training else "eval"
            yield f"in {mode} the gradient of its gates or losses is not their slope"


def _gradient_is_slope(router: Router) -> bool:
    """Compares gradients with differences in float64. x is random, so no choice is near a tie."""
    x_TD, info = _tokens(6)
    parameters, buffers = dict(router.named_parameters()), dict(router.named_buffers())

    def results(x_TD: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        # copies, because a rule may add to its balance state
        state = {name: buffer.clone() for name, buffer in buffers.items()}
        state.update(zip(parameters, values, strict=True))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            routing = functional_call(router, state, (x_TD, info))
        if isinstance(routing, SoftRouting):
            return routing.dispatch_BNS, routing.combine_BNS
        return torch.where(routing.chosen_TK(), routing.gate_TK, 0.0), *routing.losses.values()

    leaves = [x_TD.double(), *(value.detach().clone() for value in parameters.values())]
    inputs = [leaf.requires_grad_() for leaf in leaves]
    return gradcheck(results, inputs, fast_mode=True, raise_exception=False)


def _order(make: Make) -> Iterator[str]:
    router = make()
    if not router.batch_dependent and not permutes(router, training=False):
        yield "batch_dependent=False, but with the tokens in another order they are routed differently"


def permutes(router: Router, *, training: bool) -> bool:
    """Returns whether permuted tokens give permuted rows. A batch-dependent rule need not do so, but may."""
    x_TD, info = _tokens()
    order_T = torch.randperm(T)
    moved = _run(router, x_TD[order_T], replace(info, token_id_T=_ids(info)[order_T]), training=training)
    return _same(_rows(_run(router, x_TD, info, training=training), order_T), _rows(moved), tolerance=1e-5)


def _losses(make: Make) -> Iterator[str]:
    x_TD, info = _tokens()
    router = make()
    routing = _run(router, x_TD, info, training=True)
    if set(routing.losses) != set(router.loss_weights):
        yield f"asked for losses {sorted(router.loss_weights)}, it returned {sorted(routing.losses)}"
    elif router.loss_weights:
        expected = sum(router.loss_weights[name] * loss for name, loss in routing.losses.items())
        if routing.aux_loss is None or not torch.allclose(routing.aux_loss, torch.as_tensor(expected)):
            yield "aux_loss is not the sum of its losses times their weights"
    plain = _run(make(loss_weights=None), x_TD, info, training=True)
    if plain.aux_loss is not None or plain.losses:
        yield "it returns losses that nobody asked for"
    try:
        make(loss_weights={"no such loss": 1.0})
    except ValueError:
        return
    yield "it accepts a loss weight for a loss it does not have"


def _randomness(make: Make) -> Iterator[str]:
    router, (x_TD, info) = make(), _tokens()
    if not _same(*(_rows(_run(router, x_TD, info, training=False, seed=seed)) for seed in (0, 1))):
        yield "two runs in eval mode differ"
    if not _same(*(_rows(_run(router, x_TD, info, training=True, seed=seed)) for seed in (0, 0))):
        yield "two runs in training mode with the same seed differ"


def _masks(make: Make) -> Iterator[str]:
    router = make()
    for training, num_sequences in ((True, 1), (True, 2), (False, 1), (False, 2)):
        keep_T = torch.arange(T) % (T // 2) < T // 2 - 5
        x_TD, info = _tokens(T, num_sequences)
        info = replace(info, mask_T=keep_T)
        routing = _run(router, x_TD, info, training=training)
        if isinstance(routing, Routing):
            routing.validate()
        yield from _gate_sum(router, routing, keep_T)
        first, second = _rows(routing, ~keep_T)
        absent = 0 if isinstance(routing, SoftRouting) else -1
        if bool((first != absent).any()) or bool((second != 0).any()):
            yield "it sends masked tokens somewhere"

        poisoned_TD = torch.where(keep_T[:, None], x_TD, float("nan"))
        poisoned = _run(router, poisoned_TD, info, training=training)
        if not _same(_rows(routing), _rows(poisoned)):
            yield "what stands in masked tokens changes where the others go"
        if not _same(list(routing.losses.values()), list(poisoned.losses.values())):
            yield "what stands in masked tokens changes a loss"
        yield from _backward(
            copy.deepcopy(router), poisoned_TD.requires_grad_(), info, "NaN in masked tokens"
        )

        if not training and not router.batch_dependent:
            # the mask leaves both halves equally long, so they can stay sequences of their own
            kept = TokenInfo(token_id_T=_ids(info)[keep_T], num_sequences=num_sequences)
            alone = _run(router, x_TD[keep_T], kept, training=False)
            for name, loss in routing.losses.items():
                if not torch.allclose(loss, alone.losses[name], rtol=1e-4):
                    yield f"the {name} loss counts masked tokens"
        silent = _run(router, x_TD, replace(info, mask_T=torch.zeros_like(keep_T)), training=training)
        yield from _finite_losses(silent, "a batch masked throughout", zero=True)


def _leaks(make: Make) -> Iterator[str]:
    router = make()
    later_matters = other_matters = False
    for trial in range(16):
        x_TD, info = _tokens(T, num_sequences=1 + trial % 2)
        at = int(torch.randint(1, T, ()))
        later_T, other_T = torch.arange(T) >= at, torch.arange(T) != at
        later_matters |= _matters(router, x_TD, info, later_T, training=trial % 4 < 2)
        other_matters |= _matters(router, x_TD, info, other_T, training=trial % 4 < 2)
    if later_matters and router.causal:
        yield "it declares causal=True, but later tokens change where earlier ones go"
    if not later_matters and not router.causal:
        yield "it declares causal=False, but no trial showed an earlier token depend on a later one"
    if other_matters and not router.batch_dependent:
        yield "it declares batch_dependent=False, but other tokens change where a token goes"
    if not other_matters and router.batch_dependent:
        yield "it declares batch_dependent=True, but no trial showed a token depend on another"


def _matters(router: Router, x_TD: Tensor, info: TokenInfo, changed_T: Tensor, *, training: bool) -> bool:
    """Returns whether changing, masking or removing the changed tokens changes the routing of the others."""
    keep_T = ~changed_T
    before = _rows(_run(router, x_TD, info, training=training), keep_T)
    new_TD, new_info = _tokens(T)
    new_TD = torch.where(changed_T[:, None], new_TD, x_TD)
    new_id_T = torch.where(changed_T, _ids(new_info), _ids(info))
    replaced = _run(router, new_TD, replace(info, token_id_T=new_id_T), training=training)
    masked = _run(router, x_TD, replace(info, mask_T=keep_T), training=training)
    if not _same(before, _rows(replaced, keep_T)) or not _same(before, _rows(masked, keep_T)):
        return True
    if training or info.num_sequences > 1:
        return False  # fewer tokens would draw other noise, and sequences would be unequal
    removed = _run(router, x_TD[keep_T], TokenInfo(token_id_T=_ids(info)[keep_T]), training=False)
    return not _same(before, _rows(removed), tolerance=1e-5)


def _tokens(num_tokens: int = T, num_sequences: int = 1) -> tuple[Tensor, TokenInfo]:
    # large vectors, so that a freshly initialised router has clear preferences
    x_TD = 4 * torch.randn(num_tokens, D)
    return x_TD, TokenInfo(token_id_T=torch.randint(50_000, (num_tokens,)), num_sequences=num_sequences)


def _ids(info: TokenInfo) -> Tensor:
    assert info.token_id_T is not None
    return info.token_id_T


def _run(
    router: Router, x_TD: Tensor, info: TokenInfo, *, training: bool, seed: int = 0
) -> Routing | SoftRouting:
    """Runs a copy with a fixed seed, so that neither state nor noise passes from run to run."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return copy.deepcopy(router).train(training)(x_TD, info)


def _gates(routing: Routing | SoftRouting) -> Tensor:
    return _rows(routing)[1]


def _rows(routing: Routing | SoftRouting, keep_T: Tensor | slice = slice(None)) -> list[Tensor]:
    """Returns the decision for each token: ids (-1 for none) and gates, or its rows of dispatch and
    combine."""
    if isinstance(routing, SoftRouting):
        rows = [routing.dispatch_BNS.flatten(0, 1), routing.combine_BNS.flatten(0, 1)]
    else:
        chosen_TK = routing.chosen_TK()
        rows = [
            torch.where(chosen_TK, routing.expert_TK, -1),
            torch.where(chosen_TK, routing.gate_TK, 0.0),
        ]
    return [row.detach()[keep_T] for row in rows]


def _same(a: list[Tensor], b: list[Tensor], *, tolerance: float = 0.0) -> bool:
    return all(
        x.shape == y.shape and torch.allclose(x.double(), y.double(), rtol=tolerance, atol=tolerance)
        for x, y in zip(a, b, strict=True)
    )


CHECKS = (
    _declarations,
    _groups,
    _validity,
    _gradients,
    _extremes,
    _slopes,
    _losses,
    _randomness,
    _masks,
    _order,
    _leaks,
)
