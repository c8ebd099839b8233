"""The variables that the ranks of a node would find, as far as they say how they talk and compute."""

from __future__ import annotations

import os
from typing import Any

from allranks.contract import is_secret
from allranks.probe.order import Order

_PREFIXES = (
    *("NCCL_", "TORCH_", "TORCHELASTIC_", "PYTORCH_", "GLOO_", "CUDA_", "OMP_", "MKL_", "KMP_", "UCX_", "FI_"),
    *("OMPI_", "MASTER_"),
)
_NAMES = ("LD_LIBRARY_PATH", "LD_PRELOAD", "PYTHONPATH")


def variables(order: Order) -> dict[str, Any]:
    """Return ``values`` of the variables that matter, by name, no secrets; and which of the order's are ``set``."""
    values = {name: value for name, value in sorted(os.environ.items()) if _matters(name) and not is_secret(name)}
    return {"values": values, "set": [name for name in order.variables if name in os.environ]}


def _matters(name: str) -> bool:
    return name.startswith(_PREFIXES) or name in _NAMES
