"""GPUs: whether they compute, right and as fast as each other, from what ranks have measured on them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from allranks.preflight.checks.gpus import together
from allranks.preflight.model import Finding, Grade, Seen, passed, skipped
from allranks.preflight.registry import on_the_whole

#: A GPU that reaches less than this of what others of its model do is slow.
_SLOW = 0.7
_PRECISIONS = ("fp32", "bf16")

Measured = Mapping[str, Any]


@on_the_whole(
    "gpu-compute",
    why="a GPU that computes wrongly spoils the model without a word, and one that is slow slows all ranks",
    facts=("host",),
    is_full=True,
    needs_trial=True,
)
def compute(seen: Seen) -> Iterator[Finding]:
    """Look at what ranks have computed on the GPUs of the nodes."""
    measured = {node.host: node.facts["gpu-compute"] for node in seen.nodes if "gpu-compute" in node.facts}
    if measured:
        yield from judge(measured)
    else:
        yield skipped(seen.why_no_trial or "no rank has computed on a GPU")


def judge(per_node: Mapping[str, Sequence[Measured]]) -> Iterator[Finding]:
    """Judge what GPUs have computed.

    Args:
        per_node: for each host what :func:`allranks.trial.gpu_compute.measure` has returned on each of its GPUs.
    """
    everything = [each for measured in per_node.values() for each in measured]
    for host, measured in per_node.items():
        bad = [(f"GPU {each['index']}", *fault) for each in measured for fault in _faults(each, everything)]
        if not bad:
            yield passed(_reached(measured, everything), host=host)
            continue
        grade = Grade.FAIL if any(each is Grade.FAIL for _, each, _ in bad) else Grade.WARN
        what = together((gpu, text) for gpu, _, text in bad)
        yield Finding(grade, what, f"have {host} looked at: dcgmi diag -r 3", host, exclude=host)


def _faults(each: Measured, everything: Iterable[Measured]) -> Iterator[tuple[Grade, str]]:
    tried = [name for name in _PRECISIONS if name in each]
    if not tried:
        built = ", ".join(each["arches"])
        yield Grade.FAIL, f"is of compute capability {each['capability']}, and torch is built for {built or 'none'}"
    for name in tried:
        found = each[name]
        others = [other[name]["tflops"] for other in _alike(each, everything, name) if other is not each]
        if "error" in found:
            yield Grade.FAIL, f"cannot compute in {name}: {found['error']}"
        elif found["wrong"]:
            yield Grade.FAIL, f"computes wrongly: {found['wrong']} of {found['values']} values of a product in {name}"
        elif others and found["tflops"] < _SLOW * median(others):
            yield (
                Grade.WARN,
                f"reaches {_written(found['tflops'])} TFLOP/s in {name}, others {_written(median(others))}",
            )


def _alike(each: Measured, everything: Iterable[Measured], precision: str) -> list[Measured]:
    """Return those of the same model that have computed in a precision."""
    alike = (other for other in everything if other["name"] == each["name"])
    return [other for other in alike if "tflops" in other.get(precision, ())]


def _reached(measured: Sequence[Measured], everything: Sequence[Measured]) -> str:
    """Write what GPUs of these models reach on all nodes, which is the same for each node that has them."""
    told = []
    for name in dict.fromkeys(each["name"] for each in measured):
        rates = [
            f"{_range([each[precision]['tflops'] for each in alike])} in {precision}"
            for precision in _PRECISIONS
            if (alike := _alike({"name": name}, everything, precision))
        ]
        told.append(f"{name}: {', '.join(rates)} TFLOP/s, and right")
    return "; ".join(told)


def _range(rates: Sequence[float]) -> str:
    least, most = _written(min(rates)), _written(max(rates))
    return least if least == most else f"{least} to {most}"


def _written(rate: float) -> str:
    """Write a rate with three digits: 0.0512, 51.2, 712."""
    return f"{rate:.3g}"
