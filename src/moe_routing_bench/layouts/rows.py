"""The rows of a routing plan and the tiles of its stages, expressed as layouts.

Compact, padded and block differ in where an expert's rows begin and how many there are:

    padded    one layout for all experts: (expert, rank) -> row is (E,C):(C,1)
    block     one layout for each expert, from its first row on: (block_rows,blocks):(1,block_rows)
    compact   the same with blocks of one row

In compact and block the start of a span is data, not shape: no shape:stride layout contains it, so a Span
stores it beside its layout. That is why a grouped GEMM reads offset_E1 and a batched GEMM does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from moe_routing_bench.layouts.algebra import logical_divide, zipped_divide
from moe_routing_bench.layouts.layout import Layout, row_major


@dataclass(frozen=True)
class RowSpan:
    """The rows of one expert: rank -> first + rows(rank)."""

    first: int
    rows: Layout | None  # None: no rows

    def __call__(self, rank: int) -> int:
        if self.rows is None or not 0 <= rank < self.rows.size:
            raise ValueError(f"rank {rank} is not in a span of {0 if self.rows is None else self.rows.size}")
        return self.first + self.rows(rank)


def pairs(T: int, K: int) -> Layout:
    """(token, choice) -> pair: (T,K):(K,1)."""
    return row_major(T, K)


def padded_rows(E: int, C: int) -> Layout:
    """(expert, rank) -> row: (E,C):(C,1)."""
    return row_major(E, C)


def spans(offset_E1: Sequence[int], block_rows: int = 1) -> list[RowSpan]:
    """Each expert's rows as (place in a block, block), from the starts of spans; block_rows=1 is compact.

    spans([0, 4, 4, 6], 2) -> [Span(0, (2,2):(1,2)), Span(4, None), Span(4, (2,1):(1,0))]
    """
    made = []
    for first, end in pairwise(offset_E1):
        rows = logical_divide(Layout(end - first), block_rows) if end > first else None
        made.append(RowSpan(first, rows))
    return made


def tiles(rows: int, columns: int, tall: int, wide: int, pitch: int | None = None) -> Layout:
    """((i, j), (row tile, column tile)) -> place, in rows that are `pitch` apart (columns, if not given).

    What every stage does with a matrix:
      dispatch      x_RD   tiles(R, D, BLOCK_R, BLOCK_D)
      grouped_gemm  x      tiles(C, D, BLOCK_M, BLOCK_K), from the first row of a span of C rows
                    w      tiles(D, G, BLOCK_K, BLOCK_N), of one expert
                    y      tiles(C, G, BLOCK_M, BLOCK_N), from the same row
      combine       y_TD   tiles(T, D, BLOCK_T, BLOCK_D)
    A tile at an edge is whole; the kernel masks the rest.
    """
    whole = Layout((rows, columns), (columns if pitch is None else pitch, 1))
    return zipped_divide(whole, [tall, wide])


def programs(tiles_m: int, tiles_n: int) -> Layout:
    """(row tile, column tile) -> program, columns fastest, as in dispatch and combine."""
    return row_major(tiles_m, tiles_n)


def blocks(R: int, block_rows: int) -> Layout:
    """(place in a block, block) -> row, over all R rows. No block has rows of two experts."""
    if R % block_rows:
        raise ValueError(f"{R} rows are not whole blocks of {block_rows}")
    return logical_divide(Layout(R), block_rows)
