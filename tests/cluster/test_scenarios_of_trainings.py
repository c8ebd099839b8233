"""A training that is taken off its nodes, on clusters of all kinds, ends as if nothing had happened.

Each takes more than 10 s: ranks import torch, some of them twice, and Slurm lets a job that is put back wait for 11 s.
"""

from __future__ import annotations

import re

import pytest
from sites import Site, SlurmSite, on
from trainings import OPTIONS, Training, assert_it_went_on_where_it_left, both, undisturbed

from exact_runs import weights_in
from waiting import PATIENCE

pytestmark = pytest.mark.timeout(900)  # Up to four trainings at once, instead of as many waits for a scheduler.


def assert_undisturbed(training: Training) -> None:
    """Let a training continue, and assert that its second attempt has ended it as if there had been but one."""
    assert weights_in(training.end()) == undisturbed(training.lab, *OPTIONS)
    assert training.attempts == 2
    assert next(note["step"] for note in training.notes() if note["attempt"] == 1) > 0


@on("slurm", "pbs", "grid_engine", "ssh", "pdsh")
def test_a_cancelled_training_is_resumed(site: Site) -> None:
    """It takes more than 10 s: three trainings import torch on each node."""
    training = Training(site.lab, site, ("--nodes", "2"))
    training.saves()
    name = training.run.name
    site.let_save()
    assert site.lab("cancel", timeout=PATIENCE).rc == 0
    _, err = training.process.communicate(timeout=PATIENCE)
    found = (training.process.returncode, training.state, training.attempts)
    assert found == (143, "CANCELLED", 1), err.decode()
    assert re.search(rf"^allranks: {name} was cancelled at step \d+, with a checkpoint", err.decode(), re.MULTILINE)
    site.assert_nothing_left()
    training.resume()
    assert_undisturbed(training)
    assert_it_went_on_where_it_left(training)
    assert re.search(r"^attempts +2$", site.lab("status", name).stdout, re.MULTILINE)
    site.assert_nothing_left()


@on("slurm", "standin")
def test_a_requeue_by_the_admin_changes_nothing(site: Site) -> None:
    """It continues under its id, with either launcher.

    It takes more than 10 s: a requeued job waits 11 s, and each attempt imports torch.
    """
    trainings = both(site.lab, site)
    jobs = [training.trains() for training in trainings]
    site.let_save()
    for job in jobs:
        site.requeue(job)
    assert [training.trains(attempt=1) for training in trainings] == jobs
    for training in trainings:
        assert_undisturbed(training)
        assert_it_went_on_where_it_left(training)
    site.assert_nothing_left()


@on("slurm", "standin")
def test_a_node_that_dies_costs_an_attempt(site: Site) -> None:
    """The first node of some trainings, and on Slurm the second one of others, with either launcher of both.

    It takes more than 10 s: until the death is noticed, until the job is requeued, and each attempt imports torch.
    """
    trainings = _trainings_with_a_node_in_common(site)
    jobs = [training.trains() for training in trainings]
    places = [site.hosts_of(job) for job in jobs]
    (dead,) = {*places[0]}.intersection(*places[1:]) if isinstance(site, SlurmSite) else {places[0][0]}
    assert {hosts.index(dead) for hosts in places} == ({0, 1} if isinstance(site, SlurmSite) else {0})
    site.cluster.kill_node(dead)
    for training, job in zip(trainings, jobs, strict=True):
        assert training.trains(attempt=1) == job
        assert dead not in site.hosts_of(job)
    for training in trainings:
        assert_undisturbed(training)
    site.assert_nothing_left()


def _trainings_with_a_node_in_common(site: Site) -> list[Training]:
    """Start trainings on two nodes each; on Slurm the second node of the last two is the first of the others."""
    if not isinstance(site, SlurmSite):
        return both(site.lab, site)
    first = site.cluster.sbatch("--nodelist=node01", "--exclusive", "--wrap=sleep 600", folder=site.lab.folder)
    site.cluster.wait_for_state(first, "RUNNING")
    trainings = both(site.lab, site)
    for training in trainings:
        training.saves()
    site.cluster.run("scancel", str(first))
    site.cluster.wait_for_state(first, "CANCELLED")
    return [*trainings, *both(site.lab, site)]
