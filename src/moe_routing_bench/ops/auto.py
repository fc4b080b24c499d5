"""The one place where impl="auto" becomes a name."""

from __future__ import annotations

from moe_routing_bench.ops.registry import Implementation, Op


def resolve(op: Op, impl: str) -> Implementation:
    """`impl` as given, or for "auto" the op's named default.

    This is the seam for the measured dispatch table: it will look up (machine, op, shape bucket, dtype,
    skew) here and nowhere else. Layers resolve once, when they are built, so a compiled forward holds no
    choice and a record can name what ran.
    """
    return op.get(op.default if impl == "auto" else impl)
