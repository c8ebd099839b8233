"""The Grid Engine cluster is what the tests of that kind take it for: each feature of it that they lean on, once."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_tools import ClusterError, wait_until
from grid_engine_cluster import GridEngineCluster
from grid_engine_conf import GridEngineShape

NAMES = ["node01", "node02", "node03", "node04"]
# Writes down each signal that could end it, and continues: as a job's script, and as a task of it on another node.
HEARS = """
import os, signal, socket, sys
heard = open(sys.argv[1], "a", buffering=1)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, lambda number, _: heard.write(signal.Signals(number).name + "\\n"))
heard.write("ready\\n")
while True:
    signal.pause()
"""
# The signal is for all processes of the script's group: a shell that waited for the program would die of it.
ON_TWO_NODES = """
other=$(sed -n '2s/ .*//p' "$PE_HOSTFILE")
qrsh -inherit "$other" "exec python3 '$PWD/hears.py' '$PWD/task'" </dev/null &
until grep -q ready task 2>/dev/null; do sleep 0.1; done
exec python3 hears.py script
"""


def script(folder: Path, text: str, name: str = "job.sh") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def said(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def failed(record: dict[str, str]) -> tuple[int, int]:
    """Return what Grid Engine and what the job's script report of its end, as numbers."""
    return int(record["failed"].split()[0]), int(record["exit_status"].split()[0])


@pytest.fixture
def hears(work: Path) -> Path:
    """Give the directory with a program that writes down the signals it gets."""
    script(work, HEARS, "hears.py")
    return work


def test_four_idle_nodes_with_four_gpus(grid_engine: GridEngineCluster) -> None:
    lines = [line.split() for line in grid_engine.run("qhost", "-F", "gpu,slots").splitlines()]
    assert [line[0] for line in lines if line[1:2] == ["lx-amd64"]] == NAMES
    assert [line for line in lines if line[0].startswith(("Host", "hc:"))] == (
        [["Host", "Resource(s):", "hc:gpu=4.000000"], ["hc:slots=8.000000"]] * 4
    )
    assert grid_engine.queue_states() == {f"closed.q@{name}": "d" for name in NAMES}


def test_a_task_on_each_node(grid_engine: GridEngineCluster, work: Path) -> None:
    text = """
    cat "$PE_HOSTFILE"
    for host in $(cut -d' ' -f1 "$PE_HOSTFILE"); do qrsh -inherit "$host" hostname </dev/null; done"""
    job = grid_engine.qsub("-pe", "four", "8", "-l", "gpu=1", "-o", "out", script(work, text), folder=work)
    assert failed(grid_engine.finished(job)) == (0, 0)
    hosts, tasks = said(work / "out")[:2], said(work / "out")[2:]
    assert [line.split()[1] for line in hosts] == ["4", "4"]
    assert tasks == [line.split()[0] for line in hosts]


def test_slots_and_gpus_are_given_out(grid_engine: GridEngineCluster, work: Path) -> None:
    job = grid_engine.qsub("-b", "y", "-pe", "four", "8", "-l", "gpu=1", "sleep", "60", folder=work)
    grid_engine.wait_for_state(job, "r")
    shown = grid_engine.run("qhost", "-F", "gpu").split()
    assert sorted(word for word in shown if word.startswith("hc:")) == ["hc:gpu=0.000000"] * 2 + ["hc:gpu=4.000000"] * 2


def test_the_warning_at_h_rt_reaches_script_and_tasks(grid_engine: GridEngineCluster, hears: Path) -> None:
    """It takes more than 10 s: until the limit, and then until SIGKILL."""
    options = ["-pe", "one", "2", "-notify", "-l", "h_rt=15"]  # Until then both must be ready.
    job = grid_engine.qsub(*options, script(hears, ON_TWO_NODES), folder=hears)
    record = grid_engine.finished(job)
    assert said(hears / "script") == said(hears / "task") == ["ready", "SIGUSR2"]
    assert failed(record) == (37, 137)


def test_s_rt_warns_a_job_without_tasks(grid_engine: GridEngineCluster, hears: Path) -> None:
    job = grid_engine.qsub("-l", "s_rt=5", script(hears, "exec python3 hears.py script"), folder=hears)
    grid_engine.wait_until("the warning", lambda: said(hears / "script") == ["ready", "SIGUSR1"])
    assert grid_engine.states() == {job: "r"}


def test_s_rt_kills_the_tasks_of_a_job(grid_engine: GridEngineCluster, hears: Path) -> None:
    """It takes more than 10 s: until the limit, by when both must be ready."""
    job = grid_engine.qsub("-pe", "one", "2", "-l", "s_rt=10", script(hears, ON_TWO_NODES), folder=hears)
    assert failed(grid_engine.finished(job))[1] == 137
    assert said(hears / "task") == ["ready"]


def test_h_rt_kills(grid_engine: GridEngineCluster, hears: Path) -> None:
    job = grid_engine.qsub("-l", "h_rt=5", script(hears, "exec python3 hears.py script"), folder=hears)
    assert failed(grid_engine.finished(job)) == (37, 137)
    assert said(hears / "script") == ["ready"]


def test_cancel_warns_first(grid_engine: GridEngineCluster, hears: Path) -> None:
    """It takes more than 10 s: 15 of them lie between the signal and SIGKILL."""
    job = grid_engine.qsub("-pe", "one", "2", "-notify", script(hears, ON_TWO_NODES), folder=hears)
    grid_engine.wait_until("the script", lambda: said(hears / "script") == ["ready"])
    grid_engine.run("qdel", str(job))
    grid_engine.wait_until("the state", lambda: grid_engine.states() == {job: "dr"})
    assert failed(grid_engine.finished(job)) == (100, 137)
    assert said(hears / "script") == said(hears / "task") == ["ready", "SIGUSR2"]


def test_a_task_that_dies_of_a_signal_ends_the_job(grid_engine: GridEngineCluster, work: Path) -> None:
    text = """
    other=$(sed -n '2s/ .*//p' "$PE_HOSTFILE")
    qrsh -inherit "$other" 'exit 7' </dev/null; echo $?
    qrsh -inherit "$other" 'kill -KILL $$' </dev/null; echo $?
    sleep 60"""
    job = grid_engine.qsub("-pe", "one", "2", "-o", "out", script(work, text), folder=work)
    assert failed(grid_engine.finished(job)) == (100, 137)
    assert said(work / "out") == ["7", "137"]


def test_99_requeues(grid_engine: GridEngineCluster, work: Path) -> None:
    text = 'echo "attempt $RESTARTED"; [ "$RESTARTED" = 1 ] || exit 99'
    job = grid_engine.qsub("-r", "y", "-pe", "one", "2", "-o", "out", script(work, text), folder=work)
    grid_engine.wait_until("the second attempt", lambda: said(work / "out") == ["attempt 0", "attempt 1"])
    assert failed(grid_engine.finished(job)) == (0, 0)


def test_an_admin_reschedules(grid_engine: GridEngineCluster, work: Path) -> None:
    text = 'echo "attempt $RESTARTED"; [ "$RESTARTED" = 1 ] || sleep 60'
    job = grid_engine.qsub("-r", "y", "-o", "out", script(work, text), folder=work)
    grid_engine.wait_until("the first attempt", lambda: said(work / "out") == ["attempt 0"])
    assert grid_engine.run("qmod", "-rj", str(job)).startswith(f"Pushed rescheduling of job {job} on host node")
    grid_engine.wait_until("the second attempt", lambda: said(work / "out") == ["attempt 0", "attempt 1"])


def test_array(grid_engine: GridEngineCluster, work: Path) -> None:
    job = grid_engine.qsub("-t", "1-5:2", "-j", "y", script(work, "echo $SGE_TASK_ID; exit $SGE_TASK_ID"), folder=work)
    grid_engine.wait_until("all to be finished", lambda: not grid_engine.states())
    assert [said(work / f"job.sh.o{job}.{task}") for task in (1, 3, 5)] == [["1"], ["3"], ["5"]]

    def codes() -> list[str]:
        shown = grid_engine.tried("qacct", "-j", str(job))[1].splitlines()
        return sorted(line.split()[1] for line in shown if line.startswith("exit_status"))

    wait_until("all records", lambda: len(codes()) == 3)
    assert codes() == ["1", "3", "5"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("-q nowhere.q", 'Job was rejected because job requests unknown queue "nowhere.q"'),
        ("-pe nothing 2", 'job rejected: the requested parallel environment "nothing" does not exist'),
        ("-l tpu=1", 'unknown resource "tpu"'),
        ("-l h_rt=soon", 'attribute "h_rt" is not a time value'),
    ],
)
def test_refusals(grid_engine: GridEngineCluster, work: Path, options: str, why: str) -> None:
    with pytest.raises(ClusterError) as refused:
        grid_engine.qsub(*options.split(), "-b", "y", "true", folder=work)
    assert why in str(refused.value)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ("-q closed.q", 'queue instance "closed.q@node01" dropped because it is disabled'),
        ("-q staff.q", 'has no permission for cluster queue "staff.q"'),
        ("-l gpu=5", "offers only hc:gpu=4.000000"),
        ("-pe one 5", 'cannot run in PE "one" because it only offers 4 slots'),
    ],
)
def test_reasons(grid_engine: GridEngineCluster, work: Path, options: str, why: str) -> None:
    job = grid_engine.qsub(*options.split(), "-b", "y", "sleep", "60", folder=work)
    grid_engine.wait_until("the reason", lambda: why in grid_engine.run("qstat", "-j", str(job)))
    assert grid_engine.states() == {job: "qw"}


def test_error_state(grid_engine: GridEngineCluster, work: Path) -> None:
    job = grid_engine.qsub("-b", "y", "-o", "/nowhere/out", "true", folder=work)
    grid_engine.wait_for_state(job, "Eqw")
    grid_engine.wait_until("the reason", lambda: "error reason" in grid_engine.run("qstat", "-j", str(job)))


def test_dead_node(grid_engine: GridEngineCluster, work: Path) -> None:
    """It takes more than 10 s: a node is silent for a while before it is unknown."""
    job = grid_engine.qsub("-r", "y", "-q", "main.q@node03", "-b", "y", "sleep", "60", folder=work)
    grid_engine.wait_for_state(job, "r")
    grid_engine.kill_node("node03")
    with pytest.raises(ClusterError, match="node03 is dead"):
        grid_engine.run_on("node03", ["true"])
    grid_engine.wait_until("it to be noticed", lambda: grid_engine.queue_states().get("main.q@node03") == "u")
    assert grid_engine.states() == {job: "r"}  # Nothing else becomes of it: most sites have it so.
    grid_engine.start_node("node03")
    grid_engine.wait_for_state(job, "Rq", "Rt", "Rr")


def test_cut_cable(grid_engine: GridEngineCluster) -> None:
    there = ["timeout", "2", "bash", "-c", "</dev/tcp/node02/6445"]
    grid_engine.run_on("node01", there)
    grid_engine.cut("node02")
    with pytest.raises(ClusterError):
        grid_engine.run_on("node01", there)
    grid_engine.mend("node02")
    wait_until("node02 to be reached", lambda: not subprocess.call(grid_engine.network.nodes["node01"].enter(there)))


def test_jobs_continue_without_qmaster(grid_engine: GridEngineCluster, work: Path) -> None:
    """It takes more than 10 s: execds connect to a new qmaster half a minute after the old one left."""
    text = "echo started; until [ -e go ]; do sleep 0.1; done; echo done"
    job = grid_engine.qsub("-o", "out", script(work, text), folder=work)
    grid_engine.wait_until("the job", lambda: said(work / "out") == ["started"])
    grid_engine.stop_master()
    with pytest.raises(ClusterError, match="unable to send message to qmaster using port 6444"):
        grid_engine.states()
    (work / "go").touch()
    wait_until("the job's end", lambda: said(work / "out") == ["started", "done"])
    grid_engine.start_master()
    assert failed(grid_engine.finished(job)) == (0, 0)


OWNER = """
import sys
from pathlib import Path
from grid_engine_cluster import GridEngineCluster
from grid_engine_conf import GridEngineShape
cluster = GridEngineCluster(Path(sys.argv[1]), GridEngineShape(nodes=1))
cluster.start()
cluster.qsub("-b", "y", "sleep", "600", folder=Path(sys.argv[1]))
cluster.wait_for_state(1, "r")
print("up", flush=True)
sys.stdin.read()
"""


def of_cluster(folder: Path) -> set[int]:
    """Return the processes that know a cluster by its environment."""
    root, found = os.fsencode(f"SGE_ROOT={folder / 'sge'}\0"), set()
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if root in path.read_bytes():
                found.add(int(path.parent.name))
        except OSError:
            continue  # It has exited meanwhile.
    return found


def test_a_killed_owner_leaves_no_process(grid_engine: GridEngineCluster, tmp_path: Path) -> None:
    here = os.pathsep.join(map(str, (Path(__file__).parent, Path(__file__).parents[1])))
    command, env = [sys.executable, "-c", OWNER, str(tmp_path)], {**os.environ, "PYTHONPATH": here}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env) as owner:
        assert owner.stdout and owner.stdout.readline() == b"up\n"
        wait_until("qmaster, execd, shepherd and job", lambda: len(of_cluster(tmp_path)) >= 4)
        assert not grid_engine.states()  # The job of the other cluster is none of this one's.
        owner.kill()
    wait_until("the processes to be gone", lambda: not of_cluster(tmp_path))


def test_a_daemon_that_ends_is_named(tmp_path: Path) -> None:
    with GridEngineCluster(tmp_path, GridEngineShape(nodes=1)) as cluster:
        cluster.run_on("node01", ["kill", "-KILL", (cluster.spool / "node01/execd.pid").read_text().strip()])
        with pytest.raises(ClusterError, match="the daemon of node01 ended with"):
            wait_until("the end of the daemon", lambda: cluster.check())
    assert of_cluster(tmp_path) == set()
