"""The verdict on a hang: which rank the others wait for, and what to do."""

from __future__ import annotations

from allranks.diagnosis.model import Diagnosis, Line
from allranks.runs.hangs import Group, Hang, span

_FIX = {
    "hang": "look at what that line waits for",
    "hang-in-debugger": "remove breakpoint() or pdb from the script, or give that rank the terminal: "
    "allranks run --stdin N",
    "hang-stopped": "kill -CONT PID on its node lets it continue: the event ranks-started of agent.jsonl has the PID",
    "hang-in-kernel": "df and ls on the rank's node show which file server or device does not answer",
    "hang-rank-left": "all ranks must make the same number of steps: give each as many batches (drop_last=True), or "
    "use torch.distributed.algorithms.join",
    "hang-mismatch": "all ranks must call the same collectives in the same order: look for a branch before these lines "
    "that depends on the rank or its data",
    "hang-at-exit": "end or join the threads and processes that the script has started, or make them daemons",
}
_RETRY = {"hang": "", "hang-stopped": "", "hang-in-kernel": "on other nodes"}
_SURE = ("hang-in-debugger", "hang-stopped", "hang-mismatch", "hang-rank-left")


def verdict(hang: Hang) -> Diagnosis:
    """Return the verdict on a hang that agents have recorded."""
    odd, kind = hang.odd, hang.kind
    if hang.kind == "hang-rank-left":
        rank: int | None = hang.left[0]
    elif odd and len(hang.groups) > 1:
        rank = odd.ranks[0]
    else:
        rank = None
    first = [odd] if odd else []
    evidence = [line for group in (*first, *hang.groups) if (line := _line(group))]
    return Diagnosis(
        id=kind,
        cause=f"no rank advanced for {span(hang.time - hang.since)}: {hang.sentence}",
        sure="certain" if kind in _SURE else "likely",
        rank=rank,
        when=hang.since,
        evidence=tuple(dict.fromkeys(evidence)),
        fix=_FIX[kind],
        retry=_RETRY.get(kind, "never"),
    )


def _line(group: Group) -> Line | None:
    frame = group.users or (group.frames[0] if group.frames else None)
    return Line(frame[0], frame[1], f"{group.named}: in {frame[2]}") if frame else None
