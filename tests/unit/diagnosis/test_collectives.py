"""Ranks that all timed out: whether they had called different collectives."""

from __future__ import annotations

import pytest

from allranks.diagnosis.sources import of_text

DIFFERENT = "ranks called different collectives, or gave them different shapes"
TIMEOUT = "a collective timed out: a rank failed, hangs, or did not call it"


def wait(rank: int, number: int, kind: str, size: int = 8, group: str = "") -> str:
    work = f"WorkNCCL(SeqNum={number}, OpType={kind}, NumelIn={size}, NumelOut={size}, Timeout(ms)=600000)"
    start = f"[rank{rank}]:[E101 10:00:00.1 ProcessGroupNCCL.cpp:"
    lines = f"{start}616] [Rank {rank}] Watchdog caught collective operation timeout: {work} ran for 600020 ms\n"
    if group:
        lines += (
            f"{start}1785] [PG ID 1 PG GUID {group} Rank {rank}] Exception detected by watchdog at work: {number}, "
        )
        lines += f"last enqueued NCCL work: {number + 3}, last completed NCCL work: {number - 1}.\n"
    return lines


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (
            wait(0, 4, "ALLREDUCE") + wait(1, 4, "BROADCAST"),
            "rank 0 waited in ALLREDUCE of 8 elements (number 4), rank 1 waited in BROADCAST of 8 elements (number 4)",
        ),
        (
            wait(0, 4, "ALLREDUCE", group="0") + wait(1, 4, "ALLREDUCE", 16, group="0"),
            "rank 0 waited in ALLREDUCE of 8 elements (number 4), rank 1 waited in ALLREDUCE of 16 elements (number 4)",
        ),
        (
            wait(0, 4, "ALLREDUCE") + wait(2, 4, "ALLREDUCE") + wait(1, 5, "ALLREDUCE"),
            "rank 0 waited in ALLREDUCE of 8 elements (number 4), rank 1 waited in ALLREDUCE of 8 elements (number 5)",
        ),
    ],
    ids=["kinds", "sizes", "one more"],
)
def test_ranks_of_one_group_that_wait_in_different_collectives(text: str, told: str) -> None:
    found = of_text(text.encode())
    assert found
    assert (found.id, found.sure, found.cause) == ("collective-mismatch", "likely", f"{DIFFERENT}: {told}")
    assert found.followed == TIMEOUT
    assert [line.rank for line in found.evidence] == [0, 1]


@pytest.mark.parametrize(
    "text",
    [
        wait(0, 4, "ALLREDUCE") + wait(1, 4, "ALLREDUCE"),
        wait(0, 4, "ALLREDUCE") + wait(0, 5, "BROADCAST"),
        wait(0, 4, "ALLREDUCE") + wait(1, 90, "ALLREDUCE"),
        wait(0, 4, "ALLREDUCE", group="0") + wait(1, 4, "BROADCAST", group="7"),
        wait(0, 4, "ALLREDUCE", group="0") + wait(1, 4, "BROADCAST"),
        wait(0, 4, "ALLREDUCE") + wait(1, 4, "SEND"),
        wait(0, 4, "ALLTOALL_BASE", 8) + wait(1, 4, "ALLTOALL_BASE", 24),
    ],
    ids=["the same", "one rank", "far apart", "two groups", "an unknown group", "point to point", "uneven"],
)
def test_ranks_that_may_have_called_the_same(text: str) -> None:
    found = of_text(text.encode())
    assert found
    assert (found.id, found.sure, found.cause) == ("nccl-timeout", "unknown", TIMEOUT)


def test_another_cause_comes_first() -> None:
    text = wait(0, 4, "ALLREDUCE") + wait(1, 4, "BROADCAST") + "RuntimeError: CUDA out of memory.\n"
    found = of_text(text.encode())
    assert found and found.id == "cuda-out-of-memory"
