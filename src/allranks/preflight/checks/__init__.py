"""The checks, each in its place."""

from importlib import import_module

#: In the order in which their findings are shown, whichever of them is imported first.
_MODULES = (
    "scheduler",
    "nodes",
    "job",
    "machine",
    "gpus",
    "gpu_health",
    "gpu_links",
    "gpu_compute",
    "network",
    "reach",
    "settings",
    "tried",
)

for _name in _MODULES:
    import_module(f"{__name__}.{_name}")
