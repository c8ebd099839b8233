"""The waits of allranks: what they really are, and what the internal setting for tests makes of them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from allranks import contract
from allranks.contract import full_wait, scaled_wait

#: Module, constant, what it really is in seconds (in milliseconds where the name says so), and a tenth of it.
WAITS = (
    ("agent.nodes.channel", "_SILENCE_SECONDS", 5, 2),
    ("agent.nodes.channel", "_PATIENT_SECONDS", 30, 3),
    ("agent.nodes.client", "_OTHER_KEY_SECONDS", 30.0, 3.0),
    ("agent.nodes.client", "_WITHOUT_A_NODE_SECONDS", 5.0, 0.5),
    ("agent.workers.fork_server", "_LEFT_PATIENCE", 5.0, 0.5),
    ("agent.hangs", "_LEAST_SECONDS", 300.0, 30.0),
    ("agent.hangs", "_LOOK_SECONDS", 1.0, 0.1),
    ("agent.hangs", "_SAMPLE_SECONDS", 5.0, 0.5),
    ("agent.hangs", "_NEAR_SECONDS", 300.0, 30.0),
    ("agent.heartbeat", "_HEARTBEAT_SECONDS", 5.0, 0.5),
    ("runs.agents", "HEARTBEAT_IS_OLD", 30.0, 3.0),
    ("runs.hangs", "_SHOWN_AFTER", 60.0, 6.0),
    ("clusters.batch.cluster", "_MOST_SECONDS", 15.0, 1.5),
    ("clusters.batch.scheduler", "_AFTER_ID_SECONDS", 10.0, 1.0),
    ("agent.tasks", "_SEEN_SECONDS", 5, 1),
    ("agent.tasks", "_PATIENCE", 15, 5),
    ("clusters.ssh", "_BEAT_SECONDS", 5.0, 0.5),
    ("clusters.ssh", "_LOST_SECONDS", 10.0, 1.0),
    ("clusters.ssh.plan", "_SECONDS_OF_SILENCE", 30, 3),
    ("clusters.ssh.transport", "_ALIVE_SECONDS", 5, 1),
    ("plan.torch_launcher", "_BEAT_MS", 5000, 500),
    ("runtime.steptime", "_WINDOW_SECONDS", 2.0, 0.2),
)
#: Each module is loaded as a user has it, and once more with the setting.
LOAD = f"""
import importlib, json, os, sys
names = json.loads(sys.argv[1])
modules = {{module: importlib.import_module(module) for module, _ in names}}
def values():
    return [getattr(modules[module], name) for module, name in names]
found = {{"real": values()}}
os.environ["{contract.WAITS}"] = "0.1"
for module in modules.values():
    importlib.reload(module)
print(json.dumps({{**found, "tenth": values()}}))
"""


@pytest.fixture(scope="module")
def loaded() -> dict[str, dict[tuple[str, str], float]]:
    """Give the constants as they are in an interpreter of their own: without the setting, and with a tenth."""
    names = [(module, name) for module, name, *_ in WAITS]
    environ = {name: value for name, value in os.environ.items() if name != contract.WAITS}
    given = json.dumps([(f"allranks.{module}", name) for module, name in names])
    done = subprocess.run([sys.executable, "-c", LOAD, given], env=environ, stdout=subprocess.PIPE, check=True)
    return {which: dict(zip(names, values, strict=True)) for which, values in json.loads(done.stdout).items()}


@pytest.mark.parametrize(("module", "name", "real", "tenth"), WAITS)
def test_a_wait_is_real_unless_a_test_has_it_shorter(
    loaded: dict[str, dict[tuple[str, str], float]], module: str, name: str, real: float, tenth: float
) -> None:
    assert loaded["real"][module, name] == real
    assert loaded["tenth"][module, name] == tenth


def test_no_wait_that_the_setting_scales_is_left_out() -> None:
    root, found = Path(contract.__file__).parent, Counter[str]()
    for path in root.rglob("*.py"):
        module = ".".join(path.relative_to(root).with_suffix("").parts).removesuffix(".__init__")
        found[module] += len(re.findall(r"\b(?:scaled|full)_wait\(\d", path.read_text()))
    assert +found == Counter(module for module, *_ in WAITS)


@pytest.mark.parametrize("factor", ["", "fast", "0", "-1", "1.1", "nan", "inf"])
def test_a_setting_that_is_invalid_is_refused(monkeypatch: pytest.MonkeyPatch, factor: str) -> None:
    monkeypatch.setenv(contract.WAITS, factor)
    with pytest.raises(ValueError, match=re.escape(f"invalid _ALLRANKS_WAITS: {factor!r} (expected a number above 0")):
        scaled_wait(5.0)


@pytest.mark.parametrize(
    ("factor", "scaled", "whole"), [(None, 5.0, 5), ("1", 5.0, 5), ("0.5", 2.5, 2), ("0.01", 0.05, 1)]
)
def test_a_wait_is_scaled_by_the_setting(
    monkeypatch: pytest.MonkeyPatch, factor: str | None, scaled: float, whole: int
) -> None:
    monkeypatch.delenv(contract.WAITS, raising=False)
    if factor:
        monkeypatch.setenv(contract.WAITS, factor)
    assert (scaled_wait(5.0), full_wait(5)) == (scaled, whole)
