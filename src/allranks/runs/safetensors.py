"""Writes a checkpoint's tensors as a safetensors file, without torch, by copying their bytes.

The format: 8 bytes with the length of the header (little endian), the header as JSON (for each tensor ``dtype``,
``shape`` and ``data_offsets`` from the end of the header), then the data without gaps.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from itertools import product
from pathlib import Path
from typing import BinaryIO

from allranks.errors import AllranksError, UsageError
from allranks.record.checkpoints import PART, Chunk, TensorEntry

#: torch's names of dtypes, and those of safetensors.
DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "complex64": "C64",
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


def write(target: Path, directory: Path, tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> None:
    """Write ``tensors`` of the checkpoint in ``directory`` to ``target``, atomically.

    Raises:
        UsageError: safetensors does not support a dtype.
        AllranksError: the file cannot be written.
    """
    header, places = _header(tensors, metadata)
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as out:
            out.write(len(header).to_bytes(8, "little") + header)
            for name, offset in places.items():
                _copy(tensors[name], directory, out, 8 + len(header) + offset)
            out.flush()
            os.fsync(out.fileno())
        temporary.replace(target)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink()
        fix = "name a file elsewhere, or free space there"
        raise AllranksError(f"cannot write {target}", why=error.strerror, fix=fix) from error


def _header(tensors: Mapping[str, TensorEntry], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the header, padded to 8 bytes, and the offset of each tensor: widest elements first, for alignment."""
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    places, end = {}, 0
    for name, tensor in sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0])):
        if tensor.dtype not in DTYPES:
            raise UsageError(f"{name} is {tensor.dtype}, which safetensors does not know", fix="export to a .pt file")
        begin, end = end, end + math.prod(tensor.shape) * tensor.itemsize
        places[name] = begin
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    return text + b" " * (-len(text) % 8), places


def _copy(tensor: TensorEntry, directory: Path, out: BinaryIO, begin: int) -> None:
    """Copy the chunks of a tensor to their offsets."""
    for chunk in tensor.chunks:
        with (directory / chunk.file).open("rb") as stream:
            stream.seek(chunk.offset)
            for element, count in _runs(tensor.shape, chunk):
                out.seek(begin + element * tensor.itemsize)
                left = count * tensor.itemsize
                while left:
                    data = stream.read(min(left, PART))
                    if not data:
                        raise OSError(0, "the checkpoint changed while it was read")
                    out.write(data)
                    left -= len(data)


def _runs(shape: tuple[int, ...], chunk: Chunk) -> Iterator[tuple[int, int]]:
    """Yield the contiguous runs of a chunk in the whole tensor: index of the first element, and number of elements."""
    inner = len(shape)
    while inner and chunk.shape[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    run = math.prod(chunk.shape[outer:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    first = sum(start * stride for start, stride in zip(chunk.start, strides, strict=True))
    for index in product(*map(range, chunk.shape[:outer])):
        yield first + sum(place * stride for place, stride in zip(index, strides[:outer], strict=True)), run
