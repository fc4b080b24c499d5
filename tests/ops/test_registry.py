"""Discovery: a file, an entry point or a folder adds an implementation; what cannot run says why."""

from __future__ import annotations

import importlib.metadata
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe_routing_bench import Layout, Routing, combine, make_plan
from moe_routing_bench.ops import registry
from moe_routing_bench.ops.catalog import find_all
from moe_routing_bench.ops.combine.op import op as combine_op
from moe_routing_bench.ops.registry import Op, all_ops, include

GOOD = '''"""Mine."""
from moe_routing_bench.ops.combine.gather_sum import run as theirs
def run(y_RD, gate_TK, plan, *, twist=1): return theirs(y_RD, gate_TK, plan)
'''


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "combine").mkdir()
    return tmp_path


def put(folder: Path, text: str, name: str = "mine") -> None:
    (folder / "combine" / f"{name}.py").write_text(text)
    include(folder)


def arguments():
    routing = Routing(expert_TK=torch.tensor([[0], [1]]), gate_TK=torch.ones(2, 1), num_experts=2)
    return torch.randn(2, 3), routing.gate_TK, make_plan(routing, Layout.compact())


def test_ops_are_found_by_listing_the_folder() -> None:
    ops = all_ops()
    routed, computed = ["score_topk", "topk", "make_plan"], ["grouped_gemm", "combine", "ep_combine"]
    around = ["rms_norm", "attention", "linear"]
    assert list(ops) == [*routed, "dispatch", "ep_dispatch", *computed, "expert_ffn", *around]
    folders = {p.parent.name for p in Path(registry.__file__).parent.glob("*/op.py")}
    assert folders == set(ops)
    for op in ops.values():
        files = {p.stem for p in (Path(registry.__file__).parent / op.name).glob("*.py")}
        assert set(op.names()) >= files - {"op", "preferences", "__init__"}
        assert op.default in op.names()
        assert op.summary.startswith(f"{op.name}: ")
        for found in find_all(op, configs=False):
            # what needs a library that is not here has no summary, but a reason
            assert found.implementation.summary if found.implementation else "needs " in found.reason


def test_a_file_in_an_included_folder_is_an_implementation(folder: Path) -> None:
    put(folder, GOOD)
    assert "mine" in combine_op.names()
    assert combine_op.get("mine").origin.startswith("file ")
    args = arguments()
    assert torch.equal(combine(*args, impl="mine"), combine(*args))
    assert combine_op.get("mine(twist=2)").config == {"twist": 2}
    assert combine_op.get("mine(twist=2)").label == "mine(twist=2)"


def test_an_entry_point_is_an_implementation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "outside_kernels.py").write_text(GOOD)
    monkeypatch.syspath_prepend(tmp_path)
    entry = importlib.metadata.EntryPoint("combine.outside", "outside_kernels", registry.GROUP)
    monkeypatch.setattr(registry, "_entry_points", lambda: (entry,))
    monkeypatch.setattr(combine_op, "_ready", SimpleNamespace())
    assert combine_op.get("outside").origin == "package outside_kernels"
    assert "outside" not in all_ops()["dispatch"].names()
    sys.modules.pop("outside_kernels")


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")
def test_torch_compile_may_trace_the_call_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(combine_op, "_ready", SimpleNamespace())
    args = arguments()

    def twice(*args: Any) -> torch.Tensor:
        return combine_op.get("index_add")(*args) + combine_op.get("gather_sum")(*args)

    compiled = torch.compile(twice, fullgraph=True, backend="eager")(*args)
    torch.testing.assert_close(compiled, 2 * combine(*args))


def test_an_absent_library_is_a_reason(folder: Path) -> None:
    put(folder, "import no_such_library\n" + GOOD)
    assert "no_such_library" in (combine_op.why_not("mine", *arguments()) or "")
    with pytest.raises(NotImplementedError, match="no_such_library"):
        combine(*arguments(), impl="mine")


def test_our_own_import_bug_is_raised(folder: Path) -> None:
    put(folder, "import moe_routing_bench.no_such_module\n" + GOOD)
    with pytest.raises(ModuleNotFoundError, match="no_such_module"):
        combine_op.why_not("mine", *arguments())
    put(folder, "from moe_routing_bench.core.plan import NoSuchName\n", name="other")
    with pytest.raises(ImportError, match="NoSuchName"):
        combine_op.get("other")


def test_a_file_without_unsupported_runs_everywhere(folder: Path) -> None:
    put(folder, "def run(y_RD, gate_TK, plan, *, speed=0): return y_RD")
    assert combine_op.why_not("mine", *arguments()) is None
    assert combine_op.why_not("mine(speed=1)", *arguments()) is None


@pytest.mark.parametrize(
    "text,words",
    [
        ("def run(y_RD, gate_TK, plan): pass\nunsupported = None", "define unsupported"),
        ("def unsupported(y_RD, gate_TK, plan): pass", "define run"),
        ("def run(y, gate_TK, plan): pass", r"\(y, gate_TK, plan\).*\(y_RD, gate_TK, plan\)"),
        ("def run(y_RD): pass", r"\(y_RD\).*\(y_RD, gate_TK, plan\)"),
    ],
)
def test_a_wrong_file_is_refused_in_words(folder: Path, text: str, words: str) -> None:
    put(folder, text)
    with pytest.raises(ValueError, match=words):
        combine_op.get("mine")


def test_a_name_taken_twice_is_refused(folder: Path) -> None:
    put(folder, GOOD, name="gather_sum")
    with pytest.raises(ValueError, match=r"combine.gather_sum .*built in and file"):
        combine_op.names()


def test_names_are_guessed() -> None:
    with pytest.raises(ValueError, match="'gather_sum'"):
        combine_op.get("gathersum")
    with pytest.raises(ValueError, match="option speed"):
        combine_op.get("gather_sum(speed=9)")
    with pytest.raises(ValueError, match=r"option speed.* batch_invariant, combine, dispatch, grouped_gemm"):
        all_ops()["expert_ffn"].get("staged(speed=9)")
    for unreadable in ("gather_sum(", "a b", "gather_sum(speed)"):
        with pytest.raises(ValueError, match="cannot read"):
            combine_op.get(unreadable)


def test_a_folder_must_hold_ops(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="holds no folder"):
        include(tmp_path)
    with pytest.raises(ValueError, match="is not a folder"):
        include(tmp_path / "nowhere")


def test_forward_only_refuses_what_wants_a_gradient() -> None:
    dispatch_op = all_ops()["dispatch"]
    y_RD, _, plan = arguments()
    y_RD.requires_grad_()
    assert "no backward" in (dispatch_op.why_not("index_select_reused", y_RD, plan) or "")
    with pytest.raises(NotImplementedError, match=r"dispatch.index_select_reused: .*backward"):
        dispatch_op.get("index_select_reused")(y_RD, plan)
    with torch.no_grad():
        assert dispatch_op.why_not("index_select_reused", y_RD, plan) is None


def test_a_reused_buffer_is_per_thread_and_can_be_released() -> None:
    from concurrent.futures import ThreadPoolExecutor

    from moe_routing_bench.ops.dispatch import index_select_reused

    y_RD, _, plan = arguments()
    first = index_select_reused.run(y_RD, plan)
    assert index_select_reused.run(y_RD * 2, plan).data_ptr() == first.data_ptr()
    with ThreadPoolExecutor(1) as pool:
        elsewhere = pool.submit(index_select_reused.run, y_RD, plan).result()
    assert elsewhere.data_ptr() != first.data_ptr()
    index_select_reused.release()
    assert not index_select_reused._buffers.by_type


def test_what_cannot_run_says_why() -> None:
    x_RD, gate_TK, plan = arguments()
    w_EDF = torch.randn(2, 3, 4)
    gemm: Op = all_ops()["grouped_gemm"]
    assert "padded" in (gemm.why_not("padded_bmm", x_RD, w_EDF, plan, None) or "")
    assert "block" in (gemm.why_not("block_sparse", x_RD, w_EDF, plan, None) or "")
    assert "16 bytes" in (gemm.why_not("torch_grouped_mm", x_RD, w_EDF, plan, None) or "")
    assert "one dtype" in (combine_op.why_not("embedding_bag", x_RD.bfloat16(), gate_TK, plan) or "")
    topk = all_ops()["topk"]
    assert "expert id" in (topk.why_not("packed_key", torch.rand(2, 4).double(), 1) or "")
