"""What a scheduler's commands say when they fail, in words that help: what happened, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.errors import LaunchError, StartCancelledError

if TYPE_CHECKING:
    from allranks.plan.plan import Reason

UNREACHABLE, REFUSED = "{} cannot be reached", "{} refuses the job"


@dataclass(frozen=True)
class Refusals:
    """How the commands of one scheduler fail.

    Attributes:
        scheduler: what people call it.
        submit: its command that submits a script.
        known: what is found in what a command said, whether that means ``UNREACHABLE`` or ``REFUSED``, and what to do;
            the first that is found counts. Where it is one of many things that the scheduler may not like, its own
            words say why.
        said_before: pattern of what its commands may put before what they have to say, after their own name.
        ask_again: what to do where a command gave no answer.
        place: where its commands are.
        list_jobs: the command that lists a person's jobs.
        cancel: the command that cancels a job.
    """

    scheduler: str
    submit: str
    known: Sequence[tuple[str, str, str]]
    said_before: str
    ask_again: str
    place: str
    list_jobs: str
    cancel: str

    def refusal(self, command: Sequence[str], code: int, said: str) -> LaunchError:
        """Explain a command that failed.

        Args:
            command: the command.
            code: what it ended with.
            said: what it said.
        """
        why = self._own_words(command[0], said) or f"{command[0]} ended with {code} and said nothing"
        submits = command[0] == self.submit
        for pattern, what, fix in self.known:
            if re.search(pattern, said) and (what == UNREACHABLE or submits):
                return LaunchError(what.format(self.scheduler), why=why, fix=fix)
        return LaunchError(REFUSED.format(self.scheduler) if submits else f"{command[0]} failed", why=why)

    def not_there(self, name: str, error: OSError) -> LaunchError:
        """Explain that a command cannot be executed."""
        return LaunchError(
            f"there is no {self.scheduler} here: {name} cannot be started",
            why=error.strerror,
            fix=f"run this where {name} is in PATH, such as {self.place}",
        )

    def no_answer(self, name: str, seconds: float) -> LaunchError:
        """Explain that a command did not end in time."""
        unreachable = UNREACHABLE.format(self.scheduler)
        return LaunchError(f"{unreachable}: {name} gave no answer for {seconds:g} s", fix=self.ask_again)

    def cancelled(self, number: int) -> StartCancelledError:
        """Explain that the command which submits a job was killed, because of a signal, before it told an id."""
        return StartCancelledError(
            f"cancelled while {self.submit} was submitting the job",
            number,
            why=f"{self.submit} did not end within a second, and was killed: the job may be submitted all the same",
            fix=f"{self.list_jobs} lists your jobs, and {self.cancel} cancels one",
        )

    def no_id(self, said: str) -> LaunchError:
        """Explain that the command which submits a job did not tell its id."""
        return LaunchError(
            f"{self.submit} did not tell the id of the job",
            why=f"it said {said.strip()!r}",
            fix=f"{self.list_jobs} lists the jobs that you have",
        )

    def _own_words(self, name: str, said: str) -> str:
        """Return what a command said, without what it puts before each line, and each thing once."""
        before = re.compile(rf"^({re.escape(name)}: )?{self.said_before}")
        lines = (before.sub("", line).strip() for line in said.splitlines())
        return "; ".join(dict.fromkeys(line for line in lines if line))


def with_values(error: LaunchError, reasons: Iterable[Reason]) -> LaunchError:
    """Return the error with the values of those keys of the job that it says to change.

    Args:
        error: why a job was refused.
        reasons: of its plan; for a directive they say which key asks for it.
    """
    values = {reason.why: f"{reason.why} ({reason.value})" for reason in reasons if reason.value}
    fix = error.fix and re.sub(r"\b(scheduler|resources)\.\w+", lambda key: values.get(key[0], key[0]), error.fix)
    return LaunchError(error.what, why=error.why, fix=fix, see=error.see)
