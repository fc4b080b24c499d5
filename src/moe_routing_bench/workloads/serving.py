"""Reads the routed experts that serving engines return: read_requests(file) -> the choices of each request.

vLLM (--enable-return-routed-experts) answers with `choices[].routed_experts`, a base64 .npy of length x
layers x choices; some versions put the prompt's rows into `prompt_routed_experts`. SGLang
(--enable-return-routed-experts) answers with `meta_info.routed_experts`, or `sgl_ext.routed_experts` of a
choice: base64 of flat int32. Proxies send an object with data, shape, dtype and start. The token sampled last
has no row, because it was never run.

A file is one array (.npy), one response or a list of them (JSON), or one response a line. It is not trusted:
sizes are bounded, nothing is unpickled, and a wrong form is an error of one sentence. trace_check finds what
is wrong with the ids.
"""

from __future__ import annotations

import base64
import binascii
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

MAX_BYTES = 1 << 30
MAX_LAYERS, MAX_CHOICES, MAX_REQUESTS = 1024, 64, 1 << 16
MAGIC = b"\x93NUMPY"
INTEGERS = ("uint8", "uint16", "uint32", "int8", "int16", "int32", "int64")


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it arrived; ids were not checked.

    A prompt of 3 tokens and 2 sampled ones, in a model with 2 MoE layers and 2 choices:
      name   = "response 0, choice 0"
      ids    = 4 x 2 x 2: [[[5, 0], [1, 2]], ...]    tokens x layers x choices, in the type they came in
      start  = 0                                     the position of the first row
      tokens = 5                                     in all, if the response says so
      token_ids = (17, 4, 9, 2, 11)                  if the response has them all
    """

    name: str
    ids: NDArray[Any]
    start: int = 0
    tokens: int | None = None
    token_ids: tuple[int, ...] | None = None


def read_requests(
    path: Path | str,
    *,
    num_layers: int | None = None,
    choices: int | None = None,
    start: int = 0,
    max_bytes: int = MAX_BYTES,
) -> list[Request]:
    """Returns the requests in a file. Raises ValueError with a sentence if the file has another form.

    num_layers, choices  needed for SGLang's flat arrays, compared with the shape of other arrays
    start                the position of the first row, if the file does not say it
    """
    path = Path(path)
    if not path.is_file():
        raise ValueError(f"there is no file {path}")
    if (size := path.stat().st_size) > max_bytes:
        raise ValueError(f"{path} has {size:,} bytes, over the limit of {max_bytes:,}; split it")
    if start < 0:
        raise ValueError(f"start is {start}; the first row cannot stand before position 0")
    content, form = path.read_bytes(), (num_layers, choices)
    if content.startswith(MAGIC):
        requests = [Request(name="the array", ids=_npy(content, "the array"), start=start)]
    else:
        requests = []
        for number, response in enumerate(_responses(content, path)):
            requests += _requests(response, f"response {number}", form, start)
            if len(requests) > MAX_REQUESTS:
                raise ValueError(f"{path} has more than {MAX_REQUESTS:,} requests; split it")
    if not requests:
        raise ValueError(
            f"{path} holds no routed_experts; start the engine with --enable-return-routed-experts"
        )
    for request in requests:
        _check_shape(request, form, requests[0])
    return requests


def _check_shape(request: Request, form: tuple[int | None, int | None], first: Request) -> None:
    shape = request.ids.shape
    shown = " x ".join(map(str, shape))
    if len(shape) != 3:
        raise ValueError(f"routed_experts of {request.name} is {shown}; it must be tokens x layers x choices")
    if not 1 <= shape[1] <= MAX_LAYERS or not 1 <= shape[2] <= MAX_CHOICES:
        raise ValueError(
            f"routed_experts of {request.name} is {shown}; there are 1 to {MAX_LAYERS} layers and 1 to "
            f"{MAX_CHOICES} choices"
        )
    for what, number, wanted in (("layers", shape[1], form[0]), ("choices", shape[2], form[1])):
        if wanted is not None and number != wanted:
            raise ValueError(
                f"routed_experts of {request.name} is {shown}, tokens x layers x choices, but {wanted} "
                f"{what} were asked for"
            )
    if shape[1:] != first.ids.shape[1:]:
        raise ValueError(
            f"routed_experts of {request.name} is {shown}, of {first.name} "
            f"{' x '.join(map(str, first.ids.shape))}: requests of one model have as many layers and choices"
        )


def _responses(content: bytes, path: Path) -> Iterator[Any]:
    try:
        document = _json(content)
    except ValueError:
        lines = [line for line in content.splitlines() if line.strip()]
        if len(lines) < 2:
            raise ValueError(f"{path} is neither a .npy array nor JSON") from None
        for number, line in enumerate(lines):
            try:
                yield _json(line)
            except ValueError:
                raise ValueError(f"{path} is neither a .npy array nor JSON (line {number + 1})") from None
        return
    yield from document if isinstance(document, list) else [document]


def _json(content: bytes) -> Any:
    try:
        return json.loads(content)
    except RecursionError:
        raise ValueError("nested too deep") from None


def _requests(response: Any, name: str, form: tuple[int | None, int | None], start: int) -> Iterator[Request]:
    if not isinstance(response, dict):
        raise ValueError(f"{name} is no JSON object; a file holds responses as the engine sent them")
    choices = response.get("choices")
    if choices is None:
        about = response.get("meta_info", response)
        about = about if isinstance(about, dict) else {}
        ids = _ids(about, name, form)
        if ids is not None:
            yield _request(name, ids, about, response.get("prompt_ids"), response.get("output_ids"), start)
        return
    if not isinstance(choices, list) or not all(isinstance(choice, dict) for choice in choices):
        raise ValueError(f"choices of {name} is no list of objects")
    prompt = _ids({"routed_experts": response.get("prompt_routed_experts")}, f"{name} (prompt)", form)
    usage = response.get("usage") if len(choices) == 1 else None
    for number, choice in enumerate(choices):
        which = f"{name}, choice {number}"
        about = choice if choice.get("routed_experts") is not None else choice.get("sgl_ext")
        ids = _ids(about if isinstance(about, dict) else {}, which, form)
        if ids is None:
            continue
        if prompt is not None:
            if prompt.ndim != 3 or ids.ndim != 3 or prompt.shape[1:] != ids.shape[1:]:
                raise ValueError(f"{which} has {ids.shape} ids, its prompt {prompt.shape}: they do not fit")
            ids = np.concatenate((prompt, ids))
        prompt_ids = response.get("prompt_token_ids", choice.get("prompt_token_ids"))
        given = {**(usage if isinstance(usage, dict) else {}), "routed_experts": choice.get("routed_experts")}
        yield _request(which, ids, given, prompt_ids, choice.get("token_ids"), start)


def _request(
    name: str, ids: NDArray[Any], about: dict[str, Any], prompt: Any, output: Any, start: int
) -> Request:
    counts = [about.get("prompt_tokens"), about.get("completion_tokens")]
    tokens = sum(counts) if all(type(count) is int for count in counts) else None  # type: ignore[arg-type]
    token_ids = (*prompt, *output) if isinstance(prompt, list) and isinstance(output, list) else None
    if token_ids is not None and not all(type(token) is int and 0 <= token < 2**31 for token in token_ids):
        raise ValueError(f"the token ids of {name} are not numbers from 0 on")
    packed = about.get("routed_experts")
    if isinstance(packed, dict):
        start = packed.get("start", start)
        if type(start) is not int or not 0 <= start < 2**40:
            raise ValueError(f"routed_experts of {name} starts at {str(start)[:20]!r}; it must be a position")
    return Request(
        name=name,
        ids=ids,
        start=start,
        tokens=len(token_ids) if token_ids is not None else tokens,
        token_ids=token_ids,
    )


def _ids(about: dict[str, Any], name: str, form: tuple[int | None, int | None]) -> NDArray[Any] | None:
    """Returns the array of `routed_experts`, in any of the forms it is sent in; None if there is none."""
    packed = about.get("routed_experts")
    if packed is None:
        return None
    if isinstance(packed, list):
        return _nested(packed, name)
    if isinstance(packed, dict):
        if packed.get("encoding", "base64") != "base64" or not isinstance(packed.get("data"), str):
            raise ValueError(f"routed_experts of {name} has no data in base64")
        shape = packed.get("shape")
        if not isinstance(shape, list) or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"routed_experts of {name} does not say its shape")
        return _flat(_bytes(packed["data"], name), packed.get("dtype", "int32"), name, shape)
    if not isinstance(packed, str):
        raise ValueError(f"routed_experts of {name} is neither base64, nor a list, nor an object with data")
    content = _bytes(packed, name)
    if content.startswith(MAGIC):
        return _npy(content, name)
    num_layers, choices = form
    if num_layers is None or choices is None:
        raise ValueError(
            f"routed_experts of {name} is a flat array, as SGLang sends it; say how many layers (with those "
            "that have no experts) and choices the model has: --num-layers 48 --choices 8"
        )
    dtype = about.get("routed_experts_dtype", "int32")
    row = num_layers * choices * (np.dtype(dtype).itemsize if dtype in INTEGERS else 1)
    if row < 1 or len(content) % row:
        raise ValueError(
            f"routed_experts of {name} has {len(content):,} bytes, which is no multiple of {num_layers} "
            f"layers x {choices} choices in {str(dtype)[:20]}; give the model's own numbers"
        )
    return _flat(content, dtype, name, [len(content) // row, num_layers, choices])


def _bytes(text: str, name: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise ValueError(f"routed_experts of {name} is not base64") from None


def _flat(content: bytes, dtype: Any, name: str, shape: list[int]) -> NDArray[Any]:
    if dtype not in INTEGERS:
        raise ValueError(f"routed_experts of {name} is {str(dtype)[:20]}; ids are whole numbers")
    kind = np.dtype(dtype).newbyteorder("<")
    if math.prod(shape) * kind.itemsize != len(content):
        raise ValueError(
            f"routed_experts of {name} has {len(content):,} bytes, not those of shape {str(shape)[:60]} in "
            f"{dtype}"
        )
    return np.frombuffer(content, kind).reshape(shape)


def _npy(content: bytes, name: str) -> NDArray[Any]:
    file = io.BytesIO(content)
    try:
        version = np.lib.format.read_magic(file)
        read = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }[version]
        shape, by_columns, kind = read(file)
    except Exception:  # numpy's parser raises many kinds of errors
        raise ValueError(
            f"routed_experts of {name} begins like a .npy array, but its header is broken"
        ) from None
    if kind.hasobject or kind.kind not in "iu":
        raise ValueError(f"routed_experts of {name} is {str(kind)[:20]}; ids are whole numbers")
    if math.prod(shape) * kind.itemsize != len(content) - file.tell():
        raise ValueError(
            f"routed_experts of {name} has {len(content) - file.tell():,} bytes, not those of shape "
            f"{str(list(shape))[:60]} in {kind}"
        )
    flat = np.frombuffer(content, kind, offset=file.tell())
    return flat.reshape(shape, order="F" if by_columns else "C")


def _nested(rows: list[Any], name: str) -> NDArray[Any]:
    wrong = f"routed_experts of {name} is a list, but not of tokens x layers x choices whole numbers"
    try:
        ids = np.array(rows)
    except (ValueError, OverflowError, RecursionError):
        raise ValueError(wrong) from None
    if ids.ndim != 3 or ids.dtype != np.int64:
        raise ValueError(wrong)
    return ids
