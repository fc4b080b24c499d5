"""Op: one operation and the implementations found for it.

An implementation is a file `ops/<op>/<name>.py`, an entry point `<op>.<name>` in the group
`moe_routing_bench.implementations`, or a file `<folder>/<op>/<name>.py` in a folder given to `include()`.
It defines

    run(*arguments of the op)                    compute it
    unsupported(*same arguments) -> str | None   a sentence why it cannot; looks at shapes, dtypes, devices
                                                 and layouts, never at values

with its own options, if any, as keywords after the op's arguments (`unsupported` takes those it needs),
if it is composed of other implementations `parts(**options) -> {option: Implementation}`,
if it has an option `store`, a type to keep weights in, `stored(weights, *, store)`: what it computes with,
and, if it needs to, FORWARD_ONLY, CONFIGS, HOST_SYNC, DETERMINISTIC, REUSES_OUTPUT or TIES (DESIGN.md).
The first line of its docstring is what `mrb list` shows. Nothing here falls back: what cannot run raises
NotImplementedError with the reason.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.names import did_you_mean

OURS = __name__.partition(".")[0]
GROUP = f"{OURS}.implementations"
BUILT_IN = "built in"
NO_IMPLEMENTATIONS = {"op", "preferences"}  # files of an op's folder: its meaning, what auto prefers
_included: list[Path] = []


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an op, ready to call.

    expert_ffn.op.get("staged(combine=index_add)") gives
      op="expert_ffn", name="staged", config={"combine": "index_add"}, label="staged(combine=index_add)"
    """

    op: str
    name: str
    origin: str  # "built in", "package <name>" or "file <path>"
    summary: str
    run: Callable[..., Any]
    unsupported: Callable[..., str | None]
    config: Mapping[str, Any] = field(default_factory=dict)
    configs: Sequence[Mapping[str, Any]] = ()  # what a tuner may try
    forward_only: bool = False  # no gradients; refuses inputs that want them
    host_sync: str = ""  # why it must read device values on the host
    deterministic: bool = True  # same input, same bits
    reuses_output: bool = False  # the result is overwritten by the next call on the same thread
    # computes with other weights than it is given (option store=): these; results are judged against them
    stored: Callable[..., Any] | None = None
    ties: str = "lower id first"  # topk only: "any" if equal scores may be picked in any order

    @property
    def label(self) -> str:
        """The name with its configuration: what a record says really ran."""
        if not self.config:
            return self.name
        return f"{self.name}({','.join(f'{k}={v}' for k, v in sorted(self.config.items()))})"

    def why_not(self, *args: Any) -> str | None:
        """Why these arguments cannot be computed here, in words; None if they can."""
        if self.forward_only and torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args)):
            return "it has no backward; call it under torch.no_grad() or choose another implementation"
        return self.unsupported(*args)

    def __call__(self, *args: Any) -> Any:
        if (reason := self.why_not(*args)) is not None:
            raise NotImplementedError(f"{self.op}.{self.label}: {reason}")
        return self.run(*args)

    def composed_of(
        self, parts: Mapping[str, Implementation], config: Mapping[str, Any]
    ) -> tuple[Implementation, dict[str, Any]]:
        """The same with the flags of its parts, and the config that names them: the label says what runs."""
        composed = replace(
            self,
            forward_only=self.forward_only or any(part.forward_only for part in parts.values()),
            deterministic=self.deterministic and all(part.deterministic for part in parts.values()),
            host_sync="; ".join(
                f"{part.op}.{part.name}: {part.host_sync}" for part in parts.values() if part.host_sync
            ),
        )
        return composed, {**config, **{option: part.label for option, part in parts.items()}}

    def configured(self, config: Mapping[str, Any], op_parameters: Sequence[str]) -> Implementation:
        """The same with its options set; `unsupported` gets those it takes."""
        takes_run, takes_unsupported = (
            set(inspect.signature(function).parameters) - set(op_parameters)
            for function in (self.run, self.unsupported)
        )
        if unknown := set(config) - takes_run:
            raise ValueError(
                f"{self.op}.{self.name} has no option {', '.join(sorted(unknown))}; "
                f"it has {', '.join(sorted(takes_run)) or 'none'}"
            )
        seen = {name: value for name, value in config.items() if name in takes_unsupported}
        stored = self.stored if self.stored is None else partial(self.stored, store=config.get("store"))
        return replace(
            self,
            config=config,
            run=partial(self.run, **config) if config else self.run,
            unsupported=partial(self.unsupported, **seen) if seen else self.unsupported,
            stored=stored if config.get("store") else None,
            forward_only=self.forward_only or bool(config.get("store")),
        )


@dataclass(frozen=True)
class _Source:
    origin: str
    owner: str  # top-level package whose absence is a bug, not a missing library
    load: Callable[[], ModuleType]


class Op:
    """An operation: its meaning (`reference`, plain torch, any float dtype), and the ways to compute it."""

    def __init__(self, package: str, reference: Callable[..., Any], *, default: str, stage: int):
        self.package = package
        self.stage = stage  # place in the flow of data, for listings
        self.name = package.rpartition(".")[2]
        self.reference = reference
        self.default = default  # runs wherever torch does: auto's last resort, the benchmark's baseline
        self.summary = (inspect.getdoc(sys.modules[reference.__module__]) or "").partition("\n")[0]
        self._ready: dict[str, Implementation] = {}

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _op_named, (self.name,)  # copies and pickles of a layer mean this op, not one like it

    def names(self) -> list[str]:
        return sorted(self._sources())

    def get(self, spec: str) -> Implementation:
        """The implementation called `spec`: a name, or a name with a configuration `name(key=value,...)`.

        Raises ValueError for a name that does not exist, NotImplementedError if a library it needs is absent.
        """
        if (ready := self._ready.get(spec)) is not None:
            return ready
        name, config = _parse(spec)
        source = self._source(name)
        try:
            module = source.load()
        except ModuleNotFoundError as missing:
            absent = missing.name or "?"
            if absent.partition(".")[0] in (OURS, source.owner):
                raise  # a bug in that code, not an absent library
            raise NotImplementedError(f"{self.name}.{name}: needs {absent}, which is not installed") from None
        found = self._implementation(name, source.origin, module)
        ready = found.configured(config, self.parameters())
        if parts := getattr(module, "parts", None):
            composed, config = found.composed_of(parts(**config), config)
            ready = composed.configured(config, self.parameters())
        self._ready[spec] = ready
        return ready

    def why_not(self, spec: str, *args: Any) -> str | None:
        """Why `spec` cannot compute these arguments here, in words; None if it can."""
        try:
            implementation = self.get(spec)
        except NotImplementedError as reason:
            return str(reason).partition(": ")[2]
        return implementation.why_not(*args)

    def origin(self, name: str) -> str:
        """Where an implementation comes from, whether or not it can be loaded; nothing is."""
        return self._source(name).origin

    def parameters(self) -> list[str]:
        return list(inspect.signature(self.reference).parameters)

    def _source(self, name: str) -> _Source:
        sources = self._sources()
        if name not in sources:
            hint = did_you_mean(name, sources)
            raise ValueError(
                f"{self.name} has no implementation {name!r}; {hint}there are {', '.join(sorted(sources))}"
            )
        return sources[name]

    def _sources(self) -> dict[str, _Source]:
        found: dict[str, _Source] = {}

        def add(name: str, source: _Source) -> None:
            if name in found:
                raise ValueError(
                    f"{self.name}.{name} exists twice: {found[name].origin} and {source.origin}; rename one"
                )
            found[name] = source

        package = importlib.import_module(self.package)
        for module in pkgutil.iter_modules(package.__path__):
            if module.name not in NO_IMPLEMENTATIONS and not module.name.startswith("_"):
                add(
                    module.name,
                    _Source(BUILT_IN, OURS, _importer(f"{self.package}.{module.name}")),
                )
        for entry in _entry_points():
            op_name, _, name = entry.name.partition(".")
            if op_name == self.name:
                owner = entry.module.partition(".")[0]
                add(name, _Source(f"package {owner}", owner, entry.load))
        for folder in _included:
            for path in sorted((folder / self.name).glob("[!_]*.py")):
                add(path.stem, _Source(f"file {path}", "", _file_importer(self.name, path)))
        return found

    def _implementation(self, name: str, origin: str, module: ModuleType) -> Implementation:
        for required in ("run", "unsupported"):
            if not callable(getattr(module, required, None)):
                raise ValueError(f"{self.name}.{name} ({origin}) must define {required}(...)")
            given = list(inspect.signature(getattr(module, required)).parameters)
            needed = self.parameters()
            if given[: len(needed)] != needed:
                raise ValueError(
                    f"{self.name}.{name} ({origin}): {required} takes ({', '.join(given)}), "
                    f"but the op's arguments are ({', '.join(needed)})"
                )
        configs = tuple(getattr(module, "CONFIGS", ()))
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
            unsupported=module.unsupported,
            configs=configs,
            forward_only=getattr(module, "FORWARD_ONLY", False),
            host_sync=getattr(module, "HOST_SYNC", ""),
            deterministic=getattr(module, "DETERMINISTIC", True),
            reuses_output=getattr(module, "REUSES_OUTPUT", False),
            stored=getattr(module, "stored", None),
            ties=getattr(module, "TIES", "lower id first"),
        )


def all_ops() -> dict[str, Op]:
    """Every folder of ops/ that holds an op.py, by name, in the order data flows through them."""
    package = importlib.import_module(f"{OURS}.ops")
    found = {
        module.name: importlib.import_module(f"{OURS}.ops.{module.name}.op").op
        for module in pkgutil.iter_modules(package.__path__)
        if module.ispkg
    }
    return dict(sorted(found.items(), key=lambda item: item[1].stage))


def _op_named(name: str) -> Op:
    return all_ops()[name]


def include(folder: Path | str) -> None:
    """Also look for implementations in `<folder>/<op>/<name>.py`; the folder may hold routers alone."""
    path = Path(folder).resolve()
    if not path.is_dir():
        raise ValueError(
            f"{folder} is not a folder; it should hold <op>/<name>.py or routers/<name>.py files"
        )
    names = set(all_ops())
    if not any(child.name in {*names, "routers"} for child in path.iterdir() if child.is_dir()):
        raise ValueError(
            f"{folder} holds no folder named after an op and none called routers; "
            f"the ops are {', '.join(sorted(names))}"
        )
    if path not in _included:
        _included.append(path)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside nested tuples, dicts and dataclasses."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item)
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif is_dataclass(value):
        for f in fields(value):
            yield from tensors_in(getattr(value, f.name))


def _parse(spec: str) -> tuple[str, dict[str, Any]]:
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", spec)
    if match is None:
        raise ValueError(f"cannot read the implementation {spec!r}; write name or name(option=value,...)")
    config: dict[str, Any] = {}
    # commas inside inner parentheses belong to an option's own options
    for word in re.findall(r"(?:[^,()]|\([^()]*\))+", match[2] or ""):
        key, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise ValueError(f"cannot read {word!r} in {spec!r}; write option=value")
        config[key] = int(value) if re.fullmatch(r"-?\d+", value) else value
    return match[1], config


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
        spec.loader.exec_module(module)
        return module

    return load
