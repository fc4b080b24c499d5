"""Experiment: what is measured, under which routing, and how. Pure data, sent to workers as JSON.

A case of a suite (cases.py) is an experiment without implementations; replace(case, implementations=...,
threads=2) is one that can be measured. Nothing here imports torch, which readers of records need not wait
for.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import MISSING, dataclass
from functools import cached_property, partial

from pydantic import TypeAdapter, ValidationError

from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.core.text import first_problem
from moe_routing_bench.workloads.axes import axis, explained

# seconds: filling the caches from memory takes 1 to 3 ms, which hardly matter in so long a call
LONG_CALL = 0.05
CACHES = {
    "hot": f"one untimed call of the same implementation just before, unless a call takes {LONG_CALL} s",
    "cold": "all caches overwritten just before",
    "weights-cold": "all caches overwritten, then the activations read: decoding, where weights stream in",
}
BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
DIRECTIONS = {
    "forward": "the result alone",
    "backward": "gradients alone; the forward before it is not timed",
    "train": "forward and backward",
}
# the views of each device, the default first
VIEWS = {
    "cpu": ("host_wall",),
    "cuda": ("cuda_events", "cuda_device", "cuda_graph", "profiler_span", "host_wall"),
    "pretend": ("cuda_events", "cuda_device", "cuda_graph"),
}
CARDS = ("h100", "a100", "mi300x", "b200", "4090")  # that can be pretended (bench/pretend.py)
FAULTS = {
    "oom": "an implementation needs more memory than the device has",
    "poison": "a kernel faults, and from then on every call of its process fails",
    "compiler": "the compiler ends the process",
    "driver": "the driver is too old for torch",
    "shared": "another process computes on the device",
    "clock": "the device falls to half its speed during the rounds",
    "events": "events measure 0",
}
WORKLOAD = "zipf(1.2)"  # the default; uniform routing flatters every kernel
# a twin for tests and for a first look: what takes seconds on any machine
MAX_WEIGHT_BYTES = 256 * 2**20
MAX_ACTIVATION_BYTES = 256 * 2**20
MAX_FLOPS = 2e10
ATTENTION = "attention"  # the span whose work grows with the length of a sequence, not with its tokens alone
MODEL = "model"  # the span of more than one layer
FEWER_TOKENS = "-tokens"  # ends the name of a case that has fewer tokens than asked for


def device_kind(device: str) -> str:
    """cpu, cuda or pretend, of pretend:h100 too"""
    return device.partition(":")[0]


def check_device_name(device: str) -> None:
    """ValueError unless it is cpu, cuda, pretend, pretend:CARD, pretend:CARD:FAULT or
    pretend:CARD:FAULT@IMPLEMENTATION."""
    kind, *more = device.split(":", 2)
    if kind not in VIEWS or (more and kind != "pretend"):
        raise ValueError(f"there is no device {device!r}; there are {', '.join(VIEWS)}")
    for name, known in zip(more, (CARDS, FAULTS), strict=False):
        if name.partition("@")[0] not in known:
            raise ValueError(f"there is no device {device!r}: {name!r} is none of {', '.join(known)}")


Question = tuple[str, str, str, str]
_what, _how = partial(axis, group="what"), partial(axis, group="how")


@dataclass(frozen=True, kw_only=True)
class ImplementationRef:
    """An implementation in a layout; in the span layer also a router and the layer around it.

    ImplementationRef(name="staged(combine=index_add)", layout="compact")        span expert_ffn
    ImplementationRef(name="index_select+gather_sum", layout="block(64)")        span pack: dispatch + combine
    ImplementationRef(name="native", router="switch", layer="chain(iterations=2)")   span layer
    ImplementationRef(name="native", frozen=True)    with weights packed once; tables say frozen(native)

    >>> mrb.ImplementationRef(name="native", router="switch").title
    'native | compact | switch'
    """

    name: str
    layout: str = "compact"
    router: str = ""  # a rule, with options in brackets; empty means softmax_topk
    layer: str = ""  # moe, chain(...) or perft(...); empty means moe
    frozen: bool = False  # only what also reads weights as they are is asked (Implementation.reads_plain)

    @staticmethod
    def read(text: str, **more: str) -> ImplementationRef:
        """Makes a reference of a name, or of frozen(name)."""
        inner = re.fullmatch(r"\s*frozen\((.*)\)\s*", text)
        return ImplementationRef(name=(inner[1] if inner else text).strip(), frozen=inner is not None, **more)

    def called(self, label: str) -> str:
        """Returns its label as records and tables write it."""
        return f"frozen({label})" if self.frozen else label

    @property
    def text(self) -> str:
        """As options take it: native, frozen(native)."""
        return self.called(self.name)

    @property
    def title(self) -> str:
        """native | compact, and with a router and a layer: native | compact | switch | chain(iterations=2)"""
        return " | ".join((self.text, self.layout, *filter(None, (self.router, self.layer))))

    @property
    def int8_rows(self) -> bool:
        """Does it round rows to int8 too, as native(store=int8_a8) does? So accurate it can be, no more."""
        from moe_routing_bench.formats.named import INT8_ROWS

        return re.search(rf"\bstore=\w+{INT8_ROWS}\b", self.name) is not None

    @property
    def question(self) -> Question:
        """Says what it must compute, and how well: implementations with the same question have the same right
        result and the same tolerance."""
        return self.layout, self.router, self.layer, "int8 rows" if self.int8_rows else ""


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """One case under one routing, measured in one way. Its implementations are timed together, in interleaved
    rounds; the first is the baseline the others are compared with. mrb.bench measures it.

    >>> both = mrb.ImplementationRef(name="gather_sum"), mrb.ImplementationRef(name="index_add")
    >>> one = mrb.Experiment(span="combine", T=16, D=32, F=16, E=4, K=2, implementations=both)
    >>> one.shape.num_pairs, one.workload, one.threads, one.cache
    (32, 'zipf(1.2)', 1, 'hot')
    """

    span: str = axis(
        MISSING, "An op; or pack (dispatch and combine), routing, layer, block, decoder, model, parallel.",
        compare="agree", plural="spans",
    )  # fmt: skip
    direction: str = axis(
        "forward", explained(DIRECTIONS), compare="agree", plural="directions", choices=DIRECTIONS
    )
    case: str = axis("", "A name for what is measured, as suites give it.", compare="row")
    T: int = axis(MISSING, "Tokens in a call.", compare="row")
    D: int = axis(MISSING, "Width of the model.", compare="row")
    F: int = axis(MISSING, "Hidden width of an expert.", compare="row")
    E: int = axis(MISSING, "Experts of the layer.", compare="row")
    K: int = axis(MISSING, "Experts per token.", compare="row")
    W: int = axis(1, "Ranks that share the experts.", compare="row")
    dtype: str = _what(
        "bfloat16", f"{', '.join(list(BYTES)[:-1])} or {list(BYTES)[-1]}.",
        flag="--dtype", asks=True, compare="agree", plural="dtypes",
    )  # fmt: skip
    store: str = _what(
        "", "For expert_ffn: weights in this format, int8 or int4_g32 (`mrb model formats`).",
        flag="--store", asks=True, compare="agree", plural="formats of weights",
    )  # fmt: skip
    activation: str = _what(
        "swiglu", "Of the experts: swiglu, gelu, ...", flag="--activation", asks=True, compare="row"
    )
    bias: bool = _what(False, "Give the experts biases.", flag="--bias/--no-bias", asks=True, compare="row")
    shared_F: int = _what(
        0, "Hidden width of a shared expert; 0: none.", flag="--shared", asks=True, compare="row"
    )
    heads: int = _what(
        0,
        "Heads of the attention; 0: one for each 64 of the width.",
        flag="--heads",
        asks=True,
        compare="row",
    )
    kv_heads: int = _what(
        0, "Heads of keys and values; 0: as many as heads.", flag="--kv-heads", asks=True, compare="row",
        since=3,
    )  # fmt: skip
    sequences: int = _what(1, "Sequences in the batch.", flag="--sequences", asks=True, compare="row")
    context: int = _what(
        0, "Keys of each sequence; 0: as many as its tokens.", flag="--context", asks=True, compare="row",
        since=3,
    )  # fmt: skip
    layers: int = _what(
        1, "Layers of the model, for the span model.", flag="--layers", asks=True, compare="row", since=3
    )
    causal: bool = _what(
        True, "A query sees no later key.", flag="--causal/--no-causal", asks=True, compare="row", since=3
    )
    window: int = _what(
        0, "A query sees only keys so near; 0: all.", flag="--window", asks=True, compare="row", since=3
    )
    rotary: bool = _what(
        False, "Turn queries and keys inside the call.", flag="--rotary/--no-rotary", asks=True,
        compare="row", since=3,
    )  # fmt: skip
    layout: str = axis("compact", "The layout for whoever names none.", column="case_layout", since=3)
    weights: bool = axis(True, "Experts' weights take part.", since=3)
    checkpoint: str = axis("", "A saved model to take weights and router from.", since=3)
    checkpoint_layer: int = axis(0, "Which of its layers, from 0.", since=3)
    scaled_from: str = axis("", "The name of the case that this one stands in for.")
    workload: str = axis(
        WORKLOAD, "How tokens choose experts; empty: by the checkpoint's own router.", compare="row", since=3
    )
    seed: int = axis(0, "Random seed of routing and data.", compare="row", column="routing_seed")
    device: str = _how(
        "cpu",
        f"cpu, cuda (AMD's GPUs too), or pretend:CARD, a GPU's steps on the CPU ({', '.join(CARDS)}). "
        "Default: cuda for gpu-quick and gpu-hour, else cpu.",
        flag="--device", asks=True, compare="agree", plural="devices",
    )  # fmt: skip
    threads: int = _how(
        1, "Threads (of a rank), pinned to cores. Default: all physical cores that are idle.",
        flag="--threads", asks=True, compare="agree", plural="numbers of threads",
    )  # fmt: skip
    cache: str = _how(
        "hot", explained(CACHES), flag="--cache", compare="agree", plural="cache policies", choices=CACHES
    )
    view: str = _how(
        "host_wall",
        "What a time on a GPU is: cuda_events, cuda_device (a replayed graph where that is possible, else "
        "events), cuda_graph, profiler_span, host_wall. Default: cuda_events, for gpu-hour cuda_device.",
        flag="--view", asks=True, compare="agree", plural="timer views",
    )  # fmt: skip
    processes: int = _how(1, "Repeat in this many processes; 3 for a published figure.", flag="--processes")
    max_rounds: int = _how(1000, "Most rounds of a case.", flag="--rounds", since=3)
    min_rounds: int = _how(20, "Fewest rounds of a case.", flag="--min-rounds", since=3)
    max_seconds: float = _how(
        60.0,
        "Seconds for the whole command, in `mrb sweep` for each case; kernels are built before. Default: 60, "
        "or 20 a case.",
        flag="--seconds", asks=True, key=False, since=3,
    )  # fmt: skip
    target: float = _how(0.01, "Stop when every ratio is known this precisely.", flag="--target", since=3)
    step_seconds: float = _how(
        120.0, "Seconds after which a call counts as hanging.", flag="--limit", key=False, since=3
    )
    memory_gib: float = _how(12.0, "GiB that a worker may allocate.", flag="--memory", key=False, since=3)
    checked: int = _how(3, "Timed results to check, for each implementation.", flag="--checked", since=3)
    stages: bool = _how(False, "Also time the stages.", flag="--stages", since=3)
    sandbox: bool = _how(
        False,
        "Run code from outside under bubblewrap: no network, nothing written.",
        flag="--sandbox",
        since=3,
    )
    trust: bool = _how(
        False,
        "Call code from outside FASTER also where no ptrace, seccomp or Landlock holds it.",
        flag="--trust",
        since=3,
    )
    all: bool = _how(
        False, "All rounds also for what is 5 times slower than the best.", flag="--all", since=3
    )
    # in the key by their code and their files (identity.py)
    implementations: tuple[ImplementationRef, ...] = axis(
        (), "What is timed, the baseline first.", key=False, since=3
    )
    include: tuple[str, ...] = axis((), "Folders of implementations from outside.", key=False, since=3)

    def __post_init__(self) -> None:
        known: dict[str, Collection[str]] = {"dtype": BYTES, "direction": DIRECTIONS, "cache": CACHES}
        check_device_name(self.device)
        known |= {"view": VIEWS[device_kind(self.device)]}
        for name, values in known.items():
            if (given := getattr(self, name)) not in values:
                raise ValueError(f"there is no {name} {given!r}; there are {', '.join(values)}")
        if self.device != "cpu" and self.cache != "hot":
            raise ValueError(f"cache={self.cache}: the caches of a GPU are not overwritten yet; choose hot")
        shape = self.shape  # raises if there is no such layer
        if self.store:
            from moe_routing_bench.workloads.stored_cases import check_store

            where = {"span": self.span, "direction": self.direction, "checkpoint": self.checkpoint}
            check_store(self.store, shape, **where)
        if not (self.threads >= 1 and self.processes >= 1 and 1 <= self.checked <= 100):
            raise ValueError("threads, processes and checked outputs must be at least 1")
        if not 8 <= self.min_rounds <= self.max_rounds <= 10_000:
            raise ValueError(
                f"{self.min_rounds} to {self.max_rounds} rounds; at least 8 are needed to decide anything, "
                "and at most 10000 are taken"
            )
        if not (0 < self.target < 1 and self.max_seconds > 0 and self.step_seconds > 0):
            raise ValueError("target is a fraction such as 0.01, and limits of time are positive seconds")
        if not 0.1 <= self.memory_gib <= 4096:
            raise ValueError(f"a memory cap of {self.memory_gib} GiB; give between 0.1 and 4096")
        if len(set(self.implementations)) < len(self.implementations):
            raise ValueError("the same implementation in the same layout is named twice")
        if self.span == ATTENTION:
            _ = self.query_shape  # raises if there is none
        if self.layers < 1 or (self.layers > 1 and self.span != MODEL):
            raise ValueError(f"{self.layers} layers; the span {MODEL} has one or more, all others have one")

    @cached_property
    def shape(self) -> MoEShape:
        return MoEShape(T=self.T, D=self.D, F=self.F, E=self.E, K=self.K)

    @property
    def title(self) -> str:
        """Names its case, its workload, and what is unusual."""
        more = [] if self.direction == "forward" else [self.direction]
        more += [f"{self.W} ranks"] if self.W > 1 else []
        return " ".join((self.case or self.span, self.workload or "own router", *more))

    def to_json(self) -> str:
        return _EXPERIMENT.dump_json(self).decode()

    @staticmethod
    def from_json(text: str) -> Experiment:
        try:
            return _EXPERIMENT.validate_json(text)
        except ValidationError as error:
            raise ValueError(f"this is not an experiment: {first_problem(error)}") from None

    @property
    def query_shape(self) -> tuple[int, int, int, int]:
        """Sequences, heads, tokens of each and numbers of a head; ValueError if they do not come out even."""
        B, H = self.sequences, self.heads or max(1, self.D // 64)
        J = self.kv_heads or H
        if min(B, H, J) < 1 or self.T % B or self.D % H or H % J or self.D // H % 2 * self.rotary:
            raise ValueError(
                f"{self.T} tokens are not {B} equal sequences, width {self.D} is not {H} equal heads, "
                f"{J} heads of keys do not divide {H}, or rotary has an odd width of a head"
            )
        if min(self.context, self.window) < 0:
            raise ValueError(f"context {self.context} and window {self.window} are not negative")
        return B, H, self.T // B, self.D // H

    @property
    def key_shape(self) -> tuple[int, int, int, int]:
        B, H, N, A = self.query_shape
        return B, self.kv_heads or H, self.context or N, A

    @property
    def element_size(self) -> int:
        return BYTES[self.dtype]

    @property
    def weight_bytes(self) -> int:
        """As they are stored: in the case's dtype, or with the bits and scales of its format."""
        if not self.store:
            return self.drawn_bytes
        from moe_routing_bench.workloads.stored_cases import bytes_per_weight

        # all matrices but one are as deep as the model is wide
        of_in, of_out = (bytes_per_weight(self.store, depth) for depth in (self.D, self.F))
        share = ((self._matrices - 1) * of_in + of_out) / self._matrices / self.element_size
        return round(self.drawn_bytes * share)

    @property
    def drawn_bytes(self) -> int:
        """All weights in the case's dtype."""
        if not self.weights:
            return 0
        return self.layers * self._matrices * self.D * (self.E * self.F + self.shared_F) * self.element_size

    @property
    def held_bytes(self) -> int:
        """Counts the weights in the memory of a process: those of a stored case are also held as they were
        drawn."""
        return self.drawn_bytes * (2 if self.store else 1)

    @property
    def activation_bytes(self) -> int:
        """The largest set of rows a plain implementation holds at once; of attention also all scores."""
        if self.span == ATTENTION:
            (B, H, N, A), (_, J, M, _) = self.query_shape, self.key_shape
            return B * (2 * (H * N + J * M) * A * self.element_size + 4 * H * N * M)
        width = self.D + 2 * self.F if self.weights else self.D
        return self.shape.num_pairs * width * self.element_size

    @property
    def needed_bytes(self) -> int:
        """At least: the weights of the worker, those of one layer for the judge, a few copies of the rows."""
        return self.held_bytes + self.held_bytes // self.layers + 4 * self.activation_bytes

    @property
    def flops(self) -> int:
        pairs = self.shape.num_pairs
        if self.span == ATTENTION:
            return 4 * self.T * self.D * self.key_shape[2]
        if not self.weights:
            return 2 * pairs * self.D
        return self.layers * 2 * self._matrices * self.D * (pairs * self.F + self.T * self.shared_F)

    @property
    def _matrices(self) -> int:
        """Counts the matrices of an expert."""
        from moe_routing_bench.core.experts import GATED

        return 3 if self.activation in GATED else 2

    @property
    def fewer_tokens(self) -> bool:
        """Does it stand in for a case that differs in nothing but its tokens?"""
        return bool(self.scaled_from) and self.case.endswith(FEWER_TOKENS)

    @property
    def fits_a_laptop(self) -> bool:
        return (
            self.held_bytes <= MAX_WEIGHT_BYTES
            and self.activation_bytes <= MAX_ACTIVATION_BYTES
            and self.flops <= MAX_FLOPS
        )


_EXPERIMENT = TypeAdapter(Experiment)
