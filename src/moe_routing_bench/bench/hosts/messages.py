"""The answers a child may give to each request. All others are refused."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Text = Annotated[str, Field(max_length=4_000)]
Seconds = Annotated[float, Field(gt=0, lt=1e7, allow_inf_nan=False)]


class Reply(BaseModel):
    """The request is done; there is nothing else to say."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Ready(Reply):
    ready: bool


class Described(Reply):
    """What an implementation declares: Described(label="index_add", origin="built in", ...)."""

    label: Text
    origin: Text = ""
    deterministic: bool = True
    reuses_output: bool = False
    compiles: bool = False
    host_sync: Text = ""
    ties: Text = ""


class Prepared(Reply):
    """unsupported: why the implementation cannot run on these inputs, by its own account"""

    unsupported: Text | None = None


class HandedOver(Reply):
    """One call whose result is in a file.

    wrong_type  what is wrong with the result's type, in words
    print       fingerprint of the inputs after the call
    runs        what really ran, in words
    changed     settings of torch that the call changed
    """

    wrong_type: Text = ""
    print: Text
    runs: Text
    aliases: bool = False
    changed: Annotated[tuple[Text, ...], Field(max_length=20, strict=False)]


class KitRun(Reply):
    """How many cells of the kit passed and failed, the first failure in words, and the cells it refuses."""

    passed: Annotated[int, Field(ge=0, le=10**6)]
    failed: Annotated[int, Field(ge=0, le=10**6)]
    first: Text
    refused: Annotated[tuple[Text, ...], Field(max_length=10_000, strict=False)] = ()


class Loaded(Reply):
    """Files from elsewhere than Python, the system and this package."""

    files: Annotated[tuple[Text, ...], Field(max_length=1_000, strict=False)]


# when each stage began and ended on a rank, by the clock that all processes of a machine share
Stamps = Annotated[
    tuple[Annotated[float, Field(ge=0, allow_inf_nan=False)], ...], Field(max_length=64, strict=False)
]
Stages = Annotated[dict[Annotated[str, Field(max_length=200)], Seconds], Field(max_length=64)]


class Timed(Reply):
    """used, launch_seconds: of a device's clock (clock.py)"""

    seconds: Seconds
    used: Annotated[str, Field(max_length=20)] = ""
    launch_seconds: Annotated[float, Field(ge=0, lt=1e7, allow_inf_nan=False)] = 0.0
    stages: Stages = Field(default_factory=dict)
    stamps: Stamps = ()


class DeviceSaid(Reply):
    """others: a sentence if another process uses the device"""

    others: Text = ""


class StagesTimed(Reply):
    stages: Stages


class Weights(Reply):
    print: Text


Size = Annotated[int, Field(ge=0, lt=2**48)]


class TensorAt(Reply):
    """Where a tensor of a result lies in the worker's memory."""

    name: Annotated[str, Field(max_length=200)]
    address: Annotated[int, Field(ge=0, lt=2**64)]
    shape: Annotated[tuple[Size, ...], Field(max_length=8, strict=False)]
    stride: Annotated[tuple[Size, ...], Field(max_length=8, strict=False)]
    dtype: Annotated[str, Field(max_length=20)]


class ResultAt(Reply):
    """A result in the worker's memory, or what is wrong with its type."""

    wrong_type: Text = ""
    tensors: Annotated[tuple[TensorAt, ...], Field(max_length=64, strict=False)] = ()
    filled: bool = False


class Done(Reply):
    results: Annotated[tuple[ResultAt, ...], Field(max_length=256, strict=False)]
