"""Status: how one implementation ended in one cell, with the meaning of each status."""

from __future__ import annotations

from enum import StrEnum


class Status(StrEnum):
    """Status.TIMEOUT is the text "TIMEOUT", its .meaning the sentence. Only PASSED has a time."""

    meaning: str

    def __new__(cls, value: str, meaning: str) -> Status:
        member = str.__new__(cls, value)
        member._value_ = value
        member.meaning = meaning
        return member

    PASSED = "PASSED", "right before, during and after it was timed"
    WRONG_SHAPE = "WRONG_SHAPE", "the result does not have the oracle's shape"
    WRONG_DTYPE = "WRONG_DTYPE", "the result does not have the contract's dtype"
    WRONG_VALUE = "WRONG_VALUE", "the error is above the bound"
    WRONG_STRUCTURE = "WRONG_STRUCTURE", "the result is not of the contract's type"
    NONFINITE = "NONFINITE", "NaN or infinity where the oracle is finite"
    NONDETERMINISTIC = "NONDETERMINISTIC", "two runs gave different bits, though it promises equal ones"
    MUTATED_INPUT = "MUTATED_INPUT", "it wrote to its inputs"
    UNSUPPORTED = "UNSUPPORTED", "it says itself that it cannot run here"
    RUNTIME_ERROR = "RUNTIME_ERROR", "it raised an error"
    OOM = "OOM", "it needed more memory than the cap"
    TIMEOUT = "TIMEOUT", "it did not end within the time limit"
    NO_TIME = "NO_TIME", "the time was over before it could be timed"
    CRASHED = "CRASHED", "its process died"
    SUSPECT = "SUSPECT", "its time or behaviour is not believable, so no time is kept"


class ImplementationError(Exception):
    """Why an implementation gets no time: a status and a sentence.

    series: the one that failed, if it may be another than the one whose turn it is
    """

    def __init__(self, status: Status, reason: str, series: object = None):
        super().__init__(reason)
        self.status, self.reason, self.series = status, reason, series
