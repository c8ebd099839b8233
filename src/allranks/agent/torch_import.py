"""The import of torch into the agent, before there are ranks or beside them; and its version, without an import."""

from __future__ import annotations

import gc
import importlib.util
import os
import re
import sys
import threading
from pathlib import Path

from allranks import contract
from allranks.agent.telling import complain
from allranks.errors import LaunchError

_VERSION = re.compile(r"^__version__\b[^=\n]*=\s*'([^']+)'", re.MULTILINE)


def version_to_match() -> str | None:
    """Return what must be the same on all nodes of torch's version; None if there is no torch. It is not imported.

    With nccl that is all of it: behind the + stands which CUDA it was built for, and so which NCCL. Builds for GPUs and
    for CPUs of one version do understand each other over gloo.
    """
    version = _version()
    return version.partition("+")[0] if version and os.environ.get(contract.BACKEND) == "gloo" else version


def _version() -> str | None:
    if "torch" in sys.modules:
        return str(sys.modules["torch"].__version__)
    spec = importlib.util.find_spec("torch")
    path = Path(spec.origin).with_name("version.py") if spec and spec.origin else None
    found = _VERSION.search(path.read_text()) if path and path.is_file() else None
    return found[1] if found else None


def _active() -> str:
    """Name the virtual environment that is active where the run was started, if this interpreter is another one's."""
    active = os.environ.get("VIRTUAL_ENV", "")
    return f"; active is {active}" if active and Path(active).resolve() != Path(sys.prefix).resolve() else ""


class TorchImport:
    """Imports torch once, in this thread or in one of its own.

    Attributes:
        is_over: whether the import has ended, well or not.
    """

    def __init__(self) -> None:
        self.is_over = False
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def has_begun(self) -> bool:
        """Tell whether a thread imports torch, or has done so."""
        return self._thread is not None

    def begin(self) -> None:
        """Begin to import in a thread: this one goes on to watch the ranks."""
        self._thread = threading.Thread(target=self._import, name="import torch", daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Import now, unless that is over, or wait for what was begun.

        Raises:
            LaunchError: torch cannot be imported.
        """
        if self._thread:
            self._thread.join()
        elif not self.is_over:
            self._import()
        if self._error:
            raise LaunchError(
                f"{sys.executable} cannot import torch",
                why=str(self._error),
                fix="install torch there, or name the environment that has it: environment.venv, .conda or .python"
                + _active(),
            ) from self._error

    def _import(self) -> None:
        gc.disable()  # Going over what torch has loaded takes a tenth of a second each time.
        try:
            import torch.distributed  # noqa: F401
        except Exception as error:  # noqa: BLE001 - a library of torch's that is missing or broken raises anything
            complain()
            self._error = error
        finally:
            gc.freeze()
            gc.enable()
            self.is_over = True
