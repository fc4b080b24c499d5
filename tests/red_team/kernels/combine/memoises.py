"""Remembers results: by address (wrong as soon as memory is used again), by a cheap checksum (the first four
numbers of each input), or by a hash of all inputs (never wrong, and free for an input seen before)."""

import hashlib

import torch

from moe_routing_bench.ops.combine.op import op

honest = op.get(op.default).run
_seen = {}


def key_of(y_RD, gate_TK, plan, by):
    if by == "address":
        return y_RD.data_ptr(), gate_TK.data_ptr(), y_RD.shape
    if by == "checksum":
        return y_RD.shape, *y_RD.flatten()[:4].tolist(), *gate_TK.flatten()[:4].tolist()
    content = hashlib.blake2b(digest_size=16)
    for tensor in (y_RD, gate_TK, plan.row_TK):
        content.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return content.digest()


def run(y_RD, gate_TK, plan, *, by):
    key = key_of(y_RD, gate_TK, plan, by)
    if key not in _seen:
        if len(_seen) >= 256:  # a cheat need not eat the memory
            _seen.clear()
        _seen[key] = honest(y_RD, gate_TK, plan)
    return _seen[key].clone()
