"""Subject: one contender of a cell."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Subject:
    """An implementation in a layout; in the span layer also a router and the layer around it.

    Subject(spec="staged(combine=index_add)", layout="compact")        span expert_ffn
    Subject(spec="index_select+gather_sum", layout="block(64)")        span pack: dispatch + combine
    Subject(spec="native", router="switch", layer="chain(iterations=2)")   span layer
    """

    spec: str
    layout: str = "compact"
    router: str = ""  # a rule, with options in brackets; empty means softmax_topk
    layer: str = ""  # moe, chain(...) or perft(...); empty means moe

    @property
    def name(self) -> str:
        more = [word for word in (self.router, self.layer) if word]
        return " | ".join((self.spec, self.layout, *more))

    @property
    def question(self) -> tuple[str, str, str]:
        """What it must compute: subjects with the same question have the same right result."""
        return self.layout, self.router, self.layer
