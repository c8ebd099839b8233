"""What the NVML of other machines answers, for the code that asks it: a strict stand-in for pynvml.

A machine is a file of ``nvml_answers``: what is answered about the system, what each device answers, and for each what
it answers otherwise. A call is written as the name of the function with its arguments, but for the device, and
``[0-3]`` stands for several. What is not in the file was not recorded, and to ask for it is an error of the test.
"""

from __future__ import annotations

import inspect
import json
import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pynvml

ANSWERS = Path(__file__).parent / "nvml_answers"


@dataclass(frozen=True)
class Handle:
    """What the stand-in calls a device, or a part of one."""

    number: int
    part: int | None = None

    def __str__(self) -> str:
        return str(self.number)


class RecordedNvml(ModuleType):
    """The NVML of a machine."""

    def __init__(self, machine: str) -> None:
        super().__init__("pynvml")
        raw = json.loads((ANSWERS / f"{machine}.json").read_text())
        self.system, self.each = _expanded(raw["system"]), _expanded(raw["each"])
        self.devices = [_expanded(device) for device in raw["devices"]]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        real = getattr(pynvml, name)
        return partial(self._called, name, inspect.signature(real)) if name.startswith("nvml") else real

    def _called(self, name: str, signature: inspect.Signature, *arguments: Any) -> Any:
        signature.bind(*arguments)
        if name == "nvmlDeviceGetCount":
            return len(self.devices)
        if name == "nvmlDeviceGetHandleByIndex":
            _answer({**self.each, **self.devices[arguments[0]]}[name])
            return Handle(arguments[0])
        if name == "nvmlDeviceGetMigDeviceHandleByIndex":
            return self._part(*arguments)
        known = self._of(arguments[0]) if arguments else self.system
        key = f"{name}({' '.join(map(_written, arguments[1:]))})" if arguments[1:] else name
        if key not in known:
            raise AssertionError(f"{key} was not recorded of {arguments[:1]}")
        return _answer(known[key])

    def _part(self, handle: Handle, number: int) -> Handle:
        if number >= len(self.devices[handle.number]["parts"]):
            raise pynvml.NVMLError_NotFound
        return Handle(handle.number, number)

    def _of(self, handle: Handle) -> dict[str, Any]:
        device = self.devices[handle.number]
        return {**self.each, **device} if handle.part is None else device["parts"][handle.part]


def _expanded(table: dict[str, Any]) -> dict[str, Any]:
    return {key: answer for text, answer in table.items() for key in _each(text)}


def _each(text: str) -> list[str]:
    match = re.fullmatch(r"(.*)\[(\d+)-(\d+)\](.*)", text)
    if not match:
        return [text]
    return [f"{match[1]}{number}{match[4]}" for number in range(int(match[2]), int(match[3]) + 1)]


def _written(argument: Any) -> str:
    return " ".join(map(str, argument)) if isinstance(argument, list) else str(argument)


def _answer(recorded: Any) -> Any:
    if isinstance(recorded, dict):
        if "raises" in recorded:
            raise getattr(pynvml, f"NVMLError_{recorded['raises']}")
        return SimpleNamespace(**{key: _answer(value) for key, value in recorded.items()})
    return [_answer(each) for each in recorded] if isinstance(recorded, list) else recorded
