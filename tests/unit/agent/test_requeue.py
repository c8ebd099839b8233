"""Whether another attempt follows one that has ended, by what the run's directory tells."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from allranks import contract
from allranks.agent.requeue import Decision, decide, may_start, start_next
from allranks.record.events import EventWriter
from node_orders import pbs


@pytest.fixture
def run(tmp_path: Path) -> Path:
    (tmp_path / contract.ATTEMPTS_DIR).mkdir()
    return tmp_path


def note(run: Path, *noted: tuple[int, int], leaving: bool = False, cut: str = "") -> None:
    """Note (attempt, step) as the training does."""
    records = [{"attempt": attempt, "step": step, "path": None, "leaving": leaving} for attempt, step in noted]
    lines = [json.dumps(record) + "\n" for record in records]
    (run / contract.CHECKPOINTS_FILE).write_text("".join(lines) + cut)


def why_not(run: Path, attempt: int, most: int) -> str | None:
    """Start an attempt; return why it is not to be, if so."""
    (run / contract.attempt_dir(attempt)).mkdir()
    (run / contract.attempt_dir(0)).mkdir(exist_ok=True)
    (run / contract.attempt_dir(0) / contract.JOB).write_text("7.server\n")
    decided = run / contract.attempt_dir(attempt) / contract.AGAIN
    if may_start(run, attempt, most, pbs({"PBS_JOBID": "7.server"})):
        assert not decided.exists()
        return None
    decision = json.loads(decided.read_text())
    assert (decision["again"], decision["given_up"]) == (False, True)
    return str(decision["why"])


def lose(run: Path, attempt: int, *lost: str) -> None:
    """Let the agents of an attempt tell that it ended because nodes were lost."""
    for node in range(2):
        folder = run / contract.node_dir(attempt, node)
        folder.mkdir(parents=True)
        events = EventWriter(folder / contract.AGENT_EVENTS)
        events.write(contract.ENDED, state="FAILED", exit_code=1, lost=list(lost))


def test_ranks_that_saved_and_left_go_on(run: Path) -> None:
    assert decide(run, 0, 75, 10) == Decision(True, "it was stopped on request, and is to be continued")


def test_a_lost_node_is_a_reason_to_go_on(run: Path) -> None:
    lose(run, 0, "node 1 (gpu2)", "node 3 (gpu4)")
    assert decide(run, 0, 1, 10) == Decision(True, "node 1 (gpu2), node 3 (gpu4) was lost", lost=True)


@pytest.mark.parametrize("code", [143, 137])
def test_ranks_that_were_ended_while_they_left_go_on(run: Path, code: int) -> None:
    note(run, (0, 7), (1, 9), leaving=True)
    assert decide(run, 1, code, 10).again
    note(run, (0, 7), leaving=True)
    assert not decide(run, 1, code, 10).again


@pytest.mark.parametrize("code", [0, 1, 137, 143])
def test_any_other_end_is_none(run: Path, code: int) -> None:
    lose(run, 0)
    assert decide(run, 0, code, 10) == Decision(False, f"it exited with code {code}, and is not retried")


def fail(run: Path, attempt: int, error: str) -> None:
    """Let rank 1 of an attempt, on gpu2, fail with an error."""
    folder = run / contract.node_dir(attempt, 1)
    folder.mkdir(parents=True)
    (folder / "rank-1.err").write_text(f'Traceback (most recent call last):\n  File "/x.py", line 1\n{error}\n')
    events = [
        {"kind": contract.RANKS_STARTED, "restart": 0, "ranks": [{"rank": 1}]},
        {"kind": contract.RANK_EXITED, "rank": 1, "code": 1, "ended": 7.0},
        {"kind": contract.ENDED, "state": "FAILED", "exit_code": 1, "because_of_rank": 1},
    ]
    lines = [json.dumps({"time": 7.0, "host": "gpu2", **event}) + "\n" for event in events]
    (folder / contract.AGENT_EVENTS).write_text("".join(lines))


ALL = (contract.NODE, contract.PREEMPTION, contract.HARDWARE)
ECC = "RuntimeError: CUDA error: uncorrectable ECC error encountered"


def test_hardware_is_retried_without_its_node(run: Path) -> None:
    fail(run, 0, ECC)
    why = "a GPU has damaged memory (uncorrectable ECC error) on gpu2"
    assert decide(run, 0, 1, 10, ALL) == Decision(True, why, without="gpu2")
    counted = "there were 1 attempts: 1 are allowed (retry.max_attempts)"
    assert decide(run, 0, 1, 1, ALL) == Decision(False, f"{why}, but {counted}", given_up=True)


@pytest.mark.parametrize(
    ("error", "retry_on"),
    [
        (ECC, (contract.NODE, contract.PREEMPTION)),
        ("NameError: name 'weigths' is not defined", ALL),  # certain, and never to be retried
        ("torch.OutOfMemoryError: CUDA out of memory.", ALL),  # certain, and to be changed
        ("SomeError: Xid 13", ALL),  # not certain
        ("", ALL),
    ],
)
def test_no_other_failure_of_a_rank_is(run: Path, error: str, retry_on: tuple[str, ...]) -> None:
    fail(run, 0, error)
    assert decide(run, 0, 1, 10, retry_on) == Decision(False, "it exited with code 1, and is not retried")


def test_a_job_that_the_scheduler_has_ended_is_not_retried_for_its_hardware(run: Path) -> None:
    fail(run, 0, ECC)
    (run / contract.attempt_dir(0) / contract.TERMINATED).touch()
    assert not decide(run, 0, 1, 10, ALL).again


def test_ends_that_are_not_named_are_not_retried(run: Path) -> None:
    why = "it was stopped on request, and is to be continued, but retry.on does not name preemption"
    assert decide(run, 0, 75, 10, (contract.NODE,)) == Decision(False, why, given_up=True)
    lose(run, 0, "node 1 (gpu2)")
    lost = "node 1 (gpu2) was lost, but retry.on does not name node"
    assert decide(run, 0, 1, 10, (contract.PREEMPTION,)) == Decision(False, lost, given_up=True)


def test_pbs_cannot_leave_a_node_out(run: Path) -> None:
    why = "a GPU is lost on gpu2"
    given = start_next(run, 0, Decision(True, why, without="gpu2"), pbs({"PBS_JOBID": "7.server", **place(run)}))
    assert given == Decision(False, f"{why}, but PBS cannot leave a node out", given_up=True)


def place(run: Path) -> dict[str, str]:
    return {contract.RUN_DIR: str(run), contract.ATTEMPT: "0"}


def test_attempts_are_counted(run: Path) -> None:
    assert decide(run, 1, 75, 3).again
    counted = "there were 3 attempts: 3 are allowed (retry.max_attempts)"
    why = f"it was stopped on request, and is to be continued, but {counted}"
    assert decide(run, 2, 75, 3) == Decision(False, why, given_up=True)
    assert why_not(run, 2, 3) is None
    assert why_not(run, 3, 3) == "there were 3 attempts: 3 are allowed (retry.max_attempts)"


FRUITLESS = "3 attempts in a row came no further than step {step}"


@pytest.mark.parametrize(
    ("noted", "attempt", "step"),
    [
        ([(0, 0), (1, 0), (2, 0)], 3, 0),
        ([(0, 0), (1, 0)], 2, None),
        ([(0, 0), (0, 40), (1, 40), (2, 40)], 3, None),
        ([(0, 0), (0, 40), (1, 40), (2, 40), (3, 40)], 4, 40),
        # Attempts that end before anything is noted come no further either.
        ([(0, 0), (0, 40)], 4, 40),
        # One that starts again is measured by what was reached before.
        ([(0, 0), (0, 40), (1, 0), (1, 20), (2, 20), (2, 30), (3, 30)], 4, 40),
        ([(0, 0), (0, 40), (1, 40), (2, 40), (3, 40), (3, 41)], 4, None),
        # Who saves in a way of their own is not judged.
        ([], 7, None),
    ],
)
def test_three_attempts_without_progress_are_enough(
    run: Path, noted: list[tuple[int, int]], attempt: int, step: int | None
) -> None:
    note(run, *noted)
    assert why_not(run, attempt, 10) == (None if step is None else FRUITLESS.format(step=step))


def test_attempts_are_counted_from_where_a_person_has_resumed(run: Path) -> None:
    note(run, *[(attempt, 5) for attempt in range(4)])
    assert why_not(run, 4, 10) == FRUITLESS.format(step=5)
    (run / contract.attempt_dir(5)).mkdir()
    (run / contract.attempt_dir(5) / contract.RESUMED).touch()
    assert why_not(run, 6, 2) is None
    assert why_not(run, 7, 2) == "there were 2 attempts: 2 are allowed (retry.max_attempts)"
    assert why_not(run, 8, 10) == FRUITLESS.format(step=5)


def test_a_line_that_was_cut_off_is_none(run: Path) -> None:
    note(run, (0, 5), (1, 5), (2, 5), cut='{"attempt": 3, "st')
    assert why_not(run, 3, 10) is None
    assert why_not(run, 4, 10) == FRUITLESS.format(step=5)
