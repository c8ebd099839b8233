"""Continuing from the newest whole checkpoint: found, verified, checked against the parts, then loaded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from allranks.errors import RankError
from allranks.runs.checkpoints import (
    OBJECTS,
    Manifest,
    TensorEntry,
    entries,
    problems,
    read_file,
    read_manifest,
    read_tensors,
)
from allranks.runtime.checkpoint import random_states
from allranks.runtime.checkpoint.fitting import misfits, refuse, sharded_likes
from allranks.runtime.checkpoint.objects import load_objects
from allranks.runtime.checkpoint.parts import Part
from allranks.runtime.checkpoint.reading import read_all
from allranks.runtime.checkpoint.state import names_in, put_together
from allranks.runtime.checkpoint.writing import checksum
from allranks.runtime.say import say

if TYPE_CHECKING:
    from allranks.runtime.context import Context

#: What refuses to continue comes first: a loader finds that its dataset is another one.
_ORDER = {"other": 0, "module": 1, "optimizer": 2}


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


def resume(
    ctx: Context, folder: Path, own: list[Part], around: list[Part], *, seen: bool
) -> tuple[Resumed | None, set[Path]]:
    """Load the newest whole checkpoint into the parts; all ranks call it.

    Args:
        ctx: the context.
        folder: of the checkpoints.
        own: the script's parts, which the checkpoint must hold.
        around: the context's parts, which it need not.
        seen: whether all ranks see the folder.

    Returns:
        What was loaded, or None; and the damaged ones.

    Raises:
        RankError: the newest whole checkpoint does not fit the parts.
    """
    listed = [(entry.path.name, entry.problem) for entry in entries(folder)] if ctx.is_main else []
    damaged: set[Path] = set()
    for name, problem in ctx.control.broadcast(listed):
        path = folder / name
        bad = [problem] if problem else _problems(ctx, path, seen)
        if not bad:
            return _load(ctx, path, own, around), damaged
        damaged.add(path)
        if ctx.is_main:
            more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
            say(f"{path} is damaged and is skipped: {bad[0]}{more}")
    if damaged and ctx.is_main:
        say(f"no checkpoint in {folder} is whole: training starts from the beginning")
    return None, damaged


def _problems(ctx: Context, path: Path, seen: bool) -> list[str]:
    """Read all of a checkpoint, each rank a share of it where all see it."""
    if not seen:
        return ctx.on_main(_all_problems, path)
    found = list(problems(path, share=ctx.rank, shares=ctx.world_size, checksum=checksum))
    return sorted({problem for some in ctx.control.gather(found) for problem in some})


def _all_problems(path: Path) -> list[str]:
    return sorted(set(problems(path, checksum=checksum)))


def _load(ctx: Context, path: Path, own: list[Part], around: list[Part]) -> Resumed:
    manifest, tensors, objects = _contents(ctx, path)
    skeletons = objects["parts"]
    wrong = misfits(own, skeletons, objects["shapes"], tensors)
    if any(ctx.control.gather(bool(wrong))):
        raise refuse(path, wrong or ["it does not fit on another rank"])
    parts = [*own, *(part for part in around if part.name in skeletons)]
    _tell_unused(ctx, path, skeletons, parts)
    for part in sorted(parts, key=lambda part: _ORDER[part.kind]):
        _load_part(ctx, path, part, skeletons[part.name], tensors)
    if ctx.is_main:
        epoch = "" if manifest.epoch is None else f"epoch {manifest.epoch}, "
        say(f"continuing from {path} ({epoch}step {manifest.step})")
    _restore_random(ctx, objects["random"], manifest)
    return Resumed(path, manifest.step, manifest.epoch, objects["config"])


def _contents(ctx: Context, path: Path) -> tuple[Manifest, dict[str, TensorEntry], dict[str, Any]]:
    """Give all ranks what rank 0 reads: manifest, index of tensors, and what is no tensor."""
    read = None
    if ctx.is_main:
        manifest = read_manifest(path)
        read = (manifest, read_tensors(path, manifest), read_file(path, OBJECTS, manifest))
    contents = ctx.control.broadcast(read)
    assert contents is not None
    return contents[0], contents[1], load_objects(path, contents[2])


def _tell_unused(ctx: Context, path: Path, skeletons: dict[str, Any], parts: list[Part]) -> None:
    unused = [name for name in skeletons if name not in {part.name for part in parts} and not name.startswith("ctx.")]
    if unused and ctx.is_main:
        say(f"{path} also holds {', '.join(unused)}, which ctx.checkpoints() was not given")


def _load_part(ctx: Context, path: Path, part: Part, skeleton: Any, tensors: dict[str, TensorEntry]) -> None:
    """Load one part; when it fails on one rank, all raise."""
    likes = sharded_likes(part, skeleton, tensors)
    found = read_all(path, dict.fromkeys(names_in(skeleton)), tensors, likes, ctx.control)
    failure: Exception | None = None
    try:
        part.held.load_state_dict(put_together(skeleton, found.__getitem__))
    except Exception as error:  # noqa: BLE001 - whatever the script's object raises
        failure = error
    if not ctx.control.agree(int(failure is not None))[0]:
        return
    if isinstance(failure, RankError):
        raise failure
    why = f"{type(failure).__name__}: {failure}" if failure else "it failed on another rank"
    raise RankError(
        f"{path}: {part.name} cannot be loaded", why=why, fix="pass resume=False, or another folder"
    ) from failure


def _restore_random(ctx: Context, states: list[dict[str, Any]], manifest: Manifest) -> None:
    if len(states) == ctx.world_size:
        random_states.restore(states[ctx.rank], ctx.device)
        return
    change = f"{ctx.world_size} ranks continue from {manifest.world_size}"
    if ctx.seed is None:
        told = f"{change}: random generators stay as they are"
    else:
        random_states.reseed(ctx.seed, ctx.rank, manifest.step)
        told = f"{change}: random generators were seeded anew from seed, rank and step"
    if ctx.is_main:
        say(told)
