"""Loads a quantised checkpoint as a Transformers model whose routed experts keep their stored codes.

    model = load_stored("gpt-oss-20b")          plugin.load is this, with our kernels named to the model

Codes go from the files into frozen panels (native.freeze_stored), one layer at a time. No expert is ever
bfloat16, and no weight is rounded again. Everything else is what from_pretrained makes of the folder:
quantised linear layers of attention and shared experts in the model's dtype, rotary tables, tied embeddings,
generation settings. Transformers itself does that part. We give it a state dict whose experts repeat one
number, so that they take no memory, and put the panels in their place afterwards.

This reads qwen3_moe, olmoe, mixtral, deepseek_v3 and gpt_oss in the formats of stored_layers.py. Before it
reads a number, it compares every tensor's name, shape and type with the model that config.json describes. A
missing, additional or wrongly shaped tensor is a ValueError. It prints on stderr which tensors Transformers
leaves out of the model by itself (DeepSeek's layer for speculation).

Time grows with the bytes of the checkpoint, each read once, and with the number of tensors. Memory is that of
the result, plus once or twice the codes of one layer while it is read and packed.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_routing_bench.core.dtypes import IN_SAFETENSORS
from moe_routing_bench.core.experts import QuantisedExperts
from moe_routing_bench.core.frozen import as_parameter, give_back
from moe_routing_bench.core.packed_files import PackedFiles
from moe_routing_bench.core.text import short
from moe_routing_bench.models.checkpoint import MAX_CONFIG_BYTES, About, Tensors, number_in, opened, read_json
from moe_routing_bench.models.reading import experts_modules, read, tensors_of
from moe_routing_bench.models.stored_layers import layer_of, linear_of, quantisation
from moe_routing_bench.ops.expert_ffn import native

# what configs and models may raise when config.json holds values of the wrong kind
NO_MODEL = (
    StrictDataclassError, ArithmeticError, AssertionError, AttributeError, ImportError, LookupError,
    RuntimeError, TypeError, ValueError,
)  # fmt: skip
# entries of config.json that we ignore: we dequantise, and a file may not choose which code runs
NOT_READ = ("quantization_config", "attn_implementation", "experts_implementation", "fusion_config")
FEW = 4  # names in a message


@dataclass(frozen=True, kw_only=True)
class Folder:
    """A checkpoint and the model that its config.json describes, on the meta device."""

    path: Path
    config: Mapping[str, Any]
    how: Mapping[str, Any]
    block: str  # what the checkpoint calls mlp
    dtype: torch.dtype
    settings: Any  # Transformers' config
    described: Any  # the model without numbers

    def experts(self) -> Iterator[tuple[str, nn.Module, About]]:
        """Yields each experts module: its path, the module, and what config.json says about its layer."""
        for path, module in experts_modules(self.described):
            yield path, module, About(self.path, self.config, int(path.split(".")[2]))


def load_stored(
    folder: Path | str,
    *,
    store: str | None = None,
    dtype: torch.dtype | None = None,
    kept: PackedFiles | None = None,
) -> Any:
    """Returns the model in evaluation mode, without gradients. Only our kernel can run its experts modules.

    store: the checkpoint's format, perhaps with _a8 behind it (docs/formats.md).
    dtype: of activations and of what is not stored in a format, float32 or bfloat16; else config.json's.
    """
    path = Path(folder)
    config = _config_of(path)
    with opened(path) as tensors:
        checkpoint = _describe(path, config, tensors, dtype)
        _compare_all(checkpoint, tensors)
        frozen = {}
        for place, module, about in checkpoint.experts():
            # mapped for this layer alone, so that what was read leaves memory
            with tensors.again() as mapped:
                stored = layer_of(about, mapped)()
            frozen[place] = _frozen(module, stored, checkpoint.dtype, store, kept)
            del stored
            give_back()
        with tensors.again() as mapped:
            state = {name: reader() for name, reader in _readers(checkpoint, mapped).items()}
    model = _made(checkpoint, state)
    for place, matrices in frozen.items():
        for name, tensor in matrices.items():
            setattr(model.get_submodule(place), name, nn.Parameter(tensor, requires_grad=False))
    return model.requires_grad_(False)


def _config_of(path: Path) -> dict[str, Any]:
    if not path.is_dir():
        raise ValueError(f"{path} is not a folder; give the folder that holds the checkpoint's config.json")
    config = read_json(path / "config.json", MAX_CONFIG_BYTES)
    if config.get("quantization_config") is None:
        raise ValueError(
            f"{path} is not quantised; load it with Transformers' from_pretrained, and plugin.freeze(model) "
            "packs its experts"
        )
    quantisation(path, config)
    return config


def _describe(path: Path, config: dict[str, Any], tensors: Tensors, dtype: torch.dtype | None) -> Folder:
    layers = number_in(config, path / "config.json", "num_hidden_layers")
    about = About(path, config, layers - 1)  # sizes are within bounds before anything is made of them
    names = tensors.names()
    if not any(name.startswith(f"model.layers.{layers - 1}.") for name in names) or layers > len(names):
        raise ValueError(f"{path} has no tensors of layer {layers - 1}, which config.json calls for")
    plain = {name: value for name, value in config.items() if name not in NOT_READ and name[:1] != "_"}
    try:
        settings = CONFIG_MAPPING[about.model_type].from_dict(plain)
        stored = IN_SAFETENSORS.get(str(tensors.type_of("model.embed_tokens.weight")))
        asked = dtype or settings.dtype or stored
        with torch.device("meta"):
            described = AutoModelForCausalLM.from_config(settings, dtype=asked)
    except NO_MODEL as error:
        raise ValueError(f"Transformers makes no model of {path / 'config.json'}: {short(error)}") from None
    if not isinstance(asked, torch.dtype):
        raise ValueError(f"{path} does not say its dtype, neither in config.json nor by its embeddings")
    if (reason := native.why_not_freeze(asked, None)) is not None:
        raise NotImplementedError(
            f"the experts of {path} cannot be frozen in {asked}: {reason}; dtype=torch.bfloat16 or "
            "torch.float32 may be asked for"
        )
    return Folder(
        path=path, config=config, how=quantisation(path, config), block=about.family.module,
        dtype=asked, settings=settings, described=described,
    )  # fmt: skip


def _compare_all(checkpoint: Folder, tensors: Tensors) -> None:
    """Compares every name, shape and type before a number is read."""
    for _, _, about in checkpoint.experts():
        layer_of(about, tensors)
    _readers(checkpoint, tensors)
    left = sorted(tensors.names() - tensors.asked)
    patterns = [*(checkpoint.described._keys_to_ignore_on_load_unexpected or ()), r"rotary_emb\.inv_freq"]
    unknown = [name for name in left if not any(re.search(pattern, name) for pattern in patterns)]
    if unknown:
        raise ValueError(
            f"{checkpoint.path} has {_few(unknown)}, which a {checkpoint.settings.model_type} of its "
            "config.json does not"
        )
    if left:
        print(f"moe_routing_bench: not in the model, as Transformers has it: {_few(left)}", file=sys.stderr)


def _few(names: list[str]) -> str:
    more = f" and {len(names) - FEW} more" if len(names) > FEW else ""
    return ", ".join(map(short, names[:FEW])) + more


def _readers(checkpoint: Folder, tensors: Tensors) -> dict[str, Callable[[], Tensor]]:
    """Returns a reader for each parameter and persistent buffer that is not an expert's matrix."""
    model, readers = checkpoint.described, {}
    matrices = {id(w) for _, module in experts_modules(model) for w in tensors_of(module)[:2]}
    for name, like in model.state_dict(keep_vars=True).items():
        if id(like) in matrices:
            readers[name] = _repeated(like)
            continue
        stored = name.replace(".mlp.", f".{checkpoint.block}.")
        if name in model.all_tied_weights_keys and stored not in tensors:
            continue
        readers[name] = _reader(checkpoint, tensors, stored, tuple(like.shape))
    return readers


def _repeated(like: Tensor) -> Callable[[], Tensor]:
    """Makes a tensor of this shape that takes no memory, for a parameter that panels will replace."""
    return lambda: torch.zeros(1, dtype=like.dtype).expand(like.shape)


def _reader(checkpoint: Folder, tensors: Tensors, name: str, shape: tuple[int, ...]) -> Callable[[], Tensor]:
    home, _, last = name.rpartition(".")
    if last == "weight" and len(shape) == 2:
        path = checkpoint.path / "config.json"
        linear = linear_of(path, tensors, checkpoint.how, home, (shape[0], shape[1]))
        if linear is not None:
            return lambda: linear(checkpoint.dtype)
    plain = tensors.slice(name, shape)
    # never narrower than it is stored: Transformers decides which parameters stay float32
    dtype = torch.promote_types(IN_SAFETENSORS[plain.get_dtype()], checkpoint.dtype)
    return lambda: plain[:].to(dtype, copy=True)


def _made(checkpoint: Folder, state: dict[str, Tensor]) -> Any:
    generation = checkpoint.path / "generation_config.json"
    how = read_json(generation, MAX_CONFIG_BYTES) if generation.is_file() else None
    try:
        model, info = type(checkpoint.described).from_pretrained(
            None, config=checkpoint.settings, state_dict=state, dtype=checkpoint.dtype,
            generation_config=None if how is None else GenerationConfig.from_dict(how),
            output_loading_info=True,
        )  # fmt: skip
    except NO_MODEL as error:
        raise ValueError(f"Transformers makes no model of {checkpoint.path}: {short(error)}") from None
    wrong = {what: sorted(map(str, names)) for what, names in info.items() if names}
    if wrong or any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers())):
        raise ValueError(f"{checkpoint.path} does not fill the model: {short(wrong)}")
    model.name_or_path = model.config.name_or_path = str(checkpoint.path)
    return model


def _frozen(
    module: Any, stored: QuantisedExperts, dtype: torch.dtype, store: str | None, kept: PackedFiles | None
) -> dict[str, Tensor]:
    """Returns panels in the shape of the module's parameters, by name."""
    reading = read(module)
    if reading.activation != stored.activation:
        raise NotImplementedError(
            f"the model's experts compute {reading.activation or reading.why}, and these weights are for "
            f"{stored.activation}"
        )
    frozen = native.freeze_stored(stored, dtype, store=store, kept=kept)
    output_first = not module.is_transposed
    made = {
        "gate_up_proj": as_parameter(
            frozen.w_in_EDG, output_first=output_first, alternating=reading.interleaved
        ),
        "down_proj": as_parameter(frozen.w_out_EFD, output_first=output_first, alternating=False),
    }
    for name, tensor in made.items():
        if tensor.shape != (wanted := getattr(module, name).shape):
            raise ValueError(f"{name} of the model is {list(wanted)}, stored is {list(tensor.shape)}")
    return made
