"""Two runs that are equal to the bit, where torch can."""

from __future__ import annotations

import os
from collections.abc import Callable

from allranks.runtime.say import say

_CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
#: One of the two values with which cuBLAS repeats its results (NVIDIA cuBLAS, "Results Reproducibility").
_CUBLAS_VALUE = ":4096:8"

_LIMITS = (
    "with the same script, data, seed, number of ranks, hardware and versions, two runs give the same bits; not with "
    "others. Beyond torch's reach: kernels of other packages that use atomics, the order in which NCCL adds up "
    "(set NCCL_ALGO=Ring and NCCL_PROTO=Simple to fix it), and what depends on time"
)


def make_deterministic(*, tell: bool, seeded: bool) -> Callable[[], None]:
    """Let torch use deterministic algorithms only; return what puts the settings back.

    An operation that has none raises a RuntimeError of torch's that names it.

    Args:
        tell: whether to say what it cannot guarantee, which one rank does.
        seeded: whether the generators were seeded.
    """
    import torch
    from torch.utils import deterministic

    late = torch.cuda.is_initialized() and _CUBLAS not in os.environ  # type: ignore[no-untyped-call]
    undo = [_set_variable(_CUBLAS, _CUBLAS_VALUE), _use_algorithms()]
    for owner, name, value in (
        (torch.backends.cudnn, "deterministic", True),
        (torch.backends.cudnn, "benchmark", False),
        (deterministic, "fill_uninitialized_memory", True),
    ):
        undo.append(_set(owner, name, value))
    if tell:
        for text in (f"deterministic: {_LIMITS}", *_warnings(late=late, seeded=seeded)):
            say(text)

    def put_back() -> None:
        while undo:
            undo.pop()()

    return put_back


def _warnings(*, late: bool, seeded: bool) -> list[str]:
    texts = []
    if late:
        texts.append(f"warning: CUDA was in use before init(); set {_CUBLAS}={_CUBLAS_VALUE} in the job's environment")
    if not seeded:
        texts.append("warning: seed=None leaves the generators alone, so that the numbers differ in each run")
    if os.environ.get("PYTHONHASHSEED", "random") == "random":
        texts.append("deterministic: PYTHONHASHSEED is not set: the order of a set of texts differs in each run")
    return texts


def _use_algorithms() -> Callable[[], None]:
    import torch

    before = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)
    return lambda: torch.use_deterministic_algorithms(before, warn_only=warn_only)


def _set(owner: object, name: str, value: bool) -> Callable[[], None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    return lambda: setattr(owner, name, before)


def _set_variable(name: str, value: str) -> Callable[[], None]:
    """Set a variable unless the user has; the call that is returned takes it away again."""
    if name in os.environ:
        return lambda: None
    os.environ[name] = value

    def take_away() -> None:
        os.environ.pop(name, None)

    return take_away
