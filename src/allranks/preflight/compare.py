"""What nodes have in common, and which ones differ."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import TypeVar

Value = TypeVar("Value")


def odd_ones(values: Mapping[str, Value]) -> tuple[Value, dict[str, Value]]:
    """Return the value that most have, and who has another one; of two that are as frequent, the first one's.

    Args:
        values: at least one value, by host.
    """
    (common, _), *_ = Counter(values.values()).most_common(1)
    return common, {host: value for host, value in values.items() if value != common}
