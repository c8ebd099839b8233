"""On which kinds of cluster a scenario runs."""

from __future__ import annotations

import pytest

ON_SCHEDULERS = ("slurm", "pbs", "torque")
EVERYWHERE = (*ON_SCHEDULERS, "ssh", "pdsh")


def on(*kinds: str) -> pytest.MarkDecorator:
    """Run a scenario on clusters of these kinds, each of which it gets as ``site``."""
    return pytest.mark.parametrize("site", kinds, indirect=True)
