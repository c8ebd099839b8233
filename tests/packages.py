"""Packages that some tests need and this environment may lack."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest


def needs(package: str) -> pytest.MarkDecorator:
    """Skip a test unless a package is installed. It is not imported: for some that takes seconds of each worker."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f"{package} is not installed: pip install {package}")


#: The frameworks whose scripts are run as they are.
FRAMEWORKS: list[Any] = [pytest.param(name, marks=needs(name)) for name in ("lightning", "accelerate")]
