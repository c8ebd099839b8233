"""Data for a training loop: which rank gets which samples, when, and how they are fetched.

``fetch`` and ``workers`` get the samples; ``mapped`` and ``stream`` say what is in each batch, and make it; ``loader``
is what a script iterates; ``make`` checks what the script gave, and makes loaders.
"""

from __future__ import annotations

from allranks.runtime.data.loader import EvaluationLoader, Loader
from allranks.runtime.data.make import LoaderOptions, make_evaluation_loader, make_loader

__all__ = ["EvaluationLoader", "Loader", "LoaderOptions", "make_evaluation_loader", "make_loader"]
