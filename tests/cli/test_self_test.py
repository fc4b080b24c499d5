"""mrb doctor --device: what not to trust is named, whatever way a kernel fails."""

from __future__ import annotations

import subprocess
from types import SimpleNamespace

import pytest
import torch

from command_line import mrb, mrb_json, refused
from moe_routing_bench.conformance import self_test
from moe_routing_bench.conformance.check import Outcome
from moe_routing_bench.conformance.self_test import Tried


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "no CUDA device" in refused("doctor", "--device", "cuda")
    assert "set TRITON_INTERPRET=1" in refused("doctor", "--device", "pretend")
    assert "too old" in refused("doctor", "--device", "pretend:h100:driver")
    assert "h200" in refused("doctor", "--device", "pretend:h200")
    assert "use cuda, cuda:1" in refused("doctor", "--device", "cpu")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A Card")
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (60 * 2**30, 80 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 7))


def test_what_is_wrong_is_not_to_be_trusted(a_gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [
        Tried("topk.triton_select", "right", "3 small cells"),
        Tried("combine.triton_gather_sum", "wrong", "bfloat16, compact: the result is off"),
        Tried("grouped_gemm.triton_ragged(tma=1)", "not tried", "sm_87 has no TMA"),
    ]
    monkeypatch.setattr("moe_routing_bench.cli.doctor.try_all", lambda device, pattern: iter(answers))
    text = mrb("doctor", "--device", "cuda", code=1).stdout
    assert "A Card, sm_87" in text and "sm_87 is not" in text and "holds 20 of the GPU's 80 GiB" in text
    assert "1 right, 1 wrong, 1 not tried" in text
    assert "do not use: combine.triton_gather_sum" in text
    assert "grouped_gemm.triton_ragged(tma=1)" in text
    document = mrb_json("doctor", "--device", "cuda", code=1)
    assert [one["answer"] for one in document["tried"]] == ["right", "wrong", "not tried"]
    answers[1:] = []
    assert "All are correct" in mrb("doctor", "--device", "cuda").stdout
    answers.clear()
    assert "GPU kernel" in mrb("doctor", "--device", "cuda", "--impl", "nothing", code=2).output


@pytest.mark.parametrize(
    "stdout,code,answer,reason",
    [
        ("noise\n" + '["right", "3 small cells"]\n', 0, "right", "3 small cells"),
        ("", -11, "wrong", "its process ended with code -11: illegal memory access"),
        ("nonsense\n", 0, "wrong", "its process ended with code 0: illegal memory access"),
    ],
)
def test_a_kernel_that_ends_its_process(
    monkeypatch, stdout: str, code: int, answer: str, reason: str
) -> None:
    ran = SimpleNamespace(stdout=stdout, stderr="illegal memory\naccess\n", returncode=code)
    monkeypatch.setattr(subprocess, "run", lambda *words, **options: ran)
    assert self_test.tried_isolated("topk", "sort", "cuda") == Tried("topk.sort", answer, reason)


def test_a_kernel_that_never_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*words: object, **options: object) -> None:
        raise subprocess.TimeoutExpired("python", 1)

    monkeypatch.setattr(subprocess, "run", run)
    assert "not end" in self_test.tried_isolated("topk", "sort", "cuda").reason


def test_the_first_case_it_takes_is_tried_in_every_dtype_and_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that takes whole tiles alone is tried with whole tiles."""
    asked = []

    def check(cell) -> Outcome:
        asked.append((cell.case.name, cell.dtype, cell.layout, cell.device))
        if cell.case.name == "plain":
            return Outcome(cell=cell, status="unsupported", sentences=("no",))
        return Outcome(cell=cell, status="passed")

    monkeypatch.setattr(self_test, "check", check)
    assert self_test.tried("dispatch", "index_select", "cuda").answer == "right"
    assert len(asked) == 18 and asked[-1][0] == "whole_tiles" and asked[-1][3] == "cuda"
    assert {dtype for _, dtype, *_ in asked} == {"float32", "bfloat16", "float16"}
    failing = lambda cell: Outcome(cell=cell, status="failed", sentences=("it is off",))  # noqa: E731
    monkeypatch.setattr(self_test, "check", failing)
    wrong = self_test.tried("dispatch", "index_select", "cuda")
    assert wrong.answer == "wrong" and "float32, compact" in wrong.reason and "it is off" in wrong.reason


@pytest.mark.slow
def test_it_runs_a_real_one_in_a_process_of_its_own() -> None:
    """With a kernel of plain torch in the place of a GPU's."""
    found = self_test.tried_isolated("topk", "sort", "cpu")
    assert found == Tried("topk.sort", "right", "3 small cells, forward and backward where it has one")
