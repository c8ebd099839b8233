"""The verdict on logs of real failures, and how often it is right.

``logs/*.toml`` holds excerpts of what failed trainings printed, from public threads: the lines of programs alone,
masked, without source code; the class of failure, and how it is established. A seed splits them: rules were written
while looking at one part, and the other part is only scored. All that were gathered later, and some others, have been
looked at after they were scored.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import tomllib

from allranks.diagnosis.model import Diagnosis
from allranks.diagnosis.sources import of_text

SAMPLES: list[dict[str, Any]] = [
    sample
    for path in sorted(Path(__file__).with_name("logs").glob("*.toml"))
    for sample in tomllib.loads(path.read_text())["log"]
]
#: Rules that say more of a class than its label does.
FINER = {
    "index-out-of-range": "shape-mismatch",
    "second-backward": "inplace-modification",
    "initialized-twice": "not-initialized",
    "half-precision-weights": "dtype-mismatch",
    "gpu-driver": "gpu-xid",
    "gpu-peer-access": "nccl-cuda",
    "killed": "host-memory-killed",
    "library-exception": "script-exception",
    "shared-memory-locks": "shared-memory-full",
    "no-space": "disk-full",
    "save-failed": "disk-full",
    "dataset-empty": "file-not-found",
    "data-damaged": "script-exception",
    "bus-error": "shared-memory-full",
    "checkpoint-world-size": "state-dict",
    "ray-node-lost": "node-lost",
    "package-versions": "script-exception",
    "store-connect": "store-timeout",
    "slurm-time": "slurm-limits",
    "slurm-partition": "slurm-configuration",
}


def is_seen(sample: dict[str, Any]) -> bool:
    return sample.get("looked_at") or int(hashlib.sha256(f"2026{sample['source']}".encode()).hexdigest(), 16) % 2 == 0


def verdict(sample: dict[str, Any]) -> Diagnosis | None:
    return of_text(sample["text"].encode())


def is_right(sample: dict[str, Any], found: Diagnosis | None) -> bool:
    return found is not None and FINER.get(found.id, found.id) == sample["class"]


def test_there_are_enough_of_them() -> None:
    assert len(SAMPLES) >= 300
    assert len({sample["class"] for sample in SAMPLES}) >= 110
    assert len({sample["source"] for sample in SAMPLES}) == len(SAMPLES)


@pytest.mark.parametrize(("seen", "right", "sure"), [(True, 0.98, 0.0), (False, 0.92, 0.013)])
def test_the_cause_is_found(seen: bool, right: float, sure: float) -> None:
    """The rates are those that were reached: a change of the rules may not make them worse."""
    samples = [sample for sample in SAMPLES if is_seen(sample) is seen]
    found = [(sample, verdict(sample)) for sample in samples]
    wrong = [(sample, each) for sample, each in found if not is_right(sample, each)]
    told = [(sample["class"], sample["source"], each and (each.id, each.sure)) for sample, each in wrong]
    assert 1 - len(wrong) / len(samples) >= right, told
    confident = [each for _, each in wrong if each and each.sure == "certain"]
    assert len(confident) / len(samples) <= sure, told


def test_a_rank_that_is_named_is_found() -> None:
    samples = [sample for sample in SAMPLES if is_seen(sample) and "rank" in sample]
    found = [(sample, verdict(sample)) for sample in samples]
    named = [(sample, each.rank) for sample, each in found if each and each.rank is not None]
    wrong = [(sample["source"], sample["rank"], rank) for sample, rank in named if rank != sample["rank"]]
    assert len(named) >= 0.5 * len(samples)
    assert len(wrong) <= 0.1 * len(named), wrong
