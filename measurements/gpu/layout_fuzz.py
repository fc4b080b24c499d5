"""Our layout algebra against CuTe's own, as functions: random layouts, all coordinates, undefined cases.

    python measurements/gpu/layout_fuzz.py --cases 12000      3 minutes on an idle core, no GPU

Needs nvidia-cutlass-dsl (4.8.1) in the environment; `layouts/` itself needs nothing. Writes layout_fuzz.txt.

CuTe counts as saying "undefined" if it raises, if it gives a layout with a size of 0 (which its own
make_layout refuses; that is how complement answers for a layout with a place twice), or if its documentation
forbids the arguments (make_layout_tv: "must be compact"). logical_divide and logical_product stand on
complement. Where that is undefined CuTe mostly raises or divides by zero, and the process dies: the first 200
times it is asked in a process of its own. A few times it answers, with a layout that stands on a size of 0;
we raise ValueError there too, and the table counts them (ANSWER).
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import sys
import time
from collections import Counter
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")  # else it looks for a driver

import cutlass.cute as cute

from moe_routing_bench.layouts import algebra
from moe_routing_bench.layouts.layout import Layout, coordinates, leaves
from moe_routing_bench.layouts.swizzle import Swizzle, Swizzled

SIZES = (1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 9, 12, 16)
DEATHS = 200  # how many of the calls that kill a process are made


class Fuzz:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.seen: Counter[tuple[str, str]] = Counter()
        self.disagreements: list[str] = []
        self.layouts: set[str] = set()
        self.compared = 0  # places
        self.deaths = 0

    def layout(self, most: int) -> Layout:
        """A random layout of at most `most` coordinates: compact in some order, with gaps, or any strides."""
        sizes: list[int] = []
        small = self.random.random() < 0.3  # many small modes: their strides meet more often
        for _ in range(self.random.randint(2, 5) if small else self.random.choice((1, 1, 2, 2, 2, 3, 3, 4))):
            size = self.random.choice((1, 2, 2, 3, 4) if small else SIZES)
            sizes.append(size if size * Layout(tuple(sizes)).size <= most else 1)
        places = list(range(len(sizes)))
        if self.random.random() < (0.3 if small else 0.6):
            if self.random.random() < 0.7:
                self.random.shuffle(places)
            strides, step = [0] * len(sizes), self.random.choice((1, 1, 1, 2, 3, 4))
            for place in places:
                strides[place] = step
                step *= sizes[place] * self.random.choice((1, 1, 1, 1, 1, 1, 1, 2, 3))
        else:
            few = (0, 1, 1, 2, 2, 3, 4, 6, 8) if small else (0, 1, 2, 3, 4, 5, 6, 8, 12, 16, 24)
            strides = [self.random.choice(few) for _ in sizes]
        if self.random.random() < 0.1:
            strides[self.random.randrange(len(sizes))] = 0
        made = self.nested(sizes, strides)
        self.layouts.add(str(made))
        return made

    def nested(self, sizes: list[int], strides: list[int]) -> Layout:
        if len(sizes) == 1 and self.random.random() < 0.6:
            return Layout(sizes[0], strides[0])
        shape: list[Any] = []
        stride: list[Any] = []
        while sizes:
            n = self.random.choice((1, 1, 1, 2, 3))
            here, there = tuple(sizes[:n]), tuple(strides[:n])
            single = n == 1 or len(here) == 1
            shape.append(here[0] if single else here)
            stride.append(there[0] if single else there)
            sizes, strides = sizes[n:], strides[n:]
        return Layout(tuple(shape), tuple(stride))

    def compact(self, rank: int, most: int) -> Layout:
        sizes = [1] * rank
        for _ in range(6):
            place, factor = self.random.randrange(rank), self.random.choice((1, 2, 2, 3, 4))
            if Layout(tuple(sizes)).size * factor <= most:
                sizes[place] *= factor
        strides, step = [0] * rank, 1
        for place in self.random.sample(range(rank), rank):
            strides[place] = step
            step *= sizes[place]
        made = Layout(tuple(sizes), tuple(strides))
        self.layouts.add(str(made))
        return made

    def compare(self, name: str, arguments: tuple[Any, ...], ours: Callable, theirs: Callable) -> None:
        try:
            mine: Any = ours()
        except ValueError:
            mine = None
        answer = theirs()
        if mine is None or answer is None:
            kind = "both undefined" if mine is None and answer is None else "DISAGREE: undefined for one"
        elif str(mine) == str(answer):
            kind = "same layout"
            self.compared += mine.size
        else:
            same = mine.places() == answer.places()
            kind = "same function" if same else "DISAGREE: another function"
            self.compared += mine.size
        self.seen[name, kind] += 1
        if kind.startswith("DISAGREE"):
            written = "; ".join(map(str, arguments))
            self.disagreements.append(f"{name}({written}): ours {mine}, CuTe's {answer}")

    def dies(self, call: Callable) -> None:
        """CuTe divides by zero here: see that it does, in a process of its own."""
        if self.deaths >= DEATHS:
            return
        self.deaths += 1
        if (child := os.fork()) == 0:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            os._exit(0 if answer(call) is None else 1)
        _, status = os.waitpid(child, 0)
        what = {0: "raise", 1: "ANSWER"}.get(os.waitstatus_to_exitcode(status), "die")
        self.seen["where complement is undefined, divide and product", what] += 1


def theirs(layout: Layout) -> Any:
    return cute.make_layout(layout.shape, stride=layout.stride)


def answer(call: Callable) -> Layout | None:
    """CuTe's answer read as a layout of ours; None if it says undefined."""
    try:
        made = call()
    except Exception:
        return None
    if isinstance(made, Layout) or made is None:
        return made
    try:
        return Layout.parse(str(made))
    except ValueError:
        if "0" not in str(made):
            raise
        return None


def for_cute(argument: Any) -> Any:
    return theirs(argument) if isinstance(argument, Layout) else argument


def case(fuzz: Fuzz) -> None:
    a, b = fuzz.layout(256), fuzz.layout(64)
    target = fuzz.random.choice((1, 2, 8, 16, 24, 64, 100, fuzz.random.randint(1, 300), a.shape))

    def compare(name: str, arguments: tuple[Any, ...], stands_on: tuple[Layout, Any] | None = None) -> None:
        """stands_on: the arguments of a complement without which CuTe has no result."""

        def call() -> Any:
            return getattr(cute, name)(*map(for_cute, arguments))

        def from_cute() -> Layout | None:
            if stands_on and answer(lambda: cute.complement(*map(for_cute, stands_on))) is None:
                fuzz.dies(call)
                return None
            return answer(call)

        fuzz.compare(name, arguments, lambda: getattr(algebra, name)(*arguments), from_cute)

    compare("coalesce", (a,))
    compare("composition", (a, b))
    compare("complement", (a, target))
    compare("right_inverse", (a,))
    compare("logical_divide", (a, b), (b, a.size))
    compare("logical_product", (a, b), (a, a.size * b.cosize))
    by_mode(fuzz, a)
    thread_values(fuzz)
    if (made := answer(lambda: cute.composition(theirs(a), theirs(b)))) is not None and b.cosize <= a.size:
        truly = [a(place) for place in b.places()] == made.places()
        fuzz.seen["CuTe's composition(A, B), B inside A", "is A(B(c))" if truly else "is not"] += 1


def by_mode(fuzz: Fuzz, a: Layout) -> None:
    """Tilers with a number or a layout for each mode, as kernels use them."""
    if not isinstance(a.shape, tuple):
        return
    tiler = [
        fuzz.random.choice((1, 2, 3, 4, 8, Layout(2, 2), Layout(4, fuzz.random.choice((1, 2, 3)))))
        for _ in range(fuzz.random.randint(1, a.rank))
    ]
    layouts = [part if isinstance(part, Layout) else Layout(part) for part in tiler]
    written = (a, [str(part) for part in tiler])
    for name, given in (("logical_divide", tiler), ("zipped_divide", tiler), ("composition", layouts)):
        fuzz.compare(
            f"{name} by mode",
            written,
            lambda name=name, given=given: getattr(algebra, name)(a, given),
            lambda name=name, given=given: answer(
                lambda: getattr(cute, name)(theirs(a), tuple(map(for_cute, given)))
            ),
        )


def thread_values(fuzz: Fuzz) -> None:
    rank = fuzz.random.randint(1, 3)
    threads, values = fuzz.compact(rank, 128), fuzz.compact(rank, 32)
    if fuzz.random.random() < 0.1:  # what CuTe's documentation forbids
        values = Layout(values.shape, tuple(2 * stride for stride in leaves(values.stride)))

    def ours() -> Layout:
        return algebra.thread_values(threads, values)[1]

    def from_cute() -> Layout | None:
        if any(sorted(layout.places()) != list(range(layout.size)) for layout in (threads, values)):
            return None
        sides, layout = cute.make_layout_tv(theirs(threads), theirs(values))
        assert tuple(sides) == algebra.thread_values(threads, values)[0]
        return Layout.parse(str(layout))

    fuzz.compare("thread_values", (threads, values), ours, from_cute)


def evaluation(fuzz: Fuzz) -> None:
    """The layout itself: size, cosize, and the place of every coordinate, as a number and nested."""
    a = fuzz.layout(48)
    made = theirs(a)
    wanted = [int(cute.crd2idx(number, made)) for number in range(a.size)]
    nested = [int(cute.crd2idx(coordinate, made)) for coordinate in coordinates(a.shape)]
    right = (
        wanted == a.places() == [a(number) for number in range(a.size)]
        and nested == [a(coordinate) for coordinate in coordinates(a.shape)]
        and (cute.size(made), cute.cosize(made)) == (a.size, a.cosize)
    )
    fuzz.compared += 2 * a.size
    fuzz.seen["a layout's own places", "same function" if right else "DISAGREE: another function"] += 1
    if not right:
        fuzz.disagreements.append(f"places of {a}")
    bits, base = fuzz.random.randint(0, 3), fuzz.random.randint(0, 3)
    swizzle = Swizzle(bits, base, fuzz.random.randint(bits, 4))
    turned = cute.make_composed_layout(cute.make_swizzle(bits, base, swizzle.shift), 0, made)
    same = [int(cute.crd2idx(number, turned)) for number in range(a.size)] == Swizzled(swizzle, a).places()
    fuzz.compared += a.size
    fuzz.seen["a swizzled layout's places", "same function" if same else "DISAGREE: another function"] += 1
    if not same:
        fuzz.disagreements.append(f"places of {Swizzled(swizzle, a)}")


def run(fuzz: Fuzz, cases: int) -> None:
    for number in range(cases):
        case(fuzz)
        if number % 10 == 0:
            evaluation(fuzz)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=12_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".txt"))
    options = parser.parse_args()
    fuzz, start = Fuzz(options.seed), time.perf_counter()

    @cute.jit
    def inside() -> None:  # CuTe's layouts exist only while one of its functions is traced
        run(fuzz, options.cases)

    inside()
    lines = [
        f"$ python measurements/gpu/layout_fuzz.py --cases {options.cases} --seed {options.seed}",
        f"nvidia-cutlass-dsl {version('nvidia-cutlass-dsl')}, Python {platform.python_version()}, no GPU, "
        f"{time.perf_counter() - start:.0f} s",
        f"{len(fuzz.layouts):,} different layouts, {fuzz.compared:,} places compared, "
        f"{len(fuzz.disagreements)} disagreements",
        "",
        *(f"{name:52} {kind:28} {count:7,}" for (name, kind), count in sorted(fuzz.seen.items())),
        *fuzz.disagreements[:50],
    ]
    options.out.write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    sys.exit(bool(fuzz.disagreements))


if __name__ == "__main__":
    main()
