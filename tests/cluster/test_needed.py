"""What becomes of a test that lacks something."""

from __future__ import annotations

import pytest
from needed import need


def test_who_requires_all_hears_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    need("pdsh", None)
    monkeypatch.delenv("ALLRANKS_REQUIRE_CLUSTER", raising=False)
    with pytest.raises(pytest.skip.Exception, match=r"^no pdsh: it is on Mars$"):
        need("pdsh", "it is on Mars")
    monkeypatch.setenv("ALLRANKS_REQUIRE_CLUSTER", "1")
    with pytest.raises(pytest.fail.Exception, match=r"^ALLRANKS_REQUIRE_CLUSTER is set, and there is no pdsh: it is "):
        need("pdsh", "it is on Mars")
