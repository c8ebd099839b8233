"""Inside each rank: who it is, its device, its process group."""

from __future__ import annotations

from allranks.runtime.context import Context
from allranks.runtime.startup import init

__all__ = ["Context", "init"]
