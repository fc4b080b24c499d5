"""Bundles: honest ones open, and whatever else somebody sends is refused in a sentence."""

from __future__ import annotations

import hashlib
import io
import json
import random
import stat
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from command_line import mrb, mrb_json
from damaged_files import assert_one_sentence
from made_sweeps import MadeUp, made_cells
from moe_routing_bench.bench.runner import run_cell
from moe_routing_bench.bench.verdict import compare
from moe_routing_bench.fleet import bundle
from moe_routing_bench.fleet.bundle import MANIFEST, make_bundle, opened_bundle
from moe_routing_bench.fleet.executor import LocalExecutor
from moe_routing_bench.fleet.sweep import run_sweep
from moe_routing_bench.results.folder import iterate
from moe_routing_bench.results.recompute import CLAIMED
from moe_routing_bench.results.remeasure import measure_again
from sweep_driver import make_cells

Files = dict[str, bytes]


@pytest.fixture(scope="module")
def honest(tmp_path_factory) -> Files:
    """The files of an honest bundle."""
    place = tmp_path_factory.mktemp("bundle")
    list(run_sweep(made_cells(3), place / "results", MadeUp(failing=[101], twin=True)))
    make_bundle(place / "results", place / "a.zip", made_by="test")
    with zipfile.ZipFile(place / "a.zip") as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def sealed(files: Files) -> Files:
    """With a manifest that has their sizes and hashes, as a forger would make it."""
    manifest = json.loads(files[MANIFEST])
    manifest["files"] = {
        name: {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in files.items()
        if name != MANIFEST
    }
    return {**files, MANIFEST: json.dumps(manifest).encode()}


def write(files: Files, path: Path, *, seal: bool = True) -> Path:
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in (sealed(files) if seal else files).items():
            archive.writestr(name, data)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(ValueError) as caught, opened_bundle(path):
        pass
    assert_one_sentence(caught.value, path)
    return str(caught.value)


def one(files: Files, ending: str) -> str:
    return next(name for name in files if name.endswith(ending))


def test_an_honest_bundle_opens_with_the_same_records_and_is_the_same_bytes_each_time(honest, tmp_path):
    with opened_bundle(write(honest, tmp_path / "a.zip")) as (folder, manifest):
        assert len(list(iterate(folder))) == 9 and len(manifest.machines) == 1
        make_bundle(folder, tmp_path / "b.zip", made_by="test")
        make_bundle(folder, tmp_path / "c.zip", made_by="test")
    assert (tmp_path / "b.zip").read_bytes() == (tmp_path / "c.zip").read_bytes()
    assert not folder.exists()


def _edited(files: Files, ending: str, change: Callable[[bytes], bytes]) -> Files:
    name = one(files, ending)
    return {**files, name: change(files[name])}


def _scaled(line: bytes) -> bytes:
    """All times of a record a tenth, consistently: only the samples contradict it."""
    record = json.loads(line)
    if record["timing"]:
        for name in ("median", "mean", "std", "least", "most", "p05", "p25", "p75", "p95"):
            record["timing"][name] /= 10
        for name in ("tokens_per_second", "flops_per_second", "bytes_per_second"):
            if record["work"][name] is not None:
                record["work"][name] *= 10
    return json.dumps(record).encode()


def _summary_of_others(data: bytes) -> bytes:
    manifest = json.loads(data)
    next(iter(manifest["machines"].values()))["name"] = "a-better-machine"
    return json.dumps(manifest).encode()


FORGED: dict[str, tuple[Callable[[Files], Files], str]] = {
    "times a tenth": (
        lambda f: _edited(f, "records.jsonl", lambda d: b"\n".join(map(_scaled, d.splitlines())) + b"\n"),
        "where its samples say",
    ),
    "no samples": (
        lambda f: {name: data for name, data in f.items() if not name.endswith("samples.f64")},
        "has no samples.f64",
    ),
    "samples cut": (lambda f: _edited(f, "samples.f64", lambda d: d[:-8]), "contradicts its samples"),
    "a line cut": (lambda f: _edited(f, "records.jsonl", lambda d: d[:-5]), "cut off"),
    "another machine in the summary": (lambda f: _edited(f, MANIFEST, _summary_of_others), "machines are"),
    "a machine edited": (
        lambda f: {**f, next(n for n in f if n.startswith("env")): b'{"machine":{"name":"x"}}'},
        "description",
    ),
    "no machine": (
        lambda f: {name: data for name, data in f.items() if not name.startswith("environments")},
        "description",
    ),
    "zip slip": (lambda f: {**f, "../../evil": b"x"}, "which no bundle has"),
    "an absolute path": (lambda f: {**f, "/etc/evil": b"x"}, "which no bundle has"),
    "a pickle": (lambda f: {**f, "records.pkl": b"x"}, "which no bundle has"),
    "a bomb": (lambda f: {**f, "power.json": b"0" * (8 << 20)}, "a bomb"),
    "no records": (lambda f: {MANIFEST: f[MANIFEST]}, "there are no records"),
    "a huge manifest": (lambda f: _edited(f, MANIFEST, lambda d: d + b" " * (9 << 20)), "bytes|a bomb"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_bundle_is_refused(honest, tmp_path, name):
    forge, words = FORGED[name]
    said = refusal(write(forge(honest), tmp_path / "a.zip", seal=name != "a huge manifest"))
    assert any(word in said for word in words.split("|")), said


def _set(path: str, value: object, role: str = "") -> Callable[[Files], Files]:
    """A field of all records changed, or of those with a role; what it was may decide what it becomes."""

    def line(data: bytes) -> bytes:
        record = json.loads(data)
        *parents, last = path.split(".")
        part = record
        for parent in parents:
            part = (part or {}).get(parent)
        if part is not None and part[last] is not None and role in ("", record["implementation"]["role"]):
            part[last] = value(part[last]) if callable(value) else value
        return json.dumps(record).encode()

    return lambda files: _edited(
        files, "records.jsonl", lambda data: b"\n".join(map(line, data.splitlines())) + b"\n"
    )


# what a forger gains most by, and that it is refused by the numbers and not by its form
LIES = {
    "verdict": _set("comparison.verdict", "SAME", "candidate"),
    "rounds": _set("protocol.rounds", 1000),
    "error": lambda f: _set("correctness.max_error", 1.0)(_with_bound(f)),
    "repro": _set("repro", "rm -rf ~"),
    "p value": _set("comparison.p_adjusted", 1e-30, "candidate"),
    "A/A floor": _set("comparison.aa_floor", 0.0),
    "reason": _set("comparison.reason", "it is ten times as fast"),
    "threads": _set("protocol.all_threads", 64),
    "stages": _set("timing.stages", {"dispatch": 1e-9}),
    "noise": lambda f: _edited(
        f, "records.jsonl", lambda d: b"".join(x for x in d.splitlines(True) if b'"role":"twin"' not in x)
    ),
}


def _with_bound(files: Files) -> Files:
    def line(data: bytes) -> bytes:
        record = json.loads(data)
        if record["timing"]:
            record["correctness"] |= {"max_error": 1e-6, "max_bound": 1e-5}
        return json.dumps(record).encode()

    return _edited(files, "records.jsonl", lambda d: b"\n".join(map(line, d.splitlines())) + b"\n")


@pytest.mark.parametrize("name", LIES)
def test_what_follows_from_the_samples_cannot_be_edited(honest, tmp_path, name):
    path = write(resummed(LIES[name](honest), tmp_path), tmp_path / "a.zip")
    said = refusal(path)
    assert "-00000" in said and "manifest" not in said, said  # it names the record
    assert "mrb: " in mrb("bundle", "verify", path, "--measure", 0, code=2).stderr


def test_a_machine_is_called_by_its_facts(honest, tmp_path):
    old = next(name for name in honest if name.startswith("environments"))
    document = json.loads(honest[old])
    document["machine"]["memory_gib"] = 1024
    data = json.dumps(document).encode()
    new = f"environments/{hashlib.sha256(data).hexdigest()}.json"
    files = {(new if name == old else name): (data if name == old else d) for name, d in honest.items()}
    files = _set("environment", new[13:-5])(files)
    assert "facts say" in refusal(write(resummed(files, tmp_path), tmp_path / "a.zip"))


def resummed(files: Files, tmp_path: Path) -> Files:
    """With a manifest whose summary is that of the edited records."""
    folder = tmp_path / "edited"
    for name, data in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(data)
    summary = {**json.loads(files[MANIFEST]), **bundle._summary(folder)}
    summary["machines"] = {key: one.model_dump() for key, one in summary["machines"].items()}
    return {**files, MANIFEST: json.dumps(summary).encode()}


def leaves(part: object, path: str = "") -> list[str]:
    if isinstance(part, dict) and part:
        return [leaf for name, inner in part.items() for leaf in leaves(inner, f"{path}.{name}".lstrip("."))]
    return [path]


def test_every_field_is_derived_or_said_to_be_claimed(honest, tmp_path):
    """Of each field, the value of another in all records: refused, or it is among the claimed."""
    record = json.loads(honest[one(honest, "records.jsonl")].splitlines()[1])
    assert record["timing"] and record["comparison"]
    other = {
        bool: lambda v: not v,
        int: lambda v: v + 1,
        float: lambda v: v * 1.01,
        str: lambda v: v[::-1] + "0",
    }
    accepted = []
    for path in leaves(record):
        *parents, last = path.split(".")
        value = record
        for name in (*parents, last):
            value = value[name]
        if type(value) not in other or any(path == name or path.startswith(name + ".") for name in CLAIMED):
            continue
        files = _set(path, other[type(value)])(honest)
        try:
            with opened_bundle(write(files, tmp_path / "a.zip")):
                accepted.append(path)
        except ValueError:
            pass
    assert not accepted


def test_wrong_hashes_and_sizes_are_refused(honest, tmp_path):
    for change in (lambda d: d + b"\n", lambda d: d[:-1] + b"\0", lambda d: b""):
        said = refusal(write(_edited(honest, "records.jsonl", change), tmp_path / "a.zip", seal=False))
        assert "sha256" in said
    spare = {**honest, "power.json": b"{}"}
    assert "in both" in refusal(write(spare, tmp_path / "a.zip", seal=False))


def test_links_two_of_a_name_and_what_is_no_zip_are_refused(honest, tmp_path):
    path = tmp_path / "a.zip"
    write(honest, path)
    with zipfile.ZipFile(path, "a") as archive:
        link = zipfile.ZipInfo(f"environments/{'a' * 64}.json")
        link.external_attr = (stat.S_IFLNK | 0o777) << 16
        archive.writestr(link, "/etc/passwd")
    assert "plain file" in refusal(path)
    write(honest, path)
    with zipfile.ZipFile(path, "a") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr(MANIFEST, b"{}")
    assert "same name" in refusal(path)
    path.write_bytes(b"not a zip")
    assert "zip file" in refusal(path)
    path.write_bytes(write(honest, tmp_path / "b.zip").read_bytes()[:-200])
    assert "zip file" in refusal(path)


def test_too_many_files_and_too_many_bytes_are_refused(honest, tmp_path, monkeypatch):
    path = write(honest, tmp_path / "a.zip")
    monkeypatch.setattr(bundle, "MAX_BYTES", 100)
    assert "unpacks to" in refusal(path)
    monkeypatch.setattr(bundle, "MAX_FILES", 1)
    assert "files, over" in refusal(path)


def mutated(honest: Files, draw: random.Random) -> bytes:
    """Bytes of the zip changed or cut; or those of a file in it; or its name."""
    buffer = io.BytesIO()
    files = dict(honest)
    kind = draw.randrange(4)
    if kind:
        name = draw.choice(list(files))
        data = bytearray(files[name])
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(data))
            data[at] = (data[at] + draw.randint(1, 255)) % 256
        if draw.random() < 0.3:
            del data[draw.randrange(len(data)) :]
        files[name] = bytes(data)
        if kind == 2:
            files[draw.choice(["../x", name.upper(), "", "session=/records.jsonl", name])] = files.pop(name)
        if kind == 3 and name != MANIFEST:
            files = sealed(files)
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name or "_", data)
    raw = bytearray(buffer.getvalue())
    if not kind:
        at = draw.randrange(len(raw))
        raw[at] ^= 1 << draw.randrange(8)
        if draw.random() < 0.3:
            del raw[draw.randrange(len(raw)) :]
    return bytes(raw)


def times_in(folder: Path) -> list[float]:
    return sorted(record.timing.median for record in iterate(folder) if record.timing)


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(range(40), id="some"), pytest.param(range(40, 640), id="600", marks=pytest.mark.nightly)],
)
def test_mutations_are_refused_in_a_sentence_or_change_no_time(honest, tmp_path, rounds):
    path, opened = tmp_path / "a.zip", 0
    with opened_bundle(write(honest, path)) as (folder, _):
        true = times_in(folder)
    for seed in rounds:
        path.write_bytes(mutated(honest, random.Random(seed)))
        try:
            with opened_bundle(path) as (folder, _):
                assert times_in(folder) == true, seed
                opened += 1
        except ValueError as error:
            assert_one_sentence(error, path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["a.zip"]
    assert opened < len(rounds) / 2


def test_a_bundle_of_this_machine_is_measured_again_and_a_lie_is_seen(tmp_path):
    cells = make_cells(2, [])
    list(run_sweep(cells, tmp_path / "results", LocalExecutor()))
    mrb("bundle", "make", tmp_path / "results", "-o", tmp_path / "a.zip")
    outcomes = {}

    def as_then(cell):
        outcomes[cell.title] = run_cell(cell)
        return outcomes[cell.title]

    with opened_bundle(tmp_path / "a.zip") as (folder, _):
        (answer,) = measure_again(folder, 1, seed=0, run=as_then)
        assert answer.what in ("agrees", "differs") and "then" in answer.sentence  # the machine may be busy

        def tenfold(cell):
            outcome = outcomes[cell.title]
            base, second, *rest = outcome.outcomes
            samples = tuple(10 * sample for sample in second.samples)
            worse = replace(second, samples=samples, comparison=compare(base.samples, samples))
            return replace(outcome, outcomes=(base, worse, *rest))

        (answer,) = measure_again(folder, 1, seed=0, run=tenfold)
        assert answer.what == "differs"


def test_cells_that_cannot_be_measured_alike_say_why(honest, tmp_path):
    path = write(honest, tmp_path / "a.zip")
    answers = mrb_json("bundle", "verify", path)["again"]
    assert {answer["what"] for answer in answers} == {"not compared"}
    reasons = " ".join(answer["sentence"] for answer in answers)
    assert "different code" in reasons and "fewer than two" in reasons
    assert "not compared" in mrb("bundle", "verify", path).stdout
    assert "every file" in mrb("bundle", "verify", path, "--measure", 0).stdout.lower()
    path.write_bytes(b"PK")
    assert "mrb: " in mrb("bundle", "verify", path, code=2).stderr


def test_a_report_reads_bundles(honest, tmp_path):
    path = write(honest, tmp_path / "a.zip")
    assert "native" in mrb("results", "report", path, "--markdown").stdout
