"""Resume from the newest complete checkpoint: verify it, compare it with the parts, and load it."""

from __future__ import annotations

import ctypes
import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, distributed

from allranks.errors import RankError
from allranks.record.checkpoints import (
    OBJECTS,
    Chunk,
    Manifest,
    TensorEntry,
    entries,
    problems,
    read_file,
    read_manifest,
    read_tensors,
)
from allranks.runtime import log
from allranks.runtime.checkpoint.snapshot import box, is_sharded
from allranks.runtime.checkpoint.state import PLACEHOLDER, StatePart, join, names_in
from allranks.runtime.seed import hashed, restore_random, seed_all

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: Loading order: parts that can reject a checkpoint come first, such as a loader with another dataset.
_ORDER = {"other": 0, "module": 1, "optimizer": 2}
#: torch's error for a type that it does not load with ``weights_only=True``.
_REFUSED = re.compile(r"[Uu]nsupported (?:global: )?(?:GLOBAL|class) ([\w.]+)")
#: Most keys that an error names.
_SHOWN = 8
#: Bytes of tensors to broadcast together.
_TOGETHER = 64 << 20
#: The tensors of a checkpoint, by name.
TensorIndex = dict[str, TensorEntry]


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a training resumed from.

    Attributes:
        path: directory of the checkpoint.
        step: number of optimizer steps done before it.
        epoch: epoch of the loader; None if no part is a loader.
        config: the ``config`` that it was saved with.
    """

    path: Path
    step: int
    epoch: int | None
    config: dict[str, Any]


def load_newest(
    ctx: Context, directory: Path, own: list[StatePart], internal: list[StatePart], *, shared_disk: bool
) -> tuple[Resumed | None, set[Path]]:
    """Load the newest complete checkpoint into the parts; return it, and the corrupt ones. All ranks call it.

    The checkpoint must hold the script's ``own`` parts, and may lack the ``internal`` ones, of the context.
    ``shared_disk`` is True if all ranks see the directory.

    Raises:
        RankError: the checkpoint does not fit the parts.
    """
    listed = [(entry.path.name, entry.problem) for entry in entries(directory)] if ctx.is_main else []
    corrupt: set[Path] = set()
    for name, problem in ctx.control.broadcast(listed):
        path = directory / name
        found = [problem] if problem else _problems(ctx, path, shared_disk)
        if not found:
            return _load(ctx, path, own, internal), corrupt
        corrupt.add(path)
        if ctx.is_main:
            more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            log(f"{path} is corrupt and is skipped: {found[0]}{more}")
    if corrupt and ctx.is_main:
        log(f"no checkpoint in {directory} is complete: training starts from the beginning")
    return None, corrupt


def _problems(ctx: Context, path: Path, shared_disk: bool) -> list[str]:
    """Verify a checkpoint; each rank reads a share of it if all see it."""
    if not shared_disk:
        return ctx.on_main(lambda: sorted(set(problems(path))))
    found = list(problems(path, share=ctx.rank, shares=ctx.world_size))
    return sorted({problem for some in ctx.control.gather(found) for problem in some})


def _load(ctx: Context, path: Path, own: list[StatePart], internal: list[StatePart]) -> Resumed:
    read = None
    if ctx.is_main:
        manifest = read_manifest(path)
        read = (manifest, read_tensors(path, manifest), read_file(path, OBJECTS, manifest))
    contents = ctx.control.broadcast(read)
    assert contents is not None
    manifest, tensors, objects = contents[0], contents[1], load_objects(path, contents[2])
    skeletons = objects["parts"]
    wrong = _differences(own, skeletons, objects["shapes"], tensors)
    if any(ctx.control.gather(bool(wrong))):
        raise RankError(
            f"{path} is of another model",
            why="; ".join(wrong) or "it does not fit on another rank",
            fix="give this training a directory of its own, or pass resume=False; nothing was loaded",
        )
    parts = [*own, *(part for part in internal if part.name in skeletons)]
    unused = [name for name in skeletons if name not in {part.name for part in parts} and not name.startswith("ctx.")]
    if unused and ctx.is_main:
        log(f"{path} also holds {', '.join(unused)}, which ctx.checkpoints() was not given")
    for part in sorted(parts, key=lambda part: _ORDER[part.kind]):
        _load_part(ctx, path, part, skeletons[part.name], tensors)
    if ctx.is_main:
        epochs = f"{manifest.epoch} epoch{'s' * (manifest.epoch != 1)} done, " if manifest.epoch is not None else ""
        log(f"continuing from {path} ({epochs}step {manifest.step})")
    _restore_random(ctx, objects["random"], manifest)
    return Resumed(path, manifest.step, manifest.epoch, objects["config"])


def _load_part(ctx: Context, path: Path, part: StatePart, skeleton: Any, tensors: TensorIndex) -> None:
    """Load one part; if it fails on one rank, all raise."""
    found = _read_part(ctx, path, part, skeleton, tensors)
    failure: Exception | None = None
    try:
        part.held.load_state_dict(join(skeleton, found.__getitem__))
    except Exception as error:  # noqa: BLE001 - whatever the script's object raises
        failure = error
    if not ctx.control.agree(int(failure is not None))[0]:
        return
    if isinstance(failure, RankError):
        raise failure
    why = f"{type(failure).__name__}: {failure}" if failure else "it failed on another rank"
    raise RankError(
        f"{path}: {part.name} cannot be loaded", why=why, fix="pass resume=False, or another directory"
    ) from failure


def _restore_random(ctx: Context, states: list[dict[str, Any]], manifest: Manifest) -> None:
    if len(states) == ctx.world_size:
        restore_random(states[ctx.rank], ctx.device)
        return
    change = f"{ctx.world_size} rank{'s continue' if ctx.world_size > 1 else ' continues'} from {manifest.world_size}"
    if ctx.seed is None:
        message = f"{change}: random generators stay as they are"
    else:
        seed_all(hashed(f"allranks/{ctx.seed}/continued/{manifest.step}"), ctx.rank)
        message = f"{change}: random generators were seeded again from seed, rank and step"
    if ctx.is_main:
        log(message)


# --- objects.pt ---


def load_objects(path: Path, data: bytes) -> dict[str, Any]:
    """Load ``objects.pt`` of the checkpoint in ``path`` from its bytes, without running any code that it contains.

    Raises:
        RankError: it holds an object that cannot be loaded without code; the error names its type.
    """
    try:
        objects: dict[str, Any] = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as error:  # noqa: BLE001 - the bytes may be anything
        if refused := _REFUSED.search(str(error)):
            raise RankError(
                f"{path}: {OBJECTS} holds an object of type {refused[1]}, which cannot be loaded without running code",
                why="ctx.checkpoints() saves no such object: another program wrote or changed this checkpoint",
                fix="use one that a training of yours has saved; export of a part to a .safetensors file reads "
                "tensors alone",
            ) from None
        raise RankError(
            f"{path}: {OBJECTS} cannot be loaded",
            why=f"{type(error).__name__}: {error}".splitlines()[0],
            fix="use a checkpoint that a training of yours has saved",
        ) from None
    return objects


# --- how a checkpoint differs from the parts ---


def _differences(
    parts: list[StatePart], skeletons: dict[str, Any], shapes: dict[str, Any], tensors: TensorIndex
) -> list[str]:
    """Return how a checkpoint differs from the parts: in keys, shapes, parameters of optimizers."""
    found = []
    for part in parts:
        if part.name not in skeletons:
            found.append(f"it holds no {part.name}")
        elif part.kind == "module":
            found += _module_differences(part, skeletons[part.name], tensors)
        elif part.kind == "optimizer" and part.name in shapes:
            saved, current = shapes[part.name], part.shapes()
            if len(saved) != len(current):
                found.append(f"{part.name}: it is of {len(saved)} parameters, and here are {len(current)}")
            elif saved != current:
                place = next(index for index in range(len(saved)) if saved[index] != current[index])
                found.append(f"{part.name}: parameter {place} is {saved[place]} there and {current[place]} here")
    return found


def _module_differences(part: StatePart, skeleton: dict[str, Any], tensors: TensorIndex) -> list[str]:
    current = part.held.state_dict()
    found = []
    if missing := [key for key in current if key not in skeleton]:
        found.append(f"{part.name}: it lacks {_list(missing)}")
    if unexpected := [key for key in skeleton if key not in current]:
        found.append(f"{part.name}: it has {_list(unexpected)}, which the model does not have")
    other = []
    for key, value in skeleton.items():
        name = _tensor_name(value)
        if isinstance(current.get(key), Tensor) and name and tensors[name].shape != tuple(current[key].shape):
            other.append(f"{key} ({list(tensors[name].shape)} there, {list(current[key].shape)} here)")
    if other:
        found.append(f"{part.name}: other shapes: {_list(other)}")
    return found


def _list(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def _tensor_name(value: Any) -> str | None:
    return value.get(PLACEHOLDER) if isinstance(value, dict) else None


# --- reading tensors ---


def _read_part(ctx: Context, path: Path, part: StatePart, skeleton: Any, tensors: TensorIndex) -> dict[str, Tensor]:
    """Return a part's tensors on all ranks: rank 0 reads and broadcasts them; each rank reads its boxes of DTensors."""
    found: dict[str, Tensor] = {}
    common: list[Tensor] = []
    size = 0
    likes = _sharded_likes(part, skeleton, tensors)
    for name in names_in(skeleton):
        entry = tensors[name]
        if name in likes:
            found[name] = _read_sharded(path, entry, likes[name])
            continue
        if ctx.is_main:
            found[name] = read_tensor(path, entry)
        else:
            found[name] = torch.empty(entry.shape, dtype=getattr(torch, entry.dtype))
        common.append(found[name].view(-1).view(torch.uint8))
        size += common[-1].numel()
        if size > _TOGETHER:  # In portions, so that ranks waiting for a slow disk do not time out.
            _broadcast(ctx, common)
            common, size = [], 0
    _broadcast(ctx, common)
    return found


def _broadcast(ctx: Context, tensors: list[Tensor]) -> None:
    tensors = [tensor for tensor in tensors if tensor.numel()]
    if ctx.control.group is not None and tensors:
        distributed._broadcast_coalesced(ctx.control.group, tensors, _TOGETHER, 0)  # type: ignore[attr-defined]


def _sharded_likes(part: StatePart, skeleton: Any, tensors: TensorIndex) -> dict[str, Any]:
    """Return, for each tensor to shard, a DTensor of the same layout."""
    likes = {}
    if part.kind == "module":
        current = part.held.state_dict()
        for key, value in skeleton.items():
            if (name := _tensor_name(value)) and is_sharded(current.get(key)):
                likes[name] = current[key]
    elif part.kind == "optimizer":
        for index, parameter in enumerate(part.parameters()):
            if is_sharded(parameter):
                for value in skeleton["state"].get(index, {}).values():
                    if (name := _tensor_name(value)) and tensors[name].shape == tuple(parameter.shape):
                        likes[name] = parameter
    return likes


def _read_sharded(directory: Path, entry: TensorEntry, like: Any) -> Tensor:
    """Read this rank's box, and return a DTensor that is distributed as ``like`` is."""
    shape, start = box(like)
    local = read_box(directory, entry, start, shape).to(like.device)
    made: Tensor = type(like.detach()).from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return made


def read_tensor(directory: Path, entry: TensorEntry) -> Tensor:
    """Read a whole tensor."""
    return read_box(directory, entry, (0,) * len(entry.shape), entry.shape)


def read_box(directory: Path, entry: TensorEntry, start: Sequence[int], shape: Sequence[int]) -> Tensor:
    """Read a box of a tensor: of this shape, and with its first element at index ``start``."""
    out = torch.empty(tuple(shape), dtype=getattr(torch, entry.dtype))
    missing = out.numel()
    for chunk in entry.chunks:
        low = [max(ours, theirs) for ours, theirs in zip(start, chunk.start, strict=True)]
        ends = zip(start, shape, chunk.start, chunk.shape, strict=True)
        high = [min(ours + size, theirs + extent) for ours, size, theirs, extent in ends]
        if all(first < last for first, last in zip(low, high, strict=True)):
            missing -= _read_overlap(directory, chunk, low, high, out, start)
    if missing > 0:
        raise RankError(f"{directory} does not hold all of a tensor", why="the file of a rank is missing")
    return out


def _read_overlap(
    directory: Path, chunk: Chunk, low: list[int], high: list[int], out: Tensor, start: Sequence[int]
) -> int:
    """Read the elements between ``low`` and ``high`` of a chunk into ``out``; return their number."""
    target = out[tuple(slice(a - at, b - at) for a, b, at in zip(low, high, start, strict=True))]
    rows = (low[0] - chunk.start[0], high[0] - chunk.start[0]) if low else (0, 1)
    row = math.prod(chunk.shape[1:])
    direct = target.is_contiguous() and target.numel() == (rows[1] - rows[0]) * row
    block = target if direct else torch.empty(((rows[1] - rows[0]), *chunk.shape[1:]), dtype=out.dtype)
    size = block.numel() * block.element_size()
    with (directory / chunk.file).open("rb") as stream:
        stream.seek(chunk.offset + rows[0] * row * out.element_size())
        if stream.readinto((ctypes.c_char * size).from_address(block.data_ptr())) < size:
            raise RankError(f"{stream.name} ends too early", why="it was changed while it was read")
    if not direct:
        inner = [slice(a - at, b - at) for a, b, at in zip(low[1:], high[1:], chunk.start[1:], strict=True)]
        target.copy_(block[(slice(None), *inner)])
    return target.numel()
