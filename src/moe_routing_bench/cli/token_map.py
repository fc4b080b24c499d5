"""The map of `mrb check --tokens 1-512`: for how many tokens is an implementation right?

A kernel may be wrong for a few numbers of tokens alone: where another tile, another branch or another table
begins. Every number is tried with the kit's plain case, in every dtype and layout that it takes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from moe_routing_bench.cli.apart import ApartError, Shown, answers
from moe_routing_bench.cli.checking import Row
from moe_routing_bench.conformance.cases import CASES, KitCell, layouts_for
from moe_routing_bench.conformance.check import check
from moe_routing_bench.names import base_name, option_numbers
from moe_routing_bench.ops.registry import get_op

MOST_TOKENS = 65_536
PER_LINE = 64
MARKS = {"passed": ".", "failed": "X", "unsupported": "-"}
LAYOUT_OF = {"padded": "padded(capacity_factor=8)", "compact": "compact", "block": "block(16)"}


class TokensOutcome(BaseModel):
    """All dtypes and layouts at one number of tokens. `begun` comes first, to know where code died."""

    model_config = ConfigDict(extra="forbid")
    T: int
    status: Literal["begun", "passed", "failed", "unsupported"]
    sentence: Shown = ""


@dataclass
class TokenMap:
    """A row of the table by number of tokens: {1: "passed", 2: "failed", ...}, and what is wrong."""

    op: str
    spec: str
    status: dict[int, str] = field(default_factory=dict)
    wrong: dict[int, str] = field(default_factory=dict)

    @property
    def ran(self) -> bool:
        return any(status != "unsupported" for status in self.status.values())

    def lines(self) -> Iterator[str]:
        """At most 80 letters each: 64 numbers of tokens, the first of them in front."""
        tokens = sorted(self.status)
        for start in range(0, len(tokens), PER_LINE):
            some = tokens[start : start + PER_LINE]
            yield f"  {some[0]:>6}  " + "".join(MARKS[self.status[T]] for T in some)


def parse_tokens(text: str) -> list[int]:
    return sorted(set(option_numbers("--tokens", text, "1-512 or 1-64,100", MOST_TOKENS)))


def checked_tokens(
    op: str, spec: str, dtypes: tuple[str, ...], device: str, tokens: list[int]
) -> Iterator[dict[str, Any]]:
    """Runs where the implementation is loaded, which may be a process of its own."""
    plain = CASES[0]
    for T in tokens:
        yield {"T": T, "status": "begun"}
        seen, sentence = set(), ""
        for layout in layouts_for(get_op(op), plain):
            layout = LAYOUT_OF.get(base_name(layout), layout)
            for dtype in dtypes:
                case = replace(plain, name=f"plain at T={T}", T=T)
                cell = KitCell(op=op, spec=spec, case=case, layout=layout, dtype=dtype, device=device)
                outcome = check(cell)
                seen.add(outcome.status)
                if outcome.status == "failed" and not sentence:
                    sentence = f"{dtype}, {layout}: {outcome.sentences[0]}"[:2_000]
        status = next(one for one in ("failed", "passed", "unsupported") if one in seen)
        yield {"T": T, "status": status, "sentence": sentence}


def token_map(row: Row, dtypes: tuple[str, ...], device: str, tokens: list[int]) -> TokenMap:
    """What dies or hangs is wrong at the number it had begun, and the rest is not known."""
    result, asked = TokenMap(row.op, row.spec), (row.op, row.spec, dtypes, device, tokens)
    begun = tokens[0]
    try:
        source: Any = (
            map(TokensOutcome.model_validate, checked_tokens(*asked))
            if row.outside is None
            else answers(checked_tokens, *asked, include=row.outside.folders, answer=TokensOutcome)
        )
        for one in source:
            begun = one.T
            if one.status != "begun":
                result.status[one.T] = one.status
                if one.status == "failed":
                    result.wrong[one.T] = one.sentence
    except (ApartError, ValueError) as reason:
        result.status[begun], result.wrong[begun] = "failed", str(reason)
    return result
