"""Implementation: one way to compute an operation, ready to call."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.frozen import Frozen, PackedMatrix
from moe_routing_bench.core.packed_files import PackedFiles
from moe_routing_bench.ops.knobs import KnobSet


def supported_everywhere(*_arguments: Any) -> None:
    """The default of the hook `unsupported`: no reason, so it can run everything."""


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
    unsupported: Callable[..., str | None] = supported_everywhere
    config: Mapping[str, Any] = field(default_factory=dict)
    configs: Sequence[Mapping[str, Any]] = ()  # configurations to check; a tuner takes those of `knobs`
    knobs: type[KnobSet] | None = None  # options that change its time alone
    forward_only: bool = False  # it has no gradients and refuses inputs that require them
    host_sync: str = ""  # why it must read device values on the host
    spreads_nan: str = ""  # why NaN in one token reaches others, or experts it did not choose
    deterministic: bool = True  # same input, same bits
    batch_invariant: bool = False  # a token's bits are the same in every batch
    invariant_with: Mapping[str, Any] = field(default_factory=dict)  # batch_invariant with these options
    reuses_output: bool = False  # the next call on the same thread overwrites the result
    compiles: bool = False  # its first call with a size compiles, for seconds
    # the weights it computes with if the option store= is set; its results are judged by them
    stored: Callable[..., Any] | None = None
    # plain torch with the same roundings on the stored weights; None: the op's reference
    plain: Callable[..., Any] | None = None
    # weights in the form it reads fastest, for weights that do not change any more
    freeze: Callable[..., Any] | None = None
    # freeze for weights that are already stored in a format: QuantisedExperts, dtype
    freeze_stored: Callable[..., Any] | None = None
    reads_plain: bool = False  # has freeze but also reads plain weights; the benchmark times it with these
    ties: str = "lower id first"  # topk only: "any" if equal scores may be picked in any order

    @property
    def label(self) -> str:
        """The name and its configuration, as in records."""
        if not self.config:
            return self.name
        return f"{self.name}({','.join(f'{k}={v}' for k, v in sorted(self.config.items()))})"

    def why_not(self, *args: Any) -> str | None:
        """Why it cannot compute these arguments here; None if it can."""
        if self.forward_only and torch.is_grad_enabled() and any(t.requires_grad for t in tensors_in(args)):
            return "it has no backward; call it under torch.no_grad() or choose another implementation"
        return self.unsupported(*args)

    def why_not_now(self, *args: Any) -> str | None:
        """why_not for a user's call: with store= it would round plain weights again in every call, which
        takes 10x as long as not storing them. The benchmark and the kit call `run` directly."""
        if (reason := self.why_not(*args)) is not None or self.stored is None:
            return reason
        if any(isinstance(one, (Frozen, PackedMatrix)) for one in (*args, *tensors_in(args))):
            return None
        return (
            f"it would round all weights to {self.config['store']} in every call; freeze them first: "
            f'layer.freeze("{self.label}"), or plugin.freeze(model, "{self.label}")'
        )

    def __call__(self, *args: Any) -> Any:
        if (reason := self.why_not_now(*args)) is not None:
            raise NotImplementedError(f"{self.op}.{self.label}: {reason}")
        return self.run(*args)

    def has_packed(self, *matrices: Tensor) -> bool:
        """True if they are frozen for this implementation."""
        mine = self.name, self.config.get("store")
        return all(isinstance(w, Frozen) and (w.form.kernel, w.form.store) == mine for w in matrices)

    def frozen(self, weights: Any, kept: PackedFiles | None = None) -> Any:
        """freeze(weights), with the packed form in files if `kept` names their folder. The expected error is
        stored on the panels, for frozen.freezing."""
        assert self.freeze is not None
        options: dict[str, Any] = {} if kept is None else {"kept": kept}
        if not options.keys() <= inspect.signature(self.freeze).parameters.keys():
            raise NotImplementedError(f"{self.op}.{self.label} cannot keep packed weights on disk")
        packed = self.freeze(weights, **options)
        error = weights.error_stored(str(self.config["store"])) if self.stored is not None else 0.0
        for w_EKN in (packed.w_in_EDG, packed.w_out_EFD):
            if isinstance(w_EKN, Frozen):
                w_EKN.panels.error = error  # type: ignore[attr-defined]
        return packed

    def composed_of(
        self, parts: Mapping[str, Implementation], config: Mapping[str, Any]
    ) -> tuple[Implementation, dict[str, Any]]:
        """The implementation with the flags of its parts, and a config with their labels."""
        composed = replace(
            self,
            forward_only=self.forward_only or any(part.forward_only for part in parts.values()),
            deterministic=self.deterministic and all(part.deterministic for part in parts.values()),
            batch_invariant=self.batch_invariant and all(part.batch_invariant for part in parts.values()),
            host_sync="; ".join(
                [self.host_sync] * bool(self.host_sync)
                + [f"{part.op}.{part.name}: {part.host_sync}" for part in parts.values() if part.host_sync]
            ),
            spreads_nan="; ".join(
                f"{part.op}.{part.name}: {part.spreads_nan}" for part in parts.values() if part.spreads_nan
            ),
        )
        return composed, {**config, **{option: part.label for option, part in parts.items()}}

    def configured(self, config: Mapping[str, Any], op_parameters: Sequence[str]) -> Implementation:
        """The implementation with its options set. `unsupported` gets the options that it takes."""
        takes_run, takes_unsupported = (
            set(inspect.signature(function).parameters) - {*op_parameters, "knobs"}
            for function in (self.run, self.unsupported)
        )
        knobs = set() if self.knobs is None else {one.name for one in fields(self.knobs)}
        if unknown := set(config) - takes_run - knobs:
            raise ValueError(
                f"{self.op}.{self.name} has no option {', '.join(sorted(unknown))}; "
                f"it has {', '.join(sorted(takes_run | knobs)) or 'none'}"
            )
        seen = {name: value for name, value in config.items() if name in takes_unsupported}
        store = {"store": config["store"]} if config.get("store") else {}
        passed = {name: value for name, value in config.items() if name not in knobs}
        if self.knobs is not None and (turned := {name: config[name] for name in config if name in knobs}):
            passed["knobs"] = self.knobs(**turned)
        return replace(
            self,
            config=config,
            freeze=partial(self.freeze, **store) if self.freeze and store else self.freeze,
            run=partial(self.run, **passed) if passed else self.run,
            unsupported=partial(self.unsupported, **seen) if seen else self.unsupported,
            freeze_stored=partial(self.freeze_stored, **store) if self.freeze_stored and store else None,
            stored=partial(self.stored, **store) if self.stored and store else None,
            plain=partial(self.plain, **store) if self.plain and store else None,
            forward_only=self.forward_only or bool(config.get("store")),
            batch_invariant=self.batch_invariant
            and all(config.get(option) == value for option, value in self.invariant_with.items()),
        )


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
