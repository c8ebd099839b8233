"""What tests of this directory need: without it they are skipped, or fail where all must be there."""

from __future__ import annotations

import os

import pytest


def need(what: str, why: str | None) -> None:
    """Skip the test, or have it fail where ALLRANKS_REQUIRE_CLUSTER is set, unless nothing is missing.

    Args:
        what: what it needs.
        why: why that is not there; None: it is.
    """
    if why and os.environ.get("ALLRANKS_REQUIRE_CLUSTER"):
        pytest.fail(f"ALLRANKS_REQUIRE_CLUSTER is set, and there is no {what}: {why}", pytrace=False)
    if why:
        pytest.skip(f"no {what}: {why}")
