"""The sweeps behind the figures of README and docs/figures.md: one `mrb sweep` for each topic.

    python measurements/sweeps.py             the commands, and how long each takes at most
    python measurements/sweeps.py run         runs them all; with names of topics, only those
    python measurements/sweeps.py keep        packs what was measured, to be committed
    python measurements/sweeps.py keep-tuned DIR   packs what `mrb tune layer --out DIR` measured
    python measurements/figures.py            derives every figure from what was packed

`run` measures into measurements/records/TOPIC/, which git ignores: stop it at any time, the same command goes
on; delete the folder to begin anew. `keep` packs records, samples and environments into records/TOPIC.tar.xz.
To look at them: mkdir r; tar xf measurements/records/grid.tar.xz -C r; mrb results --folder r
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

HERE = Path(__file__).parent
RECORDS = HERE / "records"
THREADS = 2
# what a results folder holds beside copies that can be made again
KEPT = ("environments/*.json", "session=*/records.jsonl", "session=*/samples.f64")


@dataclass(frozen=True, kw_only=True)
class Topic:
    """sweep: the words after `mrb sweep`; again: those of more sweeps into the same folder; minutes: at most,
    its cells times the seconds of each; by_case: cases may be measured one by one, on more threads too."""

    shows: str
    sweep: str
    minutes: float
    threads: int = THREADS
    again: tuple[str, ...] = ()
    by_case: bool = False

    @property
    def suites(self) -> set[str]:
        """What records of these sweeps name as their suite; by_case: what it begins with."""
        suite = self.sweep.partition(" ")[0]
        return {suite.partition("/")[0] if self.by_case else suite}

    def commands(self, out: Path | str) -> list[list[str]]:
        return [["mrb", "sweep", *shlex.split(one), "--out", str(out)] for one in (self.sweep, *self.again)]


def _sweep(what: str, seconds: int, *words: str) -> str:
    return " ".join((what, *words, f"--full --threads {THREADS} --min-rounds 8 --seconds {seconds}"))


def _dense(suite: str, seconds: int, *words: str, threads: int = 1) -> str:
    return " ".join((suite, *words, f"--full --threads {threads} --seconds {seconds}"))


def _grid_cell(E: int, D: int, factor: str) -> str:
    return _sweep(
        f"seed-grid/32x128-e{E}-d{D}-c{factor} --checked 1", 300, '--impl "native @ compact"',
        f'--impl "native @ padded(capacity_factor={factor})" --impl "native @ block(64)"',
    )  # fmt: skip


SEED_GRID = tuple(
    _grid_cell(E, D, factor) for E in (4, 8, 16) for D in (1024, 2048) for factor in ("1.0", "1.25")
)


def _beside(peer: str, store: str) -> str:
    return f"native(store={store}),{peer}(store={store})"


# half of Qwen3-30B-A3B's 128 experts
DEFAULT = (
    "expert_ffn --tokens 1,4,16,64,256,1024 --width 2048 --hidden 768 --experts 64 --topk 8 --dtype bfloat16"
)


EXPERTS = "eager_loop,hf_eager,hf_grouped_mm,hf_batched_mm,auto,frozen(auto)"
# the third of Transformers copies the weights of each token's experts
FEWER_EXPERTS = EXPERTS.replace("hf_batched_mm,", "")
FUSED = tuple(
    _sweep(f"seed-fused/{case} --memory 18", 180, f'--impl "{names}"')
    for case, names in (
        *((f"{T}x7168x256", EXPERTS if T < 4 else FEWER_EXPERTS) for T in (1, 2, 4, 8, 16, 32)),
        *((f"{T}x8192x6144", FEWER_EXPERTS) for T in (32, 128)),
    )
)


TOPICS = {
    "regret": Topic(
        shows='how much slower is `impl="auto"` than the fastest that can run?',
        sweep="regret --seconds 20 --target 0.03 --min-rounds 12",
        minutes=80,
        by_case=True,
    ),
    "default": Topic(
        shows="experts as built, frozen, and Transformers' three",
        sweep=_sweep(DEFAULT, 200, '--impl "native,frozen(native),hf_grouped_mm,hf_eager,hf_batched_mm"'),
        minutes=20,
    ),
    **{
        f"default_{store}": Topic(
            shows=f"the same experts as built and stored as {store}, with rows of 8 bits",
            sweep=_sweep(DEFAULT, 110, f'--store {store} --impl "native,native(store={store}_a8)"'),
            minutes=11,
        )
        for store in ("int8", "int4_g128")
    },
    "grid": Topic(
        shows="a layer of three models: ours, vLLM's kernel, Transformers",
        sweep=_sweep(
            "cpu-grid", 55, '--impl "auto,vllm_cpu,transformers(eager),transformers(grouped_mm)"'
        ),
        minutes=18.5,
    ),
    **{
        f"large_{model.partition('-')[0]}": Topic(
            shows=f"1,024 tokens of {model}, which the grid gives too little time",
            sweep=_sweep(
                f"layer --model {model} --tokens 1024", 90, '--impl "auto,vllm_cpu,transformers(grouped_mm)"'
            ),
            minutes=1.5,
        )
        for model in ("olmoe-1b-7b", "qwen3-30b-a3b")
    },
    "decode": Topic(
        shows="Transformers' third function, which copies weights: one token only",
        sweep=_sweep(
            "layer --model qwen3-30b-a3b --tokens 1", 40,
            '--impl "auto,transformers(batched_mm),transformers(grouped_mm)"',
        ),
        minutes=0.7,
    ),
    "skew": Topic(
        shows="the same layer under even and uneven routing",
        sweep=_sweep(
            "layer --model qwen3-30b-a3b --tokens 256", 55,
            '--workload "balanced,zipf(1.2),lognormal(maxvio=15),one_expert"',
            '--impl "auto,transformers(grouped_mm)"',
        ),
        minutes=3.7,
    ),
    "training": Topic(
        shows="forward and backward",
        sweep=_sweep(
            "layer --model granite-3-moe --tokens 256,1024", 75, '--direction train',
            '--impl "native,hf_grouped_mm,staged"',
        ),
        minutes=2.5,
    ),
    **{
        f"invariant_{model.partition('-')[0]}": Topic(
            shows=f"what the same bits in every batch cost, {model}",
            sweep=_sweep(f"layer --model {model} --tokens 1,64,512", 120, "--only batch-invariant"),
            minutes=6,
        )
        for model in ("olmoe-1b-7b", "qwen3-30b-a3b")
    },
    "layouts": Topic(
        shows="compact, padded and block on the same kernels, under three kinds of routing",
        sweep=_sweep(
            "layer --tokens 2048 --width 1024 --hidden 512 --experts 16,64 --topk 2",
            50,
            '--workload "uniform,zipf(1.2),lognormal(maxvio=2)"',
            '--impl "native @ compact" --impl "native @ padded(capacity_factor=1)"',
            '--impl "native @ padded(capacity_factor=1.25)" --impl "native @ block(64)"',
            '--impl "staged(grouped_gemm=padded_bmm) @ padded(capacity_factor=1.25)"',
        ),
        minutes=5,
    ),
    "pack": Topic(
        shows="dispatch and combine, the whole grid of the original plan, with both bandwidths",
        sweep=_sweep("seed-pack", 25, '--checked 1 --impl "native+native,native_reused+native_reused"'),
        minutes=22.5,
    ),
    "plain": Topic(
        shows="dispatch and combine against plain torch, one cell: it takes seconds a call",
        sweep=_sweep(
            "seed-pack/16384x4096-e128-k2", 60,
            '--checked 1 --impl "native+native,index_select+gather_sum,index_select+index_add"',
        ),
        minutes=1,
    ),
    "topk": Topic(
        shows="the K largest of E scores",
        sweep=_sweep("topk-grid", 6, '--impl "sort,torch_topk,packed_key"'),
        minutes=2.7,
    ),
    "routing": Topic(
        shows="a layer without its experts: top-k, plan, dispatch, combine",
        sweep=_sweep(
            "seed-routing/16384-e128", 60,
            '--checked 1 --impl "auto,packed_key+native+native+native,torch_topk+native+native+native"',
        ),
        minutes=1,
    ),
    **{
        f"stored_{name}": Topic(
            shows=f"experts of {model} as {store}: rows in bfloat16 and in 8 bits, beside bfloat16 weights",
            sweep=_sweep(
                f"expert_ffn --model {model} --tokens {tokens}", 110,
                f'--store {store} --cache weights-cold',
                f'--impl "native,native(store={store}),native(store={store}_a8)"',
            ),
            minutes=round(110 / 60 * len(tokens.split(",")), 1),
        )
        for name, model, store, tokens in (
            ("int8", "qwen3-30b-a3b", "int8", "1,16,64,256,1024"),
            ("int4_g128", "qwen3-30b-a3b", "int4_g128", "1,16,64,256,1024"),
            ("olmoe", "olmoe-1b-7b", "int4_g128", "1,64,1024,4096"),
            ("gpt_oss", "gpt-oss-20b", "mxfp4", "1,64,1024"),
        )
    },
    **{
        f"peers_{name}": Topic(
            shows=f"experts of {model} as {store}: ours and {of}",
            sweep=_sweep(
                f"expert_ffn --model {model} --tokens 1,64,1024", seconds,
                f'--store {store} --cache weights-cold --impl "{impls}"',
                *(["--include-path examples/kt_kernel"] if "kt(" in impls else []),
            ),
            minutes=seconds / 20,
        )
        for name, model, store, seconds, of, impls in (
            ("q8_0", "qwen3-30b-a3b", "q8_0", 80, "llama.cpp's", _beside("llama_cpp", "q8_0_a8")),
            ("q4_k", "qwen3-30b-a3b", "q4_k", 80, "llama.cpp's", _beside("llama_cpp", "q4_k_a8")),
            ("mxfp4", "qwen3-30b-a3b", "mxfp4", 160, "llama.cpp's, KTransformers'",
             f'{_beside("llama_cpp", "mxfp4_a8")},kt(store=mxfp4)'),
            ("int8", "qwen3-30b-a3b", "int8", 110, "KTransformers'", _beside("kt", "int8_a8")),
            ("int4_g32", "qwen3-30b-a3b", "int4_g32", 130, "KTransformers'", _beside("kt", "int4_g32_a8")),
            ("fp8_block", "qwen3-30b-a3b", "fp8_block", 120, "KTransformers'", _beside("kt", "fp8_block")),
            ("olmoe", "olmoe-1b-7b", "q4_k", 80, "llama.cpp's", _beside("llama_cpp", "q4_k_a8")),
        )
    },
    "experts": Topic(
        shows="the same experts in bfloat16: ours and vLLM's kernel",
        sweep=_sweep(
            "expert_ffn --model qwen3-30b-a3b --tokens 1,16,64,256,1024", 60,
            '--cache weights-cold --impl "native,vllm_cpu"',
        ),
        minutes=5,
    ),
    "soft": Topic(
        shows="Soft-MoE against top-k, with the time of its write-back",
        sweep=_sweep("soft-moe", 20, '--router "softmax_topk,soft_moe(slots_per_expert=8)" --stages'),
        minutes=0.7,
    ),
    "seed-attention": Topic(
        shows="attention: plain, torch's and ours; decoding with cold keys and values",
        sweep=_dense("seed-attention", 150, "--min-rounds 8 --impl plain,sdpa,sdpa_folded,flex,native"),
        again=tuple(
            _dense(f"seed-attention/decode-{M}-{dtype}", 60, "--cache cold --impl sdpa_folded,sdpa,native")
            for M in (1024, 8192) for dtype in ("float32", "bfloat16")
        ),
        minutes=39,
        threads=1,
        by_case=True,
    ),
    "seed-linear": Topic(
        shows="the four products of three decoders, cold weights",
        sweep=_dense(
            "seed-linear", 45, "--cache weights-cold",
            '--impl "torch,mkl_packed,onednn_packed,inductor_frozen,native,frozen(native)"',
        ),
        minutes=18,
        threads=1,
        by_case=True,
    ),
    "seed-rmsnorm": Topic(
        shows="RMSNorm of 65,536 tokens", sweep=_dense("seed-rmsnorm", 90), minutes=3, threads=1, by_case=True
    ),
    "seed-dense": Topic(
        shows="a dense decoder block: torch, torch.compile, Transformers and ours",
        sweep=_dense("seed-dense", 90, threads=THREADS),
        minutes=9,
        by_case=True,
    ),
    "whole-model": Topic(
        shows="a model of four layers in Transformers: their experts and ours, then all ours",
        sweep=_dense("whole-model/decode-128", 150, threads=THREADS),
        again=(
            _dense("whole-model/decode-2048", 150, threads=THREADS),
            _dense(
                "whole-model/prompt-128", 420, "--checked 1",
                '--impl "transformers,transformers(experts=eager),ours,frozen(ours)"',
                '--impl "frozen(ours(attention=ours,linears=True))"', threads=THREADS,
            ),
            *(
                _dense(
                    f"whole-model/decode-128 --store {store}", 180,
                    f'--impl "transformers,ours(impl=native(store={store}))"',
                    f'--impl "ours(impl=native(store={store}_a8))"',
                    f'--impl "ours(attention=ours,linears=True,impl=native(store={store}_a8))"',
                    threads=THREADS,
                )
                for store in ("int8", "int4_g32")
            ),
        ),
        minutes=18,
        by_case=True,
    ),
    "seed-qwen": Topic(
        shows="three layers of the original plan at 128 tokens: plain torch, Transformers and ours",
        sweep=_sweep(f'seed-qwen --dtype float32 --impl "{EXPERTS}"', 80),
        again=(_sweep(f'seed-qwen --dtype bfloat16 --impl "{EXPERTS}"', 80),),
        minutes=8,
    ),
    "seed-fused": Topic(
        shows="experts of the original plan at 1 to 128 tokens; two of ten cases need more than 24 GB",
        sweep=FUSED[0],
        again=FUSED[1:],
        minutes=24,
        by_case=True,
    ),
    "seed-balance": Topic(
        shows="uneven load against time, in three layouts",
        sweep=(
            'seed-balance --impl auto --layout "compact,padded(capacity_factor=1.25),block(64)" '
            f"--threads {THREADS} --seconds 45"
        ),
        minutes=15,
        by_case=True,
    ),
    "seed-grid": Topic(
        shows="padded layers of the original plan in three layouts, the cells of 32 x 128 tokens",
        sweep=SEED_GRID[0],
        again=SEED_GRID[1:],
        minutes=60,
        by_case=True,
    ),
}  # fmt: skip


def pack(folder: Path, archive: Path) -> int:
    """Pack a results folder; the same files give the same bytes. Returns how many files."""
    paths = sorted(path for pattern in KEPT for path in folder.glob(pattern))
    with tarfile.open(archive, "w:xz") as tar:
        for path in paths:
            entry = tarfile.TarInfo(path.relative_to(folder).as_posix())
            entry.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(entry, file)
    return len(paths)


def unpack(archive: Path, folder: Path) -> Path:
    with tarfile.open(archive, "r:xz") as tar:
        tar.extractall(folder, filter="data")
    return folder


app = typer.Typer(add_completion=False, help=__doc__)
Names = Annotated[list[str] | None, typer.Argument(help="Topics; none named: all.")]


@app.callback(invoke_without_command=True)
def show(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        for name, topic in TOPICS.items():
            print(f"# {name}: {topic.shows}; at most {topic.minutes:g} minutes")
            for words in topic.commands(f"measurements/records/{name}"):
                print(shlex.join(words))
        print(f"# in all at most {sum(topic.minutes for topic in TOPICS.values()):.0f} minutes")


@app.command()
def run(names: Names = None) -> None:
    """Measure, each topic into its own folder."""
    for name in _chosen(names):
        for words in TOPICS[name].commands(RECORDS / name):
            print(shlex.join(words), flush=True)
            ran = subprocess.run((sys.executable, "-m", "moe_routing_bench", *words[1:]))
            if ran.returncode not in (0, 1):  # 1: something was not timed, and the records say why
                raise SystemExit(ran.returncode)


@app.command()
def keep(names: Names = None) -> None:
    """Pack the folders that `run` left."""
    for name in _chosen(names):
        if (RECORDS / name).is_dir():
            _pack(RECORDS / name, RECORDS / f"{name}.tar.xz")


@app.command()
def keep_tuned(folders: list[Path]) -> None:
    """Pack results of `mrb tune layer`: tuned/olmoe becomes records/tuned-olmoe.tar.xz."""
    for folder in folders:
        if not (folder / "decisions.json").is_file():
            raise typer.BadParameter(
                f"{folder} has no decisions.json; `mrb tune layer --out {folder}` writes it"
            )
        _pack(folder, RECORDS / f"tuned-{folder.resolve().name}.tar.xz")


def _pack(folder: Path, archive: Path) -> None:
    files = pack(folder, archive)
    print(f"{archive}: {files} files, {archive.stat().st_size / 1e3:.0f} kB")


def _chosen(names: list[str] | None) -> list[str]:
    if unknown := set(names or ()) - set(TOPICS):
        raise typer.BadParameter(f"there is no topic {', '.join(unknown)}; there are {', '.join(TOPICS)}")
    return names or list(TOPICS)


if __name__ == "__main__":
    app()
