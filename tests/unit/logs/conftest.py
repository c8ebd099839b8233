from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from fake_attempt import FakeAttempt


@pytest.fixture
def attempt(tmp_path: Path) -> Iterator[FakeAttempt]:
    made = FakeAttempt(tmp_path / "000")
    yield made
    made.close()
