"""How many records there are: one notion for every command that says a number."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

CONTENDERS = ("baseline", "candidate")


@dataclass(frozen=True, kw_only=True)
class RecordCount:
    """RecordCount(contenders=12, again=6): 18 records, one line of a results folder each.

    again: of a cell's baseline, timed a second time (twin) or beside code from outside.
    """

    contenders: int
    again: int

    @staticmethod
    def of(roles: Mapping[str, int]) -> RecordCount:
        contenders = sum(rows for role, rows in roles.items() if role in CONTENDERS)
        return RecordCount(contenders=contenders, again=sum(roles.values()) - contenders)

    @property
    def records(self) -> int:
        return self.contenders + self.again

    def __add__(self, other: RecordCount) -> RecordCount:
        return RecordCount(contenders=self.contenders + other.contenders, again=self.again + other.again)

    def __str__(self) -> str:
        word = "record" if self.records == 1 else "records"
        if not self.again:
            return f"{self.records:,} {word}"
        return f"{self.records:,} {word}, {self.again:,} of them of baselines timed again to show the noise"

    def to_dict(self) -> dict[str, int]:
        return {"records": self.records, "contenders": self.contenders, "baselines_again": self.again}
