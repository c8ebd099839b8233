"""Why a job of a scheduler waits or has ended, in plain English."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Reason:
    """Why a job waits or has ended.

    Attributes:
        text: the reason.
        fix: what the user can do, where that is known.
        hopeless: whether the job waits for what can never come.
    """

    text: str
    fix: str = ""
    hopeless: bool = False

    def __str__(self) -> str:
        text = f"{self.text}, and so it will never start" if self.hopeless else self.text
        return f"{text}: {self.fix}" if self.fix else text


#: Of each scheduler.
OUT_OF_TIME = Reason("it reached its time limit", "raise resources.time")
