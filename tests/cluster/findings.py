"""What tests of checks read of an answer in JSON."""

from __future__ import annotations

import json
from typing import Any

Found = list[dict[str, str]]
Bad = dict[tuple[str, str], tuple[str, str]]


def found_by(done: Any) -> Found:
    """Return what a check with --json has found, which ended as it must."""
    assert done.stdout, done.stderr
    found: Found = json.loads(done.stdout)["checks"]
    assert done.rc == (3 if "FAIL" in {each["grade"] for each in found} else 0)
    return found


def bad(found: Found) -> Bad:
    """Return grade and words of what is not well, by check and host."""
    return {(each["check"], each["host"]): (each["grade"], each["what"]) for each in found if each["fix"]}
