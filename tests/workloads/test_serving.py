"""Files of serving engines: every way routed_experts are sent is read, and what has another form gets a
sentence."""

from __future__ import annotations

import base64
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from damaged_files import assert_one_sentence
from engine_routes import flat, npy, routes, saved, sglang, text, vllm
from moe_routing_bench.workloads.serving import read_requests

WORDS = text(30)
IDS = routes(WORDS[:-1], L=4, K=3)
PACKED = {"data": flat(IDS[20:], "uint16"), "shape": [9, 4, 3], "dtype": "uint16", "start": 20}
SGLANG = {"num_layers": 4, "choices": 3}

FORMS: dict[str, tuple[Any, dict[str, int]]] = {
    "vllm": (vllm(IDS, WORDS, 12), {}),
    "vllm in bytes": (vllm(IDS.astype(np.uint8), WORDS, 12), {}),
    "vllm by columns": (vllm(np.asfortranarray(IDS), WORDS, 12), {}),
    "vllm 0.21: prompt apart": (
        {
            "prompt_routed_experts": npy(IDS[:12]),
            "choices": [{"routed_experts": npy(IDS[12:])}],
        },
        {},
    ),
    "vllm, nested lists": ({"choices": [{"routed_experts": IDS.tolist()}]}, {}),
    "sglang": (sglang(IDS, WORDS, 12), SGLANG),
    "sglang, OpenAI's form": ({"choices": [{"sgl_ext": {"routed_experts": flat(IDS)}}]}, SGLANG),
    "sglang in two bytes": (
        {"meta_info": {"routed_experts": flat(IDS, "uint16"), "routed_experts_dtype": "uint16"}},
        SGLANG,
    ),
    "a list": ([sglang(IDS, WORDS, 12)], SGLANG),
    "no other field": ({"routed_experts": npy(IDS)}, {}),
}


@pytest.mark.parametrize(("document", "options"), FORMS.values(), ids=FORMS)
def test_every_form_is_read(document: Any, options: dict[str, int], tmp_path: Path) -> None:
    (request,) = read_requests(saved(tmp_path / "r.json", document), **options)
    assert np.array_equal(request.ids, IDS) and request.start == 0
    if "usage" in str(document):
        assert request.token_ids == tuple(WORDS)
    if "prompt_tokens" in str(document):
        assert request.tokens == 30


def test_an_array_lines_and_offsets(tmp_path: Path) -> None:
    path = tmp_path / "r"
    np.save(path, IDS)
    (request,) = read_requests(tmp_path / "r.npy", start=7)
    assert np.array_equal(request.ids, IDS) and request.start == 7
    path.write_text("\n".join(json.dumps(vllm(IDS[: n + 1], WORDS[: n + 2], 1)) for n in (5, 9)) + "\n\n")
    assert [len(request.ids) for request in read_requests(path)] == [6, 10]
    (request,) = read_requests(saved(path, {"choices": [{"routed_experts": PACKED}]}))
    assert np.array_equal(request.ids, IDS[20:]) and request.start == 20 and request.ids.dtype == np.uint16
    two = {
        "choices": [{"routed_experts": npy(IDS)}, {"routed_experts": npy(IDS)}],
        "usage": {"prompt_tokens": 3},
    }
    assert [one.name for one in read_requests(saved(path, two))] == [
        "response 0, choice 0",
        "response 0, choice 1",
    ]


def response(**change: Any) -> Any:
    return {"choices": [{"routed_experts": {**PACKED, **change}}]}


def sent(packed: Any) -> Any:
    return {"choices": [{"routed_experts": packed}]}


class Trap:
    """Unpickled, it would raise."""

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return exec, ("raise ZeroDivisionError",)


WRONG: dict[str, tuple[Any, str]] = {
    "nothing": ({"choices": [{"text": "x"}]}, "holds no routed_experts; start the engine with"),
    "null": (sent(None), "holds no routed_experts"),
    "no response": ([1], "response 0 is no JSON object"),
    "choices": ({"choices": {"0": 1}}, "no list of objects"),
    "not base64": (sent("@@@"), "choice 0 is not base64"),
    "a number": (sent(5), "neither base64, nor a list"),
    "flat without sizes": (sglang(IDS, WORDS, 3), "say how many layers"),
    "floats": (sent(npy(IDS.astype(np.float32))), "is float32; ids are whole numbers"),
    "objects": (sent(npy(np.array([[[Trap()]]], dtype=object))), "is object; ids are whole numbers"),
    "two dimensions": (sent(npy(IDS[0])), "is 4 x 3; it must be tokens x layers x choices"),
    "a list of two": (sent([[1, 2]]), "is a list, but not of"),
    "ragged": (sent([[[1, 2]], [[1]]]), "is a list, but not of"),
    "words": (sent([[["a"]]]), "is a list, but not of"),
    "too large numbers": (sent([[[2**70]]]), "is a list, but not of"),
    "cut off": (
        sent(base64.b64encode(base64.b64decode(npy(IDS))[:-3]).decode()),
        "bytes, not those of shape",
    ),
    "header": (sent(base64.b64encode(b"\x93NUMPY\x01\x00\x04\x00{]{]").decode()), "its header is broken"),
    "a giant": (response(shape=[2**40, 2**20, 3]), "not those of shape"),
    "no shape": (response(shape=None), "does not say its shape"),
    "shape below 0": (response(shape=[-1, 4, 3]), "does not say its shape"),
    "dtype": (response(dtype="object"), "is object; ids are whole numbers"),
    "dtype in a list": (response(dtype=["int32"]), "ids are whole numbers"),
    "encoding": (response(encoding="base85"), "no data in base64"),
    "start": (response(start=-4), "starts at '-4'; it must be a position"),
    "token ids": (
        {**vllm(IDS, WORDS, 12), "prompt_token_ids": ["a"]},
        "token ids of response 0, choice 0 are not numbers",
    ),
    "other layers": ([vllm(IDS, WORDS, 12), vllm(IDS[:, :2], WORDS, 12)], "as many layers and choices"),
    "many layers": (sent(npy(np.zeros((1, 2000, 1), np.int32))), "1 to 1024 layers"),
    "prompt of another form": (
        {"prompt_routed_experts": npy(IDS[:, :1]), **sent(npy(IDS))},
        "they do not fit",
    ),
}


@pytest.mark.parametrize(("document", "sentence"), WRONG.values(), ids=WRONG)
def test_another_form_gets_a_sentence(document: Any, sentence: str, tmp_path: Path) -> None:
    path = saved(tmp_path / "r.json", document)
    with pytest.raises(ValueError, match=r".") as caught:
        read_requests(path)
    assert sentence in str(caught.value)
    assert_one_sentence(caught.value, path)


def test_sizes_that_do_not_fit(tmp_path: Path) -> None:
    path = saved(tmp_path / "r.json", sglang(IDS, WORDS, 12))
    for options, sentence in (
        ({"num_layers": 5, "choices": 3}, "no multiple of 5 layers x 3 choices"),
        ({"num_layers": 0, "choices": 3}, "no multiple of 0 layers"),
        ({"num_layers": 4, "choices": 3, "max_bytes": 100}, "over the limit of 100"),
        ({"num_layers": 4, "choices": 3, "start": -1}, "start is -1"),
    ):
        with pytest.raises(ValueError, match=sentence):
            read_requests(path, **options)
    np.save(tmp_path / "r.npy", IDS)
    with pytest.raises(ValueError, match=r"29 x 4 x 3, .* 5 layers"):
        read_requests(tmp_path / "r.npy", num_layers=5)
    with pytest.raises(ValueError, match="no file"):
        read_requests(tmp_path / "absent")
    for content in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b"{}\nx\n", b"\x80\x04N."):
        path.write_bytes(content)
        with pytest.raises(ValueError, match=r"\.npy .*JSON") as caught:
            read_requests(path)
        assert_one_sentence(caught.value, path)


def test_damaged_files_are_read_or_get_a_sentence(tmp_path: Path) -> None:
    draw, path = random.Random(1), tmp_path / "r"
    np.save(tmp_path / "a.npy", IDS)
    whole = [(tmp_path / "a.npy").read_bytes(), json.dumps(vllm(IDS, WORDS, 12)).encode()]
    whole.append(json.dumps([response(), response()]).encode())
    for _ in range(1500):
        content = bytearray(draw.choice(whole))
        for _ in range(draw.randint(1, 4)):
            content[draw.randrange(min(400, len(content)))] = draw.randrange(256)
        if draw.random() < 0.2:
            del content[draw.randrange(len(content)) :]
        path.write_bytes(content)
        try:
            read_requests(path)
        except ValueError as error:
            assert_one_sentence(error, path)
