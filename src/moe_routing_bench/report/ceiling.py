"""How much faster a block can become if one of its parts becomes infinitely fast."""

from __future__ import annotations

from collections.abc import Mapping

PARTS = {"experts": "are", "linears": "are", "attention": "is"}


def ceilings(stages: Mapping[str, float] | None) -> list[str]:
    """A sentence for each large part, from the seconds of a block's stages. Empty if it is not a block.

    {"norms": 0.01, "attention": 0.28, "experts": 0.71}
      -> ["experts are 71 % of this block; infinitely fast experts would give 3.4x", ...]
    """
    if not stages or "attention" not in stages:
        return []
    total, said = sum(stages.values()), []
    for name, verb in PARTS.items():
        if 0 < (seconds := stages.get(name, 0.0)) < total:
            said.append(
                f"{name} {verb} {100 * seconds / total:.0f} % of this block; infinitely fast {name} would "
                f"give {total / (total - seconds):.1f}x"
            )
    return said
