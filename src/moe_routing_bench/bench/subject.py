"""Subject: one contender of a cell."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_routing_bench.formats.named import INT8_ROWS

Question = tuple[str, str, str, str]


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An implementation in a layout; in the span layer also a router and the layer around it.

    Subject(spec="staged(combine=index_add)", layout="compact")        span expert_ffn
    Subject(spec="index_select+gather_sum", layout="block(64)")        span pack: dispatch + combine
    Subject(spec="native", router="switch", layer="chain(iterations=2)")   span layer
    Subject(spec="native", frozen=True)    with weights packed once; options and tables say frozen(native)
    """

    spec: str
    layout: str = "compact"
    router: str = ""  # a rule, with options in brackets; empty means softmax_topk
    layer: str = ""  # moe, chain(...) or perft(...); empty means moe
    frozen: bool = False  # only what also reads weights as they are is asked (Implementation.reads_plain)

    @staticmethod
    def read(text: str, **more: str) -> Subject:
        """Of a spec, or of frozen(spec)."""
        inner = re.fullmatch(r"\s*frozen\((.*)\)\s*", text)
        return Subject(spec=(inner[1] if inner else text).strip(), frozen=inner is not None, **more)

    def called(self, label: str) -> str:
        """Its label as records and tables write it."""
        return f"frozen({label})" if self.frozen else label

    @property
    def text(self) -> str:
        """As options take it: native, frozen(native)."""
        return self.called(self.spec)

    @property
    def name(self) -> str:
        more = [word for word in (self.router, self.layer) if word]
        return " | ".join((self.text, self.layout, *more))

    @property
    def int8_rows(self) -> bool:
        """Does it round rows to int8 too, as native(store=int8_a8) does? So accurate it can be, no more."""
        return re.search(rf"\bstore=\w+{INT8_ROWS}\b", self.spec) is not None

    @property
    def question(self) -> Question:
        """What it must compute, and how well: subjects with the same question have the same right result and
        the same tolerance."""
        return self.layout, self.router, self.layer, "int8 rows" if self.int8_rows else ""
