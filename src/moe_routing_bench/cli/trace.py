"""mrb model trace record and show: writes the routing of a real model into a file, and shows it.

mrb model trace import, check and diff: reads routes that serving engines captured, finds faults in them, and
compares two of them.
"""

from __future__ import annotations

import importlib.util
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.table import Table
from rich.text import Text
from torch import Tensor

from moe_routing_bench.cli.options import Json, fail, show_json, user_mistakes
from moe_routing_bench.core.dtypes import DTYPES
from moe_routing_bench.core.names import option_numbers
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.core.text import printable
from moe_routing_bench.models.tracing import ModelTrace, pieces, record_trace
from moe_routing_bench.report.console import bar, heading, show, two_columns
from moe_routing_bench.report.pictures import check_picture_path
from moe_routing_bench.report.trace_pictures import draw_trace
from moe_routing_bench.train.records import SETTINGS, load_model
from moe_routing_bench.workloads.serving import read_requests
from moe_routing_bench.workloads.trace import MAX_EXPERTS, Trace, read_trace, write_trace
from moe_routing_bench.workloads.trace_check import Fault, Recording, check
from moe_routing_bench.workloads.trace_diff import Difference, TraceDiff, diff
from moe_routing_bench.workloads.trace_summary import LayerSummary, summarise

Experts = Annotated[
    int | None, typer.Option(help="Experts per layer of the model; engines do not report it.")
]
NumLayers = Annotated[
    int | None, typer.Option(help="Layers in the engine's array, dense ones too; needed for SGLang.")
]
Choices = Annotated[int | None, typer.Option(help="Experts per token; needed for SGLang.")]
Start = Annotated[int, typer.Option(help="Position of the first row, if the prompt was left out.")]
Layers = Annotated[str | None, typer.Option(help="Only these layers of the array: 3-60. Default: all.")]


def import_command(
    file: Annotated[
        Path, typer.Argument(help="What vLLM or SGLang returned: .npy, a JSON response, or a list.")
    ],
    out: Annotated[Path, typer.Option(help="The trace to write, usually NAME.safetensors.")],
    experts: Experts = None,
    layers: Layers = None,
    num_layers: NumLayers = None,
    choices: Choices = None,
    start: Start = 0,
    first_layer: Annotated[
        int,
        typer.Option(help="The model's number of the array's first layer, if the array has only MoE layers."),
    ] = 0,
) -> None:
    """Make a trace from the experts that a serving engine returned. It is refused if `check` finds a fault.

    \b
    Examples:
      mrb model trace import vllm.json --experts 128 --out r.safetensors
      mrb model trace import sglang.json --experts 256 --num-layers 61 --choices 8 \\
        --layers 3-60 --out r.safetensors

    Engines return no gates, so every gate of the trace is 1 / K.
    """
    with user_mistakes():
        recording = _recording(file, experts, layers, num_layers, choices, start)
        if faults := check(recording):
            more = f" (and {len(faults) - 1} more: mrb model trace check)" if len(faults) > 1 else ""
            raise ValueError(f"{file} has a fault: {faults[0].sentence}{more}")
        if not out.parent.is_dir():
            raise ValueError(f"{out.parent} is not a folder; make it first")
        if not 0 <= first_layer < 10_000:
            raise ValueError(f"--first-layer is {first_layer}; it must be between 0 and 9,999")
        _write(recording, file, out, first_layer)
    show(
        f"{_file_sizes(recording)}: {out.stat().st_size:,} bytes in {out}. "
        f"`mrb model trace show {out}` shows them."
    )


def check_command(
    file: Annotated[Path, typer.Argument(help="A trace, or what vLLM or SGLang returned.")],
    experts: Experts = None,
    layers: Layers = None,
    num_layers: NumLayers = None,
    choices: Choices = None,
    start: Start = 0,
    as_json: Json = False,
) -> None:
    """Find faults in captured routes: zeros, old rows, repeated ids, shifts. Exit code 1 if there is one.

    \b
    Examples:
      mrb model trace check r.safetensors
      mrb model trace check vllm.json --experts 128
    """
    with user_mistakes():
        if _is_trace(file):
            trace = read_trace(file)
            try:
                recording = Recording.of_trace(trace)
                faults = check(recording)
            except ValueError as error:
                recording, faults = None, [Fault(kind="labels", sentence=str(error))]
        else:
            recording = _recording(file, experts, layers, num_layers, choices, start)
            faults = check(recording)
    if as_json:
        show_json({"file": str(file), "faults": [asdict(fault) for fault in faults]})
    elif faults:
        show(f"{len(faults)} fault{'s' if len(faults) > 1 else ''} in {file.name}:")
        show(*(f"  {fault.kind}: {fault.sentence}" for fault in faults))
    elif recording is not None:
        show(f"no fault found in {file.name}: {_file_sizes(recording)}")
    raise typer.Exit(1 if faults else 0)


def diff_command(
    a: Annotated[
        Path, typer.Argument(help="A trace, preferably with scores (mrb model trace record --scores).")
    ],
    b: Annotated[Path, typer.Argument(help="A trace of the same tokens.")],
    as_json: Json = False,
) -> None:
    """Show where two recordings of the same tokens differ, by layer and position, with the margin of flips.

    \b
    Examples:
      mrb model trace diff rollout.safetensors trainer.safetensors
    """
    with user_mistakes():
        difference = diff(read_trace(a), read_trace(b))
    if as_json:
        show_json(
            {
                "whole": asdict(difference.whole),
                "layers": [{"layer": layer, **asdict(one)} for layer, one in difference.by_layer.items()],
                "positions": [
                    {"first": first, "last": last, **asdict(one)}
                    for (first, last), one in difference.by_position.items()
                ],
                "only_a": difference.only_a,
                "only_b": difference.only_b,
                "scores_of": difference.scores_of,
            }
        )
        return
    layers = {str(layer): one for layer, one in difference.by_layer.items()} | {"all": difference.whole}
    spans = {_span(*span): one for span, one in difference.by_position.items()}
    show(_file_table("layer", layers, difference), "", _file_table("positions", spans, difference), "")
    show(*(Text(line, "dim") for line in _file_notes(difference)))


def _file_sizes(recording: Recording) -> str:
    rows, requests = sum(len(request.ids) for request in recording.requests), len(recording.requests)
    layers = len(recording.layers)
    return (
        f"{rows:,} tokens of {requests:,} request{'s' if requests > 1 else ''} in {layers} "
        f"layer{'s' if layers > 1 else ''}"
    )


def _file_table(first: str, rows: dict[str, Difference], difference: TraceDiff) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = [first, "tokens", "choices differ", "tokens differ"]
    names += ["margin", "usual margin"] if difference.scores_of else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    for name, one in rows.items():
        cells = [name, f"{one.tokens:,}", f"{100 * one.choices:.3f} %", f"{100 * one.flipped:.2f} %"]
        if difference.scores_of:
            cells += ["" if margin is None else f"{margin:.2g}" for margin in (one.margin, one.usual)]
        table.add_row(*cells)
    return table


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


def _file_notes(difference: TraceDiff) -> list[str]:
    notes = ["choices differ: experts that A chose for a token and B did not, in any order."]
    if difference.scores_of:
        notes.append(
            f"margin: the score of a choice minus the score of its replacement, by {difference.scores_of}'s "
            "scores, median over flips; usual margin: the score of the last chosen expert minus the first "
            "not chosen, median over tokens."
        )
    else:
        notes.append("Neither trace has scores, so there are no margins; record with --scores.")
    if difference.only_a or difference.only_b:
        notes.append(
            f"Not compared: {difference.only_a:,} tokens that only A has, "
            f"{difference.only_b:,} that only B has."
        )
    return notes


def read_layers(text: str) -> list[int]:
    return option_numbers("layers", text, "0,4,8-11", most=9_999)


def _is_trace(file: Path) -> bool:
    """Returns whether it is a safetensors file: these begin with the length of a JSON header."""
    if not file.is_file():
        raise ValueError(f"there is no file {file}")
    with file.open("rb") as opened:
        return opened.read(9)[8:] == b"{" or file.suffix == ".safetensors"


def _recording(
    file: Path,
    experts: int | None,
    layers: str | None,
    num_layers: int | None,
    choices: int | None,
    start: int,
) -> Recording:
    if experts is None:
        raise ValueError("engines do not report how many experts a layer has; give --experts")
    if not 1 <= experts <= MAX_EXPERTS:
        raise ValueError(f"--experts is {experts}; it must be between 1 and {MAX_EXPERTS:,}")
    requests = read_requests(file, num_layers=num_layers, choices=choices, start=start)
    there = requests[0].ids.shape[1]
    wanted = [*range(there)] if layers is None else read_layers(layers)
    if missing := [layer for layer in wanted if layer >= there]:
        raise ValueError(f"--layers names {missing[0]}, but {file} has {there} layers, counted from 0")
    if layers is not None:
        requests = [replace(request, ids=request.ids[:, wanted]) for request in requests]
    return Recording(requests=requests, layers=wanted, num_experts=experts)


def _write(recording: Recording, file: Path, out: Path, first_layer: int) -> None:
    requests, layers, E = recording.requests, recording.layers, recording.num_experts
    ids = np.concatenate([request.ids for request in requests]).astype(np.int64)
    T, _, K = ids.shape
    position_T = torch.cat([torch.arange(len(r.ids)) + r.start for r in requests])
    document_T = torch.arange(len(requests)).repeat_interleave(torch.tensor([len(r.ids) for r in requests]))
    gate_TK = torch.full((T, K), 1 / K)
    experts = [torch.from_numpy(ids[:, at].copy()) for at in range(len(layers))]
    write_trace(
        out,
        *(Routing(expert_TK=one, gate_TK=gate_TK, num_experts=E, ragged=False) for one in experts),
        source=f"mrb model trace import {file.name}: experts of a serving engine; no gates (1 / K each)",
        layer_T=(first_layer + torch.tensor(layers)).repeat_interleave(T),
        position_T=position_T.repeat(len(layers)),
        document_T=document_T.repeat(len(layers)),
        documents=[request.name for request in requests],
    )


BYTES = "bytes"
FORMS = ("auto", *DTYPES)
# bytes of text to read per token; the tokens of every common tokenizer are shorter on average
BYTES_PER_TOKEN = 64
MAX_TOKENS = 1 << 24
SHOWN_DOCUMENTS = 12
MAX_LETTERS = 500  # of text from a file or an error

trace_app = typer.Typer(
    no_args_is_help=True,
    help="Record, show, check and compare which experts a model chooses.",
    context_settings={"help_option_names": ["-h", "--help"]},
)
trace_app.command("import")(import_command)
trace_app.command("check")(check_command)
trace_app.command("diff")(diff_command)


@trace_app.command("record")
def record_command(
    model: Annotated[
        str, typer.Option(help="A Transformers checkpoint, a name on the Hub, or a run of mrb train.")
    ],
    text: Annotated[list[Path], typer.Option(help="A UTF-8 text to read. Repeatable: each is a document.")],
    out: Annotated[Path, typer.Option(help="The file to write, usually NAME.safetensors.")],
    tokens: Annotated[int, typer.Option(help="Total number of tokens, shared evenly by the texts.")] = 8192,
    batch: Annotated[int, typer.Option(help="Pieces of text that the model reads together.")] = 4,
    sequence: Annotated[int, typer.Option(help="Tokens in a piece, which the model reads at once.")] = 512,
    layers: Annotated[
        str | None, typer.Option(help="Only these layers: 0,4,8-11. Default: all MoE layers.")
    ] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(help="A folder or name; `bytes`: each byte is a token. Default: the model's own."),
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto: the checkpoint's; float32, bfloat16, float16.")] = "auto",
    scores: Annotated[
        bool,
        typer.Option(
            "--scores", help="Also keep the routers' scores, for the margins of mrb model trace diff."
        ),
    ] = False,
) -> None:
    """Run a model on texts and record the choices of every MoE layer, with gates, positions and documents.

    \b
    Examples:
      mrb model trace record --model ./Qwen3-30B-A3B --text a.txt --out t.safetensors
      mrb model trace record --model ./OLMoE-1B-7B --text law.txt --text code.txt \\
          --tokens 65536 --layers 0,7,15 --out olmoe.safetensors

    Replay it in any benchmark: --workload "trace(t.safetensors,layer=3)".
    """
    with _mistakes():
        _check_record(model, text, out, tokens, batch, sequence, dtype)
        if tokenizer is None and _is_run(Path(model).expanduser()):
            tokenizer = BYTES
        wanted = None if layers is None else read_layers(layers)
        loaded = loaded_model(model, dtype)
        share = math.ceil(tokens / len(text))
        documents = [_tokens_of(path, share, tokenizer or model, loaded) for path in text]
        total = min(tokens, sum(document.numel() for document in documents))
        with bar(f"reading {len(text)} text{'s' if len(text) > 1 else ''}", "tokens") as shown:
            trace = record_trace(
                loaded,
                pieces(documents, batch=batch, sequence=sequence),
                layers=wanted,
                max_tokens=total,
                on_tokens=lambda done: shown.update(done, total),
                scores=scores,
            )
        names = [path.name for path in text]
        source = _source(model, tokenizer, dtype, names, batch, sequence)
        write_trace(
            out, *trace.routings(), source=source, documents=names, score_TE=trace.scores(), **trace.labels()
        )
    show(_written(trace, out))


@trace_app.command("show")
def show_command(
    file: Annotated[Path, typer.Argument(help="A file that `mrb model trace record` wrote.")],
    picture: Annotated[Path | None, typer.Option(help="Also draw it into this .png, .svg or .pdf.")] = None,
    layer: Annotated[
        int | None, typer.Option(help="The layer whose pairs of experts are drawn. Default: the middle one.")
    ] = None,
    document: Annotated[int | None, typer.Option(help="Only the tokens of this document.")] = None,
    as_json: Json = False,
) -> None:
    """Show a recorded routing: load, entropy, dead experts, gates, and experts kept from token to token.

    \b
    Examples:
      mrb model trace show t.safetensors
      mrb model trace show t.safetensors --document 1 --picture t.png --layer 3
    """
    with _mistakes():
        if picture is not None:
            check_picture_path(picture)
        trace = read_trace(file).part(document=document)
        summaries = summarise(trace)
        if picture is not None:
            draw_trace(
                trace, summaries, picture, title=f"{printable(file.name)}: {_sizes(trace)}", layer=layer
            )
    if as_json:
        show_json(_document(trace, summaries))
        return
    show(
        heading(printable(file.name), _sizes(trace)),
        _facts(trace),
        "",
        _table(trace, summaries),
    )
    show("", *(Text(line, "dim") for line in _notes(trace, summaries)))
    if picture is not None:
        show(f"The picture is in {picture}.")


@contextmanager
def _mistakes() -> Iterator[None]:
    with user_mistakes():
        try:
            yield
        except (NotImplementedError, OSError) as reason:
            fail(_first_line(reason))


def _first_line(error: Exception) -> str:
    """Returns the first line of an error. Errors of libraries have many lines; the first says what
    happened."""
    return printable(str(error).strip().partition("\n")[0], MAX_LETTERS) or type(error).__name__


def _check_record(
    model: str, text: list[Path], out: Path, tokens: int, batch: int, sequence: int, dtype: str
) -> None:
    """Checks the options before a model is loaded, because loading may take minutes."""
    for name, value, most in (
        ("tokens", tokens, MAX_TOKENS),
        ("batch", batch, 4096),
        ("sequence", sequence, 2**20),
    ):
        if not 1 <= value <= most:
            raise ValueError(f"--{name} is {value}; it must be between 1 and {most:,}")
    if dtype not in FORMS:
        raise ValueError(f"--dtype is {dtype!r}; it must be one of {', '.join(FORMS)}")
    for path in text:
        if not path.is_file():
            raise ValueError(f"there is no text file {path}")
    if tokens < len(text):
        raise ValueError(f"{tokens} tokens cannot be shared by {len(text)} texts; give a larger --tokens")
    if not out.parent.is_dir():
        raise ValueError(f"{out.parent} is not a folder; make it first")
    if out.is_dir():
        raise ValueError(f"{out} is a folder; name a file in it")
    if not _is_run(Path(model).expanduser()) and importlib.util.find_spec("transformers") is None:
        raise ValueError("recording a model needs transformers; pip install 'moe-routing-bench[hf]'")


def _is_run(folder: Path) -> bool:
    """Returns whether `mrb train` wrote this folder."""
    return (folder / SETTINGS).is_file()


def loaded_model(name: str, dtype: str) -> Any:
    """Loads a run of `mrb train`, a Transformers checkpoint or a name on the Hub, without its code."""
    folder = Path(name).expanduser()
    if _is_run(folder):
        return load_model(folder)
    looks_local = name.startswith(("/", ".", "~")) or name.count("/") > 1
    if looks_local and not (folder / "config.json").is_file():
        raise ValueError(f"{name} holds no checkpoint: there is no config.json in it")
    from transformers import AutoModelForCausalLM

    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()
    where = str(folder) if folder.is_dir() else name
    try:
        # a pickle can run any code, and so can code that comes with a model
        return AutoModelForCausalLM.from_pretrained(
            where, dtype=dtype, use_safetensors=True, trust_remote_code=False
        )
    except Exception as error:  # errors of checkpoints have no common class
        raise ValueError(f"cannot load the model {name}: {_first_line(error)}") from error


def _tokens_of(path: Path, count: int, tokenizer: str, model: Any) -> Tensor:
    with path.open("rb") as file:
        content = file.read(count * BYTES_PER_TOKEN if tokenizer != BYTES else count)
    if tokenizer == BYTES:
        ids = list(content)
    else:
        from transformers import AutoTokenizer

        try:
            reader = AutoTokenizer.from_pretrained(tokenizer, trust_remote_code=False)
        except Exception as error:  # as for the model
            raise ValueError(
                f"cannot load the tokenizer {tokenizer}: {_first_line(error)}; name another with --tokenizer"
            ) from error
        ids = reader(content.decode("utf-8", errors="replace"), verbose=False)["input_ids"][:count]
    if not content:
        raise ValueError(f"{path} holds no text")
    if not ids:
        # Transformers makes an empty tokenizer for a folder without one
        raise ValueError(f"the tokenizer {tokenizer} makes no token of {path}; name another with --tokenizer")
    known = model.get_input_embeddings().num_embeddings
    if max(ids) >= known:
        raise ValueError(
            f"the tokenizer {tokenizer} gives token {max(ids)}, but the model knows 0 to {known - 1}; name "
            "the one it was trained with: --tokenizer"
        )
    return torch.tensor(ids)


def _source(
    model: str, tokenizer: str | None, dtype: str, names: list[str], batch: int, sequence: int
) -> str:
    source = (
        f"mrb model trace record --model {model} --tokenizer {tokenizer or model} --dtype {dtype} "
        f"--batch {batch} --sequence {sequence}; texts {', '.join(names)}; {_library(model)}"
        f"torch {torch.__version__}"
    )
    return printable(source, MAX_LETTERS)


def _library(model: str) -> str:
    if _is_run(Path(model).expanduser()):
        return ""
    import transformers

    return f"transformers {transformers.__version__}, "


def _written(trace: ModelTrace, out: Path) -> str:
    K = next(iter(trace.expert_TK.values())).shape[1]
    return (
        f"{trace.num_tokens:,} tokens in {len(trace.names)} layers, {trace.num_experts} experts, {K} per "
        f"token: {out.stat().st_size:,} bytes in {out}. `mrb model trace show {out}` shows them."
    )


def _sizes(trace: Trace) -> str:
    routing = trace.routing
    layers = 1 if trace.layer_T is None else trace.layer_T.unique().numel()
    return (
        f"{routing.num_tokens // layers:,} tokens in {layers} layer{'s' if layers > 1 else ''}, "
        f"{routing.num_experts} experts, {routing.num_choices} per token"
    )


def _facts(trace: Trace) -> Table:
    table = two_columns(10)
    table.add_row(Text("  source", "dim"), printable(trace.source, MAX_LETTERS))
    if trace.document_T is not None:
        numbers, counts = trace.document_T.unique(return_counts=True)
        layers = 1 if trace.layer_T is None else trace.layer_T.unique().numel()
        shown = [
            f"{number} {_named(trace, number)}({count // layers:,} tokens)"
            for number, count in zip(
                numbers[:SHOWN_DOCUMENTS].tolist(), counts[:SHOWN_DOCUMENTS].tolist(), strict=True
            )
        ]
        more = [f"... {numbers.numel():,} in all"] if numbers.numel() > SHOWN_DOCUMENTS else []
        table.add_row(Text("  documents", "dim"), ", ".join(shown + more))
    table.add_row(Text("  checksum", "dim"), trace.checksum[:12])
    return table


def _named(trace: Trace, number: int) -> str:
    known = 0 <= number < len(trace.documents)
    return f"{printable(trace.documents[number], MAX_LETTERS)} " if known else ""


def _table(trace: Trace, summaries: list[LayerSummary]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    names = ["layer", "max/mean", "entropy", "dead", "Gini", "top gate"]
    names += ["kept", "by document", "by chance"] if summaries[0].overlap else []
    names += ["document bits"] if summaries[0].document_bits is not None else []
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    most = math.log2(trace.routing.num_experts) or 1.0
    for one in summaries:
        cells = [
            "all" if one.layer is None else str(one.layer), f"{one.max_over_mean:.2f}",
            f"{100 * one.entropy_bits / most:.1f} %", str(one.dead_experts), f"{one.gini:.2f}",
            f"{one.top_gate:.2f}",
        ]  # fmt: skip
        if "kept" in names:
            shares = (
                (one.overlap.kept, one.overlap.by_document, one.overlap.by_chance)
                if one.overlap
                else (None,) * 3
            )
            cells += ["" if share is None else f"{100 * share:.1f} %" for share in shares]
        if "document bits" in names:
            cells.append("" if one.document_bits is None else f"{one.document_bits:.3f}")
        table.add_row(*cells)
    return table


def _notes(trace: Trace, summaries: list[LayerSummary]) -> list[str]:
    E, K = trace.routing.num_experts, trace.routing.num_choices
    notes = [
        f"max/mean: load of the busiest expert divided by the mean. entropy: 100 % is log2({E}) bits. "
        f"top gate: the largest gate divided by the sum of a token's {K} gates."
    ]
    if summaries[0].overlap:
        notes.append(
            "kept: experts that a token shares with the token before. by document, by chance: the same for "
            f"any two tokens of the document or layer; {100 * K / E:.1f} % if all experts were used equally."
        )
    if summaries[0].document_bits is not None:
        notes.append("document bits: mutual information between expert and document.")
    return notes


def _document(trace: Trace, summaries: list[LayerSummary]) -> dict[str, Any]:
    return {
        "source": trace.source,
        "checksum": trace.checksum,
        "experts": trace.routing.num_experts,
        "choices": trace.routing.num_choices,
        "documents": list(trace.documents),
        "layers": [asdict(one) for one in summaries],
    }
