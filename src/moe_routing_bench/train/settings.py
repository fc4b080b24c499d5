"""One training run as data: sizes, rule, optimiser. Equal settings give equal losses, to the bit."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

KINDS = ("moe", "chain", "dense", "perft")


@dataclass(frozen=True, kw_only=True)
class Rule:
    """The feed-forward layer of a run. A study compares several; by default all have the experts of `Size`.

    Rule(name="switch", router="switch", K=1, options={"loss_weights": {"switch": 0.01}})
    Rule(name="chain", kind="chain", iterations=2)      K experts in all, K / 2 at a time
    Rule(name="dense, equal FLOPs", kind="dense", times=2)   one network as wide as two experts
    """

    name: str
    kind: str = "moe"
    router: str = "softmax_topk"
    options: dict[str, Any] = field(default_factory=dict)  # of the router
    E: int | None = None  # None: the size's
    K: int | None = None
    F: int | None = None
    layout: str = "compact"
    controller: str | None = None  # updates the router's balance state after each step
    iterations: int = 1  # of a chain
    times: int = 1  # the width of a dense network in experts
    adapter: dict[str, Any] = field(default_factory=dict)  # options of Perft
    only: str = "all"  # what trains: MoE.train_only
    impl: str = "auto"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"a rule is of the kind {', '.join(KINDS)}, not {self.kind!r}")


@dataclass(frozen=True, kw_only=True)
class Size:
    """The model: layers, width and attention, E experts of width F, K for each token."""

    layers: int = 3
    D: int = 128
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    F: int = 128
    E: int = 8
    K: int = 2
    sequence: int = 256


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything that decides a loss. `corpus` is the hash of the text; `begin` is the key of the run whose
    final weights this one starts with, if any."""

    rule: Rule
    size: Size = Size()
    seed: int = 0  # of the first weights
    data_seed: int = 0  # of the order of the text
    steps: int = 600
    batch: int = 4
    learning_rate: float = 3e-3
    warmup: int = 40
    decay: float = 0.2  # the share of the steps, the last ones, in which the rate falls to 0
    weight_decay: float = 0.05
    clip: float = 1.0
    autocast: bool = False  # bfloat16 matmuls, float32 weights
    sees_future: bool = False  # accept a rule that is not causal; its loss is not that of a language model
    evaluations: int = 8  # how often the held-out loss is computed, evenly over the steps
    pieces: int = 48  # of the held-out text, each a sequence
    part: str = "held_out"  # the text it is computed on; `tuning` where a learning rate is chosen
    vocabulary: int = 256  # tokens; 256: bytes
    sources: tuple[str, ...] = ()  # of the corpus; (): all
    begin: str = ""
    corpus: str = ""

    def __post_init__(self) -> None:
        for name in ("steps", "batch", "evaluations", "pieces"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        if not 0 < self.learning_rate < 10:
            raise ValueError(f"a learning rate of {self.learning_rate} is no learning rate")

    @property
    def key(self) -> str:
        """16 hexadecimal digits, equal for equal settings."""
        text = json.dumps(asdict(self), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def decays_at(self) -> int:
        """The step at which the rate begins to fall. Until then longer runs are the same to the bit."""
        return max(self.warmup, self.steps - math.ceil(self.decay * self.steps))

    def evaluated_at(self) -> list[int]:
        """Returns the steps after which the held-out loss is computed; 0 is before the first step."""
        places = {round(self.steps * i / self.evaluations) for i in range(self.evaluations + 1)}
        return sorted(places)

    def to_dict(self) -> dict[str, Any]:
        return json.loads(json.dumps(asdict(self)))  # as a file has it: lists for tuples

    @staticmethod
    def from_dict(given: dict[str, Any]) -> Run:
        """Reads a run from a file that anybody may have written. Raises ValueError if it is not a run."""
        try:
            parts = {"rule": Rule(**given["rule"]), "size": Size(**given["size"])}
            known = {field.name for field in fields(Run)}
            if unknown := set(given) - known:
                raise ValueError(f"a run has no {', '.join(sorted(unknown))}")
            return Run(**{**given, **parts, "sources": tuple(given.get("sources", ()))})
        except (TypeError, KeyError) as error:
            raise ValueError(f"this is no training run: {error}") from None

    def tuning(self, learning_rate: float, steps: int) -> Run:
        """Returns the short run that tries a learning rate, evaluated at its end on text for that alone."""
        warmup = min(self.warmup, max(1, steps // 4))
        return replace(
            self, learning_rate=learning_rate, steps=steps, warmup=warmup, evaluations=1, part="tuning"
        )
