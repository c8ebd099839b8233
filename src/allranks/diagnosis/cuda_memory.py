"""Why a GPU was full, from the numbers in torch's message: by this process, by others, or by fragments."""

from __future__ import annotations

import re

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([\d.]+) (bytes|KiB|MiB|GiB)"
#: What the message says, since torch 2.1 (which wrote "capacty" at first) and before it.
_NUMBERS = {
    "wanted": rf"Tried to allocate {_SIZE}",
    "capacity": rf"total capaci?ty of {_SIZE}|{_SIZE} total capacity",
    "free": rf"of which {_SIZE} is free|{_SIZE} free",
    "own": rf"this process has {_SIZE} memory in use|{_SIZE} reserved in total by PyTorch",
    "allocated": rf"Of the allocated memory {_SIZE} is allocated by PyTorch|{_SIZE} already allocated",
    "unused": rf"{_SIZE} is reserved by PyTorch but unallocated",
}
#: The part of a GPU that a process always keeps in blocks that are not full: less is no fragmentation.
_ALWAYS = 0.05
#: CUDA's own context in a process, which old messages leave out.
_CONTEXT = 1 << 30


def reason(text: str) -> tuple[str, dict[str, str]]:
    """Return the rule for a message that a GPU has too little memory, and what its sentence names."""
    numbers = {name: _bytes(found) for name, pattern in _NUMBERS.items() if (found := re.search(pattern, text))}
    if not {"wanted", "capacity", "free"} <= numbers.keys() or not (own := _own(text, numbers)):
        return "cuda-out-of-memory", {}
    wanted = numbers["wanted"]
    unused = numbers.get("unused", max(0, own - numbers.get("allocated", own)))
    context = 0 if "memory in use" in text else _CONTEXT
    others = numbers["capacity"] - numbers["free"] - own - context
    # This process has the room itself, and others hold little beside it.
    if unused >= max(wanted, others / 2, _ALWAYS * numbers["capacity"]):
        return "cuda-memory-fragmented", {"unused": _gib(unused)}
    if others >= max(wanted - numbers["free"], _CONTEXT + context):
        return "cuda-memory-of-others", {"others": _gib(others)}
    return "cuda-out-of-memory", {"capacity": _gib(numbers["capacity"])}


def _own(text: str, numbers: dict[str, int]) -> int | None:
    """Return what this process holds; in a container torch names all processes, and not which of them it is."""
    if "own" in numbers or "allocated" not in numbers:
        return numbers.get("own")
    sizes = (_bytes(found) for found in re.finditer(rf"Process \d+ has {_SIZE} memory in use", text))
    return min((size for size in sizes if size >= numbers["allocated"]), default=None)


def _bytes(found: re.Match[str]) -> int:
    number, unit = [group for group in found.groups() if group]
    return int(float(number) * _UNITS[unit])


def _gib(size: int) -> str:
    return f"{size / _UNITS['GiB']:.1f} GiB"
