"""The model, its optimizer and the step: placed, made data parallel, accumulated and scaled so that it is right."""

from __future__ import annotations

from allranks.runtime.model.flat import unwrap
from allranks.runtime.model.training import TrainingState

__all__ = ["TrainingState", "unwrap"]
