"""Checkpoints: the state of a training, written in the background, committed whole, continued from exactly."""

from __future__ import annotations

from allranks.runtime.checkpoint.checkpointer import Checkpointer
from allranks.runtime.checkpoint.making import make_checkpointer

__all__ = ["Checkpointer", "make_checkpointer"]
