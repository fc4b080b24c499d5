"""llama.cpp's mul_mat_id on the same weights, against ours.

    python measurements/cpu/cpu_llama_cpp.py BUILD/bin

ggml's CPU library, driven through ctypes on torch's memory: gate, up, swiglu, down, gates, sum as one graph.
It wants float32 activations and gives float32; weights are bfloat16 or float32 as they are. To build it, in 2
minutes on 2 cores:

    pip download --no-deps --no-binary :all: llama-cpp-python==0.3.36 && tar xf llama_cpp_python-0.3.36.tar.gz
    cmake -S llama_cpp_python-0.3.36/vendor/llama.cpp -B BUILD -G Ninja -DCMAKE_BUILD_TYPE=Release \\
        -DBUILD_SHARED_LIBS=ON -DGGML_NATIVE=ON -DLLAMA_BUILD_TOOLS=OFF -DLLAMA_BUILD_TESTS=OFF \\
        -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_SERVER=OFF -DLLAMA_BUILD_COMMON=OFF -DLLAMA_CURL=OFF
    ninja -C BUILD ggml ggml-cpu
"""

from __future__ import annotations

import ctypes as C
import time
from pathlib import Path
from typing import Annotated

import cpu_subjects as cpu
import torch
import typer
from cpu_more import dumped, finish, measured, show
from torch import Tensor

from moe_routing_bench.experts import ExpertWeights
from moe_routing_bench.routing import Routing

# enum ggml_type of ggml 0.25
TYPES = {torch.float32: 0, torch.float16: 1, torch.int32: 26, torch.bfloat16: 30}
POINTER, NUMBER, SIZE = C.c_void_p, C.c_int64, C.c_size_t


class _InitParams(C.Structure):
    _fields_ = (("mem_size", SIZE), ("mem_buffer", POINTER), ("no_alloc", C.c_bool))


class Ggml:
    """The few functions of libggml that a layer needs."""

    def __init__(self, folder: Path):
        base = C.CDLL(str(folder / "libggml-base.so"), mode=C.RTLD_GLOBAL)
        cpu_backend = C.CDLL(str(folder / "libggml-cpu.so"), mode=C.RTLD_GLOBAL)

        def of(library: C.CDLL, name: str, result: object, *arguments: object):
            function = getattr(library, name)
            function.restype, function.argtypes = result, list(arguments)
            return function

        self.init = of(base, "ggml_init", POINTER, _InitParams)
        self.new = of(base, "ggml_new_tensor_3d", POINTER, POINTER, C.c_int, NUMBER, NUMBER, NUMBER)
        self.new_2d = of(base, "ggml_new_tensor_2d", POINTER, POINTER, C.c_int, NUMBER, NUMBER)
        three = (POINTER, POINTER, POINTER)
        self.mul_mat_id = of(base, "ggml_mul_mat_id", POINTER, POINTER, *three)
        self.swiglu = of(base, "ggml_swiglu_split", POINTER, *three)
        self.mul, self.add = (of(base, f"ggml_{name}", POINTER, *three) for name in ("mul", "add"))
        self.view = of(base, "ggml_view_2d", POINTER, POINTER, POINTER, NUMBER, NUMBER, SIZE, SIZE)
        self.graph = of(base, "ggml_new_graph", POINTER, POINTER)
        self.expand = of(base, "ggml_build_forward_expand", None, POINTER, POINTER)
        self.data = of(base, "ggml_get_data", POINTER, POINTER)
        self.compute = of(base, "ggml_backend_graph_compute", C.c_int, POINTER, POINTER)
        self.backend = of(cpu_backend, "ggml_backend_cpu_init", POINTER)()
        of(cpu_backend, "ggml_backend_cpu_set_n_threads", None, POINTER, C.c_int)(
            self.backend, torch.get_num_threads()
        )
        # where a tensor keeps the address of its data: found by looking for it
        probe = self.new_2d(self.init(_InitParams(1 << 16, None, False)), 0, 4, 4)
        words = (C.c_uint64 * 60).from_address(probe)
        self.data_at = next(8 * i for i in range(60) if words[i] == self.data(probe))

    def on(self, context: int, tensor: Tensor, *sizes: int) -> int:
        """A ggml tensor on the memory of a torch tensor."""
        made = (self.new if len(sizes) == 3 else self.new_2d)(context, TYPES[tensor.dtype], *sizes)
        C.c_uint64.from_address(made + self.data_at).value = tensor.data_ptr()
        return made


class Layer:
    """A graph for T tokens and K choices, K > 1. The result is overwritten by the next call."""

    def __init__(self, ggml: Ggml, gate_up: Tensor, down: Tensor, T: int, K: int):
        E, G, D = gate_up.shape
        F = G // 2
        gate, up = (part.contiguous() for part in gate_up.chunk(2, dim=1))
        self.ggml, self.kept = ggml, (gate, up, down)
        self.x_TD, self.gate_TK = torch.zeros(T, D), torch.zeros(T, K)
        self.expert_TK = torch.zeros(T, K, dtype=torch.int32)
        room = (1 << 22) + 4 * T * (K * (3 * F + 2 * D) + D * (K + 1))
        context = ggml.init(_InitParams(room, None, False))
        leaves = ggml.init(_InitParams(1 << 20, None, True))
        x, ids = ggml.on(leaves, self.x_TD, D, 1, T), ggml.on(leaves, self.expert_TK, K, T)
        first = [ggml.mul_mat_id(context, ggml.on(leaves, w, D, F, E), x, ids) for w in (gate, up)]
        rows = ggml.mul_mat_id(context, ggml.on(leaves, down, F, D, E), ggml.swiglu(context, *first), ids)
        weighed = ggml.mul(context, rows, ggml.on(leaves, self.gate_TK, 1, K, T))
        parts = [ggml.view(context, weighed, D, T, 4 * D * K, 4 * D * k) for k in range(K)]
        total = parts[0]
        for part in parts[1:]:
            total = ggml.add(context, total, part)
        self.graph = ggml.graph(context)
        ggml.expand(self.graph, total)
        memory = (C.c_float * (T * D)).from_address(ggml.data(total))
        self.y_TD = torch.frombuffer(memory, dtype=torch.float32).view(T, D)

    def __call__(self, x_TD: Tensor, routing: Routing) -> Tensor:
        self.x_TD.copy_(x_TD), self.expert_TK.copy_(routing.expert_TK), self.gate_TK.copy_(routing.gate_TK)
        assert self.ggml.compute(self.ggml.backend, self.graph) == 0
        return self.y_TD.to(x_TD.dtype)


def main(
    folder: Annotated[Path, typer.Argument(help="where libggml-base.so and libggml-cpu.so are")],
    threads: int = 2,
    quick: bool = False,
) -> None:
    torch.set_num_threads(threads)
    ggml = Ggml(folder.resolve())
    rows = []
    for dtype in (torch.bfloat16, torch.float32):
        model = cpu.MODELS["seed-qwen"]
        weights: ExpertWeights = cpu.make_weights(model, dtype)
        for T in (1, 16) if quick else (1, 4, 16, 64, 256, 1024):
            inputs = cpu.make_inputs(model, dtype, T, "uniform")
            subjects, _ = cpu.subjects_for(["auto"], inputs, weights, None)
            hf_layout = (w.transpose(1, 2).contiguous() for w in (weights.w_in_EDG, weights.w_out_EFD))
            layer = Layer(ggml, *hf_layout, T, model.K)
            subjects.append(cpu.Subject(name="llama.cpp", call=layer))
            with torch.no_grad():
                statuses = cpu.judge_subjects(subjects, inputs, weights)
                seconds = cpu.run_rounds(subjects, inputs, until=time.perf_counter() + (1 if quick else 5))
            found = measured(subjects, statuses, seconds, "auto")
            show(f"seed-qwen {dtype} T={T}", found, "auto")
            rows.append({"dtype": str(dtype), "T": T, "subjects": dumped(found)})
    finish("llama_cpp", quick, rows)


if __name__ == "__main__":
    typer.run(main)
