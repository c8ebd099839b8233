"""The script of a PBS job, run by bash: commands on PATH stand in for those of PBS, and two names of this machine for
two nodes. What runs there gets as good as no environment, as on a real cluster.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from pbs_recorded import TORQUE_RUNNING, at, text_of
from test_pbs_plan import plan_of

from allranks import contract
from allranks.plan.script import exports
from waiting import PATIENCE

SECONDS = PATIENCE
#: What starts a task on another node, whose environment is almost empty; signals are as for whoever restarts.
ON_NODE = """\
exec env -i HOME=/ PATH=/usr/bin:/bin PBS_NODENUM=9 OMP_NUM_THREADS=64 NCPUS=64 \\
  env --default-signal=USR1,INT,TERM,HUP "$@"
"""
TMRSH = f'#!/bin/sh\necho "$1" >>"$0.asked"\nshift\n{ON_NODE}'
#: Starts a command at a line of the file of nodes; whatever becomes of it, it says that all is well.
DSH = f'#!/bin/sh\necho "$2" >>"$0.asked"\nshift 3\n({ON_NODE})\nexit 0\n'


@dataclass
class Site:
    """A machine whose PBS has given a job two hosts.

    Attributes:
        folder: of the job, which is no simple word of shell; all else is in it.
        environ: of the script.
        started: scripts.
    """

    folder: Path
    environ: dict[str, str] = field(default_factory=dict)
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def command(self, name: str, text: str) -> None:
        """Put a command on PATH."""
        path = self.folder / "bin" / name
        path.write_text(text)
        path.chmod(0o755)

    def hosts(self, *names: str) -> None:
        """Write the file of nodes."""
        (self.folder / "hosts").write_text("".join(f"{name}\n" for name in names))

    def script(self, rank: str, **job: Any) -> Path:
        """Write the script of a job whose ranks are started one by one, and run these lines of shell."""
        program = self.folder / "program"
        program.write_text(f"#!/bin/bash\nset -e\n{rank}")
        program.chmod(0o755)
        sections = {"resources": {"nodes": 2}, "retry": {"requeue": False, "warn_before": 0}, "script": None, **job}
        sections.setdefault("launch", {"launcher": "direct", "nproc_per_node": 1})
        plan = plan_of(self.folder, standalone=True, binary="./program", **sections)
        script = self.folder / "script"
        script.write_text(plan.files[0].text)
        return script

    def start(self, rank: str, **job: Any) -> subprocess.Popen[bytes]:
        """Start that script."""
        command = ["bash", str(self.script(rank, **job))]
        self.started.append(subprocess.Popen(command, env=self.environ, cwd="/"))
        return self.started[-1]

    def end(self) -> None:
        """End what a test has left."""
        tasks = [int(path.read_text()) for path in self.folder.glob("runs/**/*.pid")]
        for process in self.started:
            process.kill()
            process.wait()
        for task in tasks:
            with suppress(ProcessLookupError):
                os.kill(task, signal.SIGKILL)

    def run(self, rank: str, **job: Any) -> int:
        """Run it; return its exit code."""
        return self.start(rank, **job).wait(SECONDS)

    @property
    def attempt(self) -> Path:
        return self.folder / "runs" / "x" / contract.attempt_dir(0)

    @property
    def said(self) -> list[str]:
        """What the script has said in its first attempt."""
        start, *lines = (self.folder / "runs" / "x" / "pbs-7.out").read_text().splitlines()
        assert start == contract.ATTEMPT_STARTS
        return lines

    def ends(self) -> dict[str, str]:
        """Return how each task ended."""
        found = {path.stem: path.read_text().split()[0] for path in self.attempt.glob("node-*/*.exit")}
        return dict(sorted(found.items()))

    def seen(self, rank: int) -> dict[str, str]:
        """Return the environment of a rank that has run ``SHOW``."""
        text = (self.folder / f"env-{rank}").read_bytes().decode(errors="surrogateescape")
        return dict(pair.split("=", 1) for pair in text.split("\0")[:-1])


#: Lets a rank write down its environment.
SHOW = 'env -0 >"env-$RANK"\n'
#: Lets a rank say that it is there, and wait to be ended.
STAY = ': >"ready-$RANK"\nwhile true; do sleep 0.05; done\n'
#: For a command that stands in: the directory of the job.
FOLDER = "folder=${0%/bin/*}\n"


def await_files(paths: Sequence[Path]) -> None:
    deadline = time.monotonic() + SECONDS
    while not all(path.exists() for path in paths):
        assert time.monotonic() < deadline, [path.name for path in paths if not path.exists()]
        time.sleep(0.02)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    folder = tmp_path / "it's a $HOME"
    (folder / "bin").mkdir(parents=True)
    made = Site(folder)
    made.environ = {"PATH": f"{folder}/bin:/usr/bin:/bin", "HOME": "/", "TZ": "UTC0", "PBS_JOBID": "7.server"}
    made.environ |= {"PBS_NODEFILE": str(folder / "hosts"), "PBS_NODENUM": "0"}
    made.hosts("localhost", "localhost", "127.0.0.1")
    made.command("pbs_tmrsh", TMRSH)
    yield made
    made.end()


def test_each_rank_knows_its_place(site: Site) -> None:
    assert site.run(SHOW) == 0
    names = ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "MASTER_ADDR"]
    for rank in range(2):
        seen = site.seen(rank)
        assert [seen[name] for name in names] == [str(rank), "0", "2", "1", str(rank), "2", "localhost"]
        assert seen["MASTER_PORT"] == site.seen(0)["MASTER_PORT"]
        assert seen["PWD"] == str(site.folder)
        assert seen["PBS_NODENUM"] == "9"  # The task's own, not the script's.
    assert sorted((site.folder / "bin" / "pbs_tmrsh.asked").read_text().split()) == ["127.0.0.1", "localhost"]
    assert site.ends() == {"rank-0": "0", "rank-1": "0"}
    assert (site.attempt / contract.EXIT).read_text() == "0\n"
    assert not [*site.attempt.glob("node-*/*.pid")]


ODD = 'it\'s "two"\nlines \\ $HOME `x` \udcff '


SECRET = {"environment": {"variables": {"HF_TOKEN": "x", "PLAIN": "a b"}}}


def secrets(site: Site) -> Path:
    """Leave the secrets of the job as its launcher does."""
    file = site.folder / "runs" / "x" / contract.SECRETS_FILE
    file.parent.mkdir(parents=True)
    file.write_text(exports(["HF_TOKEN"], {"HF_TOKEN": ODD}), errors="surrogateescape")
    return file


def test_the_environment_reaches_each_task_and_its_file_is_gone(site: Site) -> None:
    site.environ["ODD"] = ODD
    file = secrets(site)
    # A file is there until its task has read it, for nobody else.
    site.command(
        "pbs_tmrsh", '#!/bin/sh\nstat -c %a "${0%/bin/*}"/runs/x/attempts/000/environment-* >>"$0.modes"\n' + TMRSH
    )
    assert site.run(SHOW, **SECRET) == 0
    for rank in range(2):
        seen = site.seen(rank)
        assert (seen["ODD"], seen["HF_TOKEN"], seen["PLAIN"]) == (ODD, ODD, "a b")
    assert set((site.folder / "bin" / "pbs_tmrsh.modes").read_text().split()) == {"600"}
    assert not file.exists()
    # Not in the copy of our code: processes that end with the job still write what they have compiled of it.
    read_by = {"env-0", "env-1", "__pycache__"}
    written = [path for path in site.folder.rglob("*") if path.is_file() and read_by.isdisjoint(path.parts)]
    assert not [path for path in written if b'"two"' in path.read_bytes()]


def test_the_tasks_of_an_array_leave_the_secrets_to_each_other(site: Site) -> None:
    site.environ |= {"PBS_JOBID": "7[3].server", "PBS_ARRAY_INDEX": "3"}
    file = secrets(site)
    assert site.run(SHOW, scheduler={"array": "0-3"}, **SECRET) == 0
    assert (file.exists(), site.seen(1)["HF_TOKEN"]) == (True, ODD)


def test_a_job_that_pbs_ends_keeps_its_secrets_for_the_next_attempt(site: Site) -> None:
    file = secrets(site)
    process = site.start("trap 'exit 9' TERM\n" + STAY, **SECRET)
    await_files([site.folder / f"ready-{rank}" for rank in range(2)])
    process.send_signal(signal.SIGTERM)
    assert (process.wait(SECONDS), file.exists()) == (9, True)


def test_secrets_may_come_with_qsub(site: Site) -> None:
    site.environ["HF_TOKEN"] = "by hand"
    assert site.run(SHOW, **SECRET) == 0
    assert site.seen(1)["HF_TOKEN"] == "by hand"


def test_without_its_secrets_the_script_ends(site: Site) -> None:
    script = site.script(SHOW, **SECRET)
    done = subprocess.run(["bash", str(script)], env=site.environ, capture_output=True, text=True, check=False)
    assert (done.returncode, site.attempt.exists()) == (1, False)
    assert done.stderr.endswith("HF_TOKEN: submit this script with it: qsub -v HF_TOKEN\n")


@pytest.mark.parametrize("starter", ["pbs_tmrsh", "pbsdsh"])
def test_the_first_rank_that_fails_ends_the_others_and_gives_its_code(site: Site, starter: str) -> None:
    site.command("pbsdsh", DSH)
    waits = 'if [ "$RANK" = 1 ]; then while [ ! -e ready-0 ]; do sleep 0.02; done; exit 3; fi\n'
    leaves = "trap 'echo ended >&2; exit 5' TERM\n"
    assert site.run(waits + leaves + STAY, scheduler={"start_with": starter}) == 3
    assert site.ends() == {"rank-0": "5", "rank-1": "3"}
    assert (site.attempt / "node-000" / "rank-0.err").read_text() == "ended\n"
    assert (site.attempt / contract.EXIT).read_text() == "3\n"
    # Of the file of nodes, with the first host twice, a line for each host.
    named = {"pbs_tmrsh": {"localhost", "127.0.0.1"}, "pbsdsh": {"0", "2"}}[starter]
    assert set((site.folder / "bin" / f"{starter}.asked").read_text().split()) == named


def test_a_task_that_cannot_be_started_is_told_of_and_ends_the_others(site: Site) -> None:
    waits = 'while [ ! -e "$folder/ready-0" ]; do sleep 0.02; done'
    refuses = f'if [ "$1" = 127.0.0.1 ]; then {waits}; echo "no such host" >&2; exit 255; fi\n'
    site.command("pbs_tmrsh", f"#!/bin/sh\n{FOLDER}{refuses}{TMRSH}")
    assert site.run(STAY) == 255
    assert site.said == ["no such host", "allranks: 127.0.0.1: a task was not started, or is lost"]
    assert site.ends() == {"rank-0": "143"}


#: Starts a task, which ends, and waits on for its end: as where PBS on a node was restarted.
WAITS_ON = (
    '#!/bin/sh\nhost=$1\nshift\n({})\n[ "$host" = localhost ] || {{ echo $$ >"$folder/waits"; exec sleep 600; }}\n'
)


def test_a_task_has_ended_when_it_says_so_not_when_its_starter_does(site: Site) -> None:
    site.command("pbs_tmrsh", WAITS_ON.format(ON_NODE).replace("\n", f"\n{FOLDER}", 1))
    assert site.run("exit 0\n") == 0
    assert site.ends() == {"rank-0": "0", "rank-1": "0"}
    assert (site.attempt / "node-001" / contract.CUT_OFF).read_text() == "PBS on 127.0.0.1\n"
    assert not (site.attempt / "node-000" / contract.CUT_OFF).exists()
    assert not Path("/proc", (site.folder / "waits").read_text().strip()).exists()
    assert site.said == []


def test_a_rerun_job_says_where_its_log_begins(site: Site) -> None:
    assert site.run("exit 0\n") == 0
    assert site.run("exit 0\n") == 0
    log = site.folder / "runs" / "x" / "pbs-7.out"
    assert log.read_text().splitlines() == [contract.ATTEMPT_STARTS] * 2


def test_what_the_first_of_the_starters_is_that_is_there(site: Site) -> None:
    (site.folder / "bin" / "pbs_tmrsh").unlink()
    site.command("pbsdsh", DSH)
    site.command("ssh", "#!/bin/sh\nexit 7\n")
    assert site.run(SHOW) == 0
    assert site.seen(1)["RANK"] == "1"


def test_ssh_gets_one_word_that_a_shell_there_takes_apart(site: Site) -> None:
    site.command("ssh", f'#!/bin/sh\nfor word; do :; done\nset -- /bin/sh -c "$word"\n{ON_NODE}')
    assert site.run(SHOW, scheduler={"start_with": "ssh"}) == 0
    assert (site.seen(0)["RANK"], site.seen(1)["RANK"]) == ("0", "1")


def test_a_job_that_is_ended_tells_its_other_nodes(site: Site) -> None:
    leaves = "trap 'exit 9' TERM\n"
    process = site.start(leaves + STAY)
    await_files([site.folder / f"ready-{rank}" for rank in range(2)])
    assert not (site.attempt / contract.TERMINATED).exists()
    assert not [*site.attempt.glob("environment*")]  # Each has read its own.
    process.send_signal(signal.SIGTERM)  # PBS sends it to the ranks of the first node too, but to no other node.
    assert process.wait(SECONDS) == 9
    assert (site.attempt / contract.TERMINATED).exists()
    assert site.ends() == {"rank-0": "9", "rank-1": "9"}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_job_that_is_ended_before_its_ranks_start_records_that(site: Site, number: signal.Signals) -> None:
    hangs = ': >"$folder/ready"\nwhile [ -d "/proc/$PPID" ]; do sleep 0.05; done\n'
    site.command("qstat", f"#!/bin/sh\n{FOLDER}{hangs}")
    process = site.start(SHOW)
    await_files([site.folder / "ready"])
    process.send_signal(number)
    assert process.wait(SECONDS) == 128 + number
    assert (site.attempt / contract.EXIT).read_text() == f"{128 + number}\n"
    assert site.ends() == {}


#: As a rank in Python, which can listen to a warning that is ignored at first.
LISTENS = """\
import signal, sys
from pathlib import Path
signal.signal(signal.SIGUSR1, lambda *_: sys.exit(75))
Path("ready-" + sys.argv[1]).touch()
while True:
    signal.pause()
"""


def test_ranks_are_warned_before_the_time_is_over(site: Site) -> None:
    site.command("qstat", "#!/bin/sh\necho '    Resource_List.walltime = 00:01:00'\n")  # Less than the job asks for.
    waits = 'while [ ! -e "$folder/ready-0" ] || [ ! -e "$folder/ready-1" ]; do sleep 0.02; done'
    site.command("pbs_tmrsh", f'#!/bin/sh\n{FOLDER}[ "$5" != USR1 ] || {waits}\n{TMRSH}')
    (site.folder / "rank.py").write_text(LISTENS)
    resources, retry = {"nodes": 2, "time": "2min"}, {"requeue": False, "warn_before": 60}
    assert site.run(f'exec {sys.executable} rank.py "$RANK"\n', resources=resources, retry=retry) == 75
    assert site.ends() == {"rank-0": "75", "rank-1": "75"}


@pytest.mark.parametrize(
    ("answer", "end"),
    [(text_of("running.txt"), at("03:21:25") + 300), (TORQUE_RUNNING, at("10:00:05") + 3600)],
    ids=["openpbs", "torque"],
)
def test_when_the_job_ends_is_what_pbs_says(site: Site, answer: str, end: float) -> None:
    (site.folder / "answer").write_text(answer)
    site.command("qstat", f'#!/bin/sh\n{FOLDER}[ "$*" = "-f 7.server" ] && cat "$folder/answer"\n')
    assert site.run(SHOW, resources={"nodes": 2, "time": "9h"}) == 0
    assert site.seen(1)[contract.END_TIME] == str(int(end))


@pytest.mark.parametrize(
    ("time_limit", "qstat", "limit"),
    [
        ("9h", None, 9 * 3600),
        ("9h", "#!/bin/sh\necho 'qstat: Unknown Job Id' >&2\nexit 153\n", 9 * 3600),
        (None, "#!/bin/sh\necho '    Resource_List.walltime = 100:08:09'\n", 100 * 3600 + 8 * 60 + 9),
        (None, None, None),
    ],
)
def test_when_the_job_ends_where_pbs_does_not_tell_all(
    site: Site, time_limit: str | None, qstat: str | None, limit: int | None
) -> None:
    if qstat:
        site.command("qstat", qstat)
    began = int(time.time())
    assert site.run(SHOW, resources={"nodes": 2, "time": time_limit}) == 0
    end = site.seen(0)[contract.END_TIME]
    if limit is None:
        assert end == ""
    else:
        assert began + limit <= int(end) <= time.time() + limit


@pytest.mark.parametrize(("of_user", "expected"), [(None, {"32"}), ("3", {"3"})])
def test_threads_are_those_of_the_user_or_a_share_of_what_pbs_gives(
    site: Site, of_user: str | None, expected: set[str]
) -> None:
    """PBS sets threads for one rank that has all CPUs of its node."""
    site.environ |= {"NCPUS": "48", "OMP_NUM_THREADS": of_user or "48"}
    assert site.run(SHOW, launch={"launcher": "direct", "nproc_per_node": 2}) == 0
    assert {site.seen(rank)["OMP_NUM_THREADS"] for rank in range(4)} == expected


@pytest.mark.parametrize(
    ("hosts", "nodes", "message"),
    [
        (
            ["n1", "n1"],
            2,
            "allranks: PBS gave the hosts n1, and the job needs 2 different ones: ask for -l place=scatter",
        ),
        (["n1", "n10", "n2"], 2, "allranks: PBS gave the hosts n1 n10 n2, and the job needs 2 different ones"),
    ],
)
def test_other_nodes_than_those_that_are_needed(site: Site, hosts: list[str], nodes: int, message: str) -> None:
    site.hosts(*hosts)
    assert site.run(SHOW, resources={"nodes": nodes}) == 1
    assert len(site.said) == 1
    assert site.said[0].startswith(message)
    assert (site.attempt / contract.EXIT).read_text() == "1\n"
    assert not (site.folder / "bin" / "pbs_tmrsh.asked").exists()


def test_without_the_file_of_nodes_the_script_ends(site: Site) -> None:
    (site.folder / "hosts").unlink()
    assert site.run(SHOW) == 1
    assert "hosts: No such file or directory" in site.said[0]


def test_each_task_of_an_array_has_a_folder_of_its_own(site: Site) -> None:
    site.environ |= {"PBS_JOBID": "7[3].server", "PBS_ARRAY_INDEX": "3"}
    assert site.run(SHOW, scheduler={"array": "0-3"}) == 0
    task = site.folder / "runs" / "x" / "task-3"
    assert site.seen(1)[contract.RUN_DIR] == str(task)
    assert (task / contract.attempt_dir(0) / contract.JOB).read_text() == "7[3].server\n"
    assert (task / contract.attempt_dir(0) / contract.EXIT).read_text() == "0\n"


def test_a_second_job_of_the_run_is_its_second_attempt(site: Site) -> None:
    assert site.run(SHOW) == 0
    assert site.run(SHOW) == 0
    assert site.seen(1)[contract.ATTEMPT] == "1"
    assert (site.attempt.parent / "001" / contract.EXIT).read_text() == "0\n"


def test_where_qsub_did_not_start_it_the_script_says_so(site: Site) -> None:
    del site.environ["PBS_JOBID"]
    done = subprocess.run(["bash", str(site.script(SHOW))], env=site.environ, capture_output=True, check=False)
    logs = [path.read_bytes() for path in (site.folder / "runs" / "x").glob("*.out")]
    said = b"".join([done.stderr, *logs])
    assert (done.returncode, said.endswith(b"PBS_JOBID: is not set: qsub this script\n")) == (1, True)
