"""How much faster a block or a model can become if one of its parts becomes infinitely fast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

PARTS = {"experts": "are", "linears": "are", "attention": "is"}


def ceilings(stages: Mapping[str, float] | None) -> list[str]:
    """A sentence for each large part, from the seconds of a block's stages. Empty if it is not a block.

    {"norms": 0.01, "attention": 0.28, "experts": 0.71}
      -> ["experts are 71 % of a call; infinitely fast experts would give 3.4x", ...]
    """
    return ceilings_of([stages or {}], "a call")


def ceilings_of(blocks: Sequence[Mapping[str, float]], which: str = "these calls") -> list[str]:
    """The same for several blocks, with the smallest and the largest share.

    -> ["experts are 71 to 83 % of these calls; infinitely fast experts would give 3.4x to 5.9x", ...]
    """
    said = []
    for name, verb in PARTS.items():
        totals = [(sum(one.values()), one.get(name, 0.0)) for one in blocks if "attention" in one]
        shares = sorted(seconds / total for total, seconds in totals if 0 < seconds < total)
        if not shares:
            continue
        ends = dict.fromkeys(f"{100 * share:.0f}" for share in (shares[0], shares[-1]))
        gains = dict.fromkeys(f"{1 / (1 - share):.1f}x" for share in (shares[0], shares[-1]))
        said.append(
            f"{name} {verb} {' to '.join(ends)} % of {which}; infinitely fast {name} would give "
            f"{' to '.join(gains)}"
        )
    return said
