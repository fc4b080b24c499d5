"""The picture of docs/tuned_files.md, from the counts that `mrb tune check --out` wrote.

python measurements/gpu/tuned_picture.py      reads tuned_files.json beside it, writes docs/tuned_files.png
"""

from __future__ import annotations

import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

HERE = Path(__file__).parent
PROJECTS = {"vllm": ("vLLM", "#4053d3"), "sglang": ("SGLang", "#ddb310")}
# of all rows of the project, but for the comparisons, which are of the rows that both sides have
TITLES = {
    "never loaded": "in a file that is never loaded",
    "wrong option": "raises or mixes two scales",
    "too large": "too large for the GPU",
    "spills": "spills registers",
    "changed": "another tile runs than is written",
    "copy": "copied from other sizes",
    "as default": "the same as without a file",
    "other project": "differs between the projects",
    "other triton": "differs between versions of Triton",
}


def main() -> None:
    document = json.loads((HERE / "tuned_files.json").read_text())
    kinds = [kind for kind in TITLES if kind in document["counts"]][::-1]
    figure, axes = plt.subplots(figsize=(8, 0.42 * len(kinds) + 1.2), layout="constrained")
    for place, kind in enumerate(kinds):
        counts = document["counts"][kind]
        for number, project in enumerate(one for one in PROJECTS if one in counts):
            rows, of = counts[project]["rows"], document["compared"].get(kind, document["rows"][project])
            height = place + (0.2 if number == 0 else -0.2) * (len(counts) > 1)
            axes.barh(height, 100 * rows / of, height=0.36, color=PROJECTS[project][1])
            axes.text(100 * rows / of, height, f" {rows:,} of {of:,}", va="center", fontsize=8)
    axes.set_yticks(range(len(kinds)), [TITLES[kind] for kind in kinds], fontsize=9)
    axes.set_xlabel("% of rows")
    axes.set_xlim(0, 85)
    axes.spines[["top", "right"]].set_visible(False)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for _, colour in PROJECTS.values()]
    axes.legend(handles, [title for title, _ in PROJECTS.values()], loc="upper right", frameon=False)
    figure.savefig(HERE.parents[1] / "docs" / "tuned_files.png", dpi=110)


if __name__ == "__main__":
    main()
