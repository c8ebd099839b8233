"""Data for a training loop: which rank gets which samples, when, and how they are fetched.

``order`` says what is in each batch and is pure; ``fetch`` and ``workers`` get the samples; ``loader``, ``stream``
and ``evaluation`` are what a script iterates; ``make`` checks what the script gave and puts them together.
"""

from __future__ import annotations

from allranks.runtime.data.evaluation import EvaluationLoader
from allranks.runtime.data.loader import Loader
from allranks.runtime.data.make import make_evaluation_loader, make_loader

__all__ = ["EvaluationLoader", "Loader", "make_evaluation_loader", "make_loader"]
