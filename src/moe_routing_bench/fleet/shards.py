"""Shard: the part of a sweep that one of several machines measures. Shards share nothing: each takes every
N-th cell of the same list, and `mrb results merge` (results/merge.py) brings their folders together."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

MAX_SHARDS = 100_000
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """number counts from 1.

    Shard(number=2, of=3).part("abcdefg") -> ("b", "e")      cells 2, 5, 8, ...: long cases are spread
    """

    number: int
    of: int

    def __post_init__(self) -> None:
        if not 1 <= self.number <= self.of <= MAX_SHARDS:
            raise ValueError(
                f"there is no shard {self.number}/{self.of}: the first of {self.of} is 1/{self.of}, "
                f"and there are at most {MAX_SHARDS:,}"
            )

    @classmethod
    def parse(cls, text: str, environment: Mapping[str, str]) -> Shard:
        """Reads "2/8", or "auto" in a Slurm array, or "auto/8" in an indexed job of Kubernetes; for auto the
        environment says which one this is."""
        if written := re.fullmatch(r"(\d{1,9})/(\d{1,9})", text):
            return cls(number=int(written[1]), of=int(written[2]))
        if not (asked := re.fullmatch(r"auto(?:/(\d{1,9}))?", text)):
            raise ValueError(
                f"a shard is I/N, the first of four is 1/4; or auto in a Slurm array, or auto/N; not {text!r}"
            )
        of = None if asked[1] is None else int(asked[1])
        if "SLURM_ARRAY_TASK_ID" in environment:
            return cls._of_slurm(of, environment)
        if "JOB_COMPLETION_INDEX" in environment:
            if of is None:
                raise ValueError(
                    "Kubernetes does not say of how many JOB_COMPLETION_INDEX is one: give the job's "
                    "completions too, as in --shard auto/8"
                )
            return cls(number=_number("JOB_COMPLETION_INDEX", environment) + 1, of=of)
        raise ValueError(
            "--shard auto reads SLURM_ARRAY_TASK_ID or JOB_COMPLETION_INDEX, and neither is set here; "
            "write it as I/N"
        )

    @classmethod
    def _of_slurm(cls, of: int | None, environment: Mapping[str, str]) -> Shard:
        here, first, last, count = (
            _number(f"SLURM_ARRAY_TASK_{name}", environment) for name in ("ID", "MIN", "MAX", "COUNT")
        )
        # an array written as a list, 0,3,17, has gaps that a task cannot know
        step, rest = divmod(last - first, max(1, count - 1))
        if rest or (here - first) % max(1, step) or not first <= here <= last:
            raise ValueError(
                f"the tasks of this Slurm array ({count} from {first} to {last}) are not evenly spaced, so "
                "--shard auto cannot know which one this is; start it as --array=1-N"
            )
        if of not in (None, count):
            raise ValueError(f"--shard auto/{of} in a Slurm array of {count}")
        return cls(number=(here - first) // max(1, step) + 1, of=count)

    def part(self, whole: Sequence[T]) -> tuple[T, ...]:
        return tuple(whole[self.number - 1 :: self.of])

    def __str__(self) -> str:
        return f"{self.number}/{self.of}"


def _number(name: str, environment: Mapping[str, str]) -> int:
    text = environment.get(name, "")
    if not re.fullmatch(r"\d{1,9}", text):
        raise ValueError(f"--shard auto needs {name}, a number, and it is {text!r}")
    return int(text)
