"""What a training logs: sums on each rank, means over all of them when they are read, records for the trackers."""

from __future__ import annotations

from allranks.runtime.metrics.log import Metrics

__all__ = ["Metrics"]
