"""Every way we know to change the weights of a module, and what a layer makes of it: right, or an error.

`python tests/changing_weights.py 10000` makes that many random changes between calls, and counts old results.
"""

from __future__ import annotations

import os
import sys
import tempfile
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector, parametrize, prune, vector_to_parameters

from moe_routing_bench import MoE

Change = Callable[[], object]
Way = Callable[[nn.Module, str], Change]
WAYS: dict[str, Way] = {}


def way(made: Way) -> Way:
    """A way is called before anything is frozen, so that it may keep a handle; what it returns changes the
    parameter `name` of the module."""
    WAYS[made.__name__] = made
    return made


def of(module: nn.Module, name: str) -> Tensor:
    return getattr(module, name)


def like(module: nn.Module, name: str) -> Tensor:
    """Other values of the same sizes."""
    before = of(module, name)
    return torch.randn(before.shape, dtype=before.dtype) * 0.3


# ---- writes that torch counts


@way
def add_in_place(module, name):
    return lambda: of(module, name).add_(0.5)


@way
def one_expert(module, name):
    return lambda: of(module, name)[2].copy_(torch.randn(()))


@way
def one_element(module, name):
    return lambda: of(module, name).__setitem__((1, 2, 3), 40.0)


@way
def initialised_anew(module, name):
    return lambda: nn.init.normal_(of(module, name))


@way
def foreach(module, name):
    return lambda: torch._foreach_mul_([of(module, name)], -1.5)


@way
def under_inference_mode(module, name):
    @torch.inference_mode()
    def change():
        of(module, name)[0].mul_(-2)

    return change


@way
def made_under_inference_mode(module, name):
    with torch.inference_mode():
        setattr(module, name, nn.Parameter(of(module, name).clone(), requires_grad=False))

    @torch.inference_mode()
    def change():
        of(module, name)[1, 3:5].mul_(-20)

    return change


# ---- writes that it does not


@way
def data_in_place(module, name):
    return lambda: of(module, name).data.mul_(-1)


@way
def data_in_part(module, name):
    return lambda: of(module, name).data[3, 2, :5].fill_(9.0)


@way
def data_masked_twice(module, name):
    """The allocator gives the second result the address of the first parameter."""

    def change():
        for _ in range(2):
            parameter = of(module, name)
            parameter.data = parameter.data * (torch.rand(parameter.shape) > 0.3)

    return change


@way
def data_set(module, name):
    return lambda: setattr(of(module, name), "data", like(module, name))


@way
def set_in_place(module, name):
    return lambda: of(module, name).set_(like(module, name))


@way
def numpy_view(module, name):
    return lambda: of(module, name).detach().numpy().__setitem__((2, 1), 7.0)


@way
def numpy_view_kept(module, name):
    kept = of(module, name).detach().numpy()
    return lambda: kept.__setitem__((1, 2, 3), 50.0)


@way
def made_from_numpy(module, name):
    array = of(module, name).detach().numpy().copy()
    setattr(module, name, nn.Parameter(torch.from_numpy(array)))
    return lambda: array.__setitem__((1, 2, 3), 50.0)


@way
def dlpack(module, name):
    return lambda: torch.from_dlpack(of(module, name).detach())[1].mul_(-3)


@way
def dlpack_kept(module, name):
    kept = torch.from_dlpack(of(module, name).detach())
    return lambda: kept[1].mul_(-3)


@way
def storage(module, name):
    return lambda: of(module, name).untyped_storage().copy_(like(module, name).untyped_storage())


@way
def storage_kept(module, name):
    kept = of(module, name).untyped_storage()
    return lambda: kept.fill_(0)


@way
def storage_freed_and_filled(module, name):
    """As sharded training does it."""

    def change():
        memory = of(module, name).untyped_storage()
        size = memory.nbytes()
        memory.resize_(0)
        memory.resize_(size)
        of(module, name).data.copy_(like(module, name))

    return change


@way
def another_process(module, name):
    of(module, name).share_memory_()

    def change():
        other = os.fork()
        if other == 0:
            of(module, name).detach().numpy()[1] *= -2  # no torch in a forked child: its threads are gone
            os._exit(0)
        os.waitpid(other, 0)

    return change


@way
def mapped_file(module, name):
    before = of(module, name).detach()
    folder = tempfile.TemporaryDirectory()
    weakref.finalize(module, folder.cleanup)
    path = Path(folder.name) / "weights"
    before.numpy().tofile(path)
    mapped = torch.from_file(str(path), shared=True, size=before.numel()).view(before.shape)
    setattr(module, name, nn.Parameter(mapped))

    def change():
        with path.open("r+b") as file:
            file.write(bytes(4000))

    return change


# ---- what training does


@way
def sgd(module, name):
    return lambda: stepped(torch.optim.SGD([of(module, name)], lr=1.0, foreach=True), of(module, name))


@way
def fused_adam(module, name):
    return lambda: stepped(torch.optim.Adam([of(module, name)], lr=0.1, fused=True), of(module, name))


@way
def optimizer_made_before(module, name):
    optimizer = torch.optim.AdamW([of(module, name)], lr=0.1)
    return lambda: stepped(optimizer, optimizer.param_groups[0]["params"][0])


def stepped(optimizer: torch.optim.Optimizer, parameter: Tensor) -> None:
    parameter.grad = torch.randn(parameter.shape)
    optimizer.step()
    parameter.grad = None


@way
def flat_buffer(module, name):
    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    at = 0
    for key, parameter in list(module.named_parameters()):
        setattr(module, key, nn.Parameter(flat[at : at + parameter.numel()].view(parameter.shape)))
        at += parameter.numel()
    return lambda: flat[: max(1, len(flat) // 700)].add_(3.0)


@way
def vector(module, name):
    return lambda: vector_to_parameters(
        parameters_to_vector(module.parameters()).detach() * -1.1, module.parameters()
    )


@way
def average_of_one_row(module, name):
    return lambda: of(module, name).data[2, 1].lerp_(torch.full_like(of(module, name)[2, 1], 30.0), 0.5)


@way
def average_in_state_dict(module, name):
    return lambda: module.state_dict()[name][1].lerp_(like(module, name)[1], 0.9)


@way
def average_in_state_dict_kept(module, name):
    kept = module.state_dict()
    return lambda: kept[name].mul_(0.5)


@way
def merged_adapter(module, name):
    def change():
        _, rows, columns = of(module, name).shape
        of(module, name).data[1, :, 3:6] += torch.randn(rows, 1) @ torch.randn(1, columns)[:, 3:6]

    return change


@way
def pruned(module, name):
    return lambda: prune.random_unstructured(module, name, amount=0.5)


class Halved(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return w * 0.5


@way
def parametrized(module, name):
    return lambda: parametrize.register_parametrization(module, name, Halved())


# ---- whole parameters


@way
def replaced(module, name):
    return lambda: setattr(module, name, nn.Parameter(like(module, name), requires_grad=False))


@way
def loaded(module, name):
    return lambda: module.load_state_dict({name: like(module, name)}, strict=False)


@way
def loaded_by_assignment(module, name):
    return lambda: module.load_state_dict({name: like(module, name)}, strict=False, assign=True)


@way
def all_loaded_by_assignment(module, name):
    return lambda: module.load_state_dict(
        {key: like(module, key) for key, _ in module.named_parameters()}, assign=True
    )


@way
def swapped(module, name):
    return lambda: torch.utils.swap_tensors(
        of(module, name), nn.Parameter(like(module, name), requires_grad=False)
    )


@way
def rounded_by_dtype(module, name):
    def change():
        of(module, name).data.mul_(1.7)
        module.bfloat16().float()

    return change


@way
def rounded_by_dtype_with_swapping(module, name):
    def change():
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            module.bfloat16().float()
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)

    return change


@way
def doubled_and_halved(module, name):
    """Nothing changes in the end, but the memory does."""

    def change():
        module.double()
        of(module, name).mul_(2)
        module.float()

    return change


# ---- what comes of a change


def outcome(way: Way, module: nn.Module, name: str, run: Callable[[], Tensor], freeze: Change | None) -> str:
    """ "right" (to be compared), "no change", or where it raises."""
    change = way(module, name)
    if freeze is not None:
        try:
            freeze()
        except RuntimeError as error:
            assert "freeze a deepcopy" in str(error), error
            return "raises in freeze"
    before = run()
    torch.manual_seed(1)
    try:
        change()
    except (RuntimeError, TypeError) as error:
        assert freeze is not None, error
        try:
            assert torch.equal(run(), before), "it raised, and something changed"
        except AttributeError:
            pass  # prune removes the parameter before it raises
        return "raises"
    try:
        return "no change" if torch.equal(run(), before) else "right"
    except (NotImplementedError, RuntimeError):
        assert freeze is not None
        return "raises at the next call"


def layer_of(impl: str) -> MoE:
    torch.manual_seed(0)
    return MoE(40, 24, 5, 2, impl=impl, bias=True)


def compared(way: str, name: str, *, frozen: bool) -> str:
    """A native layer beside the same in plain torch, which has no copies that could be old."""
    x_TD = torch.randn(30, 40, generator=torch.Generator().manual_seed(3))
    results = {}
    for impl in ("native", "staged"):
        layer = layer_of(impl)

        def run(layer: MoE = layer) -> Tensor:
            return layer(x_TD)[0]

        with torch.no_grad():
            freeze = layer.freeze if frozen and impl == "native" else None
            said = outcome(WAYS[way], layer.experts, name, run, freeze)
            results[impl] = said, run() if said == "right" else None
    (said, got), (plain, want) = results["native"], results["staged"]
    assert plain == "right", "this way changes nothing"
    if said == "right":
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert said != "no change", "an old result"
    return said


def random_changes(count: int, *, seed: int = 0, every: int = 200) -> Counter[str]:
    """Changes at random, of random parameters, with a call after each; a new layer after every so many, half
    of them frozen. Counts what came of them; "old" must not be among it."""
    draw = torch.Generator().manual_seed(seed)
    x_TD, seen, done = torch.randn(30, 40, generator=draw), Counter[str](), 0
    lasting = [key for key in WAYS if key not in ONCE]
    while done < count:
        layer, plain = layer_of("native"), layer_of("staged")
        frozen = (done // every) % 2 == 1
        if frozen:
            layer.freeze()
        for _ in range(min(every, count - done)):
            key = lasting[int(torch.randint(len(lasting), (), generator=draw))]
            name = ("w_in_EDG", "w_out_EFD")[int(torch.randint(2, (), generator=draw))]
            seen[_one_change(layer, plain, key, name, x_TD)] += 1
            done += 1
            if frozen and not any(hasattr(p, "panels") for p in layer.parameters()):
                layer.freeze()  # whole parameters were replaced
    return seen


# these leave a module in another form or in memory of others, or write to all the memory that a parameter is
# in, which may be that of other parameters too
ONCE = {
    "pruned", "parametrized", "made_under_inference_mode", "made_from_numpy", "another_process",
    "mapped_file", "flat_buffer", "storage", "storage_kept", "storage_freed_and_filled",
}  # fmt: skip


@torch.no_grad()
def _one_change(layer: MoE, plain: MoE, key: str, name: str, x_TD: Tensor) -> str:
    seed = int(torch.randint(1 << 30, ()))
    for one in (layer, plain):
        torch.manual_seed(seed)
        try:
            WAYS[key](one.experts, name)()
        except (RuntimeError, TypeError, NotImplementedError):
            assert one is layer
            return _judged(layer, plain, x_TD, "raised")
    for parameter in plain.experts.parameters():  # keep numbers in a range where they can be compared
        parameter.data.clamp_(-2, 2)
    for parameter in layer.experts.parameters():
        if not hasattr(parameter, "panels"):
            parameter.data.clamp_(-2, 2)
    return _judged(layer, plain, x_TD, "right")


def _judged(layer: MoE, plain: MoE, x_TD: Tensor, said: str) -> str:
    try:
        got = layer(x_TD)[0]
    except NotImplementedError:  # one matrix was replaced, the other is frozen
        layer.thaw()
        got, said = layer(x_TD)[0], "raised at the next call"
    return said if torch.allclose(got, plain(x_TD)[0], rtol=1e-3, atol=1e-3) else "old"


if __name__ == "__main__":
    wanted = int(sys.argv[1])
    torch.set_num_threads(1)
    found = random_changes(wanted)
    print(f"python {' '.join(sys.argv)}   torch {torch.__version__}")
    print(
        f"{wanted} random changes between calls, {len(WAYS) - len(ONCE)} ways, half of them on frozen layers:"
    )
    for said in ("right", "raised", "raised at the next call", "old"):
        print(f"  {found[said]:6d}  {said}")
    print("Every way once, on weights that are plain or frozen:")
    for key in WAYS:
        for frozen in (False, True):
            print(f"{key:32} {'frozen' if frozen else 'plain':7} {compared(key, 'w_in_EDG', frozen=frozen)}")
    sys.exit(found["old"] > 0)
