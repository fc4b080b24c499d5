"""A router from outside: one short file that is listed, checked and trained; and how such files are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from command_line import mrb, mrb_json, refused
from moe_routing_bench import MoE
from moe_routing_bench.conformance.router_checks import check_router
from moe_routing_bench.routers import router as routers
from moe_routing_bench.routers.router import all_routers, include_routers
from repository import ROOT

EXAMPLE = ROOT / "examples" / "add_a_router"
FILE = EXAMPLE / "routers" / "cosine.py"


def test_the_example_is_one_short_file() -> None:
    assert [path.name for path in EXAMPLE.rglob("*.py")] == ["cosine.py"]
    assert len(FILE.read_text().splitlines()) <= 40


def test_it_is_listed() -> None:
    document = mrb_json("list", "routers", "--include-path", EXAMPLE)["routers"]
    assert document["cosine"]["origin"] == f"file {FILE}"
    assert document["cosine"]["parameters"] == {"p_DH": 2048 * 16, "c_HE": 16 * 64, "log_scale": 1}
    text = mrb("list", "routers", "--include-path", EXAMPLE).stdout
    assert "33,793 parameters (p_DH, c_HE, log_scale)" in text and "arXiv:2204.09179" in text
    routers._included.clear()
    assert "cosine" not in mrb("list", "routers").stdout


def test_it_is_checked() -> None:
    include_routers(EXAMPLE / "routers")
    assert check_router("cosine") == []
    routers._included.clear()
    words = ("check", "--op", "routers", "--impl", "cosine", "--include-path", EXAMPLE)
    assert "1 cases passed, 0 failed" in mrb(*words).stdout


def test_it_is_the_cosine() -> None:
    include_routers(EXAMPLE / "routers")
    router = all_routers()["cosine"](6, 5, 2, width=3, dtype=torch.float64)
    x_TD = torch.randn(9, 6, dtype=torch.float64)
    h_TH = x_TD @ router.p_DH.detach().double()
    c_HE = router.c_HE.detach().double()
    cosine_TE = torch.nn.functional.cosine_similarity(h_TH[:, :, None], c_HE[None], dim=1)
    torch.testing.assert_close(router(x_TD).logits_TE, 2 * cosine_TE, rtol=1e-6, atol=1e-6)


def test_it_trains() -> None:
    include_routers(EXAMPLE / "routers")
    options = {"loss_weights": {"switch": 0.01}}
    layer = MoE(D=16, F=32, E=4, K=2, router="cosine", router_options=options)
    x_TD = torch.randn(64, 16)
    target_TD = torch.tanh(x_TD @ torch.randn(16, 16) / 4)
    optimizer = torch.optim.Adam(layer.parameters(), lr=0.01)
    before = {name: value.detach().clone() for name, value in layer.router.named_parameters()}
    losses = []
    for _ in range(10):
        y_TD, routing = layer(x_TD)
        loss = (y_TD - target_TD).square().mean() + routing.aux_loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    assert all(not torch.equal(value, before[name]) for name, value in layer.router.named_parameters())


# how files are found

RULE = '''"""A rule by another name."""
from moe_routing_bench.routers.switch import SwitchRouter
class Mine(SwitchRouter):
    pass
'''


def folder(tmp_path: Path, **files: str) -> Path:
    (tmp_path / "routers").mkdir()
    for name, text in files.items():
        (tmp_path / "routers" / f"{name}.py").write_text(text)
    return tmp_path


def test_a_folder_may_hold_routers_kernels_or_both(tmp_path: Path) -> None:
    path = folder(tmp_path, mine=RULE)
    assert "A rule by another name." in mrb("list", "--include-path", path).stdout
    (path / "combine").mkdir()
    (path / "combine" / "echo.py").write_text("def run(y_RD, gate_TK, plan): return y_RD\n")
    document = mrb_json("list", "--include-path", path)
    assert "mine" in document["routers"] and "echo" in document["ops"]["combine"]["implementations"]


@pytest.mark.parametrize("command", [("list", "routers"), ("check", "--op", "routers", "--impl", "mine")])
@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("mine", "import no_such_library", "ModuleNotFoundError"),
        ("mine", "x = 1", "must define"),
    ],
)
def test_mistakes_in_files_get_a_sentence(
    tmp_path: Path, command: tuple[str, ...], name: str, text: str, sentence: str
) -> None:
    path = folder(tmp_path, **{name: text})
    ran = mrb(*command, "--include-path", path, code=1)
    assert sentence in " ".join(ran.stdout.split())


def test_a_name_that_exists_is_refused(tmp_path: Path) -> None:
    said = refused("list", "routers", "--include-path", folder(tmp_path, switch=RULE))
    assert "routers.switch" in said


def test_a_folder_of_neither_is_refused(tmp_path: Path) -> None:
    said = refused("list", "--include-path", tmp_path)
    assert "holds no folder" in said
    said = refused("list", "--include-path", tmp_path / "nowhere")
    assert "not a folder" in said


def test_what_the_list_says_of_every_router() -> None:
    document = mrb_json("list", "routers")["routers"]
    assert document.keys() == all_routers().keys()
    for rule in document.values():
        assert rule["summary"].endswith(".") and len(rule["summary"]) < 110
        assert rule["origin"] == "built in" and "arXiv:" in rule["paper"]
        assert rule["layouts"] and rule["experts_per_token"]
    assert document["noisy_topk"]["parameters"] == {"w_DE": 2048 * 64, "w_noise_DE": 2048 * 64}
    assert document["hashed"]["parameters"] == {}
    assert document["sigmoid_bias"]["balance_state"] == ["bias_E"]
    assert document["sigmoid_bias"]["controller"] == "sign_bias"
    text = mrb("list", "routers").stdout
    for said in (
        "no parameters",
        "balanced by sign_bias",
        "experts per token: all, softly",
        "equal groups: every",
    ):
        assert said in text, said


@pytest.mark.timeout(600)
def test_it_is_measured_in_a_layer() -> None:
    words = ["--tokens", 16, "--width", 32, "--hidden", 16, "--experts", 4, "--rounds", 8]
    names = ["--router", "switch,cosine", "--include-path", EXAMPLE]
    (cell,) = mrb_json("bench", "layer", *words, *names, "--impl", "staged")
    status = {one["router"]: one["status"] for one in cell["implementations"]}
    assert status == {"switch": "PASSED", "cosine": "PASSED"}
