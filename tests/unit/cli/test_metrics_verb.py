"""``allranks metrics``: runs as OpenMetrics text, read by the grammar of the format."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from trained import train

from allranks.cli.metrics import escaped

#: By the ABNF of OpenMetrics 1.0: a sample, and a label with its escaped value.
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^\\"\n]|\\[\\"n])*"'
_SAMPLE = re.compile(rf"([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{{((?:{_LABEL})(?:,{_LABEL})*)\}})? (\S+)")
_PAIR = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^\\"\n]|\\[\\"n])*)"')
_NUMBER = re.compile(r"[+-]?\d+(?:\.\d*)?(?:e[+-]?\d+)?|[+-]?Inf|NaN", re.IGNORECASE)
_META = re.compile(r"# (TYPE|HELP) ([a-zA-Z_:][a-zA-Z0-9_:]*) (.+)")
#: Ends of names that other types than a gauge give their samples.
_RESERVED = ("_total", "_created", "_bucket", "_count", "_sum", "_info", "_gsum", "_gcount")

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda found: "\n" if found[1] == "n" else found[1], text)


def parse(text: str, *, has_end: bool) -> Samples:
    """Read text that is strictly of the format: a family's lines stand together, and no sample comes twice."""
    assert text.endswith("\n")
    lines = text[:-1].split("\n")
    if has_end:
        assert lines.pop() == "# EOF"
    found: Samples = {}
    family, seen = "", list[str]()
    for line in lines:
        if meta := _META.fullmatch(line):
            kind, name, rest = meta.groups()
            if kind == "TYPE":
                assert (rest, name in seen, name.endswith(_RESERVED)) == ("gauge", False, False)
                family = name
                seen.append(name)
            assert name == family
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample, line
        name, labels, value = sample.groups()
        assert name == family
        assert _NUMBER.fullmatch(value)
        pairs = [(key, unescaped(text)) for key, text in _PAIR.findall(labels or "")]
        assert len({key for key, _ in pairs}) == len(pairs)
        key = (name, frozenset(pairs))
        assert key not in found
        found[key] = float(value)
    return found


def value(found: Samples, name: str, /, **labels: str) -> float:
    return found[name, frozenset(labels.items())]


@pytest.fixture
def trained(allranks: Any) -> Path:
    """A run with metrics, a checkpoint, a rank's steps and a sample of its node."""
    allranks.script("")
    run = train(allranks, "a", losses={10: 2.0, 20: 1.5}, pace=0.5)
    node = run / "attempts" / "000" / "node-000"
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 30, "time": 1e9, 'acc "top\\1"\n': 0.25}) + "\n")
    (run / "checkpoints.jsonl").write_text('{"attempt": 0, "step": 20, "path": "/c", "leaving": false, "time": 5.0}\n')
    clocks = {"temperature": 64, "clock": 1110, "max_clock": 1980, "slowed_by": ["power cap", "thermal"]}
    gpus = [{"number": 2, "busy": 97, "memory": 3 << 30, "total": 80 << 30, **clocks}]
    rates = {"net_in": 1200, "net_out": 34, "disk_read": 0, "disk_write": 56}
    usage = {"host": "gpu01", "time": 1795769904.5, "cpus": 3.25, "memory": 123456789012, **rates, "gpus": gpus}
    (node / "usage.json").write_text(json.dumps(usage))
    (node / "rank-3.step").write_bytes(struct.pack("=Q", 12345))
    return run


def test_all_that_is_known_of_a_run_in_the_format(allranks: Any, trained: Path) -> None:
    done = allranks("metrics")
    assert (done.rc, done.stderr) == (0, "")
    found, run = parse(done.stdout, has_end=True), trained.name
    assert value(found, "allranks_run", run=run, name="a", cluster="local", kind="local") == 1
    states = {dict(labels)["state"]: one for (name, labels), one in found.items() if name == "allranks_run_state"}
    assert ([state for state, one in states.items() if one], len(states)) == (["SUCCEEDED"], 10)
    numbers = {"attempt": 1, "restarts": 0, "ranks": 1, "nodes": 1, "step": 30, "checkpoint_step": 20}
    assert {name: value(found, f"allranks_run_{name}", run=run) for name in numbers} == numbers
    metrics = {dict(labels)["metric"]: one for (name, labels), one in found.items() if name == "allranks_run_metric"}
    assert metrics == {"loss": 1.5, "samples_per_second": 200.0, 'acc "top\\1"\n': 0.25}
    node = {"run": run, "node": "0", "host": "gpu01"}
    assert value(found, "allranks_node_cpus", **node) == 3.25
    assert value(found, "allranks_node_memory_bytes", **node) == 123456789012
    rates = {"received": 1200, "sent": 34, "read": 0, "written": 56}
    assert {name: value(found, f"allranks_node_{name}_bytes_per_second", **node) for name in rates} == rates
    assert value(found, "allranks_gpu_busy_ratio", **node, gpu="2") == 0.97
    assert value(found, "allranks_gpu_memory_bytes", **node, gpu="2") == 3 << 30
    assert value(found, "allranks_gpu_memory_total_bytes", **node, gpu="2") == 80 << 30
    assert value(found, "allranks_gpu_clock_hertz", **node, gpu="2") == 1.11e9
    assert value(found, "allranks_gpu_temperature_celsius", **node, gpu="2") == 64
    assert value(found, "allranks_gpu_slowed", **node, gpu="2", reason="thermal") == 1
    assert value(found, "allranks_gpu_slowed", **node, gpu="2", reason="power cap") == 1
    assert value(found, "allranks_rank_steps", run=run, node="0", rank="3") == 12345


def test_a_file_for_the_node_exporter_is_replaced_and_readable(allranks: Any, trained: Path) -> None:
    file = allranks.folder / "allranks.prom"
    file.write_text("old\n")
    done = allranks("metrics", trained.name, "-o", file)
    assert (done.rc, done.stdout, done.stderr) == (0, "", "")
    found = parse(file.read_text(), has_end=False)
    assert found == parse(allranks("metrics", trained.name).stdout, has_end=True)
    assert file.stat().st_mode & 0o777 == 0o644
    assert [path.name for path in allranks.folder.glob("*allranks.prom*")] == ["allranks.prom"]


@given(st.text())
def test_every_value_of_a_label_can_be_read_again(text: str) -> None:
    found = re.fullmatch(_PAIR, f'a="{escaped(text)}"')
    assert found
    assert unescaped(found[2]) == text.encode(errors="replace").decode()
