"""The functions of ggml, llama.cpp's tensor library, that expert_ffn.llama_cpp calls by address.

The libraries are part of the package llama-cpp-python. Enums may change between versions, so the names of
types are checked when the libraries are loaded.
"""

from __future__ import annotations

import ctypes as C
import importlib.util
from collections.abc import Callable
from functools import cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_routing_bench.core.experts import OAI_ALPHA, OAI_LIMIT

INSTALL = "pip install --no-deps llama-cpp-python==0.3.36"
ACTIVATIONS = {
    "swiglu": "ggml_swiglu_split", "geglu": "ggml_geglu_erf_split", "swiglu_oai": "ggml_swiglu_oai",
}  # fmt: skip
POINTER, NUMBER, SIZE = C.c_void_p, C.c_int64, C.c_size_t


class Kind(NamedTuple):
    """A type of ggml: its number in enum ggml_type, its name, the weights of a block, and how many numbers of
    a row are rounded together."""

    number: int
    name: bytes
    block: int = 1
    rows: int = 0


KINDS: dict[object, Kind] = {
    torch.float32: Kind(0, b"f32"),
    torch.float16: Kind(1, b"f16"),
    torch.bfloat16: Kind(30, b"bf16"),
    torch.int32: Kind(26, b"i32"),
    "q8_0": Kind(8, b"q8_0", 32, 32),
    "q4_k": Kind(12, b"q4_K", 256, 256),
    "mxfp4": Kind(39, b"mxfp4", 32, 32),
}


class _InitParams(C.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", C.c_bool))


class Ggml:
    """The functions of libggml that a layer needs, with the types of their arguments."""

    def __init__(self, folder: Path):
        self.libraries = [
            C.CDLL(str(folder / f"lib{name}.so"), mode=C.RTLD_GLOBAL) for name in ("ggml-base", "ggml-cpu")
        ]
        self._quiet = C.CFUNCTYPE(None, C.c_int, C.c_char_p, POINTER)(lambda *_: None)
        self._of("ggml_log_set", None, POINTER, POINTER)(self._quiet, None)
        three = (POINTER, POINTER, POINTER)
        self.init = self._of("ggml_init", POINTER, _InitParams)
        self.free = self._of("ggml_free", None, POINTER)
        self.new = self._of("ggml_new_tensor", POINTER, POINTER, C.c_int, C.c_int, C.POINTER(NUMBER))
        self.data = self._of("ggml_get_data", POINTER, POINTER)
        self.bytes = self._of("ggml_nbytes", SIZE, POINTER)
        self.mul_mat_id = self._of("ggml_mul_mat_id", POINTER, POINTER, *three)
        self.add_id = self._of("ggml_add_id", POINTER, POINTER, *three)
        self.mul, self.add = (self._of(f"ggml_{name}", POINTER, *three) for name in ("mul", "add"))
        self.view = self._of("ggml_view_2d", POINTER, POINTER, POINTER, NUMBER, NUMBER, SIZE, SIZE)
        self.contiguous = self._of("ggml_cont", POINTER, POINTER, POINTER)
        self.mark = {end: self._of(f"ggml_set_{end}", None, POINTER) for end in ("input", "output")}
        self.graph = self._of("ggml_new_graph", POINTER, POINTER)
        self.expand = self._of("ggml_build_forward_expand", None, POINTER, POINTER)
        self.allocator = self._of("ggml_gallocr_new", POINTER, POINTER)
        self.free_allocator = self._of("ggml_gallocr_free", None, POINTER)
        self.allocate = self._of("ggml_gallocr_alloc_graph", C.c_bool, POINTER, POINTER)
        self.place = self._of("ggml_backend_alloc_ctx_tensors_from_buft", POINTER, POINTER, POINTER)
        self.free_buffer = self._of("ggml_backend_buffer_free", None, POINTER)
        self.set = self._of("ggml_backend_tensor_set", None, POINTER, POINTER, SIZE, SIZE)
        self.compute = self._of("ggml_backend_graph_compute", C.c_int, POINTER, POINTER)
        self.threads = self._of("ggml_backend_cpu_set_n_threads", None, POINTER, C.c_int)
        self.supports = self._of("ggml_backend_dev_supports_op", C.c_bool, POINTER, POINTER)
        self.backend = self._of("ggml_backend_cpu_init", POINTER)()
        self.memory = self._of("ggml_backend_cpu_buffer_type", POINTER)()
        registered = self._of("ggml_backend_cpu_reg", POINTER)()
        self.device = self._of("ggml_backend_reg_dev_get", POINTER, POINTER, SIZE)(registered, 0)
        address = self._of("ggml_backend_reg_get_proc_address", POINTER, POINTER, C.c_char_p)
        extra = C.CFUNCTYPE(C.POINTER(POINTER), POINTER)(
            address(registered, b"ggml_backend_dev_get_extra_bufts")
        )(self.device)
        self.own_memory: list[int] = []  # kinds of memory that repack weights, best first
        while extra and (kind := extra[len(self.own_memory)]) is not None:
            self.own_memory.append(kind)
        self.lock = Lock()  # there is one backend with one number of threads
        name = self._of("ggml_type_name", C.c_char_p, C.c_int)
        if wrong := [kind for kind in KINDS.values() if name(kind.number) != kind.name]:
            raise NotImplementedError(
                f"this ggml calls type {wrong[0].number} {name(wrong[0].number)!r}, not {wrong[0].name!r}; "
                + INSTALL
            )

    def _of(self, name: str, result: Any, *arguments: Any) -> Any:
        function = next(
            (getattr(library, name) for library in self.libraries if hasattr(library, name)), None
        )
        if function is None:
            raise NotImplementedError(f"this ggml has no {name}; {INSTALL}")
        function.restype, function.argtypes = result, list(arguments)
        return function

    def context(self) -> int:
        """A context for descriptions of tensors and a graph; their data are elsewhere."""
        return self.init(_InitParams(1 << 21, None, True))

    def tensor(self, context: int, kind: object, *sizes: int) -> int:
        return self.new(context, KINDS[kind].number, len(sizes), (NUMBER * len(sizes))(*sizes))

    def as_torch(self, tensor: int, dtype: torch.dtype, *shape: int) -> Tensor:
        memory = (C.c_uint8 * self.bytes(tensor)).from_address(self.data(tensor))
        return torch.frombuffer(memory, dtype=dtype).view(shape)

    def activation(self, name: str) -> Callable[..., int]:
        if name != "swiglu_oai":
            return self._of(ACTIVATIONS[name], POINTER, POINTER, POINTER, POINTER)
        function = self._of(ACTIVATIONS[name], POINTER, POINTER, POINTER, POINTER, C.c_float, C.c_float)
        return lambda *tensors: function(*tensors, OAI_ALPHA, OAI_LIMIT)


@cache
def loaded() -> Ggml:
    spec = importlib.util.find_spec("llama_cpp")
    if spec is None or not spec.submodule_search_locations:
        raise NotImplementedError("the package llama_cpp is not installed")
    folder = Path(spec.submodule_search_locations[0]) / "lib"
    try:
        return Ggml(folder)
    except OSError as error:
        raise NotImplementedError(f"ggml's libraries in {folder} cannot be loaded: {error}") from None
