"""Write down what Grid Engine answers about jobs in each state: `python tests/cluster/record_grid_engine.py`.

The answers go to `answers/grid-engine-VERSION/`, with what belongs to this machine replaced.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from cluster_tools import ClusterError
from grid_engine_cluster import GridEngineCluster
from grid_engine_conf import GridEngineShape

ANSWERS = Path(__file__).parent / "answers"
SLEEP = "-b y sleep 600"
#: Jobs that stay in the state that is named, on an empty cluster: state and options.
WAITING = {
    "pending-gpus": ("qw", "-l gpu=5"),
    "pending-slots": ("qw", "-pe one 5"),
    "pending-uneven": ("qw", "-pe four 6"),
    "pending-queue-disabled": ("qw", "-q closed.q"),
    "pending-no-permission": ("qw", "-q staff.q"),
    "pending-queue-limit": ("qw", "-q short.q -l h_rt=1:0:0"),
    "pending-begin-time": ("qw", "-a 203001010000"),
    "pending-held": ("hqw", "-h"),
    "pending-array": ("qw", "-t 1-3 -q closed.q"),
    "error-no-output-folder": ("Eqw", "-o /nowhere/out"),
    "running": ("r", "-N mnist -pe four 8 -l gpu=1,h_rt=3600 -notify -r y"),
    "running-array": ("r", "-t 1-5:2 -tc 1"),
}
#: Jobs that are finished by themselves, of which only qacct knows; a shell's script each.
FINISHED = {
    "completed": ("-pe one 2 -l gpu=2", "exit 0"),
    "completed-record-of-each-task": (
        "-pe fill 16",
        "qrsh -inherit $(sed -n '2s/ .*//p' $PE_HOSTFILE) true </dev/null",
    ),
    "failed": ("", "exit 3"),
    "failed-signal": ("", "kill -SEGV $$"),
    "failed-task-killed": (
        "-pe one 2",
        "qrsh -inherit $(sed -n '2s/ .*//p' $PE_HOSTFILE) 'kill -KILL $$' </dev/null; sleep 60",
    ),
    "failed-100": ("", "[ -e again ] || { touch again; exit 100; }"),
    "timeout": ("-l h_rt=3", "sleep 60"),
    "timeout-notify": ("-l h_rt=3 -notify", "trap : USR2; sleep 60; sleep 60"),
    "requeued-99": ("-r y", "[ $RESTARTED = 1 ] || exit 99"),
    "requeued-99-not-rerunable": ("-r n", "[ $RESTARTED = 1 ] || exit 99"),
    "array": ("-t 1-5:2", "exit $SGE_TASK_ID"),
}
REFUSED = (
    *("-q nowhere.q", "-pe nothing 2", "-pe one", "-l tpu=1", "-l h_rt=soon", "-l gpu=many", "-l hostname=nohost"),
    *(
        "-P nothing",
        "-hold_jid nothing",
        "-t 0-3",
        "-t 1-80000",
        "-N 1job",
        "-a tomorrow",
        "-w e -l gpu=5",
        "-nonsense",
    ),
)
CHECKED = ("-l gpu=5", "-pe one 5", "-q staff.q", "-q short.q -l h_rt=1:0:0", "-q closed.q", "-pe four 8 -l gpu=1")
QRSH = r"""
other=$(sed -n '2s/ .*//p' "$PE_HOSTFILE")
try() { echo "\$ qrsh -inherit $*"; qrsh -inherit "$@" </dev/null 2>&1; echo "[exit $?]"; echo; }
try $other 'echo out; echo err >&2; exit 7'
try $other "printf '%s|' 'a b' '\$HOME' ''; echo"
try $other printf '%s|' 'a b'
try $other /nowhere/program
try node09 true
try "$(comm -13 <(cut -d' ' -f1 "$PE_HOSTFILE" | sort) <(printf 'node0%s\n' 1 2 3 4) | head -1)" true
sleep 3 | qrsh -inherit $other 'sleep 2' &
sleep 1
echo '# a second task in the one slot of that host'
try $other true
wait
"""
HEARS = """
import os, signal, socket, sys, time
log = open(sys.argv[1], "a", buffering=1)
def say(text):
    log.write(f"{time.time() - float(sys.argv[2]):5.1f} s  {sys.argv[3]} on {socket.gethostname()}: {text}\\n")
for number in {*signal.Signals} - {signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD}:
    signal.signal(number, lambda number, _: say(signal.Signals(number).name))
say("ready")
while True:
    signal.pause()
"""
ON_BOTH = """
for host in $(cut -d' ' -f1 "$PE_HOSTFILE"); do
  qrsh -inherit $host "exec python3 $PWD/hears.py $PWD/$JOB_NAME $BEGAN task" </dev/null &
done
exec python3 hears.py $JOB_NAME $BEGAN script
"""


class Recorder:
    """Brings jobs into their states on one cluster, and writes down the answers about them."""

    def __init__(self, cluster: GridEngineCluster, work: Path, answers: Path) -> None:
        self.cluster, self.work, self.answers = cluster, work, answers

    def submit(self, options: str, script: str | None = None) -> int:
        """Submit a job that sleeps, or runs a script with bash."""
        if script is None:
            return self.cluster.qsub(*options.split(), *SLEEP.split(), folder=self.work)
        (self.work / "job.sh").write_text(script)
        return self.cluster.qsub("-S", "/bin/bash", *options.split(), "job.sh", folder=self.work)

    def record(self, name: str, job: int) -> None:
        """Write down all answers about a job that qstat knows."""
        print(name, job, flush=True)
        self.said(f"{name}/qstat.txt", ["qstat", "-u", "*"], ["qstat", "-j", str(job)])
        self._write(f"{name}/qstat.xml", self.cluster.run("qstat", "-u", "*", "-r", "-xml"))
        self._write(f"{name}/job.xml", self.cluster.run("qstat", "-j", str(job), "-xml"))

    def finished(self, name: str, job: int) -> None:
        """Write down what qacct and qstat answer about a job that is finished."""
        with_record = self.cluster.finished(job, 120)
        print(name, job, with_record["failed"], with_record["exit_status"], flush=True)
        self.said(f"{name}.txt", ["qacct", "-j", str(job)], ["qstat", "-j", str(job)])

    def said(self, file: str, *commands: list[str]) -> None:
        """Write down what commands print, and their exit codes."""
        shown = []
        for command in commands:
            code, out, err = self.cluster.tried(*command, folder=self.work)
            shown.append(f"$ {' '.join(command)}\n{out}{err}[exit {code}]\n")
        self._write(file, "\n".join(shown))

    def printed(self, file: str, options: str, script: str) -> None:
        """Write down what the script of a job prints."""
        job = self.submit(f"{options} -j y -o out", script)
        self.cluster.finished(job)
        self._write(file, (self.work / "out").read_text(errors="backslashreplace"))
        (self.work / "out").unlink()

    def _write(self, name: str, text: str) -> None:
        path = self.answers / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace(str(self.work), "/home/ada/project").replace(str(self.cluster.folder), "/ge")
        text = text.replace(f"{self.cluster.network.subnet}.", "10.0.0.")
        path.write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))


def scenarios(take: Recorder) -> None:
    """Bring jobs to all states, most of which need a hand, and then ask for what is refused."""
    cluster = take.cluster
    for name, (state, options) in WAITING.items():
        job = take.submit(options)
        cluster.wait_for_state(job, state)
        if state != "r":
            cluster.wait_until("the reason", lambda job=job: "scheduling info" in cluster.run("qstat", "-j", str(job)))
        take.record(name, job)
        if name == "running":
            take.record("pending-dependency", take.submit(f"-hold_jid {job}"))
            cluster.run("qmod", "-sj", str(job))
            cluster.wait_for_state(job, "s")
            take.record("suspended", job)
        cluster.reset()
    full = take.submit("-pe fill 32")
    cluster.wait_for_state(full, "r")
    job = take.submit("-pe one 2")
    cluster.wait_until("the reason", lambda: "scheduling info" in cluster.run("qstat", "-j", str(job)))
    take.record("pending-busy", job)
    cluster.reset()
    for name, (options, script) in FINISHED.items():
        job = take.submit(options, script)
        if name == "failed-100":
            cluster.wait_for_state(job, "Eqw")
            take.record("error-100", job)
            take.said("clear-error.txt", ["qmod", "-cj", str(job)])
        take.finished(name, job)
    by_hand(take)


def by_hand(take: Recorder) -> None:
    """Record what becomes of jobs that are cancelled, rescheduled or lose their node, and what they see."""
    cluster = take.cluster
    job = take.submit("-notify")
    cluster.wait_for_state(job, "r")
    cluster.run("qdel", str(job))
    cluster.wait_for_state(job, "dr")
    take.record("deleting", job)
    take.finished("cancelled", job)
    job = take.submit("-h")
    take.said(
        "cancelled-pending.txt", *([*command, str(job)] for command in (["qdel"], ["qacct", "-j"], ["qstat", "-j"]))
    )
    job = take.submit("-r y")
    cluster.wait_for_state(job, "r")
    take.said("reschedule.txt", ["qmod", "-rj", str(job)])
    cluster.wait_for_state(job, "Rr")
    take.record("rescheduled", job)
    cluster.run("qdel", str(job))
    take.finished("rescheduled-cancelled", job)
    job = take.submit("-r y -q main.q@node03")
    cluster.wait_for_state(job, "r")
    cluster.kill_node("node03")
    cluster.wait_until("the silence", lambda: cluster.queue_states().get("main.q@node03") == "u" or None)
    take.record("running-on-a-dead-node", job)
    take.said("dead-node.txt", ["qhost"], ["qstat", "-f"], ["qdel", str(job)], ["qdel", "-f", str(job)])
    cluster.reset()
    take.printed("environment.txt", "-pe one 2 -notify -r y -l h_rt=60", "env | sort; echo; cat $PE_HOSTFILE")
    take.printed(
        "task-environment.txt",
        "-pe one 2",
        "export MINE=1; qrsh -inherit $(sed -n '2s/ .*//p' $PE_HOSTFILE) 'pwd; env | sort' </dev/null",
    )
    take.printed("array-environment.txt", "-t 2", "env | grep -e TASK -e JOB | sort")
    take.printed("qrsh.txt", "-pe one 2", QRSH)
    signals(take)
    refusals(take)


def signals(take: Recorder) -> None:
    """Record which signals a job's script and tasks get when it is deleted or comes to its limits."""
    (take.work / "hears.py").write_text(HEARS)
    cases = {"qdel": "", "qdel-notify": "-notify", "h_rt-notify": "-l h_rt=6 -notify", "s_rt": "-l s_rt=6,h_rt=20"}
    shown = []
    for name, options in cases.items():
        job = take.submit(f"-N {name} -pe one 2 -v BEGAN={time.time():.1f} {options}", ON_BOTH)
        log = take.work / name
        take.cluster.wait_until(
            "script and tasks", lambda log=log: log.exists() and log.read_text().count("ready") == 3
        )
        if name.startswith("qdel"):
            take.cluster.run("qdel", str(job))
        record = take.cluster.finished(job)
        shown.append(
            f"# {name}: {options}\n{log.read_text()}failed {record['failed']}, exit_status {record['exit_status']}"
        )
    take._write("signals.txt", "\n\n".join(shown) + "\n")


def refusals(take: Recorder) -> None:
    """Record what Grid Engine answers to what it does not accept, and what it tells of itself."""
    take.said(
        "refused.txt", *(["qsub", *flags.split(), *SLEEP.split()] for flags in REFUSED), ["qsub", "/nowhere/job.sh"]
    )
    take.cluster.reset()
    take.said("verified.txt", *(["qsub", "-w", "v", *flags.split(), *SLEEP.split()] for flags in CHECKED))
    accepted = (["-terse"], ["-terse", "-t", "1-5:2"], [], ["-t", "1-5:2"])
    take.said("submitted.txt", *(["qsub", *flags, "-h", *SLEEP.split()] for flags in accepted), ["qdel", "-u", "*"])
    unknown = (["qstat", "-j"], ["qacct", "-j"], ["qdel"], ["qmod", "-rj"], ["qmod", "-cj"])
    take.said("unknown-job.txt", *([*command, "999999"] for command in unknown))
    take.said("queues.txt", ["qconf", "-sql"], ["qconf", "-sq", "short.q"], ["qselect", "-pe", "one", "-q", "main.q"])
    take.said(
        "environments.txt", ["qconf", "-spl"], *(["qconf", "-sp", name] for name in ("one", "first", "fill", "loose"))
    )
    take.said("nodes.txt", ["qhost"], ["qhost", "-F", "gpu,slots"], ["qhost", "-q"], ["qstat", "-f"], ["qconf", "-sc"])
    take.said("version.txt", ["qstat", "-help"], ["qconf", "-sconf"], ["qconf", "-ssconf"])
    take.cluster.stop_master()
    asked = (["qsub", *SLEEP.split()], ["qstat"], ["qstat", "-j", "1"], ["qdel", "1"], ["qacct", "-j", "1"])
    take.said("no-qmaster.txt", *asked)


def main() -> None:
    """Record everything."""
    folder = Path(tempfile.mkdtemp(prefix="ge-"))
    folder.chmod(0o755)
    try:
        with GridEngineCluster(folder, GridEngineShape()) as cluster:
            # No names of this machine in the answers.
            cluster.environment["PATH"] = os.pathsep.join([str(cluster.bin), os.defpath])
            version = cluster.tried("qstat", "-help")[1].split()[1]
            answers = ANSWERS / f"grid-engine-{version}"
            shutil.rmtree(answers, ignore_errors=True)
            (folder / "work").mkdir()
            scenarios(Recorder(cluster, folder / "work", answers))
    except ClusterError as error:
        sys.exit(f"error: {error}")
    finally:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
