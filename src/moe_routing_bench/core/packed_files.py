"""Stores packed weights on disk. They are packed once; every process that freezes the same weights maps them.

    <folder>/<sha256>.safetensors     one matrix of all experts of a layer

The name is a hash of the weights, of the packed form and of the code that packs, so no file becomes outdated:
other weights have another name. A file is written under a name with ".part-", synced and renamed; a killed
process leaves nothing else. It is mapped read-only, so processes share its memory. The panels begin at byte
4096, so the kernels' vectors are aligned. Every freeze checks the size, the header and a CRC of all bytes,
because a disk can lose some. This does not protect against an attacker who can write to the folder. You can
delete the files at any time, even while they are used.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import mmap
import sys
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_routing_bench.core.dtypes import IN_SAFETENSORS
from moe_routing_bench.core.paths import home
from moe_routing_bench.core.whole_files import written_whole

HEADER = 4096  # bytes before the panels, a page
TYPES = {"U8": torch.uint8, **IN_SAFETENSORS}
LEFT_OVER = 3600  # seconds; an older part is from a process that was killed


class PackedFiles:
    """A folder of packed weights, by default <MRB_HOME>/packed. It counts the bytes mapped and written."""

    def __init__(self, folder: Path | str | None = None):
        self.folder = home() / "packed" if folder is None else Path(folder)
        self.mapped = self.written = 0

    @staticmethod
    def asked(keep_packed: bool | Path | str) -> PackedFiles | None:
        """True means the default folder, False means no folder."""
        if isinstance(keep_packed, bool):
            return PackedFiles() if keep_packed else None
        return PackedFiles(keep_packed)

    def panels(self, how: object, source: Iterable[Tensor], pack: Callable[[], Tensor]) -> Tensor:
        """Returns the packed source, from its file if there is one. how: other inputs of the file's name."""
        content = repr((how, torch.__version__, [_content(tensor) for tensor in source]))
        path = self.folder / f"{hashlib.sha256(content.encode()).hexdigest()}.safetensors"
        try:
            panels = _mapped(path)
        except FileNotFoundError:
            pass
        except ValueError as damage:
            warnings.warn(f"{path} is not used, and packed again: {damage}", stacklevel=2)
        else:
            self.mapped += panels.nbytes
            return panels
        panels = pack()
        try:
            self._write(path, panels)
        except OSError as error:
            warnings.warn(f"packed weights are not kept in {self.folder}: {error}", stacklevel=2)
            return panels
        self.written += panels.nbytes
        return _mapped(path)

    def say(self) -> None:
        """Prints on stderr how many bytes were mapped and written."""
        print(
            f"moe_routing_bench: packed weights in {self.folder}: {self.mapped / 1e9:.3g} GB mapped, "
            f"{self.written / 1e9:.3g} GB written; you can delete them at any time",
            file=sys.stderr,
        )

    def _write(self, path: Path, panels: Tensor) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        for left in self.folder.glob("*.part-*"):
            with contextlib.suppress(FileNotFoundError):  # another process does the same
                if time.time() - left.stat().st_mtime > LEFT_OVER:
                    left.unlink()
        with written_whole(path, sync=True) as part, part.open("wb") as file:
            file.write(_header(path, panels))
            file.write(_bytes(panels))


def _mapped(path: Path) -> Tensor:
    """Maps a file. Raises ValueError if it is not exactly the file that was written under this name."""
    with path.open("rb") as file:
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)  # ValueError if it is empty
    try:
        entry = json.loads(memory[8:HEADER])["panels"]
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # nobody writes to panels
            panels = torch.frombuffer(memory, dtype=TYPES[entry["dtype"]], offset=HEADER).view(entry["shape"])
    except (ValueError, LookupError, TypeError, RuntimeError):
        raise ValueError("its header or its end is missing or damaged") from None
    if memory[:HEADER] != _header(path, panels):
        raise ValueError("its bytes are not those that were written under this name")
    return panels


def _header(path: Path, panels: Tensor) -> bytes:
    """A header of safetensors: its length in 8 bytes, JSON, spaces up to the data."""
    dtype = next(name for name, dtype in TYPES.items() if dtype == panels.dtype)
    about = {"name": path.stem, "crc32": f"{zlib.crc32(repr(_each(panels, zlib.crc32)).encode()):08x}"}
    entry = {"dtype": dtype, "shape": list(panels.shape), "data_offsets": [0, panels.nbytes]}
    text = json.dumps({"__metadata__": about, "panels": entry}).encode().ljust(HEADER - 8)
    return len(text).to_bytes(8, "little") + text


def _content(tensor: Tensor) -> tuple[object, ...]:
    """The type, the sizes and a hash of each expert's values, read in the order they have in memory."""
    order = [0, *sorted(range(1, tensor.ndim), key=tensor.stride, reverse=True)]
    return tensor.dtype, tuple(tensor.shape), order, _each(tensor.detach().permute(order), _sha256)


def _each(tensor: Tensor, check: Callable[[Any], object]) -> list[object]:
    """check(bytes) of every expert; hashlib and zlib let other threads run."""

    def checked(part: Tensor) -> object:
        part = part.contiguous()
        return check(_bytes(part))

    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return list(threads.map(checked, tensor))


def _sha256(data: Any) -> str:
    return hashlib.sha256(data).hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor, without a copy; the caller keeps the tensor."""
    return (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
