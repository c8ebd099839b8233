"""allranks: one PyTorch training script, on any number of ranks.

In a training script::

    import allranks

    with allranks.init() as ctx:
        model = DistributedDataParallel(Net().to(ctx.device))
        ...

Importing this module imports neither torch nor numpy; the first use of a name does what that name needs.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from allranks.errors import AllranksError, DeviceError, RankEnvironmentError, RankError
    from allranks.runtime.context import Context
    from allranks.runtime.startup import init

#: Written here, not looked up: nodes get a plain copy of the source.
__version__ = "0.1.0"

__all__ = ["AllranksError", "Context", "DeviceError", "RankEnvironmentError", "RankError", "__version__", "init"]

if not os.path.isdir(os.path.join(os.path.dirname(__file__), "cli")):  # noqa: PTH112, PTH118, PTH120 - quick
    # The copy that a run carries for its ranks: what it lacks, such as the command, is in the installation.
    from pkgutil import extend_path

    __path__ = extend_path(__path__, __name__)

#: Public name -> the module that holds it.
_HOMES = {
    **dict.fromkeys(("AllranksError", "DeviceError", "RankEnvironmentError", "RankError"), "allranks.errors"),
    "Context": "allranks.runtime.context",
    "init": "allranks.runtime.startup",
}


def __getattr__(name: str) -> object:
    """Import a public name when it is first used (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"allranks has no {name!r}: perhaps ctx.{name}, if ctx is what allranks.init() returns")
    from importlib import import_module

    value: object = getattr(import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return the names here, public ones also before their first use."""
    return sorted({*globals(), *__all__})
