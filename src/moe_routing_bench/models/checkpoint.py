"""Reads one MoE layer from a checkpoint in safetensors shards: the weights of its experts, and how it routes.

    layer = read_layer("Qwen3-30B-A3B", 12);  layer.weights -> ExpertWeights;  layer.route(x_TD) -> Routing

A folder holds config.json and model.safetensors, or model.safetensors.index.json and shards. The reader maps
the files into memory and reads only the layer's tensors. After model.layers.{i}. their names are:

    qwen3_moe, olmoe, deepseek_v3   mlp.experts.{e}.gate_proj|up_proj|down_proj.weight, mlp.gate.weight
    mixtral                         block_sparse_moe.experts.{e}.w1|w3|w2.weight, block_sparse_moe.gate.weight
    gpt_oss                         mlp.experts.gate_up_proj (E, D, 2F; gate and up alternate), down_proj
                                    (E, F, D), both with biases, mlp.router.weight and bias
    any, as in Transformers 5       mlp.experts.gate_up_proj (E, 2F, D), down_proj (E, D, F)

A checkpoint is not trusted: nothing in it is executed or unpickled, names of files may not leave the folder,
and every shape and type is compared with config.json before memory is allocated.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_routing_bench.core.dtypes import IN_SAFETENSORS
from moe_routing_bench.core.experts import OAI_LIMIT, ExpertWeights, from_transformers
from moe_routing_bench.core.published import FAMILIES
from moe_routing_bench.core.routing import Routing
from moe_routing_bench.core.text import short
from moe_routing_bench.ops.score_topk.op import ScoreRule, score_topk
from moe_routing_bench.routers.router import Router, build

MAX_CONFIG_BYTES = 4 * 2**20
MAX_INDEX_BYTES = 256 * 2**20  # deepseek-v3's has 9 MB
ONE_FILE = "model.safetensors"
MOST = 2**24  # the largest size a config may name
GATED_AS = {"silu": "swiglu", "gelu": "geglu"}
READ = {family.model_type: family for family in FAMILIES.values() if family.F}


@dataclass(frozen=True, kw_only=True)
class CheckpointLayer:
    """For example layer 12 of Qwen3-30B-A3B: weights of 128 experts, router_ED 128 x 2048, K=8.

    bias_E: added to the logits (gpt-oss), or to the scores that choose (DeepSeek-V3).
    shared: DeepSeek-V3's shared experts as one.
    """

    source: str
    model_type: str
    layer: int
    weights: ExpertWeights
    router_ED: Tensor
    K: int
    rule: ScoreRule
    bias_E: Tensor | None = None
    shared: ExpertWeights | None = None

    def route(self, x_TD: Tensor) -> Routing:
        """Returns what the model's router chooses for these tokens, in float32; ties are broken as in our
        topk."""
        logits_TE, bias_E = F.linear(x_TD.float(), self.router_ED.float()), self.bias_E
        if bias_E is not None and self.rule.score == "softmax":
            logits_TE, bias_E = logits_TE + bias_E.float(), None
        gate_TK, expert_TK = score_topk(logits_TE, bias_E, self.K, self.rule)
        E = self.router_ED.shape[0]
        return Routing(expert_TK=expert_TK, gate_TK=gate_TK, num_experts=E, ragged=False, logits_TE=logits_TE)

    def router(self, topk: str = "auto") -> Router:
        """Builds the model's router as one of our rules, with its weights."""
        rule, (E, D) = self.rule, self.router_ED.shape
        options: dict[str, Any] = {"topk": topk}
        if rule.score == "sigmoid":
            name, bias = "sigmoid_bias", "bias_E"
            options |= {"renormalise": rule.renormalise, "scale": rule.scale, "groups": rule.groups}
            options |= {"keep_groups": rule.keep_groups, "group_score": rule.group_score}
        else:
            name, bias = "softmax_topk", "b_E"
            whole = "softmax_then_topk"
            options |= {"order": f"{whole}_renormalised" if rule.renormalise else whole}
            options |= {"bias": self.bias_E is not None}
        router = build(name, D, E, self.K, **options)
        state = router.state_dict(keep_vars=True)
        with torch.no_grad():
            state["w_DE"].copy_(self.router_ED.t())
            if self.bias_E is not None:
                state[bias].copy_(self.bias_E)
        return router


def read_layer(folder: Path | str, layer: int) -> CheckpointLayer:
    """Raises ValueError in one sentence if the folder is damaged, hostile or not a checkpoint, and
    NotImplementedError with the reason if we cannot read the way it is stored."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder; give the folder that holds the checkpoint's config.json")
    config = read_json(folder / "config.json", MAX_CONFIG_BYTES)
    about = About(folder, config, layer)
    method = config.get("quantization_config")
    if isinstance(method, dict) and method.get("quant_method") is not None:
        raise NotImplementedError(
            f"{folder} is quantised ({short(method['quant_method'])}), and this reads only float32, bfloat16 "
            "and float16; its experts are read by models.stored_layers, or save a copy with Transformers' "
            "dequantize"
        )
    with opened(folder) as tensors:
        return _Reader(about, tensors).read()


class About:
    """What config.json says about the layer. Each number was checked against its bounds."""

    def __init__(self, folder: Path, config: Mapping[str, Any], layer: int):
        self.path, self.config, self.layer = folder / "config.json", config, layer
        model_type = config.get("model_type")
        if not isinstance(model_type, str) or model_type not in READ:
            raise NotImplementedError(
                f"{self.path} is for model_type {short(model_type)}; this reads {', '.join(READ)}"
            )
        self.model_type, self.family = model_type, READ[model_type]
        layers = self.number("num_hidden_layers")
        if not 0 <= layer < layers:
            raise ValueError(f"{folder} has layers 0 to {layers - 1}, not {layer}")
        if layer < (dense := self.number("first_k_dense_replace", 0, least=0)):
            raise ValueError(f"layer {layer} of {folder} has no experts; the first that has some is {dense}")
        names = self.family.E
        self.E = self.number(next((name for name in names if name in config), names[0]))
        self.D, self.F = self.number("hidden_size"), self.number(self.family.F)
        self.K = self.number("num_experts_per_tok")
        self.rule = self._rule()
        act = config.get("hidden_act")
        if not isinstance(act, str) or act not in GATED_AS:
            known = ", ".join(GATED_AS)
            raise NotImplementedError(f"{self.path} has hidden_act {short(act)}; this reads {known}")
        self.activation = GATED_AS[act]
        if model_type == "gpt_oss":
            self.activation = "swiglu_oai"
            if (limit := config.get("swiglu_limit", OAI_LIMIT)) != OAI_LIMIT:
                raise NotImplementedError(
                    f"{self.path} has swiglu_limit {short(limit)}; our activation has {OAI_LIMIT}"
                )

    def number(self, name: str, default: int | None = None, *, least: int = 1) -> int:
        return number_in(self.config, self.path, name, default, least=least)

    def _rule(self) -> ScoreRule:
        K, renormalise = self.K, self.config.get("norm_topk_prob", False)
        if K > self.E:
            raise ValueError(f"{self.path} has {K} choices per token of only {self.E} experts")
        if type(renormalise) is not bool:
            value = short(renormalise)
            raise ValueError(f"norm_topk_prob in {self.path} is {value}; it must be true or false")
        if self.family.score == "softmax":
            return ScoreRule(renormalise=self.family.renormalises or renormalise)
        groups, keep = self.number("n_group", 1), self.number("topk_group", 1)
        if self.E % groups or not keep <= groups or self.E // groups * keep < K or self.E < 2 * groups:
            raise ValueError(
                f"{self.path}: {K} experts cannot come from {keep} of {groups} groups of {self.E} experts"
            )
        scale = self.config.get("routed_scaling_factor", 1.0)
        if type(scale) not in (int, float) or not math.isfinite(scale) or scale <= 0:
            raise ValueError(f"routed_scaling_factor in {self.path} is {short(scale)}; it must be positive")
        return ScoreRule(
            score=self.family.score, renormalise=renormalise, scale=float(scale), groups=groups,
            keep_groups=keep, group_score="top2_sum",
        )  # fmt: skip


class Tensors:
    """The tensors of all shards by name. Shapes and types are known at once; numbers are read from a slice.

    asked: the names of all tensors that were sliced.
    """

    def __init__(self, folder: Path, shard_of: Mapping[str, str] | None, stack: ExitStack):
        self.folder, self._shard_of, self._stack = folder, shard_of, stack
        self._open: dict[str, Any] = {}
        self._names: dict[str, frozenset[str]] = {}
        self.asked: set[str] = set()

    def __contains__(self, name: str) -> bool:
        if self._shard_of is not None:
            return name in self._shard_of
        return name in self._keys(ONE_FILE)

    def names(self) -> set[str]:
        """Returns all tensors in all files, including those that the index does not name."""
        shards = {ONE_FILE} if self._shard_of is None else set(self._shard_of.values())
        return set(self._shard_of or ()).union(*(self._keys(shard) for shard in sorted(shards)))

    def type_of(self, name: str) -> str | None:
        """Returns safetensors' name of the type, for example BF16; None if there is no such tensor."""
        shard = ONE_FILE if self._shard_of is None else self._shard_of.get(name)
        if shard is None or name not in self._keys(shard):
            return None
        return str(self._open[shard].get_slice(name).get_dtype())

    @contextmanager
    def again(self) -> Iterator[Tensors]:
        """Maps the same files again. What is read from them leaves memory at the end of `with`."""
        with ExitStack() as stack:
            yield Tensors(self.folder, self._shard_of, stack)

    def slice(
        self, name: str, shape: tuple[int, ...], dtypes: Collection[str] = tuple(IN_SAFETENSORS)
    ) -> Any:
        """Returns the tensor in its file, not yet read. Raises if its shape or type is not the expected
        one."""
        self.asked.add(name)
        shard = ONE_FILE if self._shard_of is None else self._shard_of.get(name)
        if shard is None:
            raise ValueError(f"the index of {self.folder} has no tensor {name}, which config.json calls for")
        if name not in self._keys(shard):
            raise ValueError(f"{self.folder / shard} has no tensor {name}")
        tensor = self._open[shard].get_slice(name)
        if tuple(tensor.get_shape()) != shape:
            raise ValueError(
                f"{name} in {self.folder / shard} has shape {tensor.get_shape()}; config.json calls for "
                f"{list(shape)}"
            )
        if (dtype := tensor.get_dtype()) not in dtypes:
            raise NotImplementedError(
                f"{name} in {self.folder / shard} is stored as {dtype}; this reads {', '.join(dtypes)}"
            )
        return tensor

    def _keys(self, shard: str) -> frozenset[str]:
        if shard not in self._open:
            from safetensors import SafetensorError, safe_open

            path = self.folder / shard
            if not path.is_file():
                raise ValueError(f"{path} is missing; download the checkpoint again")
            try:
                self._open[shard] = self._stack.enter_context(safe_open(path, framework="pt"))
            except SafetensorError as error:
                raise ValueError(f"{path} is not a whole safetensors file: {short(error)}") from None
            self._names[shard] = frozenset(self._open[shard].keys())
        return self._names[shard]


@contextmanager
def opened(folder: Path) -> Iterator[Tensors]:
    index = folder / "model.safetensors.index.json"
    shard_of: dict[str, str] | None = None
    if index.is_file():
        shard_of = read_json(index, MAX_INDEX_BYTES).get("weight_map")
        if not isinstance(shard_of, dict):
            raise ValueError(f"{index} has no weight_map from tensors to files")
        for name, shard in shard_of.items():
            # a plain name in this folder; the file itself may be a link, as in Hugging Face's cache
            if not isinstance(shard, str) or not _is_file_name(shard):
                raise ValueError(
                    f"{index} puts {short(name)} into {short(shard)}, which is not a .safetensors file of "
                    "this folder"
                )
    elif not (folder / ONE_FILE).is_file():
        raise ValueError(
            f"{folder} has neither model.safetensors nor model.safetensors.index.json; files that would have "
            "to be unpickled are not read"
        )
    with ExitStack() as stack:
        yield Tensors(folder, shard_of, stack)


def _is_file_name(shard: str) -> bool:
    plain = Path(shard).name == shard and shard.isprintable() and len(shard) < 256
    return plain and shard.endswith(".safetensors")


class _Reader:
    def __init__(self, about: About, tensors: Tensors):
        self.about, self.tensors = about, tensors
        home = f"model.layers.{about.layer}"
        block = f"{home}.{about.family.module}"
        # Transformers 5 calls it mlp everywhere when it does not save in the original format
        self.block = block if f"{block}.{about.family.router}.weight" in tensors else f"{home}.mlp"

    def read(self) -> CheckpointLayer:
        about, tensors = self.about, self.tensors
        router_name = f"{self.block}.{about.family.router}"
        if f"{self.block}.experts.gate_up_proj_blocks" in tensors:
            raise NotImplementedError(
                f"{tensors.folder} holds MXFP4 blocks, which are not read here; save a copy with "
                "Transformers' Mxfp4Config(dequantize=True)"
            )
        router = tensors.slice(f"{router_name}.weight", (about.E, about.D))
        bias = about.family.router_bias
        bias_slice = tensors.slice(f"{router_name}.{bias}", (about.E,)) if bias else None
        fused = f"{self.block}.experts.gate_up_proj"
        weights = self._fused(fused) if fused in tensors else self._separate()
        return CheckpointLayer(
            source=str(tensors.folder),
            model_type=about.model_type,
            layer=about.layer,
            weights=weights,
            router_ED=router[:].clone(),
            K=about.K,
            rule=about.rule,
            bias_E=None if bias_slice is None else bias_slice[:].clone(),
            shared=self._shared(),
        )

    def _separate(self) -> ExpertWeights:
        """Copies the three matrices of each expert into two for all experts."""
        about = self.about
        names = [f"{self.block}.experts.{e}" for e in range(about.E)]
        return self._stacked(names, about.F)

    def _shared(self) -> ExpertWeights | None:
        if not (n := self.about.number("n_shared_experts", 0, least=0)):
            return None
        return self._stacked([f"{self.block}.shared_experts"], n * self.about.F)

    def _stacked(self, experts: list[str], F: int) -> ExpertWeights:
        E, D = len(experts), self.about.D
        gate, up, down = self.about.family.parts
        shapes = {gate: (F, D), up: (F, D), down: (D, F)}
        # all shapes and types are checked before memory is allocated
        slices = [
            {part: self.tensors.slice(f"{name}.{part}.weight", shape) for part, shape in shapes.items()}
            for name in experts
        ]
        dtype = self._one_dtype([tensor for parts in slices for tensor in parts.values()])
        gate_up_EGD, down_EDF = torch.empty(E, 2 * F, D, dtype=dtype), torch.empty(E, D, F, dtype=dtype)
        for e, parts in enumerate(slices):
            gate_up_EGD[e, :F] = parts[gate][:]
            gate_up_EGD[e, F:] = parts[up][:]
            down_EDF[e] = parts[down][:]
        return from_transformers(gate_up_EGD, down_EDF, activation=self.about.activation)

    def _fused(self, name: str) -> ExpertWeights:
        """All experts in one tensor: gpt-oss's own layout, or that of Transformers 5."""
        about, home = self.about, name.rpartition(".")[0]
        E, D, F = about.E, about.D, about.F
        oss = about.model_type == "gpt_oss"
        shapes: dict[str, tuple[int, ...]] = {
            "gate_up_proj": (E, D, 2 * F) if oss else (E, 2 * F, D),
            "down_proj": (E, F, D) if oss else (E, D, F),
        }
        if oss:
            shapes |= {"gate_up_proj_bias": (E, 2 * F), "down_proj_bias": (E, D)}
        slices = {part: self.tensors.slice(f"{home}.{part}", shape) for part, shape in shapes.items()}
        self._one_dtype(list(slices.values()))
        # copies: the weights outlive the mapped file and start at an aligned address
        tensors = {part: tensor[:].clone() for part, tensor in slices.items()}
        return from_transformers(
            **tensors, activation=about.activation, is_transposed=oss, is_concatenated=not oss
        )

    def _one_dtype(self, slices: list[Any]) -> torch.dtype:
        dtypes = {part.get_dtype() for part in slices}
        if len(dtypes) > 1:
            names = ", ".join(sorted(dtypes))
            raise ValueError(f"the experts in {self.tensors.folder} have mixed types: {names}")
        return IN_SAFETENSORS[dtypes.pop()]


def read_json(path: Path, most: int) -> dict[str, Any]:
    if not path.is_file():
        raise ValueError(f"there is no {path}; give the folder that a model was saved to")
    if (size := path.stat().st_size) > most:
        raise ValueError(f"{path} has {size:,} bytes; this reads at most {most:,}")
    try:
        document = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise ValueError(f"{path} is not JSON") from None
    if not isinstance(document, dict):
        raise ValueError(f"{path} is not a JSON object")
    return document


def number_in(
    config: Mapping[str, Any], path: Path, name: str, default: int | None = None, *, least: int = 1
) -> int:
    value = config.get(name, default)
    if type(value) is not int or not least <= value <= MOST:
        raise ValueError(f"{name} in {path} is {short(value)}; it must be from {least} to {MOST:,}")
    return value
