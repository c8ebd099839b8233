"""How a node's part of an attempt, or the attempt on all its nodes, ended."""

from __future__ import annotations

from dataclasses import dataclass

from allranks import contract
from allranks.agent.workers.fork_policy import group_advice
from allranks.contract import NodeSpec
from allranks.system import processes


@dataclass(frozen=True)
class Outcome:
    """How it ended.

    Attributes:
        state: SUCCEEDED, FAILED, CANCELLED or PREEMPTED.
        exit_code: of the agent.
        reason: in one line, if there is one.
        rank: the global rank that failed first.
        lost: the names of the nodes that were lost, if that ended it.
    """

    state: str
    exit_code: int
    reason: str | None = None
    rank: int | None = None
    lost: tuple[str, ...] = ()


#: Of ranks that a request has ended: its source starts them again.
PREEMPTED = Outcome("PREEMPTED", contract.CONTINUE_LATER, "the ranks have saved and exited, as requested")


def succeeded(node: NodeSpec, ranks: int, have_met: bool) -> Outcome:
    """Return the success of so many ranks; the reason says so if each of them has trained alone."""
    reason = None
    if ranks > 1 and not have_met and (advice := group_advice(node)):
        reason = f"the {ranks} ranks formed no process group: each ran the whole script alone; {advice}"
    return Outcome("SUCCEEDED", 0, reason)


def failed(rank: int, code: int, host: str | None = None) -> Outcome:
    """Return the failure of a rank, on a host if there are several; ``code`` is as Python gives it."""
    return Outcome("FAILED", code if code > 0 else 128 - code, processes.rank_ended(rank, code, host), rank)
