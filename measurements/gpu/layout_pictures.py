"""The pictures of docs/layouts.md, drawn from a real plan and from layouts that are checked first.

python measurements/gpu/layout_pictures.py      writes docs/layouts_rows.png and docs/layouts_threads.png
"""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle

from moe_routing_bench import Layout, Routing, RoutingPlan, make_plan
from moe_routing_bench.layouts import layout as strided
from moe_routing_bench.layouts.algebra import thread_values
from moe_routing_bench.layouts.encodings import matrix_reads
from moe_routing_bench.layouts.rows import padded_rows, spans
from moe_routing_bench.layouts.swizzle import Swizzle, Swizzled
from moe_routing_bench.layouts.tiles import faults, look_at_copy

DOCS = Path(__file__).parents[2] / "docs"
CHOICES = [[0, 2], [0, 1], [0, 2], [2, 0], [0, 1]]
KINDS = ("compact", "padded(capacity=3)", "block(4)")
TOKENS = plt.get_cmap("Set2").colors  # type: ignore[attr-defined]
EXPERTS = ("#4053d3", "#ddb310", "#b51d14")


def checked(plan: RoutingPlan) -> RoutingPlan:
    """The plan, whose every row is where the layouts say."""
    E = plan.num_experts
    if plan.layout.kind == "padded":
        rows = padded_rows(E, plan.layout.capacity_for(plan.num_tokens, plan.num_choices, E))
        firsts = [rows((expert, 0)) for expert in range(E)]
        assert firsts == plan.offset_E1[:-1].tolist()
        return plan
    for span, first, end in zip(
        spans(plan.offset_E1.tolist(), plan.layout.block_rows or 1),
        plan.offset_E1[:-1].tolist(),
        plan.offset_E1[1:].tolist(),
        strict=True,
    ):
        assert [span(rank) for rank in range(end - first)] == list(range(first, end))
    return plan


def rows_picture(path: Path) -> None:
    routing = Routing(
        expert_TK=torch.tensor(CHOICES), gate_TK=torch.full((5, 2), 0.5), num_experts=3, ragged=False
    )
    plans = [checked(make_plan(routing, Layout.parse(kind))) for kind in KINDS]
    tallest = max(plan.num_rows for plan in plans)
    figure, panels = plt.subplots(1, 3, figsize=(11, 5.6), sharey=True)
    for panel, plan, kind in zip(panels, plans, KINDS, strict=True):
        draw_plan(panel, plan, tallest)
        offsets = ", ".join(map(str, plan.offset_E1.tolist()))
        panel.set_title(f"{kind}\noffset_E1 = {offsets}", fontsize=10)
    figure.suptitle("Five tokens, two choices each, three experts: where each token's rows go", fontsize=12)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_plan(panel: Axes, plan: RoutingPlan, tallest: int) -> None:
    token_R, expert_R, row_TK = plan.token_R().tolist(), plan.expert_R().tolist(), plan.row_TK.tolist()
    step = tallest / plan.num_tokens
    for t, rows in enumerate(row_TK):
        y = (t + 0.5) * step
        box(panel, 0, y - 0.5, 1.4, f"token {t}", TOKENS[t])
        for k, row in enumerate(rows):
            if row >= 0:
                colour = EXPERTS[CHOICES[t][k]]
                panel.plot([1.4, 4], [y, row + 0.5], color=colour, linewidth=1.2, alpha=0.8)
            else:
                panel.plot([1.4, 2.2], [y, y], color="black", linewidth=1.2, linestyle=":")
                panel.text(2.25, y, f"dropped\n(expert {CHOICES[t][k]} is full)", fontsize=7, va="center")
    for row in range(plan.num_rows):
        token = token_R[row]
        if token >= 0:
            box(panel, 4, row, 1.4, f"token {token}", TOKENS[token])
        else:
            box(panel, 4, row, 1.4, "padding", "white", hatch="///")
        panel.text(5.5, row + 0.5, f"row {row}", fontsize=7, va="center", color="gray")
    for expert in range(plan.num_experts):
        mine = [row for row in range(plan.num_rows) if expert_R[row] == expert]
        panel.plot([6.75, 6.75], [mine[0] + 0.1, mine[-1] + 0.9], color=EXPERTS[expert], linewidth=4)
        panel.text(6.95, (mine[0] + mine[-1] + 1) / 2, f"expert {expert}", fontsize=9, va="center")
    panel.set_xlim(-0.1, 8.6)
    panel.set_ylim(tallest + 0.3, -0.3)
    panel.axis("off")


def box(panel: Axes, x: float, y: float, wide: float, words: str, colour: object, hatch: str = "") -> None:
    panel.add_patch(
        Rectangle((x, y), wide, 1, facecolor=colour, edgecolor="gray", hatch=hatch, linewidth=0.7)
    )
    background = {"facecolor": "white", "edgecolor": "none", "pad": 0.5} if hatch else None
    panel.text(x + wide / 2, y + 0.5, words, ha="center", va="center", fontsize=7.5, bbox=background)


def threads_picture(path: Path) -> None:
    figure, panels = plt.subplots(1, 3, figsize=(11, 4.4), width_ratios=(1.05, 1, 1))
    sides, tv = thread_values(strided.Layout((4, 8), (8, 1)), strided.Layout((1, 8), (8, 1)))
    copy = look_at_copy(tv, sides, strided.row_major(*sides), item_bits=16)
    assert faults(copy) == [] and copy.width_bits == 128
    colours = plt.get_cmap("viridis")
    for thread in range(32):
        row, column = tv((thread, 0)) % sides[0], tv((thread, 0)) // sides[0]
        panels[0].add_patch(
            Rectangle((column // 8, row), 1, 1, facecolor=colours(thread / 40), edgecolor="w")
        )
        panels[0].text(column // 8 + 0.5, row + 0.5, f"{thread}", ha="center", va="center", color="white")
    grid(panels[0], 8, 4, "row of the tile", "16 bytes (8 numbers)")
    panels[0].set_title(
        f"thread that copies each 128 bits\n{tv}\n{copy.sectors} sectors, none to spare", fontsize=9
    )

    plain = strided.row_major(8, 64)
    for panel, memory in zip(panels[1:], (plain, Swizzled(Swizzle(3, 3, 3), plain)), strict=True):
        read = look_at_copy(matrix_reads((8, 64), 1), (8, 64), memory, item_bits=16, space="shared")
        for row in range(8):
            for chunk in range(8):
                place = memory((row, chunk * 8)) // 8
                wanted = chunk == 0
                panel.add_patch(
                    Rectangle(
                        (place % 8, place // 8), 1, 1, edgecolor="gray", linewidth=0.7,
                        facecolor="#dd4433" if wanted else "#eeeeee",
                    )
                )  # fmt: skip
                panel.text(
                    place % 8 + 0.5, place // 8 + 0.5, f"{row},{chunk}", ha="center", va="center", fontsize=7,
                    color="white" if wanted else "gray",
                )  # fmt: skip
        grid(panel, 8, 8, "128 bytes of shared memory", "4 banks each")
        passes = f"{read.passes} pass" + ("es" if read.passes > 1 else "")
        panel.set_title(f"first 16 bytes of 8 rows (row,part), read at once\n{memory}\n{passes}", fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def grid(panel: Axes, wide: int, tall: int, down: str, across: str) -> None:
    panel.set_xlim(0, wide)
    panel.set_ylim(tall, 0)
    panel.set_xticks([i + 0.5 for i in range(wide)], [str(i) for i in range(wide)])
    panel.set_yticks([i + 0.5 for i in range(tall)], [str(i) for i in range(tall)])
    panel.tick_params(length=0, labelsize=8)
    panel.set_xlabel(across, fontsize=9)
    panel.set_ylabel(down, fontsize=9)
    panel.set_aspect("equal")


if __name__ == "__main__":
    rows_picture(DOCS / "layouts_rows.png")
    threads_picture(DOCS / "layouts_threads.png")
    print("$ python measurements/gpu/layout_pictures.py  ->  docs/layouts_rows.png, docs/layouts_threads.png")
