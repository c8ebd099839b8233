"""The model, its optimizer and the step: placed, made data parallel, accumulated and scaled so that it is right."""

from __future__ import annotations

from allranks.runtime.model.training import Training
from allranks.runtime.model.wrappers import unwrap

__all__ = ["Training", "unwrap"]
