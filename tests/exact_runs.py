"""The training of ``tests/scripts/exact_light.py``: how it is started, and what it prints."""

from __future__ import annotations

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).parent / "scripts" / "exact_light.py"
#: The same with torch's own optimizer. So it is run where torch imports ``torch._dynamo`` in any case: then an agent
#: that finds an optimizer in the script imports it once for all ranks.
WHOLE = SCRIPT.with_name("exact_training.py")
WEIGHTS = re.compile(r"step (\d+) weights ([0-9a-f]{64})")
SAMPLES = re.compile(r"^\[(\d+)\] epoch (\d+) step (\d+)\.(\d+) samples \[(.*)\]$", re.MULTILINE)

_undisturbed: dict[tuple[int, tuple[str, ...]], str] = {}


def command(folder: str | Path, *options: str, ranks: int = 2, flags: tuple[str, ...] = ()) -> tuple[Any, ...]:
    # Sums are rounded as their parts are shared by threads.
    flags = ("--nproc-per-node", str(ranks), "--backend", "gloo", "--env", "OMP_NUM_THREADS=1", *flags)
    return ("run", script_for(options), *flags, "--", "--folder", str(folder), *options)


def script_for(options: tuple[str, ...]) -> Path:
    """Return the training that takes less to start with these options."""
    return WHOLE if {"ddp", "fsdp"} & {*options} else SCRIPT


def weights(done: Any) -> tuple[int, str]:
    """Return the step and the digest of the weights that a training ended with."""
    assert done.rc == 0, done.stderr
    return weights_in(done.stdout)


def weights_in(text: str) -> tuple[int, str]:
    """Return the step and the digest that a training has printed, once."""
    ((step, digest),) = WEIGHTS.findall(text)
    return int(step), digest


def undisturbed(allranks: Any, *options: str) -> tuple[int, str]:
    """Return what a training on two ranks ends with that nothing happens to; trained once for all tests."""
    return weights_in(undisturbed_output(allranks, *options))


def undisturbed_output(allranks: Any, *options: str, ranks: int = 2) -> str:
    """Return what a training prints that nothing happens to, with the rank of each line; trained once for all tests."""
    key = (ranks, options)
    if key not in _undisturbed:
        _undisturbed[key] = trained(allranks, f"undisturbed-{len(_undisturbed)}", *options, ranks=ranks)[0]
    return _undisturbed[key]


def trained(allranks: Any, folder: str | Path, *options: str, ranks: int = 2) -> tuple[str, str]:
    """Train to the end without the command; return both streams of all ranks, with the rank of each line.

    It takes less than the command does: ranks are forked that have imported all that they need.
    """
    words = ("--folder", str(folder), *options)
    done = allranks.ranks.run_ranks(script_for(options), words, allranks.folder, ranks)
    assert [code for code, _, _ in done] == [0] * ranks, done
    out, err = (
        "".join(f"[{rank}] {line}\n" for rank, each in enumerate(done) for line in each[stream].decode().splitlines())
        for stream in (1, 2)
    )
    return out, err


def samples(text: str) -> dict[tuple[int, int, int], list[int]]:
    """Return the samples of each micro-batch, by epoch, steps done before and its number: those of rank 0 first."""
    found: dict[tuple[int, int, int], dict[int, list[int]]] = {}
    for rank, epoch, step, micro, numbers in SAMPLES.findall(text):
        found.setdefault((int(epoch), int(step), int(micro)), {})[int(rank)] = json.loads(f"[{numbers}]")
    return {key: list(chain.from_iterable(by_rank[r] for r in sorted(by_rank))) for key, by_rank in found.items()}
