"""Writing a checkpoint's tensors as a safetensors file, without torch: bytes are copied as they are.

The format: 8 bytes with the length of the header (little endian), the header as JSON (for each tensor ``dtype``,
``shape`` and ``data_offsets`` from the end of the header), then the data without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from allranks.errors import AllranksError, UsageError
from allranks.runs.checkpoints import PART, Chunk, TensorEntry

#: torch's names of dtypes, and those of safetensors.
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write(target: Path, folder: Path, tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` of the checkpoint in ``folder`` to ``target``, whole or not at all.

    Raises:
        UsageError: safetensors knows no such dtype.
        AllranksError: the file cannot be written.
    """
    header, places = _header(tensors, metadata)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            out.flush()
            for name, offset in places.items():
                _copy(tensors[name], folder, out.fileno(), 8 + len(header) + offset)
            os.fsync(out.fileno())
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        raise AllranksError(f"cannot write {target}", why=error.strerror) from error


def _header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Lay the tensors out, widest elements first, so that each is aligned; pad the header to 8 bytes."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    places, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        if tensor.dtype not in DTYPES:
            raise UsageError(f"{name} is {tensor.dtype}, which safetensors does not know", fix="export to a .pt file")
        begin, end = end, end + math.prod(tensor.shape) * tensor.itemsize
        places[name] = begin
        entry = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
        header[name] = entry
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), places


def _copy(tensor: TensorEntry, folder: Path, out: int, begin: int) -> None:
    """Put the pieces of a tensor into their places."""
    for chunk in tensor.chunks:
        with (folder / chunk.file).open("rb") as stream:
            stream.seek(chunk.offset)
            for element, count in _runs(tensor.shape, chunk):
                _copy_run(
                    stream.fileno(), stream.tell(), out, begin + element * tensor.itemsize, count * tensor.itemsize
                )
                stream.seek(count * tensor.itemsize, os.SEEK_CUR)


def _copy_run(source: int, at: int, out: int, to: int, left: int) -> None:
    while left:
        data = os.pread(source, min(left, PART), at)
        if not data:
            raise OSError(0, "the checkpoint changed while it was read")
        at, left = at + len(data), left - len(data)
        while data:
            count = os.pwrite(out, data, to)
            data, to = data[count:], to + count


def _runs(shape: tuple[int, ...], chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield the stretches of a chunk that are contiguous in the whole tensor: first element and number of them."""
    inner, run = len(shape), 1
    while inner:
        inner -= 1
        run *= chunk.shape[inner]
        if chunk.shape[inner] != shape[inner]:
            break
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(chunk.start, strides, strict=True))
    outer = chunk.shape[:inner]
    for number in range(math.prod(outer) if run else 0):
        place = first
        for dim in reversed(range(inner)):
            number, index = divmod(number, outer[dim])
            place += index * strides[dim]
        yield place, run
