"""The import of torch, and of the part of the agent that stands on it: before there are ranks, or beside them."""

from __future__ import annotations

import gc
import os
import sys
import threading

from allranks import contract
from allranks.agent.telling import complain
from allranks.errors import LaunchError


def version_to_match() -> str:
    """Return what must be the same on all nodes of torch's version.

    With nccl that is all of it: behind the + stands which CUDA it was built for, and so which NCCL. Builds for GPUs and
    for CPUs of one version do understand each other over gloo.
    """
    import torch

    version = str(torch.__version__)
    return version.partition("+")[0] if os.environ.get(contract.BACKEND) == "gloo" else version


class TorchImport:
    """Imports torch and :mod:`allranks.agent.elastic` once, in this thread or in one of its own."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def has_begun(self) -> bool:
        """Tell whether a thread imports torch, or has done so."""
        return self._thread is not None

    @property
    def is_over(self) -> bool:
        """Tell whether that thread has ended, well or not."""
        return self._thread is not None and not self._thread.is_alive()

    def begin(self) -> None:
        """Begin to import in a thread: this one goes on to watch the ranks."""
        self._thread = threading.Thread(target=self._import, name="import torch", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Import now, or wait for what was begun.

        Raises:
            LaunchError: torch cannot be imported.
        """
        if self._thread:
            self._thread.join()
        else:
            self._import()
        gc.freeze()
        gc.enable()
        if self._error:
            raise LaunchError(
                f"{sys.executable} cannot import torch",
                why=str(self._error),
                fix="install torch there, or name the environment that has it: environment.venv, .conda or .python",
            ) from self._error

    def _import(self) -> None:
        gc.disable()  # Going over what torch has loaded takes a tenth of a second each time.
        try:
            import allranks.agent.elastic
            import allranks.agent.rendezvous  # noqa: F401
        except Exception as error:  # noqa: BLE001 - a library of torch's that is missing or broken raises anything
            complain()
            self._error = error
