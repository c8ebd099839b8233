"""A node that dies costs a training on PBS an attempt, and nothing else; a dead node is never waited for."""

from __future__ import annotations

from typing import Any

from followed_runs import hosts_of
from left_behind import assert_nothing_lives
from pbs_cluster import StandInPbs
from trainings import OPTIONS, Training, assert_it_went_on_where_it_left, undisturbed

from allranks import contract
from allranks.record.events import read_events
from exact_runs import weights_in
from waiting import PATIENCE


def test_another_node_than_the_first_dies(standin_lab: Any, standin: StandInPbs) -> None:
    """PBS lets the job stand until the node is back, so that the run continues in another one.

    It takes more than 10 s: until the death is noticed, and each attempt imports torch.
    """
    training = Training(standin_lab, standin, ("--nodes", "2", "--stop-timeout", "20"))
    first = training.trains()
    dead = hosts_of(standin, first)[1]
    standin.kill_node(dead)
    second = training.trains(attempt=1)
    assert standin.job(first)["job_state"] == "R"
    decision, attempt = training.decision(0), training.run / contract.attempt_dir(0)
    assert (decision["again"], decision["lost"], decision["how"], decision["job"]) == (True, True, "submit", second)
    assert decision["why"] == f"node 1 ({dead}) was lost; PBS ends a job that has lost a node only when that is back"
    assert dead not in hosts_of(standin, second)
    # Once node 0's agent has left, the dead node gets what agents need to leave, not what its ranks would get to save.
    left = [event.time for event in read_events(attempt / "node-000" / contract.AGENT_EVENTS) if event.kind == "ended"]
    assert (attempt / contract.EXIT).stat().st_mtime - left[0] < 20
    assert weights_in(training.end()) == undisturbed(standin_lab, *OPTIONS)
    told = [line.partition(f"{training.run.name}: ")[2] for line in training.said]
    assert [line.partition(": ")[0] for line in told if "was lost" in line] == [
        f"node 1 ({dead}) was lost",
        f"attempt 1 follows, in job {second}",
    ]
    standin.start_node(dead)
    standin.wait_for_state(first)
    assert (training.state, training.attempts) == ("SUCCEEDED", 2)
    assert_nothing_lives(standin, standin_lab)


def test_the_first_node_dies_under_a_job_that_is_not_to_be_put_back(standin_lab: Any, standin: StandInPbs) -> None:
    """It takes more than 10 s: a training imports torch on two nodes, and the death must be noticed."""
    training = Training(standin_lab, standin, ("--nodes", "2", "--no-requeue"))
    job = training.trains()
    standin.kill_node(hosts_of(standin, job)[0])
    _, err = training.process.communicate(timeout=PATIENCE)
    assert f"error: {training.run.name} NODE_FAIL: a node failed\n" in err.decode()
    assert (training.state, training.attempts) == ("NODE_FAIL", 1)
    assert standin.job(job)["Exit_status"] == "-20"
    assert_nothing_lives(standin, standin_lab)


def test_a_mom_that_is_gone_does_not_keep_a_run_whose_ranks_have_ended(standin_lab: Any, standin: StandInPbs) -> None:
    """PBS hears of no end on that node, and keeps the job until it does. More than 10 s: each attempt imports torch."""
    training = Training(standin_lab, standin, ("--nodes", "2"))
    job = training.trains()
    standin.kill_mom(hosts_of(standin, job)[1])
    assert weights_in(training.end()) == undisturbed(standin_lab, *OPTIONS)
    assert standin.job(job)["job_state"] == "R"
    assert (training.state, training.attempts) == ("SUCCEEDED", 1)
    standin.start_mom(hosts_of(standin, job)[1])
    standin.wait_for_state(job)
    assert_nothing_lives(standin, standin_lab)


def test_a_mom_that_is_restarted_under_a_training_costs_an_attempt(standin_lab: Any, standin: StandInPbs) -> None:
    """PBS ends the job then, and hears of no end on that node. More than 10 s: each attempt imports torch."""
    training = Training(standin_lab, standin, ("--nodes", "2"))
    first = training.trains()
    host = hosts_of(standin, first)[1]
    standin.set(kill_delay=PATIENCE)  # PBS gives it 10 s, in which a busy machine does not save.
    standin.kill_mom(host)
    standin.start_mom(host)
    second = training.trains(attempt=1)
    assert (training.run / contract.attempt_dir(0) / contract.EXIT).read_text() == "143\n"
    decision = training.decision(0)
    assert (decision["again"], decision["lost"], decision["how"], decision["job"]) == (True, True, "submit", second)
    why = f"PBS on {host} was lost; PBS ends a job that has lost a node only when that is back"
    assert decision["why"] == why
    assert weights_in(training.end()) == undisturbed(standin_lab, *OPTIONS)
    assert (training.state, training.attempts) == ("SUCCEEDED", 2)
    assert_it_went_on_where_it_left(training)
    assert_nothing_lives(standin, standin_lab)
