"""What Slurm would do with a job that is not submitted, read from what a real one has answered."""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Collection
from datetime import datetime, timezone
from pathlib import Path

import pytest
from slurm_recorded import ANSWERS
from test_slurm_plan import plan_of

from allranks.clusters.base import Feasibility, Issue
from allranks.clusters.batch.limits import NodeInfo, Requested, least, missing
from allranks.clusters.slurm import SLURM, against_each, feasibility, parse_nodes, parse_qos, read_requested

TESTED = {
    command: (int(code), said)
    for command, said, code in re.findall(
        r"^\$ sbatch --test-only --wrap=true ?(.*)\n((?:(?!\$ ).*\n)*?)\[exit (\d+)\]",
        (ANSWERS / "test-only.txt").read_text(),
        re.MULTILINE,
    )
}
SHOWN = (ANSWERS / "partitions.txt").read_text()
#: A limit of time is an hour, of nodes two.
SMALL = "PartitionName=small Default=YES State=UP MaxNodes=2 MinNodes=2 MaxTime=01:00:00\n"
GB = 1 << 30
NODES = """\
node01|idle|8|32000|gpu:4|none
node02|allocated|8|32000|gpu:a100:4(S:0-1)|none
node03|down*|8|32000|gpu:4|Not responding
node04|drained|8+|32000+|gpu:4,craynetwork:4|broken | fan
"""


def test_what_a_script_asks_for(tmp_path: Path) -> None:
    plan = plan_of(
        tmp_path,
        resources={"nodes": "2:4", "gpus_per_node": 4, "cpus_per_node": 8, "memory": "64GB", "time": "2-12:00"},
        scheduler={"partition": "a,b", "qos": "urgent", "include": "n[1-2]", "exclude": "n9"},
    )
    asked = Requested(("a", "b"), 2, 60 * 3600, "urgent", 8, 64 * GB, 4, ("n9",))
    assert read_requested(plan.files[0].text, {}) == asked
    environ = {"SBATCH_PARTITION": "c", "SBATCH_TIMELIMIT": "5"}
    assert read_requested(plan.files[0].text, environ).partitions == ("c",)
    assert read_requested(plan.files[0].text, environ).time == 300


def test_the_users_own_directives_count() -> None:
    script = "#SBATCH --nodes=2\n#SBATCH -N 3\n#SBATCH -pshort\n#SBATCH --time '1:00:00'\n#SBATCH --gres=gpu:a100:2\n"
    asked = read_requested(script, {})
    assert (asked.nodes, asked.partitions, asked.time, asked.gpus) == (3, ("short",), 3600, 2)
    assert read_requested("#SBATCH --gpus-per-node=a100:4\n#SBATCH --gres=craynetwork:8\n", {}).gpus == 4
    assert read_requested("#SBATCH --gres=craynetwork:8\n", {}).gpus == 0


def test_the_script_comes_by_stdin_and_slurm_tells_when_it_would_start(tmp_path: Path) -> None:
    asked = f'[ "$*" = "--test-only --parsable" ] && grep -q "^#SBATCH --nodes=1" && {STARTS}'
    found = predicted(tmp_path, {}, sbatch=asked)
    assert found.start == datetime(2026, 11, 22, 6, 43, 44, tzinfo=timezone.utc).timestamp()


@pytest.mark.parametrize(
    ("flag", "why", "fix"),
    [
        ("--account=nobody", "Invalid account or account/partition combination specified", "scheduler.account"),
        ("--qos=nothing", "Invalid qos specification", "scheduler.qos"),
        ("--nodelist=node09", "Invalid node name specified", "scheduler.include or scheduler.exclude"),
        ("--gres=tpu:1", "Invalid generic resource (gres) specification", "resources.gpu_type"),
        ("--reservation=none", "Requested reservation is invalid", "scheduler.reservation"),
    ],
)
def test_words_of_a_test_are_those_of_a_refusal(flag: str, why: str, fix: str) -> None:
    code, said = TESTED[flag]
    error = SLURM.refusal(("sbatch",), code, said)
    assert (error.what, error.why) == ("Slurm refuses the job", why)
    assert fix in str(error.fix)


def against(asked: Requested, shown: str = SHOWN, lifts: Collection[str] = (), most_time: int = 0) -> list[Issue]:
    return least(against_each(shown, asked, lifts, most_time).values(), takes=True)


def test_partitions() -> None:
    names = ("main", "short", "low", "high", "two", "closed")
    assert (*against_each(SHOWN, Requested(names)),) == names
    assert against_each(SHOWN, Requested()) == {"main": []}  # The default one.
    assert against_each(SHOWN, Requested(("two", "short"))) == {"short": [], "two": []}


def test_what_waits_for_ever_although_slurm_takes_it() -> None:
    # A test says of these that they could start.
    assert TESTED["--time=2:00:00"][0] == TESTED["--partition=closed"][0] == 0
    (time,) = against(Requested(time=7200))
    assert time == Issue(
        "02:00:00 are requested, and partition main gives a job at most 01:00:00",
        "lower resources.time, or choose another scheduler.partition",
    )
    (two,) = against(Requested(("two",), nodes=3))
    assert two.what == "3 nodes are requested, and partition two gives a job at most 2 nodes"
    (closed,) = against(Requested(("closed",)))
    assert (closed.what, closed.is_final) == ("partition closed is down: jobs wait until it is up", False)


def test_one_partition_of_several_is_enough() -> None:
    assert against(Requested(("short", "main"), time=1800)) == []
    assert len(against(Requested(("short", "main"), time=7200))) == 1


def test_a_partition_that_may_come_up_is_better_than_one_that_is_too_small() -> None:
    (closed,) = against(Requested(("small", "off"), time=7200), f"{SMALL}PartitionName=off State=DOWN\n")
    assert (closed.what, closed.is_final) == ("partition off is down: jobs wait until it is up", False)


@pytest.mark.parametrize(
    ("qos", "finals"),
    [
        ("", [False, False, True]),  # Each user may have another QOS by default.
        ("long", [False, True, True]),
        ("normal", [True, True, True]),
        ("normal,wide", [True, False, True]),
    ],
)
def test_a_qos_may_lift_the_limits_of_a_partition(qos: str, finals: list[bool]) -> None:
    known = parse_qos("normal||\nlong||DenyOnLimit,PartitionTimeLimit\nwide|1-00:00:00|PartitionMaxNodes\n", qos)
    wide, few = Requested(time=7200, nodes=3, qos=qos), Requested(nodes=1, qos=qos)
    assert [found.is_final for asked in (wide, few) for found in against(asked, SMALL, *known)] == finals


def test_the_limit_of_a_qos() -> None:
    known = "normal||\nbrief|00:01:00|\n"
    assert against(Requested(time=60, qos="brief"), SHOWN, *parse_qos(known, "brief")) == []
    (found,) = against(Requested(time=1800, qos="brief"), SHOWN, *parse_qos(known, "brief"))
    assert found.what == "00:30:00 are requested, and QOS brief gives a job at most 00:01:00"
    assert against(Requested(time=1800, qos="normal"), SHOWN, *parse_qos(known, "normal")) == []
    both = against(Requested(time=7200, qos="brief"), SHOWN, *parse_qos(known, "brief"))
    assert ["QOS brief" in each.what for each in both] == [False, True]


def test_nodes_and_why_they_are_away() -> None:
    nodes = parse_nodes(NODES)
    assert nodes[1] == NodeInfo("node02", "allocated", False, 8, 32000 << 20, 4, "")
    assert nodes[3] == NodeInfo("node04", "drained", True, 8, 32000 << 20, 4, "broken | fan")
    assert [node.name for node in nodes if node.is_away] == ["node03", "node04"]


@pytest.mark.parametrize(
    ("asked", "what", "is_final"),
    [
        (
            Requested(gpus=5),
            "5 GPUs of each node are requested, and no node of partition main has more than 4 GPUs",
            True,
        ),
        (
            Requested(cpus=9),
            "9 CPUs of each node are requested, and no node of partition main has more than 8 CPUs",
            True,
        ),
        (
            Requested(memory=1024 * GB),
            "1T of each node are requested, and no node of partition main has more than 32000M",
            True,
        ),
        (Requested(nodes=3), "too few of its nodes are up now: node[03-04] are down* (Not responding)", False),
    ],
)
def test_why_nodes_are_not_available(asked: Requested, what: str, is_final: bool) -> None:
    (found,) = missing(asked, "partition main", parse_nodes(NODES), "sinfo --list-reasons")
    assert (found.what, found.is_final) == (what, is_final)


def test_what_cannot_be_seen_is_left_to_slurms_words() -> None:
    assert missing(Requested(), "partition main", parse_nodes(NODES)[:2], "sinfo") == []
    assert missing(Requested(), "partition main", (), "sinfo") == []


STARTS = f"printf %s {shlex.quote(TESTED[''][1])} >&2"
#: What sacctmgr says where there is no accounting.
NO_ACCOUNTING = """\
cat >&2 <<END
You are not running a supported accounting_storage plugin
Only 'accounting_storage/slurmdbd' is supported.
END
exit 1
"""


def predicted(folder: Path, job: dict[str, object], **programs: str) -> Feasibility:
    """Return the outlook of a job where these programs, in shell, are the commands of Slurm."""
    (folder / "bin").mkdir()
    shown = f"cat {shlex.quote(str(ANSWERS / 'partitions.txt'))}"
    for name, program in {"scontrol": shown, **programs}.items():
        (folder / "bin" / name).write_text(f"#!/bin/sh\n{program}\n")
        (folder / "bin" / name).chmod(0o755)
    return feasibility(plan_of(folder, **job), {"PATH": f"{folder}/bin:{os.defpath}"})


@pytest.mark.parametrize(
    ("sacctmgr", "is_final"),
    [
        (NO_ACCOUNTING, True),
        ("echo 'normal||DenyOnLimit'", True),
        ("echo 'normal||DenyOnLimit,PartitionTimeLimit'", False),
        ("echo 'failed to open persistent connection' >&2; exit 1", False),
    ],
)
def test_a_limit_that_the_default_qos_may_lift_is_not_final(tmp_path: Path, sacctmgr: str, is_final: bool) -> None:
    job: dict[str, object] = {"resources": {"time": "2:00:00"}}
    found = predicted(tmp_path, job, sbatch=STARTS, sacctmgr=sacctmgr)
    assert [objection.is_final for objection in found.objections] == [is_final]


def test_nodes_are_looked_for_in_each_partition(tmp_path: Path) -> None:
    job: dict[str, object] = {"resources": {"gpus_per_node": 4}, "scheduler": {"partition": "main,short"}}
    sinfo = f"""\
case "$*" in
*main*) echo 'node01|idle|8|32000|gpu:2|none' ;;
*) echo '{NODES.splitlines()[2]}' ;;
esac"""
    refused = f"printf %s {shlex.quote(TESTED['--nodes=5'][1])} >&2; exit 1"
    found = predicted(tmp_path, job, sbatch=refused, sinfo=sinfo)
    told = "too few of its nodes are up now: node03 is down* (Not responding)"
    assert [(objection.what, objection.is_final) for objection in found.objections] == [(told, False)]


@pytest.mark.parametrize(
    ("ranks", "against"),
    [
        (128, []),
        (
            129,
            [
                Issue(
                    "129 ranks on each node are requested, and no node of partition main has more than 8 CPUs: "
                    "more than 16 ranks on each CPU make no progress",
                    "--nproc-per-node 8",
                )
            ],
        ),
    ],
)
def test_more_ranks_than_the_largest_node_could_run(tmp_path: Path, ranks: int, against: list[Issue]) -> None:
    job: dict[str, object] = {"launch": {"nproc_per_node": ranks}, "scheduler": {"partition": "main"}}
    nodes = "echo 'node01|idle|4|32000|(null)|none'; echo 'node02|idle|8|32000|(null)|none'"
    assert predicted(tmp_path, job, sbatch=STARTS, sinfo=nodes).objections == against


def test_a_refusal_stands_beside_what_would_only_wait(tmp_path: Path) -> None:
    refused = f"printf %s {shlex.quote(TESTED['--account=nobody'][1])} >&2; exit 1"
    found = predicted(tmp_path, {"scheduler": {"partition": "closed"}}, sbatch=refused, sacctmgr=NO_ACCOUNTING)
    assert [objection.is_final for objection in found.objections] == [False, True]
    assert found.objections[1].what.startswith("Slurm refuses the job: Invalid account")
