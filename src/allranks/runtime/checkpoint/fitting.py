"""Whether a checkpoint belongs to the parts that are to be loaded from it; found out before anything is loaded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from allranks.errors import RankError
from allranks.runs.checkpoints import TensorEntry
from allranks.runtime.checkpoint.layout import is_sharded
from allranks.runtime.checkpoint.parts import Part
from allranks.runtime.checkpoint.state import STAND_IN

_SHOWN = 8


def misfits(
    parts: Iterable[Part], skeletons: Mapping[str, Any], shapes: Mapping[str, Any], entries: Mapping[str, TensorEntry]
) -> list[str]:
    """Say in what a checkpoint differs from the parts: keys, shapes, parameters of optimizers; nothing if it fits."""
    found = []
    for part in parts:
        if part.name not in skeletons:
            found.append(f"it holds no {part.name}")
        elif part.kind == "module":
            found += _of_module(part, skeletons[part.name], entries)
        elif part.kind == "optimizer":
            found += _of_optimizer(part, shapes.get(part.name))
    return found


def refuse(path: Path, found: list[str]) -> RankError:
    """Make the error for a checkpoint that does not fit."""
    return RankError(
        f"{path} is of another model",
        why="; ".join(found),
        fix="give this training a folder of its own, or pass resume=False; nothing was loaded",
    )


def sharded_likes(part: Part, skeleton: Any, entries: Mapping[str, TensorEntry]) -> dict[str, Any]:
    """Give, for tensors that are to be spread over ranks, a DTensor that shows how."""
    if part.kind == "module":
        current = part.held.state_dict()
        pairs = ((value, current.get(key)) for key, value in skeleton.items())
        return {value[STAND_IN]: like for value, like in pairs if _name(value) and is_sharded(like)}
    if part.kind != "optimizer":
        return {}
    likes = {}
    for index, parameter in enumerate(part.parameters()):
        state = skeleton["state"].get(index, {})
        names = [name for value in state.values() if (name := _name(value))] if is_sharded(parameter) else []
        likes.update({name: parameter for name in names if entries[name].shape == tuple(parameter.shape)})
    return likes


def _name(value: Any) -> str | None:
    return value.get(STAND_IN) if isinstance(value, dict) else None


def _of_module(part: Part, skeleton: Mapping[str, Any], entries: Mapping[str, TensorEntry]) -> list[str]:
    current = part.held.state_dict()
    found = []
    if missing := [key for key in current if key not in skeleton]:
        found.append(f"{part.name}: it lacks {_list(missing)}")
    if unexpected := [key for key in skeleton if key not in current]:
        found.append(f"{part.name}: it has {_list(unexpected)}, which the model does not have")
    other = [
        f"{key} ({list(entries[name].shape)} there, {list(current[key].shape)} here)"
        for key, value in skeleton.items()
        if isinstance(current.get(key), Tensor)
        and (name := _name(value))
        and entries[name].shape != tuple(current[key].shape)
    ]
    return [*found, f"{part.name}: other shapes: {_list(other)}"] if other else found


def _of_optimizer(part: Part, saved: list[list[int]] | None) -> list[str]:
    current = part.shapes()
    if saved is None or saved == current:
        return []
    assert current is not None
    if len(saved) != len(current):
        return [f"{part.name}: it is of {len(saved)} parameters, and here are {len(current)}"]
    place = next(index for index, pair in enumerate(zip(saved, current, strict=True)) if pair[0] != pair[1])
    return [f"{part.name}: parameter {place} is {saved[place]} there and {current[place]} here"]


def _list(names: list[str]) -> str:
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")
