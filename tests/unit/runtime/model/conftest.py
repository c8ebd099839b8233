"""Contexts of one rank in this process, and what scripts on several ranks write."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import allranks


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., allranks.Context]]:
    """Give a function that opens a context in a world of one; it is closed at the end."""
    opened = []
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)

    def init(**options: Any) -> allranks.Context:
        opened.append(allranks.init("gloo", **options))
        return opened[-1]

    yield init
    for ctx in opened:
        ctx.close()


@pytest.fixture
def facts_of(run_ranks: Callable[..., list[tuple[int, str, str]]]) -> Callable[..., list[Any]]:
    """Give a function that runs a script on each of the ranks; it gives the JSON that each prints last."""

    def run(script: str, world_size: int = 2, **variables: str) -> list[Any]:
        results = run_ranks(script, world_size, **variables)
        assert [(code, err) for code, _, err in results] == [(0, "")] * len(results), results
        return [json.loads(out.splitlines()[-1]) for _, out, _ in results]

    return run
