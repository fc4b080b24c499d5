"""Op: one operation and the implementations found for it.

An implementation is a file `ops/<op>/<name>.py`, an entry point `<op>.<name>` in the group
`moe_routing_bench.implementations`, or a file `<folder>/<op>/<name>.py` in a folder given to `include()`.
It defines

    run(*arguments of the op)                    compute it
    unsupported(*same arguments) -> str | None   why it cannot run them. It reads shapes, dtypes, devices and
                                                 layouts, never values. Without it: it can run everything

Its own options are keywords after the op's arguments; `unsupported` takes the options it needs. It may define

    parts(**options) -> {option: Implementation}   if it is composed of other implementations
    stored(weights, *, store)                      with the option `store`: the weights it computes with
    plain(*arguments, store)                       the same computation in plain torch, if it rounds more
    freeze(weights)                                weights in the form it reads fastest, made once

and a dataclass Knobs of options that change its time alone (ops/knobs.py), FORWARD_ONLY, CONFIGS, NEEDS,
HOST_SYNC, SPREADS_NAN, DETERMINISTIC, BATCH_INVARIANT, REUSES_OUTPUT, COMPILES or TIES (DESIGN.md).
`mrb list` shows the first line of its docstring. There is no fallback: an implementation that cannot run
raises NotImplementedError with the reason.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict, judge_gradient, judge_result
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.levels import with_includes
from moe_routing_bench.core.names import base_name, did_you_mean, parse_spec
from moe_routing_bench.ops.implementation import Implementation
from moe_routing_bench.ops.tracing import while_tracing

OURS = __name__.partition(".")[0]
GROUP = f"{OURS}.implementations"
BUILT_IN = "built in"
NO_IMPLEMENTATIONS = {"op", "preferences"}  # files of an op's folder that are not implementations
# parameters of an operation of an MoE layer; the others are those of the layers around it
ROUTED = frozenset({"score_TE", "logits_TE", "gate_TK", "routing", "plan", "traffic"})
# functions and constants of a file that become fields of its Implementation
HOOKS = ("run", "unsupported", "stored", "plain", "freeze", "freeze_stored")
FLAGS = (
    "FORWARD_ONLY",
    "HOST_SYNC",
    "SPREADS_NAN",
    "DETERMINISTIC",
    "REUSES_OUTPUT",
    "READS_PLAIN",
    "COMPILES",
)
_included: list[Path] = []


@dataclass(frozen=True)
class _Source:
    origin: str
    owner: str  # its top-level package; if a module of it is missing, that is a bug and not a missing library
    load: Callable[[], ModuleType]


Judge = Callable[[Any, Expected, Mapping[str, Any]], list[Verdict]]


def first_line(module: ModuleType) -> str:
    return (inspect.getdoc(module) or "").partition("\n")[0]


@dataclass(eq=False, repr=False)
class Op:
    """An operation: what it means, and the ways to compute it."""

    package: str
    reference: Callable[..., Any]  # plain torch, any float dtype; the oracle when given float64
    _: KW_ONLY
    cost: Callable[..., Cost]  # the least work of a call, from its arguments
    default: str  # runs wherever torch does: the last choice of "auto", the benchmark's baseline
    stage: int  # its place in the flow of data, for listings
    judge: Judge = judge_result  # is a result right? It also gets the arguments, by name
    judge_gradient: Callable[[GradientOf, Tensor, Expected], list[Verdict]] = judge_gradient
    # the gradient of the result, as it may arrive in a model
    upstream: Callable[[Tensor, Mapping[str, Any]], Tensor] = lambda d_out, args: d_out
    # the part of a result that must be the same in two runs
    meaningful: Callable[[Any, Mapping[str, Any]], Any] = lambda out, args: out
    # the part of a result that belongs to each token, tokens first: the same in every batch if an
    # implementation is BATCH_INVARIANT. None: there is no such part, or results are exact
    by_token: Callable[[Any, Mapping[str, Any]], Any] | None = None
    usual: tuple[str, ...] = ()  # what people choose between, measured if none is named; empty: all
    weights: str = ""  # the parameter that holds weights, the same in every call; empty if there is none
    int8_rows: Callable[..., Any] | None = None  # the reference with rows rounded to 8 bits
    widens: bool = False  # if x is float64, the reference converts the weights itself, expert by expert
    differentiable: bool = True
    exact: bool = False  # structure or copies: the reference in the dtype itself is the oracle

    def __post_init__(self) -> None:
        self.name = self.package.rpartition(".")[2]
        self.file = inspect.getfile(self.reference)
        self.summary = first_line(sys.modules[self.reference.__module__])
        # not a dict: torch.compile does not see what is added to a dict that it has looked into
        self._ready = SimpleNamespace()

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return get_op, (self.name,)  # copies and pickles of a layer refer to this object

    def names(self) -> list[str]:
        return sorted(self._sources())

    def get(self, spec: str) -> Implementation:
        """Returns the implementation `spec`: a name, or a name with options `name(option=value,...)`.

        Raises ValueError for a name that does not exist, NotImplementedError if a library is not installed.
        """
        if torch.compiler.is_dynamo_compiling():
            _load(self.name, spec)
        if isinstance(ready := getattr(self._ready, spec, None), Implementation):
            return ready
        name, config = parse_spec(spec)
        source = self._source(name)
        try:
            module = source.load()
        except ModuleNotFoundError as missing:
            absent = missing.name or "?"
            if absent.partition(".")[0] in (OURS, source.owner):
                raise  # a bug in that code, not a library that is not installed
            raise NotImplementedError(f"{self.name}.{name}: needs {absent}, which is not installed") from None
        for absent, install in getattr(module, "NEEDS", {}).items():
            if importlib.util.find_spec(absent) is None:
                raise NotImplementedError(f"{self.name}.{name}: needs {absent}; {install}")
        plain = self._implementation(name, source.origin, module)
        ready = plain.configured(config, self.parameters())
        if parts := getattr(module, "parts", None):
            composed, config = plain.composed_of(parts(**config), config)
            ready = composed.configured(config, self.parameters())
        setattr(self._ready, spec, ready)
        return ready

    def why_not(self, spec: str, *args: Any) -> str | None:
        """Why `spec` cannot compute these arguments here; None if it can."""
        try:
            implementation = self.get(spec)
        except NotImplementedError as reason:
            return str(reason).partition(": ")[2]
        return implementation.why_not(*args)

    def origin(self, name: str) -> str:
        """Where an implementation comes from. Nothing is loaded."""
        return self._source(name).origin

    def source_files(self, name: str) -> list[Path]:
        """The files of an implementation, without the files that they import. Nothing is loaded."""
        source, _, where = self.origin(name).partition(" ")
        if self.origin(name) == BUILT_IN:
            return sorted(Path(self.file).parent.glob(f"{name}.py"))
        if source == "file":
            return [Path(where)]
        spec = importlib.util.find_spec(where)
        if spec is None:
            return []
        roots = [Path(root) for root in spec.submodule_search_locations or []]
        files = sorted(path for root in roots for path in root.rglob("*.py"))
        return files or ([Path(spec.origin)] if spec.origin else [])

    def source_hash(self, spec: str) -> str:
        """16 digits that change with the code of an implementation: its file, the C++ beside it with our
        headers, and those of the implementations that its options name."""
        name, config = parse_spec(spec)
        parts = [(self, name)] + [
            (get_op(option), base_name(str(part)))
            for option, part in config.items()
            if option in built_in_ops()
        ]
        python = [path for op, part in parts for path in op.source_files(part)]
        compiled = [path for path in python if path.with_suffix(".cpp").is_file()]
        files = [*python, *(one for path in compiled for one in with_includes(path.with_suffix(".cpp")))]
        return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:16]

    def parameters(self) -> list[str]:
        return list(_names_in(self.reference))

    @property
    def has_layout(self) -> bool:
        """True if it takes a plan or a layout."""
        return not {"plan", "layout"}.isdisjoint(self.parameters())

    @property
    def routed(self) -> bool:
        """Does it see what a router chose, or the scores it chooses by?"""
        return not ROUTED.isdisjoint(self.parameters())

    def arguments(self, source: object) -> dict[str, Any]:
        """Returns its arguments by name, read from attributes of `source`: a case of the kit, a call of the
        benchmark or the shapes of `mrb explain`. So a new operation needs no code in any of them."""
        try:
            return {name: getattr(source, name) for name in self.parameters()}
        except AttributeError as missing:
            if missing.obj is not source:
                raise
            raise NotImplementedError(
                f"{self.name} takes {missing.name}, which {type(source).__name__} does not make; use the "
                "argument names of the existing operations (DESIGN.md)"
            ) from None

    def _source(self, name: str) -> _Source:
        sources = self._sources()
        if name not in sources:
            hint = did_you_mean(name, sources)
            raise ValueError(
                f"{self.name} has no implementation {name!r}; {hint}there are {', '.join(sorted(sources))}"
            )
        return sources[name]

    def _sources(self) -> dict[str, _Source]:
        sources: dict[str, _Source] = {}

        def add(name: str, source: _Source) -> None:
            if name in sources:
                raise ValueError(
                    f"{self.name}.{name} exists twice: {sources[name].origin} and {source.origin}; rename one"
                )
            sources[name] = source

        if self.package.partition(".")[0] == OURS:
            for name in _files_of(self.package):
                load = partial(importlib.import_module, f"{self.package}.{name}")
                add(name, _Source(BUILT_IN, OURS, load))
        for entry in _entry_points():
            op_name, _, name = entry.name.partition(".")
            if op_name == self.name:
                owner = entry.module.partition(".")[0]
                add(name, _Source(f"package {owner}", owner, entry.load))
        for folder in _included:
            for path in sorted((folder / self.name).glob("[!_]*.py")):
                if path.stem in NO_IMPLEMENTATIONS:
                    continue
                add(path.stem, _Source(f"file {path}", "", partial(_load_file, self.name, path)))
        return sources

    def _implementation(self, name: str, origin: str, module: ModuleType) -> Implementation:
        needed = self.parameters()
        found: dict[str, Any] = {hook: getattr(module, hook, None) for hook in HOOKS}
        for hook in ("run", "unsupported") if hasattr(module, "unsupported") else ("run",):
            if not callable(found[hook]):
                raise ValueError(f"{self.name}.{name} ({origin}) must define {hook}(...)")
            given = list(inspect.signature(found[hook]).parameters)
            if given[: len(needed)] != needed:
                raise ValueError(
                    f"{self.name}.{name} ({origin}): {hook} takes ({', '.join(given)}), "
                    f"but the op's arguments are ({', '.join(needed)})"
                )
        configs = tuple(getattr(module, "CONFIGS", ()))
        ties = getattr(module, "TIES", "lower id first")
        # an exact result is one result, whatever the batch
        invariant = getattr(module, "BATCH_INVARIANT", self.exact and ties != "any")
        if not all(isinstance(config, Mapping) for config in configs):
            raise ValueError(
                f"{self.name}.{name} ({origin}): CONFIGS must hold dictionaries, option to value"
            )
        return Implementation(
            op=self.name,
            name=name,
            origin=origin,
            summary=first_line(module),
            configs=configs,
            knobs=getattr(module, "Knobs", None),
            batch_invariant=bool(invariant),
            invariant_with=invariant if isinstance(invariant, Mapping) else {},
            ties=ties,
            **{flag.lower(): getattr(module, flag) for flag in FLAGS if hasattr(module, flag)},
            **{hook: function for hook, function in found.items() if function is not None},
        )


def all_ops() -> dict[str, Op]:
    """Every operation by name, in the order in which data flows through them: each folder with an op.py in
    ops/ or in an included folder.

    >>> "gather_sum" in mrb.all_ops()["combine"].names()
    True
    """
    names = [*built_in_ops(), *_ops_outside()]
    return dict(sorted(((name, get_op(name)) for name in names), key=lambda item: item[1].stage))


def get_op(name: str) -> Op:
    """One operation. If it is from outside, only its own op.py is loaded."""
    if name not in built_in_ops():
        return _outside_op(_ops_outside()[name])
    return _op_of(name)


@cache
def _op_of(name: str) -> Op:
    op: Op = importlib.import_module(f"{OURS}.ops.{name}.op").op
    return op


@cache
def _names_in(function: Callable[..., Any]) -> tuple[str, ...]:
    return tuple(inspect.signature(function).parameters)


@while_tracing
def _load(op_name: str, spec: str) -> None:
    """Loads an implementation while torch.compile traces its first call, where an import is not possible."""
    get_op(op_name).get(spec)


@cache
def built_in_ops() -> tuple[str, ...]:
    package = importlib.import_module(f"{OURS}.ops")
    return tuple(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)


@cache
def _files_of(package: str) -> tuple[str, ...]:
    """The implementations in the folder of one of our operations."""
    found = pkgutil.iter_modules(importlib.import_module(package).__path__)
    return tuple(one.name for one in found if one.name not in NO_IMPLEMENTATIONS and one.name[0] != "_")


def _ops_outside() -> dict[str, Path]:
    files: dict[str, Path] = {}
    for path in [path for folder in _included for path in sorted(folder.glob("[!_]*/op.py"))]:
        name = path.parent.name
        if name in files or name in built_in_ops():
            raise ValueError(f"{path}: there is an operation {name} already; rename the folder")
        files[name] = path
    return files


@cache
def _outside_op(path: Path) -> Op:
    """Loads an op.py from outside. It is trusted, because it defines what is right."""
    return _load_file(path.parent.name, path).op


def include(folder: Path | str) -> None:
    """Adds the implementations in `<folder>/<op>/<name>.py` and the new ops in `<folder>/<op>/op.py`. The
    folder may also contain only routers. Nothing is loaded."""
    path = Path(folder).resolve()
    files_of([*_included, folder])
    if path not in _included:
        _included.append(path)


def included_folders() -> tuple[Path, ...]:
    return tuple(_included)


def clear_included() -> None:
    _included.clear()


def files_of(folders: Sequence[Path | str]) -> list[Path]:
    """The files in folders from outside: implementations, an op.py for each new op, and routers. Nothing is
    loaded. Raises ValueError if a folder has no such file."""
    paths = [Path(folder).resolve() for folder in folders]
    if (
        no_folder := next((f for f, path in zip(folders, paths, strict=True) if not path.is_dir()), None)
    ) is not None:
        raise ValueError(
            f"{no_folder} is not a folder; it should hold <op>/<name>.py or routers/<name>.py files"
        )
    ops = {*built_in_ops(), *(op.parent.name for path in paths for op in path.glob("[!_]*/op.py"))}
    known = [*sorted(ops), "routers"]
    for folder, path in zip(folders, paths, strict=True):
        if not any((path / name).is_dir() for name in known):
            raise ValueError(
                f"{folder} holds no folder named after an op and none called routers; "
                f"the ops are {', '.join(sorted(ops))}"
            )
    files = [file for path in paths for name in known for file in sorted((path / name).glob("[!_]*.py"))]
    return list(dict.fromkeys(files))


@cache
def _entry_points() -> tuple[EntryPoint, ...]:
    return tuple(entry_points(group=GROUP))


def _load_file(op: str, path: Path) -> ModuleType:
    name = f"{OURS}_included.{op}.{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    if path.stem == "op":  # its implementations import it by this name
        sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SystemExit as ended:
        raise RuntimeError(f"it ended the program while it was loaded: SystemExit({ended})") from None
    return module
