"""How tests damage files, take safetensors files apart, and what an error about either must be like."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def assert_one_sentence(error: ValueError | str, path: Path | str = "") -> None:
    """Exactly ValueError: UnicodeDecodeError and others are kinds of it that were not meant."""
    assert isinstance(error, str) or type(error) is ValueError, repr(error)
    text = str(error).replace(str(path), "FILE") if path else str(error)
    assert 15 < len(text) < 800 and text.isprintable(), ascii(text)
    assert "errors.pydantic" not in text and "Traceback" not in text


def hurt(value: Any, draw: random.Random, values: Sequence[Any], names: Sequence[str]) -> None:
    """One spot somewhere in a nested value becomes another value, gets lost or gets another name."""
    while keys := list(value) if isinstance(value, dict) else list(range(len(value))):
        key = draw.choice(keys)
        if isinstance(value[key], (dict, list)) and draw.random() < 0.75:
            value = value[key]
            continue
        what = draw.randrange(4)
        if what == 0:
            del value[key]
        elif what == 1 and isinstance(value, dict):
            value[draw.choice(names)] = value.pop(key)
        else:
            value[key] = copy.deepcopy(draw.choice(values))
        return


def hurt_json(
    document: Any, draw: random.Random, values: Sequence[Any], names: Sequence[str], most: int = 2
) -> bytes:
    """A document with one spot changed or several, and then perhaps some of its bytes, or its end lost."""
    for _ in range(draw.randint(1, most)):
        hurt(document, draw, values, names)
    content = bytearray(json.dumps(document).encode())
    if draw.random() < 0.3:
        for _ in range(draw.randint(1, 6)):
            content[draw.randrange(len(content))] = draw.randrange(256)
    if draw.random() < 0.1:
        del content[draw.randrange(len(content)) :]
    return bytes(content)


def apart(content: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def joined(header: Any, data: bytes) -> bytes:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    return struct.pack("<Q", len(text)) + text + data
