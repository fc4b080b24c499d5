"""Which architecture a device is, and what is assumed of one that nobody has heard of."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from moe_routing_bench.ops.targets import TARGETS, Target, as_if, target_of, why_too_old

GPU = torch.device("cuda:1")
KIB = 1024


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch):
    """A machine with this NVIDIA GPU, or this one of AMD."""

    def nvidia(major: int, minor: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (major, minor))

    def amd(name: str, warp_size: int = 64) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch, "version", SimpleNamespace(hip="7.0", cuda=None))
        card = SimpleNamespace(gcnArchName=name, warp_size=warp_size)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: card)

    return SimpleNamespace(nvidia=nvidia, amd=amd)


@pytest.mark.parametrize(
    "capability,name",
    [((8, 0), "sm_80"), ((8, 6), "sm_86"), ((8, 9), "sm_89"), ((9, 0), "sm_90a"), ((10, 0), "sm_100a"),
     ((12, 0), "sm_120")],
)  # fmt: skip
def test_nvidias_gpus_in_the_table(here, capability: tuple[int, int], name: str) -> None:
    here.nvidia(*capability)
    assert target_of(GPU) is TARGETS[name]


@pytest.mark.parametrize("name", ["gfx942", "gfx950"])
def test_amds_gpus_have_their_own_name(here, name: str) -> None:
    here.amd(f"{name}:sramecc+:xnack-")
    assert target_of(GPU) is TARGETS[name]


def test_consumer_cards_have_99_kib() -> None:
    small = {name for name, target in TARGETS.items() if target.shared_per_program == 99 * KIB}
    assert small == {"sm_86", "sm_89", "sm_120"}
    assert TARGETS["gfx942"].shared_per_program == 64 * KIB
    assert all(target.shared_per_program <= target.shared_per_unit for target in TARGETS.values())


@pytest.mark.parametrize(
    "capability,name,shared,tma",
    [((8, 7), "sm_87", 99, False), ((10, 3), "sm_103", 227, True), ((12, 1), "sm_121", 99, True),
     ((11, 0), "sm_110", 99, False)],
)  # fmt: skip
def test_an_unknown_gpu_gets_the_least_of_its_family_with_a_sentence(
    here, capability: tuple[int, int], name: str, shared: int, tma: bool
) -> None:
    here.nvidia(*capability)
    with pytest.warns(RuntimeWarning, match=rf"{name} is not one of the known GPUs.* {shared} KiB"):
        target = target_of(GPU)
    assert (target.name, target.shared_per_program, target.tma) == (name, shared * KIB, tma)
    assert why_too_old(target) is None


def test_an_unknown_amd_gpu_is_not_taken_for_another(here) -> None:
    here.amd("gfx1100", warp_size=32)
    with pytest.warns(RuntimeWarning, match="gfx1100"):
        target = target_of(GPU)
    assert (target.name, target.lanes, target.shared_per_program, target.e4m3) == (
        "gfx1100",
        32,
        64 * KIB,
        False,
    )
    assert target.warps(8) == 8


def test_what_is_older_than_sm_80_is_refused(here) -> None:
    here.nvidia(7, 5)
    with pytest.warns(RuntimeWarning):
        target = target_of(GPU)
    assert "sm_75" in (why_too_old(target) or "")


def test_a_target_may_be_assumed_where_no_gpu_is() -> None:
    assert target_of(GPU) is TARGETS["sm_80"]
    with as_if(Target.named("gfx950")):
        assert target_of(GPU).name == target_of(torch.device("cpu")).name == "gfx950"
    assert target_of(GPU).name == "sm_80"
    with pytest.raises(ValueError, match="'sm_75'"):
        Target.named("sm_75")
