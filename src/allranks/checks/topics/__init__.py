"""The checks, one module for each topic."""

from importlib import import_module

# In the order in which their findings are shown, whichever of them is imported first.
for _name in ("job", "machine", "gpus", "network", "settings", "selftest"):
    import_module(f"{__name__}.{_name}")
