"""The command line: what it prints, what it returns, and that mistakes get a sentence and no traceback."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from child_process import python
from command_line import mrb, mrb_json, refused
from moe_routing_bench import cli
from moe_routing_bench.cli import GROUPS, RENAMED, all_names, command_of, today
from moe_routing_bench.core import fork_server
from moe_routing_bench.models import decoder
from moe_routing_bench.ops import hf
from moe_routing_bench.ops.preference import machine_of
from moe_routing_bench.ops.registry import all_ops
from moe_routing_bench.routers.router import all_routers
from moe_routing_bench.workloads.cases import SUITES

pytestmark = pytest.mark.slow

GOOD = '''"""The built-in rule under another name."""
from moe_routing_bench.ops.combine.gather_sum import run
CONFIGS = ({"speed": 1},)
FORWARD_ONLY = True
gather_sum = run
def run(y_RD, gate_TK, plan, *, speed=0):
    return gather_sum(y_RD, gate_TK, plan)
'''
FILES = {
    "good": GOOD,
    "wrong_numbers": GOOD.replace("plan)\n", "plan) * 0.5\n").replace('CONFIGS = ({"speed": 1},)\n', ""),
    "bad_import": "from math import nonsense",
    "bad_signature": "def run(y): ...\ndef unsupported(y): ...",
    "bad_configs": GOOD.replace('{"speed": 1}', '"fast"'),
    "bad_option": GOOD.replace('{"speed": 1}', '{"colour": 1}'),
    "absent": "import no_such_library",
    "asks_the_gpu": GOOD + "def unsupported(y_RD, gate_TK, plan):\n    raise RuntimeError('no GPU here')\n",
    "never": GOOD + "def unsupported(y_RD, gate_TK, plan):\n    return 'it is never in the mood'\n",
}


@pytest.fixture
def folder(tmp_path: Path):
    """Makes a folder that holds the named files as implementations of combine."""

    def make(*names: str) -> str:
        (tmp_path / "combine").mkdir(exist_ok=True)
        for name in names:
            (tmp_path / "combine" / f"{name}.py").write_text(FILES[name])
        return str(tmp_path)

    return make


def test_list_json_holds_every_op_implementation_and_router():
    document = mrb_json("list")
    assert [*document["ops"]] == [*all_ops()]
    for name, op in all_ops().items():
        implementations = document["ops"][name]["implementations"]
        assert [*implementations] == op.names()
        assert [spec for spec, one in implementations.items() if one["default"]] == [op.default]
        assert len({tuple(one) for one in implementations.values()}) == 1, "the keys differ"
    assert document["routers"].keys() == all_routers().keys()
    assert document["routers"]["soft_moe"]["causal"] is False
    assert mrb_json("list", "routers").keys() == {"routers"}
    assert mrb_json("list", "ops").keys() == {"ops"}


def test_list_says_what_matters():
    text = mrb("list").stdout
    for words in (
        f"native (preferred on {machine_of(torch.device('cpu'))})",
        "ties in any order",
        "forward only; batch-invariant; reuses its output",
        "host sync: a Python loop over experts",
        "grouped_gemm=torch_grouped_mm|padded_bmm|block_sparse",
        "not causal: later tokens matter; depends on the batch",
        "arXiv:2308.00951",
    ):
        assert words in text, words
    assert "\x1b" not in text and not any(line != line.rstrip() for line in text.splitlines())


def test_list_shows_outside_code_whatever_its_state(folder):
    path = folder("good", "bad_import", "bad_signature", "bad_configs", "absent")
    text = mrb("list", "ops", "--include-path", path, code=1).stdout
    for words in ("no_such_library", "ImportError", "'nonsense'", "(y_RD, gate_TK, plan)", "CONFIGS"):
        assert words in text, words
    assert f"file {path}/combine/good.py" in text and "The built-in rule under another name." in text
    states = mrb_json("list", "--include-path", path, code=1)["ops"]["combine"]["implementations"]
    assert {name: one["state"] for name, one in states.items() if one["origin"].startswith("file")} == {
        "good": "ready",
        "bad_import": "broken",
        "bad_signature": "broken",
        "bad_configs": "broken",
        "absent": "absent",
    }


def test_an_error_in_built_in_code_is_raised(monkeypatch: pytest.MonkeyPatch):
    import moe_routing_bench.ops.combine.index_add as module

    monkeypatch.delattr(module, "run")
    monkeypatch.setattr(all_ops()["combine"], "_ready", SimpleNamespace())
    for words in (["list"], ["check", "--op", "combine"], ["explain", "combine"]):
        with pytest.raises(ValueError, match="index_add"):
            mrb(*words)


@pytest.mark.parametrize(
    ("op", "layout"),
    [
        (name, layout)
        for name, op in all_ops().items()
        for layout in ("compact", "block(64)", "padded(capacity_factor=1.25)")
        if op.has_layout or layout == "compact"
    ],
)
@pytest.mark.parametrize("device", ["cpu", "cuda", "meta"])
def test_explain_every_op_at_a_size_no_machine_holds(op, device, layout):
    words = ["--tokens", "1000000000", "--experts", "4096", "--device", device, "--layout", layout, "--bias"]
    document = mrb_json("explain", op, *words, "--train")
    assert document["chosen"]["answer"] == "could run"
    assert "(decisions are off" in document["why_chosen"]
    # without a compiler; these alone have more than their default in plain torch
    better = {("attention", device): "sdpa", ("grouped_gemm", "cuda"): "torch_grouped_mm"}
    better["expert_ffn", "cuda"] = "staged(grouped_gemm=torch_grouped_mm)"
    spec = better.get((op, device), all_ops()[op].default)
    assert document["chosen"]["implementation"] == all_ops()[op].get(spec).label
    answers = {one["spec"]: one for one in document["others"]}
    assert spec not in answers
    for one in answers.values():
        assert (one["answer"], one["reason"] is None) in {("could run", True), ("no", False)}
    if op in ("dispatch", "combine"):
        assert "over the limit" in answers["one_hot_matmul"]["reason"]
    if op == "grouped_gemm":
        assert (answers["padded_bmm"]["answer"] == "no") == (not layout.startswith("padded"))


def test_explain_names_what_auto_means_and_why_not_the_others():
    text = mrb("explain", "expert_ffn", "--tokens", "16").stdout
    chosen = r"native|staged\(combine=gather_sum,dispatch=index_select,grouped_gemm=expert_loop\)"
    assert re.search(
        rf"auto -> ({chosen}), preferred on .* \(decisions .*measurements/.* It can run this\.", text
    )
    assert "x_TD     16 x 2048 bfloat16" in text
    assert re.search(
        r"staged\(grouped_gemm=padded_bmm\) +no: grouped_gemm.padded_bmm: it needs the padded", text
    )


def test_explain_a_kernel_that_takes_plain_tensors_alone():
    document = mrb_json("explain", "expert_ffn", "--tokens", "16")
    (native,) = [one for one in (document["chosen"], *document["others"]) if one["spec"] == "native"]
    assert native["answer"] == "could run" or "compile" in native["reason"]


def test_explain_takes_sizes_of_a_model():
    words = ["explain", "expert_ffn", "--tokens", "1"]
    plain = mrb_json(*words, "--width", "2048", "--hidden", "1024", "--experts", "64", "--topk", "8")
    assert mrb_json(*words, "--model", "olmoe-1b-7b") == plain
    fewer = mrb_json(*words, "--model", "olmoe-1b-7b", "--topk", "2", "--experts", "16")["arguments"]
    assert fewer["plan"] == "compact: 2 rows for 2 pairs" and "w_in_EDG 16 x 2048" in fewer["weights"]
    assert "'absent'" in refused(*words, "--model", "absent")


def test_suites_say_how_much_of_them_is_measured(monkeypatch):
    suites = {one["name"]: one for one in mrb_json("list", "suites")["suites"]}
    assert suites.keys() == SUITES.keys()
    assert suites["topk-grid"]["cells"] == suites["topk-grid"]["measured"] == 27
    assert suites["seed-fused"]["document"] and suites["topk-grid"]["document"] is None
    documents = [row["document"] for name, row in suites.items() if name.startswith("seed-")]
    assert all(documents) and len(set(documents)) == len(documents) == 11
    assert all(one["minutes"] > 0 for one in suites.values())
    monkeypatch.setattr("moe_routing_bench.cli.list.measured_cases", lambda: None)
    assert "not known here" in mrb("list", "suites").stdout


def test_explain_a_choice_that_cannot_run():
    text = mrb("explain", "grouped_gemm", "--impl", "padded_bmm").stdout
    assert "padded_bmm, asked for by name" in text and "there is no fallback" in text
    document = mrb_json("explain", "expert_ffn", "--impl", "staged(grouped_gemm=padded_bmm)")
    assert document["chosen"]["answer"] == "no"


def test_explain_train_rules_out_forward_only():
    quiet, training = (
        {one["spec"]: one["answer"] for one in mrb_json("explain", "dispatch", flag)["others"]}
        for flag in ("--no-train", "--train")
    )
    assert (quiet["index_select_reused"], training["index_select_reused"]) == ("could run", "no")


def test_explain_code_from_outside(folder):
    path = folder("good", "bad_import", "absent", "asks_the_gpu")
    others = mrb_json("explain", "combine", "--include-path", path, code=1)["others"]
    answers = {one["spec"]: (one["answer"], one["reason"]) for one in others}
    assert answers["good"] == answers["good(speed=1)"] == ("could run", None)
    assert answers["bad_import"][0] == "broken"
    assert answers["absent"][0] == "no" and "no_such_library" in answers["absent"][1]
    assert answers["asks_the_gpu"][0] == "cannot tell"
    assert "RuntimeError: no GPU here" in answers["asks_the_gpu"][1]
    text = mrb("explain", "combine", "--include-path", path, "--impl", "absent", code=1).stdout
    assert "absent, asked for by name" in text


def test_explain_for_a_gpu_that_is_not_here():
    for arch in ("sm_80", "sm_90a", "sm_100a", "gfx942"):
        document = mrb_json("explain", "expert_ffn", "--arch", arch)
        assert (
            document["chosen"]["answer"] == "could run" and f"preferred on {arch}" in document["why_chosen"]
        )
        assert arch in document["caution"] and document["device"] == "cuda"
        native = next(one for one in document["others"] if one["spec"] == "native")
        assert native["answer"] == "no" and native["reason"]
    text = mrb("explain", "expert_ffn", "--arch", "gfx942").stdout
    assert "gfx942, MI300X" in text
    assert "'sm_75'" in refused("explain", "topk", "--arch", "sm_75")
    assert "--device mps" in refused("explain", "topk", "--arch", "sm_80", "--device", "mps")


def test_what_an_architecture_lacks_is_a_reason():
    pytest.importorskip("triton.language")
    by_arch = {
        arch: {
            one["spec"]: one["reason"]
            for one in mrb_json("explain", "grouped_gemm", "--arch", arch)["others"]
        }
        for arch in ("sm_80", "sm_90a", "gfx942")
    }
    tma, e4m3 = "triton_ragged(tma=1)", "triton_ragged(store=e4m3)"
    assert [by_arch[arch][tma] is None for arch in by_arch] == [False, True, False]
    assert "TMA" in by_arch["gfx942"][tma] and "sm_89" in by_arch["sm_80"][e4m3]


def test_explain_admits_that_the_device_is_not_here(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert "no cuda device" in mrb("explain", "topk", "--device", "cuda").stdout
    assert "no cuda device" not in mrb("explain", "topk").stdout


def test_check_passes():
    result = mrb("check", "--op", "combine", "--impl", "[eg]*", "--dtype", "float32", "--dtype", "bfloat16")
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["op", "implementation", "float32", "bfloat16", "not", "supported", "verdict"]
    assert re.search(r"^combine +gather_sum +(\d+)/\1 +(\d+)/\2 +- +passed$", result.stdout, re.MULTILINE)
    assert re.search(r"^[\d,]+ cases passed, 0 failed, [1-9]\d* not supported .*--verb", lines[-1])
    assert re.search(r"^combine.gather_sum: \d+ passed, 0 failed, 0 not", result.stderr, re.MULTILINE)
    assert "\x1b" not in result.output


def test_check_on_a_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    result = mrb("check", "--op", "topk", "--impl", "sort", "--dtype", "float32")
    assert "\x1b[32mpassed" in result.stdout
    assert re.search(r"checking: (\d+) of \1 cases", result.stderr)


def test_check_verbose_says_why_not():
    text = mrb("check", "--op", "grouped_gemm", "--impl", "padded_bmm", "--dtype", "float32", "-v").stdout
    assert re.search(r"\d+ cases: .*padded.* block\(4\)", text)
    assert "--verbose" not in text


def test_check_finds_wrong_numbers(folder):
    path = folder("good", "wrong_numbers")
    words = ["check", "--op", "combine", "--dtype", "float32", "--include-path", path]
    mrb(*words, "--impl", "good")
    document = mrb_json(*words, code=1)
    verdicts = {one["implementation"]: one["verdict"] for one in document["results"]}
    wrong = {name for name, verdict in verdicts.items() if verdict not in ("passed", "not supported")}
    assert wrong == {"wrong_numbers"} and {"good", "good(speed=1)", "gather_sum"} < verdicts.keys()
    assert document["healthy"] is False and document["failed"] > 3
    text = mrb(*words, "--impl", "wrong*", code=1).stdout
    assert "combine.wrong_numbers" in text and "about 0.5 times the oracle" in text
    assert f"cases passed, {document['failed']} failed" in text
    assert text.count("Must hold:") == 3 and f"and {document['failed'] - 3} more (--verbose)" in text
    text = mrb(*words, "--impl", "wrong*", "--verbose", code=1).stdout
    assert text.count("Must hold:") == document["failed"]


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("bad_import", "'nonsense'"),
        pytest.param("bad_signature", "(y_RD, gate_TK, plan)", marks=pytest.mark.nightly),
        pytest.param("bad_option", "option colour", marks=pytest.mark.nightly),
        pytest.param("asks_the_gpu", "RuntimeError: no GPU here", marks=pytest.mark.nightly),
    ],
)
def test_check_counts_broken_code_from_outside_as_failed(folder, name, sentence):
    words = ["check", "--op", "combine", "--dtype", "float32", "--include-path", folder(name)]
    # the rest of the op is still checked
    text = mrb(*words, "--impl", "[!e]*", code=1).stdout
    assert sentence in text and "gather_sum" in text and " 0 failed" not in text


@pytest.mark.parametrize("name", ["absent", "never"])
def test_check_is_not_content_with_nothing(folder, name):
    words = ["check", "--op", "combine", "--dtype", "float32", "--include-path", folder(name)]
    text = mrb(*words, "--impl", name, code=1).stdout
    assert "of combine could run" in text and "0 cases passed, 0 failed" in text
    text = mrb(*words, "--impl", "[agn]*", code=1).stdout
    assert "gather_sum" in text and f"combine.{name} could run" in text


def test_check_notices_an_op_without_implementations(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(all_ops()["topk"], "names", list)
    monkeypatch.setattr("moe_routing_bench.conformance.run.router_names", lambda: ["switch"])
    assert "of topk could run" in mrb("check", "--op", "[rt]*", code=1).stdout


def test_check_routers(monkeypatch: pytest.MonkeyPatch):
    assert [one["implementation"] for one in mrb_json("check", "--impl", "switch")["results"]] == ["switch"]
    checked: list[str] = []  # each of them really: tests/routers/test_routers.py
    monkeypatch.setattr(
        "moe_routing_bench.conformance.run.check_router", lambda name: checked.append(name) or []
    )
    assert f"{len(all_routers())} cases passed, 0 failed" in mrb("check", "--op", "routers").stdout
    assert checked == list(all_routers())


def test_check_reports_a_router_that_breaks_its_contract(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(all_routers()["switch"], "causal", False)
    monkeypatch.setattr(all_routers()["switch"], "batch_dependent", True)
    text = mrb("check", "--op", "routers", "--impl", "switch", code=1).stdout
    assert "routers.switch failed 1 case" in text and "causal=False" in text


@pytest.mark.parametrize(
    ("words", "named"),
    [
        (["list", "op"], "'ops'"),
        (["list", "--include-path", "/no/such/folder"], "/no/such/folder"),
        (["explain", "combin"], "'combine'"),
        (["explain", "combine", "--impl", "index_ad"], "'index_add'"),
        (["explain", "combine", "--impl", "index_add(speed=3)"], "option speed"),
        (["explain", "combine", "--dtype", "bfloat"], "'bfloat16'"),
        (["explain", "combine", "--activation", "swigl"], "'swiglu'"),
        (["explain", "combine", "--layout", "blok"], "layout 'blok'"),
        (["explain", "combine", "--choices", "200"], "E=128"),
        (["explain", "combine", "--device", "tpu"], "device 'tpu'"),
        (["explain", "combine", "--tokens", str(10**18)], "sizes"),
        (["check", "--op", "combin"], "'combine'"),
        (["check", "--op", "router"], "'routers'"),
        (["check", "--impl", "gather_summ"], "'gather_sum'"),
        (["check", "--op", "topk", "--impl", "zzz*"], "nothing to check"),
        (["check", "--dtype", "float31"], "'float32'"),
    ],
)
def test_a_mistake_is_one_sentence_that_names_it_or_what_was_meant(words, named):
    assert named in refused(*words)


def test_a_name_that_exists_twice_is_a_mistake(folder):
    path = Path(folder("good"))
    (path / "combine" / "index_add.py").write_text(GOOD)
    assert "combine.index_add" in refused("list", "--include-path", path)


@pytest.mark.parametrize(
    ("words", "meant"), [(["lst"], "'list'"), (["explain", "topk", "--tokns", "3"], "--tokens")]
)
def test_unknown_words_are_refused(words, meant):
    assert meant in mrb(*words, code=2).stderr


WITHOUT_EXAMPLES = {  # they stand in the help of their group
    ("bench", "layer"), ("bench", "balance"), ("model", "trace"), ("parallel", "fabrics"),
    ("train", "show"), ("train", "pareto"), ("train", "predict")
}  # fmt: skip


def test_help_shows_examples_and_that_of_a_group_fits_a_screen():
    for words in [(), *all_names()]:
        shown = mrb(*words, "-h").stdout
        assert shown == mrb(*words, "--help").stdout
        assert "Example" in shown or words in WITHOUT_EXAMPLES, words
        if hasattr(command_of(words)[0], "commands"):
            assert len(shown.splitlines()) <= 40, words


OLD = {
    "results SQL": ["results", "--json", "SELECT 1"],
    "results --columns": ["results", "--columns"],
    "train --study": ["train", "--quick", "--study", "routers"],
    "train --router": ["train", "--router=switch", "--out", "x"],
    "bundle": ["bundle", "results", "-o", "x.zip"],
}


@pytest.mark.parametrize("old", RENAMED)
def test_an_old_name_is_the_new_command(old):
    found, words = today(OLD.get(old, [*old.split(), "word"]))
    new = RENAMED[old].split()
    assert found == old and words[: len(new)] == new and tuple(new) in set(all_names())


def test_an_old_name_works_prints_the_new_one_and_is_not_in_help():
    assert today(OLD["train --router"])[1] == ["train", "run", "switch", "--out", "x"]
    assert today(OLD["train --study"])[1] == ["train", "study", "--quick", "routers"]
    ran = mrb("results", "--columns", "--json")
    assert "`mrb results query`" in ran.stderr and json.loads(ran.stdout)
    ran = mrb("parallel", "fabrics")
    assert not ran.stderr
    assert "decide" not in mrb("--help").stdout
    for words in all_names():
        assert today([*words, "--help"])[0] == "" == today([*words, "x"] if len(words) > 1 else words)[0], (
            words
        )


def test_a_shell_completes_commands_and_options(monkeypatch):
    def completed(*words):
        code = "from moe_routing_bench.cli import main; main()"
        asked = {
            "_MRB_COMPLETE": "complete_bash",
            "COMP_CWORD": str(len(words)),
            "COMP_WORDS": " ".join(("mrb", *words)),
        }
        program = [sys.executable, "-c", f"import sys; sys.argv[0] = 'mrb'; {code}"]
        return subprocess.run(
            program, env={**os.environ, **asked}, capture_output=True, text=True
        ).stdout.split()

    assert completed("res") == ["results"]
    assert completed("results", "") == list(GROUPS["results"].commands)
    assert completed("results", "query", "--col") == ["--columns"]


def test_help_waits_for_no_library():
    code = (
        "import sys; sys.argv = ['mrb', '--help']\n"
        "from moe_routing_bench.cli import main\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "print(*{m if m.startswith('moe_routing_bench') else m.partition('.')[0] for m in sys.modules})"
    )
    shown, _, loaded = python(code).stdout.strip().rpartition("\n")
    assert "..." not in shown.partition("Options:")[2], "a line was cut off"
    needed = {
        "moe_routing_bench",
        "moe_routing_bench.cli",
        "typer",
        "typing_extensions",
        "rich",
        "shellingham",
    }
    slow = set(loaded.split()) - set(sys.stdlib_module_names) - needed
    assert not {name for name in slow if not name.startswith(("_", "annotated_doc"))}, slow


def test_version():
    assert mrb("--version").stdout.startswith("moe-routing-bench ")


def test_the_library_alone_imports_no_command_line():
    code = "import sys, moe_routing_bench.public; print(sorted({'typer', 'rich'} & set(sys.modules)))"
    assert python(code).stdout.strip() == "[]"


def test_runs_as_a_module():
    words = [sys.executable, "-m", "moe_routing_bench", "explain", "topk", "--json"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["op"] == "topk"


def test_check_refuses_a_device_that_is_not_there():
    if not torch.cuda.is_available():
        assert "'cuda'" in refused("check", "--op", "topk", "--device", "cuda")
    assert "'gpu9'" in refused("check", "--op", "topk", "--device", "gpu9")


def test_list_models_and_cases():
    document = mrb_json("list", "cases")
    assert len(document["cases"]["seed-pack"]) == 54 and document.keys() == {"cases"}
    assert document["cases"]["seed-fused"][0]["shape"]["D"] == 7168
    text = mrb("list", "models").stdout
    assert "deepseek-v3" in text and "256 experts, 8 per token, shared expert of width 2048" in text
    assert "54 cases of pack, float16: T 8192-32768" in mrb("list", "cases").stdout


def test_workers_import_transformers_beside_the_planning_if_they_need_it(
    monkeypatch: pytest.MonkeyPatch,
):
    asked: list[tuple[str, ...]] = []
    monkeypatch.setattr(fork_server, "start_server", lambda *more: asked.append(more))
    monkeypatch.setattr(cli, "app", lambda: None)
    commands = {
        "bench layer --model olmoe-1b-7b": True,
        "bench expert_ffn --impl staged,hf_eager": True,
        "bench layer --impl staged,native": False,
        "bench layer --help": False,
        "bench topk": False,
        "sweep layer": False,
    }
    for words, wanted in commands.items():
        monkeypatch.setattr(sys, "argv", ["mrb", *words.split()])
        cli.main()
        assert len(asked) == wanted, words
        asked.clear()


def test_what_workers_import_is_what_transformers_experts_need():
    assert all(cli.TRANSFORMERS in Path(module.__file__).read_text() for module in (hf, decoder))
