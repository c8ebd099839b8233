"""What qsub is asked for: the directive for each key of a job, for OpenPBS and for Torque."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allranks.clusters.pbs_directives import directives, own, own_nodes
from allranks.clusters.pbs_words import Flavour
from allranks.errors import JobError
from allranks.job.spec import Job
from allranks.job.units import format_duration
from allranks.plan.directives import plain_name, written


def asked(flavour: Flavour, nproc: int = 1, **job: Any) -> list[str]:
    """Return the lines for a job, without the notes above them."""
    made = Job.model_validate({"script": "train.py", "cluster": "hall", **job})
    lines = written(directives(made, nproc, "/runs/x/pbs.out", flavour), "#PBS")
    return [line.removeprefix("#PBS ") for line in lines if line.startswith("#PBS ")]


def test_what_is_always_asked_for() -> None:
    rest = ["-j oe", "-o /runs/x/pbs.out", "-r y"]
    nodes = ["-l select=1:mpiprocs=1", "-l place=scatter"]
    assert asked("openpbs") == ["-N train", "-S /bin/bash", *nodes, *rest]
    assert asked("torque") == ["-N train", "-S /bin/bash", "-l nodes=1:ppn=1", *rest]


FULL = {"nodes": 2, "cpus_per_node": 8, "gpus_per_node": 4, "memory": "2GB"}
DIRECT = {"launcher": "direct"}


@pytest.mark.parametrize(
    ("job", "openpbs", "torque"),
    [
        ({"resources": {"nodes": 3}}, ["-l select=3:mpiprocs=1"], ["-l nodes=3:ppn=1"]),
        ({"resources": {"cpus_per_node": 8}}, ["-l select=1:ncpus=8:mpiprocs=1"], ["-l nodes=1:ppn=8"]),
        ({"resources": {"gpus_per_node": 4}}, ["-l select=1:ngpus=4:mpiprocs=1"], ["-l nodes=1:ppn=1:gpus=4"]),
        (
            {"resources": FULL},
            ["-l select=2:ncpus=8:ngpus=4:mem=2gb:mpiprocs=1"],
            ["-l nodes=2:ppn=8:gpus=4", "-l mem=4gb"],
        ),
        ({"resources": {"memory": "1.5G"}}, ["-l select=1:mem=1536mb:mpiprocs=1"], ["-l mem=1536mb"]),
        ({"resources": {"memory": "10kb"}}, ["-l select=1:mem=10kb:mpiprocs=1"], ["-l mem=10kb"]),
        ({"launch": DIRECT}, ["-l select=1:ncpus=6:mpiprocs=1"], ["-l nodes=1:ppn=6"]),
        (
            {"launch": DIRECT, "resources": {"cpus_per_node": 8}},
            ["-l select=1:ncpus=8:mpiprocs=1"],
            ["-l nodes=1:ppn=8"],
        ),
        (
            {"scheduler": {"constraint": "gpu_model=a100:ib"}},
            ["-l select=1:mpiprocs=1:gpu_model=a100:ib"],
            ["-l nodes=1:ppn=1:gpu_model=a100:ib"],
        ),
        (
            {"scheduler": {"include": "n[08-09]"}, "resources": {"nodes": 4}},
            ["-l select=1:mpiprocs=1:host=n08+1:mpiprocs=1:host=n09+2:mpiprocs=1"],
            ["-l nodes=n08:ppn=1+n09:ppn=1+2:ppn=1"],
        ),
        (
            {"scheduler": {"include": ["a", "b"]}, "resources": {"nodes": 2}},
            ["-l select=1:mpiprocs=1:host=a+1:mpiprocs=1:host=b"],
            ["-l nodes=a:ppn=1+b:ppn=1"],
        ),
        ({"scheduler": {"exclusive": True}}, ["-l place=scatter:excl"], ["-l naccesspolicy=singlejob"]),
        ({"resources": {"time": "2-12:00"}}, ["-l walltime=60:00:00"], ["-l walltime=60:00:00"]),
        ({"scheduler": {"partition": "gpu"}}, ["-q gpu"], ["-q gpu"]),
        ({"scheduler": {"account": "my lab"}}, ['-A "my lab"'], ['-A "my lab"']),
        ({"scheduler": {"project": "p1"}}, ["-P p1"], None),
        ({"scheduler": {"qos": "high"}}, None, ["-l qos=high"]),
        ({"scheduler": {"reservation": "R7"}}, ["-q R7"], ["-l advres=R7"]),
        (
            {"scheduler": {"resources": ["filesystems=home:eagle", "software=a"]}},
            ["-l filesystems=home:eagle", "-l software=a"],
            ["-l filesystems=home:eagle", "-l software=a"],
        ),
        ({"scheduler": {"array": "0-9%2"}}, ["-J 0-9%2"], ["-t 0-9%2"]),
        ({"notify": {"mail": "me@x"}}, ["-M me@x", "-m ae"], ["-M me@x", "-m ae"]),
        ({"notify": {"mail": "me@x", "on": "start"}}, ["-M me@x", "-m b"], ["-M me@x", "-m b"]),
        ({"notify": {"mail": "me@x", "on": "requeue"}}, ["-M me@x", "-m n"], ["-M me@x", "-m n"]),
        ({"retry": {"requeue": False}}, ["-r n"], ["-r n"]),
        ({"name": "1st-try-of-a-job"}, ["-N j1st-try-of-a-j"], ["-N j1st-try-of-a-j"]),
        ({"scheduler": {"directives": ["#PBS -p 9", " -W a=b"]}}, ["-p 9", "-W a=b"], ["-p 9", "-W a=b"]),
    ],
)
def test_each_key_is_a_directive(job: dict[str, Any], openpbs: list[str] | None, torque: list[str] | None) -> None:
    expectations: dict[Flavour, list[str] | None] = {"openpbs": openpbs, "torque": torque}
    for flavour, expected in expectations.items():
        if expected is not None:
            always = asked(flavour)
            assert [line for line in asked(flavour, nproc=6, **job) if line not in always] == expected


@pytest.mark.parametrize(
    ("flavour", "scheduler", "error"),
    [
        (
            flavour,
            {"exclude": "n1"},
            "scheduler.exclude: PBS cannot leave hosts out\n  why: it has no option for that\n"
            "  fix: name those to use in scheduler.include, or a feature that they have in scheduler.constraint",
        )
        for flavour in ("openpbs", "torque")
    ]
    + [
        (
            "openpbs",
            {"qos": "high"},
            "scheduler.qos: OpenPBS and PBS Pro have no quality of service\n"
            "  fix: a queue is scheduler.partition (--queue)",
        ),
        (
            "torque",
            {"project": "p"},
            "scheduler.project: Torque has no projects\n  fix: scheduler.account (-A) names who is charged",
        ),
        (
            "openpbs",
            {"reservation": "R1", "partition": "q"},
            "scheduler.reservation and scheduler.partition exclude each other\n"
            "  why: a reservation of OpenPBS is a queue\n  fix: leave out scheduler.partition",
        ),
        (
            "torque",
            {"include": "n[1-3]"},
            "scheduler.include names 3 hosts, for 2 nodes\n  why: all of them would have to be among the nodes\n"
            "  fix: --nodes 3, or fewer hosts",
        ),
        (
            "openpbs",
            {"include": ["n[1-"]},
            "scheduler.include: 'n[1-' has a bracket that is not closed or holds no numbers\n"
            "  fix: write them like gpu[01-03,07]",
        ),
        (
            "openpbs",
            {"directives": ["-p 1\n-q evil"]},
            "scheduler.directives: invalid directive: '-p 1\\n-q evil'\n  why: each is one line of text\n"
            "  fix: write each as an entry of its own",
        ),
        (
            "openpbs",
            {"partition": "a\nb"},
            "-q='a\\nb' cannot be asked for\n  why: a directive is one line of text\n"
            "  fix: write scheduler.partition without line breaks and control characters",
        ),
    ],
)
def test_what_cannot_be_asked_for(flavour: Flavour, scheduler: dict[str, Any], error: str) -> None:
    with pytest.raises(JobError) as caught:
        asked(flavour, resources={"nodes": 2}, scheduler=scheduler)
    assert str(caught.value) == error


def test_torque_has_queues_beside_reservations() -> None:
    found = asked("torque", scheduler={"reservation": "R1", "partition": "q"})
    assert [line for line in found if line.startswith(("-q", "-l advres"))] == ["-q q", "-l advres=R1"]


OWN = ["-l walltime=01:00:00", "-q other", "-N own", "-l software=b"]


def test_a_users_own_stand_where_pbs_lets_them_count() -> None:
    """Of several -l it takes the first, of other options the last."""
    job = {"resources": {"time": "2h"}, "scheduler": {"directives": OWN, "partition": "p", "resources": ["software=a"]}}
    found = asked("openpbs", **job)
    assert found[:2] == ["-l walltime=01:00:00", "-l software=b"]
    assert found[-2:] == ["-q other", "-N own"]
    assert {"-l walltime=02:00:00", "-q p", "-N train", "-l software=a"} <= set(found[2:-2])


@pytest.mark.parametrize("own", ["-l place=pack", "-lplace=pack", "-l walltime=60,place=pack"])
def test_a_place_of_the_users_own_takes_the_place_of_ours(own: str) -> None:
    found = asked("openpbs", scheduler={"directives": [own]})
    assert [line for line in found if "place" in line] == [own]
    assert "-l select=1:mpiprocs=1" in found


@pytest.mark.parametrize(
    ("line", "value", "count", "gpus"),
    [
        ("-l select=2", "2", 2, 0),
        ("-lselect=2:ncpus=4:ngpus=4", "2:ncpus=4:ngpus=4", 2, 4),
        ("-l select=ncpus=4:ngpus=2", "ncpus=4:ngpus=2", 1, 2),
        ("-l select=2:ngpus=4+3:ngpus=4:host=a", "2:ngpus=4+3:ngpus=4:host=a", 5, 4),
        ("-l select=1:ngpus=4+1", "1:ngpus=4+1", 2, None),
        ("-l select=2:ngpus=4,walltime=60", "2:ngpus=4", 2, 4),
        ("-l walltime=60,nodes=2:ppn=4:gpus=2", "2:ppn=4:gpus=2", 2, 2),
        ("-l nodes=gpu01:ppn=4:gpus=2+gpu02:gpus=2:ppn=4", "gpu01:ppn=4:gpus=2+gpu02:gpus=2:ppn=4", 2, 2),
        ("-l nodes=4:ppn=2:ngpus_of_ours=7", "4:ppn=2:ngpus_of_ours=7", 4, 0),
        ("-l nodes=4:ppn=2:maxgpus=7", "4:ppn=2:maxgpus=7", 4, 0),
        ("-l walltime=60", None, None, 0),
        ("-W select=2", None, None, 0),
        ("-l place=scatter", None, None, 0),
    ],
)
def test_what_a_users_own_request_for_nodes_says(
    line: str, value: str | None, count: int | None, gpus: int | None
) -> None:
    job = Job.model_validate({"script": "train.py", "scheduler": {"directives": [line]}})
    assert (own_nodes(job), *own(job)) == (value, count, gpus)


def test_of_two_requests_for_nodes_the_first_counts() -> None:
    lines = ["-l select=2:ngpus=1", "-l select=3:ngpus=4"]
    job = Job.model_validate({"script": "train.py", "scheduler": {"directives": lines}})
    assert own(job) == (2, 1)


@given(st.text(min_size=1))
def test_every_pbs_takes_the_name(name: str) -> None:
    assert re.fullmatch(r"[A-Za-z][A-Za-z0-9_.+-]{0,14}", plain_name(name, 15))


@given(st.from_regex(r"[A-Za-z][A-Za-z0-9_.+-]{0,14}", fullmatch=True))
def test_a_name_that_every_pbs_takes_stays(name: str) -> None:
    assert plain_name(name, 15) == name


@given(st.integers(0, 10**8))
def test_a_time_comes_back(seconds: int) -> None:
    text = format_duration(seconds)
    assert re.fullmatch(r"\d{2,}:[0-5]\d:[0-5]\d", text)
    hours, minutes, rest = map(int, text.split(":"))
    assert 3600 * hours + 60 * minutes + rest == seconds


def test_where_the_run_folder_fits_into_no_directive_no_log_is_named() -> None:
    job = Job.model_validate({"script": "train.py"})
    assert not [line for line in directives(job, 1, None, "openpbs") if line.option == "-o"]
