"""Every claim with a number in README and docs, and the record behind each.

    python measurements/claims.py             lists the claims: document, record, sentence
    python measurements/claims.py --write     puts the numbers of the records into the documents

A claim is a sentence with {} for each number. Tables that figures.py, quality.py, which_router.py and
docs/study/build.py write are not listed here: tests compare them with their records.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any

import figures
import page_claims
import typer
from sweeps import RECORDS, unpack

from moe_routing_bench.results.query import run_query
from moe_routing_bench.results.regrets import read_regrets
from moe_routing_bench.routers.router import built_in_names

HERE = Path(__file__).parent
ROOT = HERE.parent
FLAGSHIP = HERE / "cpu" / "flagship.tar.xz"
NEWEST = """
SELECT T, "case", impl, coalesce(ratio, 1) AS ratio, median_ms, verdict FROM records
WHERE status = 'PASSED' AND role IN ('baseline', 'candidate')
QUALIFY row_number() OVER (PARTITION BY "case", T, impl ORDER BY created_at DESC) = 1
"""


@dataclass(frozen=True, kw_only=True)
class Claim:
    """Claim(document="README.md", text="{}x faster as built", record="records/default.tar.xz", ...)

    values: the numbers as they must be written, in the order of the text.
    """

    document: str
    text: str
    record: str  # below measurements/, or a file of the repository
    values: Callable[[], tuple[object, ...]]

    def pattern(self) -> re.Pattern[str]:
        """Any white space may stand for a space, so that lines can be wrapped anywhere."""
        pieces = [re.sub(r"\\?\s+", r"\\s+", re.escape(piece)) for piece in self.text.split("{}")]
        return re.compile(r"(\d[\d.,]*(?<![.,]))".join(pieces))

    def wanted(self) -> tuple[str, ...]:
        return tuple(map(str, self.values()))

    def found(self) -> tuple[str, ...]:
        """The numbers in the document. ValueError unless the sentence stands there once."""
        matches = list(self.pattern().finditer((ROOT / self.document).read_text()))
        if len(matches) != 1:
            raise ValueError(f"{self.document} has {len(matches)} times the sentence {self.text!r}")
        return matches[0].groups()

    def written(self, text: str) -> str:
        """The document with the numbers of the record."""

        def fill(match: re.Match[str]) -> str:
            sentence, at = match[0], match.start()
            for group in range(match.lastindex or 0, 0, -1):
                begin, end = (place - at for place in match.span(group))
                sentence = sentence[:begin] + wanted[group - 1] + sentence[end:]
            return sentence

        wanted = self.wanted()
        return self.pattern().sub(fill, text)


def measured(name: str) -> Any:
    return json.loads((HERE / name).read_text())


@cache
def rows_of(archive: Path) -> tuple[dict[str, Any], ...]:
    """The newest row of each implementation in each cell; nothing if there is no such archive."""
    if not archive.is_file():
        return ()
    with tempfile.TemporaryDirectory() as scratch:
        names, rows = run_query(unpack(archive, Path(scratch)), NEWEST)
    return tuple(dict(zip(names, row, strict=True)) for row in rows)


# experts as built and frozen, over Transformers' best


def gains(name: str) -> dict[int, float]:
    """T -> how many times faster the implementation is than the fastest of Transformers' experts."""
    found, rows = {}, rows_of(RECORDS / "default.tar.xz")
    for T in sorted({row["T"] for row in rows}):
        ratio = {row["impl"]: row["ratio"] for row in rows if row["T"] == T}
        theirs = [ratio[impl] for impl in ratio if impl.startswith("hf_")]
        if theirs and name in ratio:
            found[T] = min(theirs) / ratio[name]
    return found


def ends(values: dict[int, float]) -> tuple[str, str]:
    return f"{min(values.values()):.1f}", f"{max(values.values()):.1f}"


def headline() -> tuple[str, str]:
    built, frozen = gains("native"), gains("frozen(native)")
    return ends(built)[0], ends(frozen)[1]


def caption() -> tuple[object, ...]:
    built, frozen = gains("native"), gains("frozen(native)")
    return min(built), max(built), *ends(built), *ends(frozen)


def regrets() -> tuple[int, int]:
    with tempfile.TemporaryDirectory() as scratch:
        read = read_regrets(unpack(RECORDS / "regret.tar.xz", Path(scratch)))
    slower = [one for one in read.cells if (one.transformers or 0) > 1]
    assert {one.record.experiment.dtype for one in slower} == {"float32"}
    assert not any(one.loses for one in slower)
    return len(slower), len(read.cells)


# whole models


def whole_model() -> tuple[str, ...]:
    gains = figures.model_gains({"whole-model": figures.read_topic("whole-model")})
    frozen, everything = 1, 2
    asked = (
        ("prompt-128", frozen), ("decode-128", frozen), ("prompt-128", everything),
        ("decode-128", everything), ("decode-128-int4_g32", everything),
    )  # fmt: skip
    found = [gains[case][which] for case, which in asked]
    assert all(gain and gain.sure for gain in found)
    return tuple(f"{gain.ratio:.2f}" for gain in found if gain)


def numbers_in(name: str, start: str, pattern: str = r"\d[\d.]*") -> list[str]:
    """What the pattern finds in the first line of a text file that starts so and has any."""
    lines = (HERE / name).read_text().splitlines()
    found = (re.findall(pattern, line.removeprefix(start)) for line in lines if line.startswith(start))
    return next(filter(None, found))


def vllm() -> tuple[str, ...]:
    """Wall time of vLLM's own experts over ours: the third number of a line."""
    name = "models/vllm_plugin.txt"
    return numbers_in(name, "prefill 256 ")[2], numbers_in(name, "decode, 16 sequences ")[2]


def replayed() -> tuple[str, str]:
    models = ("Qwen3Moe", "Mixtral", "Olmoe", "DeepseekV3", "GptOss")
    differ = [numbers_in("models/replay.txt", f"{model} ", r"(\S+) %")[0] for model in models]
    return min(differ, key=float), max(differ, key=float)


def shares(start: str) -> tuple[str, ...]:
    return tuple(numbers_in(QWEN, start, r"(\S+) %"))


def invariance() -> tuple[str, ...]:
    rows = rows_of(RECORDS / "invariant_olmoe.tar.xz")
    ratio = {row["T"]: row["ratio"] for row in rows if "batch_invariant" in row["impl"]}
    assert all(abs(ratio[T] - 1) < 0.01 for T in (64, 512))
    return (f"{100 * (ratio[1] - 1):.0f}",)


# the benchmark itself


def power() -> tuple[object, ...]:
    rows = {row["percent"]: row for row in measured("bench/power.json")["rows"]}
    different = sum(rows[0]["verdicts"].get(name, 0) for name in ("FASTER", "SLOWER"))
    found = [
        value
        for percent in (5, 3)
        for value in (rows[percent]["verdicts"]["SLOWER"], rows[percent]["trials"])
    ]
    return different, rows[0]["trials"], *found


def red_team() -> tuple[int]:
    folder = ROOT / "tests" / "red_team"
    return (sum(len(list((folder / name).glob("*/*.py"))) for name in ("kernels", "outside")),)


# fleets


def engines() -> tuple[object, ...]:
    runs = measured("fleet/engines.json")["runs"]
    assert all(not run["twice"] and run["same as the first"] for run in runs)
    return runs[0]["records"], sum(bool(run["kill -9"]) for run in runs)


def kills() -> tuple[object, ...]:
    runs = measured("fleet/kills.json")["runs"]
    assert all(run["cells"] == 60 and not run["double"] and not run["lost"] for run in runs)
    killed = sum((Counter(run["killed"]) for run in runs), Counter())
    return len(runs), killed["worker"], killed["server"]


def overhead() -> tuple[str, str]:
    _, *others = measured("fleet/overhead.json")["engines"]
    more = [one["more than local"] for one in others]
    return f"{min(more):.2f}", f"{max(more):.2f}"


def growth() -> tuple[str, ...]:
    """First answers with 10^6 and 10^7 records, on a busy machine and on one that was busier."""
    first, second, _, last = (run["records"] for run in measured("fleet/growth.json")["runs"])
    rows = (first[1], second[0], *last)
    return tuple(f"{sorted(row['first answers'])[1]:.1f}" for row in rows)


DEFAULT = "records/default.tar.xz"
QWEN = "models/profile_qwen_bfloat16.txt"
SHARES = "{} % | {} % | {} % | {} % | {} % |"


def claims() -> list[Claim]:
    listed: dict[str, list[tuple[str, str, Callable[[], tuple[object, ...]]]]] = {
        "README.md": [
            ("run {}x to {}x faster than those of Transformers on a CPU", DEFAULT, headline),
            ("For {} to {} tokens they are {}x to {}x faster as built,", DEFAULT, lambda: caption()[:4]),
            ("and {}x to {}x faster once their weights are frozen", DEFAULT, lambda: caption()[4:]),
            ("There are {} routers", "src/moe_routing_bench/routers", lambda: (len(built_in_names()),)),
            (
                "less time in {} of {} comparisons, all in float32, never by more than the noise",
                "records/regret.tar.xz",
                regrets,
            ),
        ],
        "docs/howto/speed_up_my_model.md": [
            (
                "runs a prompt of 128 tokens {}x faster than with Transformers' best experts, and a token "
                "after 128 others {}x faster; with our attention and dense matrices too, {}x and {}x, and "
                "{}x with experts in 4 bits",
                "records/whole-model.tar.xz",
                whole_model,
            ),
        ],
        "docs/howto/use_other_engines.md": [
            (
                "was {}x faster on a prompt of 256 tokens and {}x faster when it decoded 16 sequences",
                "models/vllm_plugin.txt",
                vllm,
            ),
        ],
        "docs/howto/record_a_trace.md": [
            ("different choices from {} % to {} % down to 0", "models/replay.txt", replayed),
        ],
        "docs/howto/profile.md": [
            (f"| Transformers, eager | {SHARES}", QWEN, partial(shares, "transformers(eager) ")),
            (f"| Transformers, grouped_mm | {SHARES}", QWEN, partial(shares, "transformers(grouped_mm) ")),
            (f"| ours, in stages | {SHARES}", QWEN, partial(shares, "ours(staged(")),
            (
                "they cost {} % at one token and nothing measurable at 64 and 512",
                "records/invariant_olmoe.tar.xz",
                invariance,
            ),
        ],
        "docs/howto/trust_a_number.md": [
            ("{} kernels that cheat or break", "tests/red_team", red_team),
            ("different in {} of {} comparisons", "bench/power.json", lambda: power()[:2]),
            (
                "A slow-down of 5 % was found in {} of {}, one of 3 % in {} of {}",
                "bench/power.json",
                lambda: power()[2:],
            ),
        ],
        "docs/howto/run_on_a_fleet.md": [
            ("equal sets of {} records", "fleet/engines.json", lambda: engines()[:1]),
            ("`kill -9` at random moments in {} runs", "fleet/engines.json", lambda: engines()[1:]),
            ("In {} runs with {} killed workers and {} killed S3 servers", "fleet/kills.json", kills),
            ("An engine adds {} s to {} s to a cell", "fleet/overhead.json", overhead),
            (
                "took {} s with 10^6 records and {} s with 10^7 at a load of 5 to 9, and {} s and {} s",
                "fleet/growth.json",
                growth,
            ),
        ],
        **page_claims.listed(),
    }
    return [
        Claim(document=document, text=text, record=record, values=values)
        for document, rows in listed.items()
        for text, record, values in rows
    ]


def differences(listed: list[Claim]) -> list[str]:
    """What the documents say and the records do not, in sentences."""
    return [
        f"{claim.document}: {claim.text!r} has {claim.found()}, and {claim.record} {claim.wanted()}"
        for claim in listed
        if claim.found() != claim.wanted()
    ]


def main(write: Annotated[bool, typer.Option("--write", help="Correct the documents.")] = False) -> None:
    listed = claims()
    if write:
        for claim in listed:
            path = ROOT / claim.document
            path.write_text(claim.written(path.read_text()))
    for claim in listed:
        print(f"{claim.document}  {claim.record}\n    {claim.text.format(*claim.found())}")
    wrong = differences(listed)
    print("\n".join(wrong) or f"{len(listed)} claims have the numbers of their records.")
    raise typer.Exit(bool(wrong))


if __name__ == "__main__":
    typer.run(main)
