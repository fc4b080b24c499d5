"""Defines the studies as data: which runs answer which question, on which text, compared with what.

Every rule has the experts of the size (E of width F) unless it names others. So K = 1 costs less than K = 2,
which the figures against seconds and operations show.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from moe_routing_bench.core.names import parse_spec
from moe_routing_bench.routers.router import router_named
from moe_routing_bench.train.settings import Rule, Run, Size

RATES = (2e-3, 4e-3, 8e-3)  # the learning rates each rule tries first, then twice or half of the best
MIN_RATE, MAX_RATE = 1e-4, 0.1
TUNING_SHARE = 0.25  # of the steps, to choose a rate
TUNING_SEEDS = (1000, 1001)  # never reported


@dataclass(frozen=True, kw_only=True)
class StudyRule:
    """A rule in a study. text: "all" sources, "home" (only the first) or "away" (only the second). begin: the
    entry whose final weights this one starts from. changes: other fields of Run."""

    rule: Rule
    text: str = "all"
    begin: str = ""
    sees_future: bool = False  # its loss is not that of a language model
    rate: float | None = None  # None: chosen from RATES
    changes: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Study:
    question: str
    entries: tuple[StudyRule, ...]
    baseline: str  # the rule that the others are compared with
    size: Size
    only_times: bool = False  # steps are timed, nothing is trained to the end


SWITCH = {"loss_weights": {"switch": 0.01}}


def _moe(name: str, **more: Any) -> StudyRule:
    return StudyRule(rule=Rule(name=name, **more))


def _routers(size: Size) -> tuple[StudyRule, ...]:
    # Soft-MoE gets as many slots as a top-K rule has pairs
    soft = {"slots_per_expert": max(1, size.sequence * size.K // size.E)}
    shazeer = {"loss_weights": {"importance": 0.01, "load": 0.01}}
    return (
        _moe("softmax_topk", options=SWITCH),
        # half as many experts of twice the width: as many weights, and as many active ones
        _moe("switch", router="switch", E=size.E // 2, K=1, F=2 * size.F, options=SWITCH),
        _moe("noisy_topk", router="noisy_topk", options=shazeer),
        _moe("sigmoid_bias", router="sigmoid_bias", controller="sign_bias"),
        _moe("top_p", router="top_p", options={"loss_weights": {"switch": 0.01, "entropy": 1e-4}}),
        _moe("relu", router="relu", options={"loss_weights": {"relu": 1.0}}, controller="l1_strength"),
        _moe("hashed", router="hashed"),
        _moe("random_fixed", router="random_fixed"),
        StudyRule(rule=Rule(name="expert_choice", router="expert_choice"), sees_future=True),
        StudyRule(rule=Rule(name="soft_moe", router="soft_moe", K=1, options=soft), sees_future=True),
        _moe("chain", kind="chain", iterations=2, options=SWITCH),
        _moe("dense, equal FLOPs", kind="dense", times=size.K),
        _moe("dense, equal parameters", kind="dense", times=size.E),
    )


def rule_for(router: str, options: dict[str, Any], size: Size, *, name: str) -> Rule:
    """Returns the rule for one router, with the losses and the controller that the study `routers` gives it.
    A router that is not in the study gets its own controller or, without one, the Switch loss if it has that.
    """
    for rule in (entry.rule for entry in _routers(size) if entry.rule.kind == "moe"):
        if rule.router == router:
            return replace(rule, name=name, options={**rule.options, **options})
    kind = router_named(router)
    balance = SWITCH if kind.controller is None and "switch" in kind.loss_names else {}
    return Rule(
        name=name, router=router, options={**balance, **options}, K=kind.fixed_K, controller=kind.controller
    )


def _soft(size: Size) -> tuple[StudyRule, ...]:
    """Compares steps with the same number of tokens in longer and longer sequences."""
    entries = []
    for sequence in (128, 256, 512, 1024):
        changes = {"size": replace(size, sequence=sequence), "batch": max(1, 2048 // sequence)}
        slots = {"slots_per_expert": max(1, sequence * size.K // size.E)}
        entries += [
            StudyRule(rule=Rule(name=f"softmax_topk, {sequence} tokens"), changes=changes, rate=3e-3),
            StudyRule(
                rule=Rule(name=f"soft_moe, {sequence} tokens", router="soft_moe", K=1, options=slots),
                changes=changes, rate=3e-3, sees_future=True,
            ),
        ]  # fmt: skip
    return tuple(entries)


def _chain_of(iterations: int) -> StudyRule:
    # K = 6 can be divided by 1, 2 and 3 iterations; experts are narrow, so that 6 of 24 cost as much as 2 of
    # 8
    sizes = {"E": 24, "F": 48, "K": 6, "options": SWITCH}
    rule = Rule(name=f"{iterations} in a chain", kind="chain", iterations=iterations, **sizes)  # type: ignore[arg-type]
    return StudyRule(rule=rule)


def _adapted(name: str, **adapter: Any) -> StudyRule:
    return StudyRule(rule=Rule(name=name, kind="perft", adapter=adapter), text="away", begin="home")


HOME = StudyRule(rule=Rule(name="home", options=SWITCH), text="home", rate=3e-3)


def studies(given: Size | None = None) -> dict[str, Study]:
    """Returns every study by name; `given` replaces the size of its models."""
    size = given or Size()
    padded = {f"capacity {factor:g}": f"padded(capacity_factor={factor:g})" for factor in (1.0, 1.25, 2.0)}
    return {
        "routers": Study(
            question="Which rule gives the lowest held-out loss, and what does it cost?",
            entries=_routers(size),
            baseline="softmax_topk",
            size=size,
        ),
        "capacity": Study(
            question="What do dropped tokens cost in loss, and padding in time?",
            entries=(
                _moe("dropless", options=SWITCH),
                *(_moe(name, layout=layout, options=SWITCH) for name, layout in padded.items()),
            ),
            baseline="dropless",
            size=size,
        ),
        "balance": Study(
            question="Does a top-2 router collapse without balance, and what does balance cost?",
            entries=(
                _moe("none"),
                _moe("switch loss", options=SWITCH),
                _moe("z loss", options={"loss_weights": {"z": 1e-3}}),
                _moe("bias controller", router="sigmoid_bias", controller="sign_bias"),
                _moe("quantile", router="quantile", controller="quantile"),
            ),
            baseline="none",
            size=size,
        ),
        "specialise": Study(
            question="A model moves to another text: is it enough to train its gates?",
            entries=(
                HOME,
                StudyRule(rule=Rule(name="all", options=SWITCH), text="away", begin="home"),
                StudyRule(rule=Rule(name="gates", options=SWITCH, only="router"), text="away", begin="home"),
                StudyRule(rule=Rule(name="gates, then all", options=SWITCH), text="away", begin="gates"),
            ),
            baseline="all",
            size=size,
        ),
        "perft": Study(
            question="Adapters on a frozen model that moves to another text: which kind is best?",
            entries=(
                HOME,
                _adapted("routed", kind="R", num_adapters=8, K=2, rank=8),
                _adapted("embedded", kind="E", rank=8),
                _adapted("dense", kind="D", num_adapters=2, rank=8),
                _adapted("shared", kind="S", rank=16),
                StudyRule(rule=Rule(name="all weights", options=SWITCH), text="away", begin="home"),
            ),
            baseline="all weights",
            size=size,
        ),
        "chain": Study(
            question="The same experts one after another: does going serial pay at equal operations?",
            entries=(
                _moe("no chain", E=24, F=48, K=6, options=SWITCH),
                *(_chain_of(iterations) for iterations in (1, 2, 3)),
            ),
            baseline="no chain",
            size=size,
        ),
        "soft": Study(
            question="What do Soft-MoE's mixing and write-back cost as sequences grow?",
            entries=_soft(size),
            baseline="softmax_topk, 256 tokens",
            size=size,
            only_times=True,
        ),
        "original": Study(
            question="Six layers of width 512, sequences of 512: a step's time, memory, a short curve.",
            entries=(
                _moe("softmax_topk", options=SWITCH),
                _moe("switch", router="switch", K=1, options=SWITCH),
                StudyRule(
                    rule=Rule(name="soft_moe", router="soft_moe", K=1, options={"slots_per_expert": 128}),
                    sees_future=True,
                ),
            ),
            baseline="softmax_topk",
            size=given
            or Size(layers=6, D=512, heads=8, kv_heads=4, head_dim=64, F=512, E=8, K=2, sequence=512),
        ),
    }  # fmt: skip


def run_of(
    study: Study,
    entry: StudyRule,
    *,
    like: Run,
    seed: int,
    rate: float,
    sources: tuple[str, ...],
    begin: str = "",
) -> Run:
    """Makes one run. `like` has the settings that all runs share; `sources` are the names in the corpus."""
    texts = {"all": (), "home": sources[:1], "away": sources[1:2]}[entry.text]
    run = replace(
        like, rule=entry.rule, size=study.size, seed=seed, data_seed=seed + 5000, learning_rate=rate,
        sources=texts, begin=begin, sees_future=entry.sees_future,
    )  # fmt: skip
    return replace(run, **entry.changes)


def rule_named(text: str, size: Size) -> Rule:
    """A router by name with options, as in mrb bench; `dense` is the control as wide as K experts."""
    if text == "dense":
        return Rule(name="dense", kind="dense", times=size.K)
    name, options = parse_spec(text)
    return rule_for(name, options, size, name=text)
