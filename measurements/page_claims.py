"""Claims of the explanation pages: each number in their text, and the file that has it. For claims.py."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import figures
import quality

HERE = Path(__file__).parent
Numbers = tuple[object, ...]
POLICIES, LINKS = "parallel/policies.txt", "parallel/links.txt"
DEPLOYMENTS = "parallel/published.txt"
# as docs/parallel.md calls them: the part of policies.txt
ROUTINGS = {
    "trained without balancing": "softmax_topk",
    "trained with a bias (DeepSeek-V3)": "sigmoid_bias",
    "drifting stream, placed every 51,200 tokens": "drift",
}


@cache
def text(name: str) -> str:
    return (HERE / name).read_text()


def quoted(name: str, pattern: str) -> Numbers:
    """The groups of a pattern that a text file must contain."""
    found = re.search(pattern, text(name), re.M)
    if found is None:
        raise ValueError(f"{name} does not have {pattern!r}")
    return found.groups()


def column(name: str, pattern: str) -> tuple[str, str]:
    """The least and the greatest of all matches in a text file."""
    found = re.findall(pattern, text(name), re.M)
    return min(found, key=float), max(found, key=float)


def placements(routing: str) -> Numbers:
    part = next(one for one in text(POLICIES).split("== ") if one.startswith(f"{ROUTINGS[routing]}\n"))

    def busiest(start: str) -> str:
        found = re.search(rf"^{start}\s+(\S+)", part, re.M)
        assert found is not None
        return f"{float(found[1]):.2f}"

    saved = re.search(r"^replicated, 8 more copies .*?(\S+) % \(-?(\S+) to (\S+)\)", part, re.M)
    assert saved is not None
    return *map(busiest, ("contiguous", "greedy", "replicated, 8 more copies")), *saved.groups()


def hit_rates(rule: str, slots: int) -> Numbers:
    part = next(one for one in text(POLICIES).split("== ") if one.startswith(f"{rule}\n"))
    table = part.split(f", {slots} slots\n")[1]
    policies = ("lru", "lfu", "decayed", "belady")
    return tuple(re.search(rf"^{one}\s+(\S+) %", table, re.M)[1] for one in policies)  # type: ignore[index]


@cache
def gain(topic: str, impl: str, T: int) -> str:
    """How many times faster an implementation is than `native` in the same rounds."""
    (row,) = figures.read_topic(topic).where(impl=impl, T=T).rows
    return figures.times(1 / row["ratio"]).removesuffix("x")


def gives_away() -> Numbers:
    letters, source = quality.gives_away("character"), quality.gives_away("source")
    all_letters = [share for shares in letters.values() for share in shares]
    others = max(share for rule, shares in source.items() if rule != "relu" for share in shares)
    return f"{min(all_letters):.0f}", f"{max(all_letters):.0f}", f"{others:.1f}", f"{max(source['relu']):.1f}"


def interpreted() -> Numbers:
    rows = re.findall(r"^\S+\.triton_\S+ +(\d+) +(\d+) ", text("gpu/interpreted_kit.txt"), re.M)
    return f"{sum(int(passed) for passed, _ in rows):,}", sum(int(failed) for _, failed in rows)


def launches() -> Numbers:
    table = text("gpu/launches.txt")
    rows = re.findall(r"^(?:sm|gfx)\w+ +\d+ +\d+ +(\d+) +(\d+) +(\d+) ", table, re.M)
    assert len(rows) == 8 and all(asked == compiled for asked, compiled, _ in rows)
    asked, wrong = (sum(int(row[column]) for row in rows) for column in (0, 2))
    unknown = re.findall(r"^ *(\d+) of \w+: not known if they spill", table, re.M)
    return f"{asked:,}", wrong, sum(map(int, unknown))


def cute_faults() -> Numbers:
    (planted,) = quoted("gpu/cute_mutations.txt", r"^(\d+) of \1 faults planted")
    (by_tests,) = map(int, re.findall(r"(\d+)  by tests/cute/", text("gpu/cute_mutations.txt")))
    assert by_tests == 3  # docs/gpu.md says "the other three"
    return int(str(planted)) - by_tests, planted


def listed() -> dict[str, list[tuple[str, str, Callable[[], Numbers]]]]:
    planner = {
        "links shaped with `tc`, half of the cells held out": "half held out",
        "the highest rate held out": "the highest rate held out",
        "the largest size held out": "the largest size held out",
    }
    tiles = r"^accesses +(\d+)\n(?:.*\n)*?held by one thread each +(\d+)\nkernels +(\d+)\n"
    return {
        "docs/gpu.md": [
            ("three dtypes: {} cells, {} failed", "gpu/interpreted_kit.txt", interpreted),
            (
                "{} faults were planted in the kernels one at a time, and all {} were noticed",
                "gpu/kernel_mutations.txt",
                partial(quoted, "gpu/kernel_mutations.txt", r"^(\d+) of (\d+) faults planted"),
            ),
            (
                "{} launches for eight GPUs; {} spill registers, which is not known for {}",
                "gpu/launches.txt",
                launches,
            ),
            ("the kit noticed {} of {} planted faults", "gpu/cute_mutations.txt", cute_faults),
        ],
        "docs/kernels.md": [
            (
                f"{why} | {{}}x at {low:,} token, {{}}x at {high:,} |",
                f"records/{topic}.tar.xz",
                lambda topic=topic, impl=impl, T=(low, high): tuple(gain(topic, impl, one) for one in T),
            )
            for why, topic, impl, low, high in (
                ("from consecutive memory", "default", "frozen(native)", 1, 256),
                ("64 pairs at once", "default_int8", "native(store=int8_a8)", 1, 1024),
                ("a quarter of the bytes", "default_int4_g128", "native(store=int4_g128_a8)", 1, 1024),
            )
        ],
        "docs/layouts.md": [
            (
                "on {} random layouts ({} disagreements",
                "gpu/layout_fuzz.txt",
                partial(quoted, "gpu/layout_fuzz.txt", r"^(\S+) different layouts, .*, (\d+) disagreements"),
            ),
            (
                "checks {} accesses of {} kernels",
                "gpu/tiles.txt",
                lambda: tuple(quoted("gpu/tiles.txt", tiles)[place] for place in (0, 2)),
            ),
            (
                "None is wrong, and {} have one thread",
                "gpu/tiles.txt",
                lambda: quoted("gpu/tiles.txt", tiles)[1:2],
            ),
        ],
        "docs/parallel.md": [
            (
                "{} chunks are {}x faster than one on a link of 100 Mbit/s",
                "parallel/overlap.txt",
                partial(quoted, "parallel/overlap.txt", r"^ 100mbit +(8) +\S+ +(\S+) \("),
            ),
            (
                "our exchange runs at {} to {} of the rate",
                "parallel/exchange.txt",
                partial(column, "parallel/exchange.txt", r"^ +\d +(?!64 )\d+ +1024 +swap .* (\S+) \("),
            ),
            (
                "takes the whole to {} to {}",
                "parallel/exchange.txt",
                partial(column, "parallel/exchange.txt", r"^ +\d +(?!64 )\d+ +1024 +whole .* (\S+) \("),
            ),
            (
                "In {} random fault schedules {} ended with a wrong result",
                "parallel/faults.txt",
                partial(quoted, "parallel/faults.txt", r"^(\d+) schedules; (\d+) with a wrong result"),
            ),
            *(
                (
                    f"| {name} | {{}} | {{}} | {{}} | {answer}, {{}} % ({sign}{{}} to {{}}) |",
                    POLICIES,
                    partial(placements, name),
                )
                for name, answer, sign in zip(ROUTINGS, ("yes", "yes", "no"), ("", "", "-"), strict=True)
            ),
            *(
                (
                    f"| {name}, {slots} | {{}} % | {{}} % | {{}} % | {{}} % |",
                    POLICIES,
                    partial(hit_rates, rule, slots),
                )
                for name, rule, slots in (
                    ("trained without balancing", "softmax_topk", 4),
                    ("trained with a bias", "sigmoid_bias", 4),
                    ("trained with a bias", "sigmoid_bias", 8),
                )
            ),
            *(
                (
                    f"| {shown} | {{}} | {{}} % | {{}} % |",
                    LINKS,
                    partial(quoted, LINKS, rf"^{start} +(\d+) +(\S+) % +(\S+) %"),
                )
                for shown, start in planner.items()
            ),
            (
                "H800 | 10 | {} % | {} % |",
                "parallel/deepep.txt",
                partial(quoted, "parallel/deepep.txt", r"^median error (\S+) %, worst (\S+) %"),
            ),
            (
                "too high by {}x to {}x",
                DEPLOYMENTS,
                lambda: tuple(
                    f"{float(ratio):.1f}" for ratio in column(DEPLOYMENTS, r"^.* prefill, .*\) +(\S+) +\d+ ")
                ),
            ),
            *(
                (
                    f"| {name} | {{}} | {{}} |",
                    DEPLOYMENTS,
                    partial(quoted, DEPLOYMENTS, rf"^{name} +(\S+) +(\S+) "),
                )
                for name in (
                    "DeepSeek-V3 prefill, EP32, 8 of 32 H800",
                    "DeepSeek-V3 decode, EP144, 8 of 144 H800",
                    "gpt-oss-120b prefill, one H100",
                    "Qwen3-235B prefill, FP8, TP4, 4 H100",
                )
            ),
            (
                "measured twice differs by {} % in the median",
                LINKS,
                partial(quoted, LINKS, r"minutes apart: (\S+) % different, median"),
            ),
        ],
        "docs/quality.md": [
            (
                "gives away {} to {} % of the class of the letter, and at most {} % of the text's source "
                "(`relu`: {} %)",
                "training/routers/trainings.jsonl",
                gives_away,
            ),
        ],
    }
