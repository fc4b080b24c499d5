"""Writes and reads recorded routings in a safetensors file: write_trace, read_trace, and the checksum of ids.

expert_TK (int32 or int64) and gate_TK (float32) are required. layer_T, position_T and document_T (int64) say
where a token came from. score_TE (float32) holds the scores that were compared. The metadata entry
`moe_routing_trace` is JSON: version, num_experts, checksum (of the ids) and source. Two entries are optional:
documents (names, by the number in document_T) and content, a checksum of everything else. write_trace always
adds content.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from moe_routing_bench.core.routing import Routing
from moe_routing_bench.core.text import short
from moe_routing_bench.core.whole_files import written_whole
from moe_routing_bench.models.tracing import ModelTrace, some_numbers

VERSION = 1
ENTRY = "moe_routing_trace"
LABELS = ("layer_T", "position_T", "document_T")
OPTIONAL = (*LABELS, "score_TE")
DTYPES = {
    "expert_TK": ("I32", "I64"), "gate_TK": ("F32",), "score_TE": ("F32",),
    **dict.fromkeys(LABELS, ("I64",)),
}  # fmt: skip
MAX_HEADER_BYTES = 1 << 20  # ours has under a kilobyte; safetensors itself would parse 100 MB
MAX_LAYERS = 1024
MAX_EXPERTS = 1 << 20  # a thousand times the largest published layer; tables of E numbers stay small


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a model's router chose, token by token, and where each token came from.

    Two tokens of document 7 in layer 3 of a model with 8 experts, two chosen per token:
      routing    = expert_TK [[5, 0], [5, 2]], gate_TK [[.75, .25], [.5, .5]], num_experts 8, ragged False
      layer_T    = [3, 3]
      position_T = [0, 1]
      document_T = [7, 7]
      documents  = ()               or the names of the documents 0, 1, ...
      score_TE   = None             or the scores that were compared: -inf where an expert was ruled out
    """

    routing: Routing
    source: str  # the model, data and command it was recorded with
    checksum: str  # of all ids in the file
    layer_T: Tensor | None = None
    position_T: Tensor | None = None
    document_T: Tensor | None = None
    documents: tuple[str, ...] = ()
    score_TE: Tensor | None = None

    def by_layer(self) -> ModelTrace:
        """Returns the choices of every layer for the same tokens. Raises ValueError if tokens differ."""
        T = self.routing.num_tokens
        layer_T = torch.zeros(T, dtype=torch.int64) if self.layer_T is None else self.layer_T
        document_T = torch.zeros_like(layer_T) if self.document_T is None else self.document_T
        layers = layer_T.unique().tolist()
        if len(layers) > MAX_LAYERS:
            raise ValueError(f"the trace has {len(layers):,} layers; at most {MAX_LAYERS:,} are taken apart")
        rows = {layer: (layer_T == layer).nonzero().squeeze(1) for layer in layers}
        if not rows:
            raise ValueError("the trace holds no tokens; record some")
        first, first_row = next(iter(rows.items()))
        position_T = self.position_T
        if position_T is None:
            position_T = torch.zeros_like(layer_T)
            for row in rows.values():
                position_T[row] = torch.arange(row.numel())
        for layer, row in rows.items():
            if row.shape != first_row.shape:
                raise ValueError(
                    f"layer {layer} has {row.numel():,} tokens, layer {first} {first_row.numel():,}; "
                    "all layers must have the same"
                )
            same_T = (document_T[row] == document_T[first_row]) & (position_T[row] == position_T[first_row])
            if not bool(same_T.all()):
                t = int((~same_T).nonzero()[0])
                raise ValueError(
                    f"row {t} of layer {layer} is position {position_T[row[t]]} of document "
                    f"{document_T[row[t]]}, but of layer {first} position {position_T[first_row[t]]} of "
                    f"document {document_T[first_row[t]]}; all layers must have the same tokens in one order"
                )
        routing = self.routing
        return ModelTrace(
            names={layer: f"layer {layer}" for layer in rows},
            expert_TK={layer: routing.expert_TK[row] for layer, row in rows.items()},
            gate_TK={layer: routing.gate_TK[row] for layer, row in rows.items()},
            score_TE={} if self.score_TE is None else {k: self.score_TE[row] for k, row in rows.items()},
            position_T=position_T[first_row],
            document_T=document_T[first_row],
            num_experts=routing.num_experts,
        )

    def part(self, *, layer: int | None = None, document: int | None = None) -> Trace:
        """Returns only the tokens with these labels, in the same order; None takes any label."""
        keep_T = torch.ones(self.routing.num_tokens, dtype=torch.bool)
        for what, wanted, label_T in (
            ("layer", layer, self.layer_T),
            ("document", document, self.document_T),
        ):
            if wanted is None:
                continue
            if label_T is None:
                raise ValueError(f"the trace does not say which {what} a token is of; leave {what} out")
            # no label equals a number beyond 64 bits, and torch would refuse it
            same_T = label_T == wanted if -(2**63) <= wanted < 2**63 else torch.zeros_like(keep_T)
            if not bool(same_T.any()):
                there = label_T.unique().tolist()
                shown = f"there are {some_numbers(there)}" if there else "it holds no tokens"
                raise ValueError(f"the trace has no {what} {_short(wanted)}; {shown}")
            keep_T &= same_T
        if layer is None and document is None:
            return self
        row = keep_T.nonzero().squeeze(1)
        routing = replace(
            self.routing, expert_TK=self.routing.expert_TK[row], gate_TK=self.routing.gate_TK[row]
        )
        labels: dict[str, Any] = {
            name: None if (label := getattr(self, name)) is None else label[row] for name in OPTIONAL
        }
        return replace(self, routing=routing, **labels)


def ids_checksum(expert_TK: Tensor, num_experts: int) -> str:
    """Returns the sha256 of the sizes and of the ids as little-endian int64, the same on any platform."""
    T, K = expert_TK.shape
    digest = hashlib.sha256(f"T={T} K={K} E={num_experts}\n".encode())
    digest.update(expert_TK.detach().cpu().contiguous().numpy().astype("<i8").tobytes())
    return digest.hexdigest()


def write_trace(
    path: Path | str,
    *routings: Routing,
    source: str,
    layer_T: Tensor | None = None,
    position_T: Tensor | None = None,
    document_T: Tensor | None = None,
    documents: Sequence[str] = (),
    score_TE: Tensor | None = None,
) -> None:
    """Writes the routings in order. Labels and scores are those of all their tokens."""
    if not routings:
        raise ValueError("a trace needs at least one routing")
    if not Path(path).parent.is_dir():
        raise ValueError(f"cannot write {path}: there is no folder {Path(path).parent}")
    sizes = {(routing.num_choices, routing.num_experts) for routing in routings}
    if len(sizes) > 1:
        raise ValueError(f"the routings differ in (choices, experts): {sorted(sizes)}; write a file for each")
    num_experts = routings[0].num_experts
    tensors = {
        "expert_TK": torch.cat([routing.expert_TK for routing in routings]).cpu().contiguous(),
        "gate_TK": torch.cat([routing.gate_TK for routing in routings]).detach().float().cpu().contiguous(),
    }
    for name, label_T in zip(LABELS, (layer_T, position_T, document_T), strict=True):
        if label_T is not None:
            tensors[name] = label_T.to(torch.int64).cpu().contiguous()
    if score_TE is not None:
        tensors["score_TE"] = score_TE.detach().float().cpu().contiguous()
    _check_values(path, tensors, num_experts)
    tensors["expert_TK"] = tensors["expert_TK"].to(torch.int32)
    about: dict[str, Any] = {
        "version": VERSION,
        "num_experts": num_experts,
        "checksum": ids_checksum(tensors["expert_TK"], num_experts),
        "source": source,
    }
    if documents:
        about["documents"] = list(documents)
    about["content"] = _content_checksum(tensors, about)
    _check_words(path, about)
    # the text is encoded in JSON twice, and the tensors' own entries need room
    if len(words := json.dumps(about)) > MAX_HEADER_BYTES // 4:
        raise ValueError(f"source and documents have {len(words):,} letters, more than a reader takes")
    with written_whole(Path(path)) as part:
        save_file(tensors, part, metadata={ENTRY: words})


def read_trace(path: Path | str, *, max_bytes: int = 4 << 30) -> Trace:
    """Reads and checks a trace. Raises ValueError with a sentence if anything is wrong with it. The header is
    checked before any tensor is read, and nothing is unpickled."""
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no trace file {path}")
    if (size := path.stat().st_size) > max_bytes:
        raise ValueError(f"{path} has {size:,} bytes, over the limit of {max_bytes:,}; raise max_bytes")
    about = _check_header(path, _read_header(path, size))
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys() if name in DTYPES}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a whole safetensors file: {_short(error)}") from None
    tensors["expert_TK"] = tensors["expert_TK"].to(torch.int64)
    routing = _check_values(path, tensors, about["num_experts"])
    checksum = ids_checksum(routing.expert_TK, routing.num_experts)
    if checksum != about["checksum"]:
        raise ValueError(
            f"the expert ids in {path} have checksum {checksum[:12]}..., but it was written with "
            f"{_short(about['checksum'][:12])}...: the file was changed or damaged; record it again"
        )
    if "content" in about and _content_checksum(tensors, about) != about["content"]:
        raise ValueError(
            f"the gates, labels or words in {path} are not those it was written with: the file was changed "
            "or damaged; record it again"
        )
    return Trace(
        routing=routing,
        source=about["source"],
        checksum=checksum,
        documents=tuple(about.get("documents", ())),
        **{name: tensors[name] for name in OPTIONAL if name in tensors},
    )


def _content_checksum(tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> str:
    """Returns the sha256 of the words and of every tensor but the ids; the ids' checksum is one of the
    words."""
    known = ("version", "num_experts", "checksum", "source", "documents")
    words = {key: about[key] for key in known if key in about}
    digest = hashlib.sha256(json.dumps(words, sort_keys=True).encode())
    for name in ("gate_TK", *OPTIONAL):
        if name in tensors:
            array = tensors[name].numpy()
            digest.update(f"\n{name}\n".encode())
            digest.update(array.astype(array.dtype.newbyteorder("<")).tobytes())
    return digest.hexdigest()


def _read_header(path: Path, size: int) -> dict[str, Any]:
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{path} is not a safetensors file, or its end is missing")
        if length > MAX_HEADER_BYTES:
            raise ValueError(
                f"{path} has a header of {length:,} bytes; a trace has under {MAX_HEADER_BYTES:,}"
            )
        try:
            header = json.loads(file.read(length))
        except (ValueError, RecursionError):
            raise ValueError(f"{path} is not a safetensors file: its header is not JSON") from None
    if not isinstance(header, dict):
        raise ValueError(f"{path} is not a safetensors file: its header is not an object")
    return header


def _check_header(path: Path, header: dict[str, Any]) -> dict[str, Any]:
    """Checks version, types and shapes, and returns what the metadata says."""
    metadata = header.get("__metadata__")
    text = metadata.get(ENTRY) if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        raise ValueError(f"{path} has no {ENTRY} entry in its metadata: it is not a routing trace")
    try:
        about = json.loads(text)
    except (ValueError, RecursionError):
        raise ValueError(f"the {ENTRY} entry of {path} is not JSON") from None
    if not isinstance(about, dict) or about.get("version") != VERSION:
        version = about.get("version") if isinstance(about, dict) else None
        raise ValueError(
            f"{path} is a trace of version {_short(version)}; this library reads version {VERSION}"
        )
    _check_words(path, about)
    num_experts = about["num_experts"]
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"{path} is for {_short(num_experts)} experts; a trace has 1 to {MAX_EXPERTS:,}")
    shapes = {}
    for name, dtypes in DTYPES.items():
        entry = header.get(name)
        if entry is None and name in OPTIONAL:
            continue
        if not isinstance(entry, dict):
            raise ValueError(f"{path} has no tensor {name}; a trace needs expert_TK and gate_TK")
        if entry.get("dtype") not in dtypes:
            dtype = _short(entry.get("dtype"))
            raise ValueError(f"{name} in {path} is {dtype}; it must be {' or '.join(dtypes)}")
        shapes[name] = entry.get("shape")
    shape = shapes["expert_TK"]
    if not _is_shape(shape):
        raise ValueError(f"expert_TK in {path} has shape {_short(shape)}; it must be tokens x choices")
    if shape[1] > num_experts:
        raise ValueError(f"{path} has {_short(shape[1])} choices per token of only {num_experts} experts")
    for name, given in shapes.items():
        wanted = (
            shape if name.endswith("_TK") else [shape[0], num_experts] if name == "score_TE" else shape[:1]
        )
        if given != wanted:
            raise ValueError(
                f"{name} in {path} has shape {_short(given)}; beside {shape} ids it must be {wanted}"
            )
    return about


def _check_words(path: Path | str, about: dict[str, Any]) -> None:
    for key, wanted in (("num_experts", int), ("checksum", str), ("source", str)):
        if type(about.get(key)) is not wanted:
            raise ValueError(f"the {ENTRY} entry of {path} must have {key} ({wanted.__name__})")
    documents = about.get("documents", [])
    if not isinstance(documents, list) or not all(isinstance(name, str) for name in documents):
        raise ValueError(f"documents in the {ENTRY} entry of {path} must be a list of names")
    content = about.get("content", "")
    if not isinstance(content, str):
        raise ValueError(f"content in the {ENTRY} entry of {path} must be a checksum (str)")
    if re.search("[\ud800-\udfff]", "".join([about["source"], about["checksum"], content, *documents])):
        raise ValueError(f"the {ENTRY} entry of {path} holds half a character, which is not text")


def _is_shape(shape: Any) -> TypeGuard[list[int]]:
    """Returns whether this is tokens x choices with at least one choice, in numbers that a tensor can
    have."""
    if not isinstance(shape, list) or len(shape) != 2 or not all(type(size) is int for size in shape):
        return False
    return 0 <= shape[0] < 2**63 and 1 <= shape[1] < 2**63


def _short(value: object) -> str:
    """Makes text from the file fit for a sentence: printable and short."""
    if isinstance(value, dict) or (
        isinstance(value, list) and (len(value) > 8 or any(isinstance(item, (list, dict)) for item in value))
    ):
        return f"{'a list' if isinstance(value, list) else 'an object'} of {len(value)}"
    return short(value)


def _check_values(path: Path | str, tensors: dict[str, Tensor], num_experts: int) -> Routing:
    """Checks ids and gates, and returns the routing."""
    expert_TK, gate_TK = tensors["expert_TK"], tensors["gate_TK"]
    for name, tensor in tensors.items():
        if name in LABELS and tensor.shape != expert_TK.shape[:1]:
            raise ValueError(f"{name} has shape {list(tensor.shape)} for {expert_TK.shape[0]} tokens")
    if (score_TE := tensors.get("score_TE")) is not None:
        if tuple(score_TE.shape) != (expert_TK.shape[0], num_experts):
            raise ValueError(
                f"score_TE has shape {list(score_TE.shape)} for {expert_TK.shape[0]} tokens and "
                f"{num_experts} experts"
            )
        if bool(score_TE.isnan().any()):
            raise ValueError(f"a score of token {int(score_TE.isnan().any(1).nonzero()[0])} of {path} is NaN")
    outside_TK = (expert_TK < 0) | (expert_TK >= num_experts)
    if bool(outside_TK.any()):
        t, k = outside_TK.nonzero()[0].tolist()
        raise ValueError(
            f"token {t} of {path} chose expert {expert_TK[t, k].item()}, outside 0 .. {num_experts - 1}; "
            "a trace holds K real experts for every token"
        )
    routing = Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=num_experts, ragged=False)
    try:
        return routing.validate()
    except ValueError as error:
        raise ValueError(f"{path} does not hold a routing: {error}") from None
