"""Cases whose weights are stored in a format: which there are, and how many bytes a weight takes."""

from __future__ import annotations

from functools import cache

import torch

from moe_routing_bench.core.shapes import MoEShape
from moe_routing_bench.formats import stored
from moe_routing_bench.formats.named import INT8_ROWS, quantise

SPAN = "expert_ffn"
SPANS = (SPAN, "model")


def check_store(store: str, shape: MoEShape, *, span: str, direction: str, checkpoint: str) -> None:
    """ValueError if nothing can be measured on weights stored like this."""
    if store.endswith(INT8_ROWS):
        name = store.removesuffix(INT8_ROWS)
        raise ValueError(
            f"{store} rounds rows too, which is for implementations to do: store the weights as {name} "
            f"and measure native(store={store})"
        )
    for depth in (shape.D, shape.F):
        bytes_per_weight(store, depth)  # raises if there is no such format
    unlike = {
        f"in {' and '.join(SPANS)}, not in {span}": span not in SPANS,
        f"forward, not {direction}": direction != "forward",
        "as they are drawn, not from a checkpoint": bool(checkpoint),
    }
    if reason := next((words for words, differs in unlike.items() if differs), ""):
        raise ValueError(f"weights stored as {store} are measured {reason}")


@cache
def bytes_per_weight(store: str, depth: int) -> float:
    """Returns the bytes of one weight of a matrix of this depth, scales included; of 128 columns, which share
    a scale in fp8_block."""
    return stored.bytes_per_weight(quantise(torch.zeros(1, depth, 128), store))
