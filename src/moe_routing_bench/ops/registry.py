"""Op: one operation and the implementations found for it.

An implementation is a file `ops/<op>/<name>.py`, an entry point `<op>.<name>` in the group
`moe_routing_bench.implementations`, or a file `<folder>/<op>/<name>.py` in a folder given to `include()`.
It defines

    run(*arguments of the op)                    compute it
    unsupported(*same arguments) -> str | None   a sentence why it cannot; looks at shapes, dtypes, devices
                                                 and layouts, never at values. Without it: it always can

with its own options, if any, as keywords after the op's arguments (`unsupported` takes those it needs). If it
is composed of other implementations, it defines `parts(**options) -> {option: Implementation}`; if it has an
option `store`, a type to keep weights in, `stored(weights, *, store)`: the weights it computes with; if it
rounds more than these, `plain(*arguments, store)`: the same in plain torch; if it likes weights in another
form, `freeze(weights)`: the same, made once, for weights that do not change. It may define FORWARD_ONLY,
CONFIGS, NEEDS, HOST_SYNC, SPREADS_NAN, DETERMINISTIC, BATCH_INVARIANT, REUSES_OUTPUT or TIES (DESIGN.md).
`mrb list` shows its docstring's first line. There is no fallback: what cannot run raises NotImplementedError
with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.accuracy import Expected, GradientOf, Verdict, judge_gradient, judge_result
from moe_routing_bench.core.cost import Cost
from moe_routing_bench.core.names import did_you_mean, parse_spec
from moe_routing_bench.ops.implementation import Implementation, supported_everywhere
from moe_routing_bench.ops.tracing import while_tracing

OURS = __name__.partition(".")[0]
GROUP = f"{OURS}.implementations"
BUILT_IN = "built in"
NO_IMPLEMENTATIONS = {"op", "preferences"}  # files of an op's folder that are not implementations
# parameters of an operation of an MoE layer; the others are those of the layers around it
ROUTED = frozenset({"score_TE", "logits_TE", "gate_TK", "routing", "plan", "traffic"})
_included: list[Path] = []


@dataclass(frozen=True)
class _Source:
    origin: str
    owner: str  # its top-level package: if a module of it is absent, that is a bug, not a missing library
    load: Callable[[], ModuleType]


Judge = Callable[[Any, Expected, Mapping[str, Any]], list[Verdict]]


class Op:
    """An operation: what it means, and the ways to compute it.

    reference       plain torch, any float dtype; the oracle when given float64
    cost            the least work of a call, from its arguments
    judge           is a result right? It also gets the arguments, by name
    judge_gradient  the same for the gradient of one argument
    upstream        the gradient of the result, as it may arrive in a model
    meaningful      the part of a result that two runs must agree on
    by_token        what of a result belongs to each token, tokens first: the same in every batch if an
                    implementation is BATCH_INVARIANT. None: nothing does, or results are exact
    weights         the parameter that holds weights, the same in every call; empty if there is none
    int8_rows       the reference with rows rounded to 8 bits, by which implementations that do so are judged
    widens          the reference converts weights itself, expert by expert, if x is float64
    exact           structure or copies: the reference in the dtype itself is the oracle
    default         runs wherever torch does: the last resort of "auto", the benchmark's baseline
    usual           what people choose between, measured if nobody names others; empty: all
    stage           its place in the flow of data, for listings
    """

    def __init__(
        self,
        package: str,
        reference: Callable[..., Any],
        *,
        cost: Callable[..., Cost],
        default: str,
        stage: int,
        judge: Judge = judge_result,
        judge_gradient: Callable[[GradientOf, Tensor, Expected], list[Verdict]] = judge_gradient,
        upstream: Callable[[Tensor, Mapping[str, Any]], Tensor] = lambda d_out, args: d_out,
        meaningful: Callable[[Any, Mapping[str, Any]], Any] = lambda out, args: out,
        by_token: Callable[[Any, Mapping[str, Any]], Any] | None = None,
        usual: tuple[str, ...] = (),
        weights: str = "",
        int8_rows: Callable[..., Any] | None = None,
        widens: bool = False,
        differentiable: bool = True,
        exact: bool = False,
    ):
        self.package = package
        self.stage = stage
        self.name = package.rpartition(".")[2]
        self.reference, self.cost = reference, cost
        self.judge, self.judge_gradient = judge, judge_gradient
        self.upstream, self.meaningful, self.by_token = upstream, meaningful, by_token
        self.weights, self.differentiable, self.exact = weights, differentiable, exact
        self.widens, self.usual, self.int8_rows = widens, usual, int8_rows
        self.file = inspect.getfile(reference)
        self.default = default
        self.summary = (inspect.getdoc(sys.modules[reference.__module__]) or "").partition("\n")[0]
        # not a dict: torch.compile does not see what is added to a dict that it has looked into
        self._ready = SimpleNamespace()

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return get_op, (self.name,)  # copies and pickles of a layer refer to this very object

    def names(self) -> list[str]:
        return sorted(self._sources())

    def get(self, spec: str) -> Implementation:
        """The implementation called `spec`: a name, or a name with a configuration `name(key=value,...)`.

        Raises ValueError for a name that does not exist, NotImplementedError if a library it needs is absent.
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
                raise  # a bug in that code, not an absent library
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
        """Why `spec` cannot compute these arguments here, in words; None if it can."""
        try:
            implementation = self.get(spec)
        except NotImplementedError as reason:
            return str(reason).partition(": ")[2]
        return implementation.why_not(*args)

    def origin(self, name: str) -> str:
        """Where an implementation comes from, even if it cannot be loaded; nothing is loaded."""
        return self._source(name).origin

    def source_files(self, name: str) -> list[Path]:
        """The files of an implementation, without what they load in turn; nothing is loaded."""
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

    def parameters(self) -> list[str]:
        return list(inspect.signature(self.reference).parameters)

    @property
    def has_layout(self) -> bool:
        """Does its work depend on where the rows lie?"""
        return not {"plan", "layout"}.isdisjoint(self.parameters())

    @property
    def routed(self) -> bool:
        """Does it see what a router chose, or the scores it chooses by?"""
        return not ROUTED.isdisjoint(self.parameters())

    def arguments(self, source: object) -> dict[str, Any]:
        """Its arguments by name, read from attributes of `source`: a hard case of the kit, a call of the
        benchmark or shapes of `mrb explain`. So a new operation needs no code in any of them."""
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
            package = importlib.import_module(self.package)
            for module in pkgutil.iter_modules(package.__path__):
                if module.name not in NO_IMPLEMENTATIONS and not module.name.startswith("_"):
                    add(module.name, _Source(BUILT_IN, OURS, _importer(f"{self.package}.{module.name}")))
        for entry in _entry_points():
            op_name, _, name = entry.name.partition(".")
            if op_name == self.name:
                owner = entry.module.partition(".")[0]
                add(name, _Source(f"package {owner}", owner, entry.load))
        for folder in _included:
            for path in sorted((folder / self.name).glob("[!_]*.py")):
                if path.stem in NO_IMPLEMENTATIONS:
                    continue
                add(path.stem, _Source(f"file {path}", "", _file_importer(self.name, path)))
        return sources

    def _implementation(self, name: str, origin: str, module: ModuleType) -> Implementation:
        for hook in ("run", "unsupported"):
            if hook == "unsupported" and not hasattr(module, hook):
                continue
            if not callable(getattr(module, hook, None)):
                raise ValueError(f"{self.name}.{name} ({origin}) must define {hook}(...)")
            given = list(inspect.signature(getattr(module, hook)).parameters)
            needed = self.parameters()
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
            summary=(inspect.getdoc(module) or "").partition("\n")[0],
            run=module.run,
            unsupported=getattr(module, "unsupported", supported_everywhere),
            configs=configs,
            forward_only=getattr(module, "FORWARD_ONLY", False),
            host_sync=getattr(module, "HOST_SYNC", ""),
            spreads_nan=getattr(module, "SPREADS_NAN", ""),
            deterministic=getattr(module, "DETERMINISTIC", True),
            batch_invariant=bool(invariant),
            invariant_with=invariant if isinstance(invariant, Mapping) else {},
            reuses_output=getattr(module, "REUSES_OUTPUT", False),
            reads_plain=getattr(module, "READS_PLAIN", False),
            stored=getattr(module, "stored", None),
            plain=getattr(module, "plain", None),
            freeze=getattr(module, "freeze", None),
            freeze_stored=getattr(module, "freeze_stored", None),
            ties=ties,
        )


def all_ops() -> dict[str, Op]:
    """Every folder with an op.py in ops/ or in an included folder, by name, in the order in which data flows
    through them.

    >>> "gather_sum" in mrb.all_ops()["combine"].names()
    True
    """
    names = [*built_in_ops(), *_ops_outside()]
    return dict(sorted(((name, get_op(name)) for name in names), key=lambda item: item[1].stage))


def get_op(name: str) -> Op:
    """One operation; of the files from outside only its own op.py is loaded."""
    return _built_in_op(name) if name in built_in_ops() else _outside_op(_ops_outside()[name])


@while_tracing
def _load(op_name: str, spec: str) -> None:
    """The first call may be one that torch.compile traces, which cannot import."""
    get_op(op_name).get(spec)


@cache
def built_in_ops() -> tuple[str, ...]:
    package = importlib.import_module(f"{OURS}.ops")
    return tuple(module.name for module in pkgutil.iter_modules(package.__path__) if module.ispkg)


@cache
def _built_in_op(name: str) -> Op:
    op: Op = importlib.import_module(f"{OURS}.ops.{name}.op").op
    return op


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
    """An op.py from outside is loaded and believed, because it defines what is right."""
    return _file_importer(path.parent.name, path)().op


def include(folder: Path | str) -> None:
    """Also look for implementations in `<folder>/<op>/<name>.py` and new ops in `<folder>/<op>/op.py`. A
    folder with nothing but routers is fine too. Nothing is loaded."""
    path = Path(folder).resolve()
    files_of([*_included, folder])
    if path not in _included:
        _included.append(path)


def included_folders() -> tuple[Path, ...]:
    return tuple(_included)


def clear_included() -> None:
    _included.clear()


def files_of(folders: Sequence[Path | str]) -> list[Path]:
    """The files of folders from outside: implementations, an op.py for each new op, and routers; nothing is
    loaded. ValueError if a folder has none of them."""
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


def _importer(module: str) -> Callable[[], ModuleType]:
    return lambda: importlib.import_module(module)


def _file_importer(op: str, path: Path) -> Callable[[], ModuleType]:
    def load() -> ModuleType:
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

    return load
