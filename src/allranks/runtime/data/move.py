"""Batches on their way to the rank's device."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch


def mover(device: torch.device, *, pinned: bool) -> Callable[[Any], Any] | None:
    """Give a function that puts a batch on the device, or None where batches are there already: on the CPU.

    Args:
        device: where the batch is to be.
        pinned: whether batches lie in pinned memory, so that the copy need not be waited for.
    """
    if device.type == "cpu":
        return None

    def move(value: Any) -> Any:
        # Objects of the user's need not know non_blocking.
        return value.to(device, non_blocking=pinned) if isinstance(value, torch.Tensor) else value.to(device)

    return lambda batch: through(batch, move)


def pin(batch: Any) -> Any:
    """Give the batch in pinned memory: its tensors on the CPU, and objects that can pin themselves."""
    return through(batch, _pin)


def _pin(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.pin_memory() if value.device.type == "cpu" else value
    return value.pin_memory() if callable(getattr(value, "pin_memory", None)) else value


def through(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Change every tensor in a batch, and every object that has a method ``to``.

    Lists, tuples, named tuples and mappings are made anew with what is in them changed; the rest is as it was.
    """
    if callable(getattr(batch, "to", None)):
        return change(batch)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(through(value, change) for value in batch))
    if isinstance(batch, (list, tuple)):
        return type(batch)([through(value, change) for value in batch])
    if isinstance(batch, Mapping):
        return {key: through(value, change) for key, value in batch.items()}
    return batch
