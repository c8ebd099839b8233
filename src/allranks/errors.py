"""Every error of allranks. Each says what happened, why, what to do and where to look.

The tree::

    AllranksError                exit code 1
    ├── UsageError               exit code 2: what was requested makes no sense
    │   ├── JobError             a value in a flag, variable, job file or cluster file
    │   └── RunNotFoundError     no run of that name here
    ├── PreflightError           exit code 3: it was checked and cannot work
    ├── RunFolderError           the run's directory cannot be written or read
    ├── LaunchError              the job could not be started
    │   └── StartCancelledError  exit code 130, or 143: a signal came before it was
    └── RankError                raised inside a rank by the training runtime
        ├── RankEnvironmentError the variables that say who a rank is are half set or disagree
        ├── CallError            a function got arguments that it does not take
        ├── StdinError           a script reads stdin, which its rank does not have
        └── DeviceError          the rank cannot have the device that it was given
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = [
    "AllranksError",
    "DeviceError",
    "JobError",
    "LaunchError",
    "PreflightError",
    "RankEnvironmentError",
    "RankError",
    "RunFolderError",
    "RunNotFoundError",
    "StartCancelledError",
    "UsageError",
]


class AllranksError(Exception):
    """Base class of all errors of allranks.

    Args:
        what: what happened, in one line, naming the value, host, rank or file.
        why: the reason, if known.
        fix: what the user can do, preferably as a command or a line of the job file.
        see: a file or page with more.
    """

    exit_code = 1

    def __init__(self, what: str, *, why: str | None = None, fix: str | None = None, see: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix
        self.see = see

    @property
    def in_a_line(self) -> str:
        """What happened, and why."""
        return f"{self.what}: {self.why}" if self.why else self.what

    def __str__(self) -> str:
        lines = [self.what]
        for label, text in (("why", self.why), ("fix", self.fix), ("see", self.see)):
            if text:
                lines.append(f"  {label}: {text}")
        return "\n".join(lines)


class UsageError(AllranksError):
    """What was requested makes no sense."""

    exit_code = 2


class JobError(UsageError):
    """A value in a flag, an environment variable, a job file or a cluster file is wrong.

    Attributes:
        key: the key of the job that gives it, such as ``script``; empty: the message itself names it.
    """

    key = ""


class RunNotFoundError(UsageError):
    """There is no run of that name in the runs directory."""


class PreflightError(AllranksError):
    """A check found, before anything started, that the job cannot work."""

    exit_code = 3


class RunFolderError(AllranksError):
    """The run's directory cannot be created, written or read."""


class LaunchError(AllranksError):
    """The job could not be started."""


class StartCancelledError(LaunchError):
    """The job was not started: a signal asked for its end before it was, and what had started of it was ended.

    Args:
        what: what happened.
        number: the signal's number.
        why: how what had started ended.
        fix: what the user can do about processes that may be left.
    """

    def __init__(self, what: str, number: int, *, why: str | None = None, fix: str | None = None) -> None:
        super().__init__(what, why=why, fix=fix)
        self.exit_code = 128 + number


class RankError(AllranksError):
    """Raised inside a rank by the training runtime."""


def unknown(name: str, value: object, expected: Sequence[str]) -> RankError:
    """Return the error for an invalid argument of the runtime, which proposes the nearest of the expected words."""
    from difflib import get_close_matches  # Not at the top: only mistakes need it.

    close = get_close_matches(str(value).lower(), expected, n=1, cutoff=0.5)
    return RankError(
        f"invalid {name}: {value!r}",
        why=f"expected one of {', '.join(map(repr, expected))}",
        fix=f"did you mean {name}={close[0]!r}?" if close else f"{name}={expected[0]!r}",
    )


class CallError(RankError, TypeError):
    """A function got arguments that it does not take. Code that expects Python's own error gets it."""


class StdinError(RankError, EOFError):
    """A script reads stdin, which its rank does not have. Code that expects the end of a file gets it."""


class RankEnvironmentError(RankError):
    """The variables that tell a rank who it is are half set or contradict each other."""


class DeviceError(RankError):
    """The rank cannot have the device that it was given."""
