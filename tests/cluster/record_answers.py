"""Write down what this machine's Slurm answers about jobs in each state: `python tests/cluster/record_answers.py`.

The answers go to `answers/slurm-VERSION/`, one directory per state, with what belongs to this machine replaced.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from datetime import datetime, timedelta
from pathlib import Path

from cgroups import why_no_cgroups
from slurm_cluster import SlurmCluster
from slurm_conf import Shape

ANSWERS = Path(__file__).parent / "answers"
SQUEUE = "%i|%T|%r|%R|%M|%l|%D|%N|%S|%e|%b"
SACCT = "JobID,JobName,State,ExitCode,DerivedExitCode,Reason,Elapsed,Timelimit,MaxRSS,NNodes,NodeList,Start,End"
HUNGRY = "python3 -c 'x = bytearray(400 << 20); import time; time.sleep(60)'"
EXTRA = "PartitionName=scrap PriorityTier=1 PreemptMode=CANCEL"
LONG = "--wrap=srun sleep 600"

#: Jobs that come by themselves to the state that is named, and the state in Slurm's words.
BY_THEMSELVES: dict[str, tuple[str, list[str]]] = {
    "pending-held": ("PENDING", ["--hold", LONG]),
    "pending-begin-time": ("PENDING", ["--begin=now+1hour", LONG]),
    "pending-partition-down": ("PENDING", ["--partition=closed", LONG]),
    "pending-partition-limit": ("PENDING", ["--partition=short", "--time=30", LONG]),
    "pending-qos-limit": ("PENDING", ["--qos=brief", "--time=30", LONG]),
    "pending-too-many-nodes": ("PENDING", ["--nodes=5", LONG]),
    "pending-partition-node-limit": ("PENDING", ["--partition=two", "--nodes=3", LONG]),
    "completed": ("COMPLETED", ["--nodes=2", "--gres=gpu:2", "--wrap=srun true"]),
    "failed": ("FAILED", ["--wrap=exit 3"]),
    "failed-step": ("FAILED", ["--nodes=2", "--wrap=srun --kill-on-bad-exit=1 sh -c 'exit $SLURM_PROCID'"]),
    "failed-signal": ("FAILED", ["--wrap=kill -SEGV $$"]),
    "failed-no-output-folder": ("FAILED", ["--output=/nowhere/job.out", "--wrap=true"]),
    "out-of-memory": ("OUT_OF_MEMORY", ["--mem=100", f"--wrap={HUNGRY}"]),
    "out-of-memory-in-step": ("FAILED", ["--mem=100", f"--wrap=srun {HUNGRY}"]),
}


class Recorder:
    """Brings jobs into their states on one cluster, and writes down the answers about them."""

    def __init__(self, cluster: SlurmCluster, work: Path, answers: Path) -> None:
        self.cluster, self.work, self.answers = cluster, work, answers

    def submit(self, *args: str) -> int:
        return self.cluster.sbatch(*args, folder=self.work)

    def running(self, *args: str) -> int:
        """Submit a job and wait until its step runs, and until there is some time to account for."""
        job = self.submit(*args, LONG)
        self.cluster.wait_for_state(job, "RUNNING")
        step = ["squeue", "--noheader", "--steps", f"--jobs={job}"]
        self.cluster.wait_until(f"step {job}.0", lambda: f"{job}.0" in self.cluster.run(*step) or None)
        self.cluster.wait_until("two seconds of it", lambda: self.cluster.job(job)["RunTime"] >= "00:00:02" or None)
        return job

    def record(self, name: str, job: int, state: str) -> None:
        """Write down all answers about a job, which comes to a state now."""
        known = self.cluster.wait_for_state(job, state)
        print(name, job, known["JobState"], known["Reason"], flush=True)
        row = ["sacct", "-nXP", f"--jobs={job}", "--format=State"]
        self.cluster.wait_until(f"sacct to say {state}", lambda: state in self.cluster.run(*row) or None)
        asked = {
            "scontrol.txt": ["scontrol", "show", "job", str(job)],
            "squeue.txt": ["squeue", "--states=all", f"--jobs={job}", f"--format={SQUEUE}"],
            "sacct.txt": ["sacct", "--parsable2", f"--jobs={job}", f"--format={SACCT}"],
        }
        for file, command in asked.items():
            self._write(f"{name}/{file}", self.cluster.run(*command))
        squeue = json.loads(self.cluster.run("squeue", "--json"))  # It knows no --jobs together with --json.
        squeue["jobs"] = [each for each in squeue["jobs"] if each["job_id"] == job]
        self._write(f"{name}/squeue.json", json.dumps(squeue, indent=1) + "\n")
        if not name.startswith("pending-"):
            sacct = json.loads(self.cluster.run("sacct", "--json", f"--jobs={job}"))
            self._write(f"{name}/sacct.json", json.dumps(sacct, indent=1) + "\n")

    def refused(self, file: str, *commands: list[str]) -> None:
        """Write down what commands say, above all those that fail."""
        said = []
        for command in commands:
            done = subprocess.run(command, cwd=self.work, env=self.cluster.environment, capture_output=True, text=True)
            said.append(f"$ {' '.join(command)}\n{done.stdout}{done.stderr}[exit {done.returncode}]\n")
        self._write(file, "\n".join(said))

    def _write(self, name: str, text: str) -> None:
        path = self.answers / name
        path.parent.mkdir(parents=True, exist_ok=True)
        text = text.replace(str(self.work), "/home/ada/project").replace(str(self.cluster.layout.folder), "/slurm")
        text = text.replace(f"{self.cluster.network.subnet}.", "10.0.0.")
        text = re.sub(rf"\b{re.escape(socket.gethostname())}\b", "login", text)
        path.write_text(re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE))


def scenarios(take: Recorder) -> None:
    """Bring jobs to all states, most of which need a hand, and then ask for what is refused."""
    cluster = take.cluster
    jobs = {name: take.submit(*args) for name, (_, args) in BY_THEMSELVES.items()}
    late = take.running()
    soon = datetime.now() + timedelta(seconds=5)
    cluster.run("scontrol", "update", f"JobId={late}", f"EndTime={soon:%Y-%m-%dT%H:%M:%S}")
    for name, (state, _) in BY_THEMSELVES.items():
        take.record(name, jobs[name], state)
    job = take.running("--nodes=2", "--gres=gpu:2", "--ntasks-per-node=2", "--job-name=mnist")
    take.record("running", job, "RUNNING")
    take.record("pending-dependency", take.submit(f"--dependency=afterok:{job}", LONG), "PENDING")
    cluster.run("scancel", str(job))
    take.record("cancelled", job, "CANCELLED")
    job = take.submit("--hold", LONG)
    cluster.run("scancel", str(job))
    take.record("cancelled-pending", job, "CANCELLED")
    take.record("timeout", late, "TIMEOUT")
    job = take.running("--partition=low", "--requeue", "--nodes=4", "--exclusive")
    take.record("pending-resources", take.submit("--nodes=4", "--partition=low", "--exclusive", LONG), "PENDING")
    cluster.run("scontrol", "requeue", str(job))
    take.record("requeued", job, "PENDING")
    cluster.reset()
    job = take.running("--partition=scrap", "--nodes=4", "--exclusive")
    take.submit("--partition=high", "--nodes=4", "--exclusive", LONG)
    take.record("preempted", job, "PREEMPTED")
    cluster.reset()
    job = take.running("--no-requeue", "--nodelist=node03,node04")
    cluster.kill_node("node04")
    take.record("node-fail", job, "NODE_FAIL")
    take.record("pending-node-down", take.submit("--nodelist=node04", LONG), "PENDING")
    cluster.reset()
    refusals(take)


def refusals(take: Recorder) -> None:
    """Take down what Slurm says to what it does not accept."""
    sbatch = ["sbatch", "--wrap=true"]
    take.refused(
        "refused.txt",
        *([*sbatch, flag] for flag in ("--partition=nowhere", "--account=nobody", "--qos=nothing", "--nodes=5")),
        *([*sbatch, flag] for flag in ("--gres=gpu:5", "--gres=tpu:1", "--mem=1T", "--cpus-per-task=9", "--time=soon")),
        *([*sbatch, flag] for flag in ("--nodelist=node09", "--constraint=fast", "--reservation=none")),
        [*sbatch, "--partition=two", "--nodes=3"],
        ["sbatch", "/nowhere/job.sh"],
        *([*command, "999999"] for command in (["scontrol", "show", "job"], ["scontrol", "requeue"], ["scancel"])),
        ["squeue", "--jobs=999999"],
        ["sacct", "--jobs=999999"],
    )
    before_submitting(take)
    take.cluster.daemons.stop_controller()
    take.refused("no-controller.txt", sbatch, ["squeue"], ["scontrol", "show", "job", "1"], ["scancel", "1"])
    take.cluster.daemons.start_controller()


def before_submitting(take: Recorder) -> None:
    """Take down what Slurm says of jobs that are not submitted, and of its partitions."""
    flags = (
        *("", "--partition=nowhere", "--account=nobody", "--qos=nothing", "--nodes=5", "--partition=two --nodes=3"),
        *("--partition=closed", "--time=2:00:00", "--partition=short --time=30", "--gres=gpu:5", "--gpus-per-node=5"),
        *("--gres=tpu:1", "--mem=1T", "--cpus-per-task=9", "--nodelist=node09", "--exclude=node09"),
        *("--constraint=fast", "--reservation=none", "--nodelist=node01,node02 --nodes=1"),
        *("--exclude=node[01-03] --nodes=2", "--array=0-7", "--nodes=1-9", "--qos=brief --time=30"),
    )
    tested = [["sbatch", "--test-only", "--wrap=true", *flag.split()] for flag in flags]
    take.refused("test-only.txt", *tested)
    take.refused("partitions.txt", ["scontrol", "show", "partition"])


def on_a_cluster(shape: Shape, record: Callable[[Recorder], None], answers: Path) -> None:
    """Bring a cluster up and record on it."""
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with SlurmCluster(folder, shape) as cluster:
            work = folder / "work"
            work.mkdir()
            record(Recorder(cluster, work, answers))
    finally:
        shutil.rmtree(folder)


def main() -> None:
    """Record everything."""
    if why := why_no_cgroups():
        sys.exit(f"error: without control groups there is no OUT_OF_MEMORY: {why}")
    version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
    answers = ANSWERS / f"slurm-{'.'.join(version.split('.')[:2])}"
    shutil.rmtree(answers, ignore_errors=True)
    accounting = Shape(accounting=True, cgroups=True, extra=EXTRA)
    on_a_cluster(accounting, scenarios, answers)
    on_a_cluster(Shape(), lambda take: take.refused("no-accounting.txt", ["sacct"], ["sacct", "--json"]), answers)


if __name__ == "__main__":
    main()
