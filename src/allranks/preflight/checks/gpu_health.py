"""GPUs: what they tell of faults, of heat, and of what slows them down."""

from __future__ import annotations

from collections.abc import Iterator

from allranks.preflight.checks.gpus import Gpu, label, on_gpus, taken, together
from allranks.preflight.model import Finding, Grade, Node, Seen, passed, skipped, warned

#: Degrees Celsius below the temperature from which on a GPU slows itself down.
_CLOSE = 5
#: What the driver wants before a GPU is used again. Of NVIDIA's words for these (GPU Memory Error Management, recovery
#: action flag) only the first two mean that it cannot be used.
_UNUSABLE = ("reset", "reboot")
_EXCHANGE = "have the GPU looked at: nvidia-smi -q -d ECC,ROW_REMAPPER on {0}"
_RESET = "when nothing runs on it, on {0} as root: nvidia-smi --gpu-reset -i {1}"


@on_gpus("gpu-ecc", why="a GPU whose memory fails ends the job that uses it, hours after the start")
def ecc(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Look at errors of memory that could not be corrected, and at memory that could not be replaced."""
    fatal = taken(gpus, seen)
    found = [(grade if gpu in fatal else Grade.WARN, text, gpu) for gpu in gpus for grade, text in _faults(gpu)]
    if found:
        grade = Grade.FAIL if any(each is Grade.FAIL for each, _, _ in found) else Grade.WARN
        worst = [gpu for each, _, gpu in found if each is grade]
        fix = (_EXCHANGE if any(_has_failed(gpu) for gpu in worst) else _RESET).format(node.host, worst[0]["index"])
        return Finding(grade, together((label(gpu), text) for _, text, gpu in found), fix, exclude=node.host)
    if all(gpu["ecc"]["uncorrected"] is None and gpu["remapped"] is None for gpu in gpus):
        return skipped("these GPUs do not check their memory")
    return passed("every error was corrected since the driver was loaded")


def _faults(gpu: Gpu) -> Iterator[tuple[Grade, str]]:
    """Yield what is wrong with a GPU's memory.

    NVIDIA, GPU Memory Error Management: with a remapping that is pending new work can be launched, without loss; after
    one that failed the GPU is to be tested and exchanged.
    """
    if gpu["recovery"]:
        yield Grade.FAIL if gpu["recovery"] in _UNUSABLE else Grade.WARN, f"the driver asks for a {gpu['recovery']}"
    if _has_failed(gpu):
        yield Grade.FAIL, "bad rows of its memory could not be replaced"
    elif gpu["remapped"] and gpu["remapped"]["pending"]:
        yield Grade.WARN, "bad rows of its memory are replaced at its next reset"
    if gpu["ecc"]["uncorrected"]:
        yield (
            Grade.WARN,
            f"{gpu['ecc']['uncorrected']} errors of its memory were not corrected since the driver was loaded",
        )


def _has_failed(gpu: Gpu) -> bool:
    return bool(gpu["remapped"] and gpu["remapped"]["failure"])


@on_gpus("gpu-throttle", why="a GPU that is slowed down, for heat or for lack of power, slows all ranks down")
def throttle(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Look at whether a GPU is slowed down at this moment, for a reason that is nobody's choice."""
    if all(gpu["throttled"] is None for gpu in gpus):
        return skipped("the driver does not tell what slows them down")
    slowed = [(label(gpu), f"slowed down: {', '.join(gpu['throttled'])}") for gpu in gpus if gpu["throttled"]]
    if slowed:
        fix = f"look after air and power of {node.host}: nvidia-smi -q -d PERFORMANCE"
        return warned(together(slowed), fix=fix, exclude=node.host)
    return passed("none is slowed down")


@on_gpus("gpu-temperature", why="a GPU that gets too warm slows itself down, and with it all ranks")
def temperature(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Look at how far GPUs are from slowing themselves down."""
    known = [gpu for gpu in gpus if gpu["temperature"] is not None]
    if not known:
        return skipped("these GPUs do not tell their temperature")
    warm = [(label(gpu), _degrees(gpu)) for gpu in known if gpu["margin"] is not None and gpu["margin"] <= _CLOSE]
    if warm:
        return warned(together(warm), fix=f"look after the cooling of {node.host}, or what runs there: nvidia-smi")
    return passed(f"below {(max(gpu['temperature'] for gpu in known) // 10 + 1) * 10} °C")


def _degrees(gpu: Gpu) -> str:
    return f"{gpu['temperature']} °C, and from {gpu['temperature'] + gpu['margin']} °C on it slows down"


@on_gpus(
    "gpu-persistence",
    why="without it the driver sets a GPU up anew for each start, which takes seconds; training itself is as fast",
    is_full=True,
)
def persistence(gpus: list[Gpu], node: Node, seen: Seen) -> Finding:
    """Look at whether the driver keeps GPUs ready that nobody uses."""
    if all(gpu["persistence"] is None for gpu in gpus):
        return skipped("the driver does not tell")
    off = [(label(gpu), "persistence mode is off") for gpu in gpus if gpu["persistence"] == 0]
    if off:
        return warned(together(off), fix=f"on {node.host} as root: nvidia-smi -pm 1, or start nvidia-persistenced")
    return passed("on")
