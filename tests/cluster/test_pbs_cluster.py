"""The PBS of the tests is what they take it for: the stand-ins of OpenPBS and Torque, and a real one if it is here."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from cluster_tools import ClusterError, wait_until
from pbs_cluster import PbsCluster, StandInPbs, has_real_pbs

from waiting import PATIENCE

#: Ends by itself at SIGTERM only; says so, for a test to wait for.
#: It hears SIGTERM before the shell that started it, and leaves after that one: PBS reports how that one ended.
TRAPS = "trap 'echo told; while kill -0 $PPID 2>&-; do :; done; exit 0' TERM\necho ready\nsleep 1000 &\nwait\nsleep 1\n"
SCATTER = "#PBS -l select=2:ncpus=2:ngpus=1:mpiprocs=2 -l place=scatter\n"
TWO_OF_TORQUE = "#PBS -l nodes=2:ppn=2:gpus=1\n"
#: What a job's environment has of PBS, on OpenPBS.
OF_JOB = """\
PBS_ENVIRONMENT PBS_JOBCOOKIE PBS_JOBDIR PBS_JOBID PBS_JOBNAME PBS_MOMPORT PBS_NODEFILE PBS_NODENUM PBS_QUEUE
PBS_TASKNUM PBS_O_HOME PBS_O_HOST PBS_O_LANG PBS_O_PATH PBS_O_QUEUE PBS_O_SHELL PBS_O_SYSTEM PBS_O_WORKDIR
"""


def script(folder: Path, text: str, name: str = "job.sh") -> Path:
    path = folder / name
    path.write_text(text)
    return path


def ended(cluster: PbsCluster, folder: Path, text: str, *args: str) -> dict[str, str]:
    """Run a job to its end, with stdout in `out` and stderr in `err`, and return what is known of it."""
    job = cluster.qsub("-o", "out", "-e", "err", *args, script(folder, text), folder=folder)
    return cluster.wait_for_state(job)


def environment(text: str) -> dict[str, str]:
    return dict(line.partition("=")[::2] for line in text.splitlines() if "=" in line)


def started(cluster: PbsCluster, folder: Path, text: str, *args: str) -> str:
    """Start a job that writes at once what it says, and wait until it is ready."""
    written = ["-k", "oed"] if cluster.flavour == "openpbs" else []
    job = cluster.qsub("-o", folder / "out", *written, *args, script(folder, text), folder=folder)
    spool = folder / "out" if written else cluster.folder / "spool" / f"{job}.OU"  # type: ignore[attr-defined]
    cluster.wait_until("the job to be ready", lambda: spool.exists() and "ready" in spool.read_text())
    return job


# What a real one and the stand-in agree on


@pytest.fixture(params=["standin", "real"] if has_real_pbs() else ["standin"])
def agreed(request: pytest.FixtureRequest, standin: StandInPbs, pbs: PbsCluster) -> PbsCluster:
    """Give each in turn."""
    return standin if request.param == "standin" else pbs


def test_the_environment_is_minimal(agreed: PbsCluster, work: Path) -> None:
    caller = {**agreed.environment, "OF_CALLER": "1", "LANG": "C.UTF-8", "SHELL": "/bin/bash"}
    job = agreed.qsub("-o", "out", script(work, "echo PWD=$PWD\nenv\n"), folder=work, env=caller)
    agreed.wait_for_state(job)
    env = environment((work / "out").read_text())
    assert {name for name in env if name.startswith("PBS_")} == {*OF_JOB.split()}
    assert "OF_CALLER" not in env and env["PWD"] == env["HOME"] and env["PBS_O_WORKDIR"] == str(work)
    assert (env["PBS_JOBID"], env["PBS_ENVIRONMENT"]) == (job, "PBS_BATCH")


def test_the_nodefile_repeats_hosts(agreed: PbsCluster, work: Path) -> None:
    known = ended(agreed, work, f"{SCATTER}cat $PBS_NODEFILE\nhostname\n")
    first, second = [part.partition("/")[0] for part in known["exec_host"].split("+")]
    assert first != second
    assert (work / "out").read_text().split() == [first, first, second, second, first]


def test_chunks_share_a_node_unless_scattered(agreed: PbsCluster, work: Path) -> None:
    known = ended(agreed, work, "cat $PBS_NODEFILE\n", "-l", "select=2:ncpus=1")
    assert len({*(work / "out").read_text().split()}) == 1 and known["Resource_List.place"] == "free"


def test_tasks_of_pbsdsh(agreed: PbsCluster, work: Path) -> None:
    text = "pbsdsh -n 2 -- env\npbsdsh -- sh -c 'echo node $PBS_NODENUM $PWD; exit 3'\necho code $?\n"
    known = ended(agreed, work, SCATTER + text)
    out = (work / "out").read_text()
    env = environment(out)
    missing = {"PBS_TASKNUM", "PBS_JOBID", "HOME", "PATH"} - env.keys()
    assert not missing and not {"USER", "SHELL", "LOGNAME"} & env.keys() and env["PATH"] == "/bin:/usr/bin"
    home = env["HOME"]
    assert sorted(re.findall(r"^node (\d) (.*)$", out, re.M)) == [(n, home) for n in "0011"]
    assert len(re.findall(r"pbsdsh: task 0x\d+ exit status 3\n", out)) == 4
    assert out.endswith("code 0\n") and known["Exit_status"] == "0"


def test_pbs_tmrsh_gives_the_code(agreed: PbsCluster, work: Path) -> None:
    text = "host=$(tail -n 1 $PBS_NODEFILE)\npbs_tmrsh $host sh -c 'hostname; exit 5'\necho $? $host\n"
    ended(agreed, work, SCATTER + text)
    host, said = (work / "out").read_text().splitlines()
    assert said == f"5 {host}"


def test_task_commands_work_in_jobs_only(agreed: PbsCluster) -> None:
    assert agreed.tried("pbsdsh", "true")[0] == 1
    code, _, err = agreed.tried("pbs_tmrsh", agreed.nodes[0], "true")
    assert code == 255 and err.endswith("pbs_tmrsh: not executing under PBS\n")


def test_outputs_arrive_at_the_end(agreed: PbsCluster, work: Path) -> None:
    job = agreed.qsub(
        "-N", "named", script(work, f"until [ -e {work}/go ]; do sleep 0.1; done\necho done\n"), folder=work
    )
    agreed.wait_for_state(job, "R")
    assert not [*work.glob("named.*")]
    (work / "go").touch()
    agreed.wait_for_state(job)
    number = job.partition(".")[0]
    assert (work / f"named.o{number}").read_text() == "done\n"
    assert (work / f"named.e{number}").read_text() == ""


def test_the_script_is_kept_as_submitted(agreed: PbsCluster, work: Path) -> None:
    job = agreed.qsub("-h", "-o", "out", script(work, "echo first\n"), folder=work)
    script(work, "echo second\n")
    agreed.run("qrls", job)
    agreed.wait_for_state(job)
    assert (work / "out").read_text() == "first\n"


def test_directives(agreed: PbsCluster, work: Path) -> None:
    lines = ["#!/bin/bash", "#PBS -N one", "#PBS -l select=1:ncpus=2", "", "# a comment", "#PBS -l select=3"]
    text = "\n".join([*lines, "#PBS -l walltime=60 -N two", "true", "#PBS -N late", ""])
    job = agreed.qsub("-h", "-l", "walltime=70", script(work, text), folder=work)
    known = agreed.job(job)
    assert (known["Job_Name"], known["Resource_List.walltime"]) == ("two", "00:01:10")
    assert (known["Resource_List.select"], known["job_state"], known["Hold_Types"]) == ("1:ncpus=2", "H", "u")


@pytest.mark.parametrize(
    ("text", "status"), [("exit 7", "7"), ("kill -9 $$", "137"), ("/nosuch", "127"), ("true", "0")]
)
def test_exit_status(agreed: PbsCluster, work: Path, text: str, status: str) -> None:
    known = ended(agreed, work, f"{text}\n")
    assert known["Exit_status"] == status
    assert known["comment"].endswith(" and finished" if status == "0" else " and failed")


def test_walltime(agreed: PbsCluster, work: Path) -> None:
    known = ended(agreed, work, TRAPS, "-l", "walltime=5")
    assert known["Exit_status"] == "-29" and known["comment"].endswith(" and exceeded resource walltime")
    assert re.search(r"^=>> PBS: job killed: walltime \d+ exceeded limit 5$", (work / "err").read_text(), re.M)
    assert (work / "out").read_text() == "ready\ntold\n"


def test_delete(agreed: PbsCluster, work: Path) -> None:
    job = started(agreed, work, TRAPS)
    assert agreed.run("qdel", job) == ""
    known = agreed.wait_for_state(job)
    assert known["Exit_status"] == "271" and re.search(r" and terminated by \w+@\w+$", known["comment"])
    assert (work / "out").read_text() == "ready\ntold\n"
    assert agreed.tried("qdel", job) == (35, "", f"qdel: Job has finished {job}\n")


def test_json_and_lines_agree(agreed: PbsCluster, work: Path) -> None:
    job = agreed.qsub("-h", "-N", "shown", script(work, "true\n"), folder=work)
    shown = json.loads(agreed.run("qstat", "-f", "-F", "json", job))
    assert [*shown["Jobs"]] == [job] and shown["pbs_server"] == job.partition(".")[2]
    attributes = shown["Jobs"][job]
    known = agreed.job(job)
    assert attributes["Variable_List"]["PBS_O_WORKDIR"] == str(work)
    assert f"PBS_O_WORKDIR={work}," in known["Variable_List"]
    names = ("Job_Name", "job_state", "queue", "Rerunable", "Hold_Types", "project", "ctime", "Output_Path")
    assert {name: attributes[name] for name in names} == {name: known[name] for name in names}
    folded = agreed.run("qstat", "-f", job)
    assert max(len(line.expandtabs(8)) for line in folded.splitlines()) == 79


def test_finished_jobs_are_history(agreed: PbsCluster, work: Path) -> None:
    job = agreed.qsub(script(work, "true\n"), folder=work)
    agreed.wait_for_state(job)
    words = f"qstat: {job} Job has finished, use -x or -H to obtain historical job information\n"
    assert agreed.tried("qstat", job) == (35, "", words)
    assert agreed.tried("qstat", "-f", "99999999") == (
        153,
        "",
        f"qstat: Unknown Job Id 99999999.{job.partition('.')[2]}\n",
    )


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (["-q", "nosuch"], 170, "qsub: Unknown queue\n"),
        (["-l", "select=2:ncpus=two"], 166, "qsub: Illegal attribute or resource value select.ncpus\n"),
        (["-l", "select=1:nosuch=2"], 187, "qsub: Unknown resource: nosuch\n"),
        (["-l", "nosuch=2"], 187, "qsub: Unknown resource Resource_List.nosuch\n"),
        (["-l", "walltime=abc"], 166, "qsub: Illegal attribute or resource value Resource_List.walltime\n"),
        (["-N", "a b"], 2, "qsub: illegal -N value\nusage: qsub "),
        (["nosuch.sh", "more"], 2, "usage: qsub "),
    ],
)
def test_refusals(agreed: PbsCluster, work: Path, args: list[str], code: int, words: str) -> None:
    got, out, err = agreed.tried("qsub", *args, script(work, "true\n"), folder=work)
    assert (got, out) == (code, "") and err.removeprefix("qsub: " if words.startswith("usage") else "").startswith(
        words
    )


def test_too_many_nodes_wait_forever(agreed: PbsCluster, work: Path) -> None:
    job = agreed.qsub("-l", "select=1000:ncpus=1", "-l", "place=scatter", script(work, "true\n"), folder=work)
    agreed.wait_until("the scheduler", lambda: "comment" in agreed.job(job))
    known = agreed.job(job)
    assert known["comment"].startswith("Can Never Run: ") and known["job_state"] == "Q"


def test_arrays(agreed: PbsCluster, work: Path) -> None:
    job = agreed.qsub("-J", "0-2%2", "-N", "many", script(work, "echo $PBS_ARRAY_INDEX $PBS_JOBID\n"), folder=work)
    number, server = job.split("[].")
    agreed.wait_for_state(job)
    said = {path.name: path.read_text() for path in work.glob("many.o*")}
    assert said == {f"many.o{number}.{index}": f"{index} {number}[{index}].{server}\n" for index in range(3)}


def test_dependencies(agreed: PbsCluster, work: Path) -> None:
    bad = agreed.qsub("-h", script(work, "exit 1\n", "bad.sh"), folder=work)
    wanted = {
        kind: agreed.qsub("-W", f"depend={kind}:{bad}", "--", "/bin/true", folder=work)
        for kind in ("afterok", "afternotok", "afterany")
    }
    assert {agreed.job(job)["job_state"] for job in wanted.values()} == {"H"}
    agreed.run("qrls", bad)
    statuses = {kind: agreed.wait_for_state(job).get("Exit_status") for kind, job in wanted.items()}
    assert statuses == {"afterok": None, "afternotok": "0", "afterany": "0"}


# What the stand-in is needed for


def test_who_gets_signals(standin: StandInPbs, work: Path) -> None:
    """As seen on a real one: the sessions of the first node do, another node by pbsdsh alone, other sessions never."""
    listens = f"trap 'echo '$1' >>{work}/told' TERM; touch {work}/$1; while :; do sleep 0.1; done"
    script(work, f"{listens}\n", "listen")
    run = f"sh {work}/listen"
    # Not bash: it handles SIGTERM itself, and was once seen to exit with 143 in the place of dying of it.
    text = (
        "#PBS -S /bin/sh\n#PBS -l select=2:ncpus=1 -l place=scatter\necho ready\n"
        f"{run} child & setsid {run} stray & pbsdsh -n 1 -- {run} task & {run} last\n"
    )
    standin.set(kill_delay=PATIENCE)
    job = started(standin, work, text)
    names = ["child", "stray", "task", "last"]
    standin.wait_until("all to listen", lambda: all((work / name).exists() for name in names))
    standin.run("qdel", job)
    (work / "told").touch()
    standin.wait_until("three to hear it", lambda: len((work / "told").read_text().split()) > 2)
    standin.run("qdel", "-W", "force", job)
    assert standin.wait_for_state(job)["Exit_status"] == "271"
    assert {*(work / "told").read_text().split()} == {"child", "task", "last"}
    left = [words for node in ("pbs01", "pbs02") for words in standin.processes(node).values() if "listen" in words]
    assert left == [f"sh {work}/listen stray"]


def test_rerun(standin: StandInPbs, work: Path) -> None:
    job = started(standin, work, f"#PBS -j oe\n{TRAPS}")
    assert standin.tried("qrerun", job) == (159, "", f"qrerun: Unauthorized Request  {job}\n")
    standin.set(operator=True)
    standin.run("qrerun", job)
    standin.wait_until("the second run", lambda: standin.job(job).get("run_count") == "2")
    known = standin.job(job)
    assert (known["job_state"], known["Exit_status"]) == ("R", "-11")
    never = started(standin, work, TRAPS, "-r", "n")
    assert standin.tried("qrerun", never) == (190, "", f"qrerun: job is not rerunnable {never}\n")


def test_the_first_node_dies(standin: StandInPbs, work: Path) -> None:
    job = started(standin, work, TRAPS, "-l", "select=1:ncpus=1:host=pbs02")
    other = started(standin, work, TRAPS, "-r", "n", "-l", "select=1:ncpus=1:host=pbs02")
    standin.set(node_down_after=0.1)
    standin.kill_node("pbs02")
    standin.wait_for_state(job, "Q")
    assert standin.wait_for_state(other)["Exit_status"] == "-20"
    with pytest.raises(ClusterError, match="pbs02 is dead"):
        standin.run_on("pbs02", ["true"])
    standin.start_node("pbs02")
    assert standin.wait_for_state(job, "R")["run_count"] == "2"


def test_another_node_dies(standin: StandInPbs, work: Path) -> None:
    text = f"{SCATTER}pbsdsh -n 2 -- sleep 1000 & {TRAPS}"
    job = started(standin, work, text, "-j", "oe")
    standin.set(node_down_after=0.1)
    standin.kill_node("pbs02")
    standin.wait_until("the server to see it", lambda: "down" in standin.run("pbsnodes", "-a"))
    assert standin.job(job)["job_state"] == "R"
    shown = json.loads(standin.run("pbsnodes", "-a", "-F", "json"))["nodes"]
    states = [node["state"] for node in shown.values()]
    assert states == ["free", "down", "free", "free"]
    standin.start_node("pbs02")
    assert standin.wait_for_state(job)["Exit_status"] == "271"
    assert "=>> PBS: job killed: node 1 (pbs02) requested job die" in (work / "out").read_text()


def test_a_server_that_is_down(standin: StandInPbs, work: Path) -> None:
    job = standin.qsub("-h", script(work, "true\n"), folder=work)
    standin.pause_server()
    words = "Connection refused\n{}: cannot connect to server pbsctl (errno=15010)\n"
    assert standin.tried("qstat", job) == (255, "", words.format("qstat"))
    assert standin.tried("qsub", "--", "true") == (162, "", words.format("qsub"))
    standin.resume_server()
    standin.fail_next("qstat", times=2, words="qstat: End of File", code=3)
    assert [standin.tried("qstat", job)[::2] for _ in range(2)] == [(3, "qstat: End of File\n")] * 2
    assert standin.job(job)["job_state"] == "H"


def test_without_history(standin: StandInPbs, work: Path) -> None:
    standin.set(history=False)
    job = standin.qsub("--", "/bin/true", folder=work)
    standin.wait_until("its end", lambda: standin.tried("qstat", job)[0] == 153)
    words = f"PBS is not configured to maintain job history {job}\n"
    assert standin.tried("qstat", "-x", job) == (0, "", words)


def test_outputs_without_a_folder_are_lost(standin: StandInPbs, work: Path) -> None:
    standin.set(copy_retry=0.1)
    known = ended(standin, work, "echo lost\n", "-o", f"{work}/nosuch/", "-j", "oe")
    assert known["Exit_status"] == "0" and sorted(path.name for path in work.iterdir()) == ["job.sh"]


def test_a_log_that_cannot_be_written_holds_the_job(standin: StandInPbs, work: Path) -> None:
    job = standin.qsub("-k", "oed", "-o", f"{work}/nosuch/out", script(work, "true\n"), folder=work)
    known = standin.wait_for_state(job, "H")
    assert (known["Exit_status"], known["Hold_Types"]) == ("-3", "s")
    assert known["comment"] == "job held, too many failed attempts to run"


def test_names_that_look_like_numbers_are_numbers_in_json(standin: StandInPbs, work: Path) -> None:
    job = standin.qsub("-h", "-N", "123", "-v", "NOTHING=nan", script(work, "true\n"), folder=work)
    shown = standin.run("qstat", "-f", "-F", "json", job)
    assert '"Job_Name":123,' in shown and '"NOTHING":nan,' in shown


def test_interactive(standin: StandInPbs, work: Path) -> None:
    """`script` gives qsub a terminal."""
    shell = subprocess.Popen(
        ["script", "-qec", "qsub -I -l ncpus=1", "/dev/null"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=work,
        env=standin.environment,
        text=True,
    )
    out, _ = shell.communicate(f"hostname; tty; echo $PBS_ENVIRONMENT >{work}/kind; exit 4\n", timeout=PATIENCE)
    assert (work / "kind").read_text() == "PBS_INTERACTIVE\n"
    assert re.search(r"job \d+\.pbsctl ready\s+.*\bpbs01\n/dev/pts/\d+\n", out, re.S), out
    assert standin.job(re.findall(r"job (\d+)", out)[0])["Exit_status"] == "4"
    assert "terminal" in standin.tried("qsub", "-I", stdin=subprocess.DEVNULL)[2]


def test_nothing_outlives_the_process_that_started_it(standin: StandInPbs, tmp_path: Path) -> None:
    """It asks for ``standin`` to run where that can."""
    text = (
        "import os, sys\nsys.path[:0] = sys.argv[2:]\nfrom pbs_cluster import Path, StandInPbs\n"
        "cluster = StandInPbs(Path(sys.argv[1])); cluster.start(); cluster.qsub('--', '/bin/sleep', '1000')\n"
        "print('up', flush=True); os.kill(os.getpid(), 9)\n"
    )
    folder = tmp_path / "pbs"
    folder.mkdir()
    here = Path(__file__).parent
    process = subprocess.run([sys.executable, "-c", text, folder, here, here.parent], capture_output=True, text=True)
    assert (process.stdout, process.returncode) == ("up\n", -9), process.stderr

    def left() -> list[str]:
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            try:
                words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            except OSError:
                continue
            found += [words] if str(folder) in words and int(entry.name) != os.getpid() else []
        return found

    wait_until("the end of all its processes", lambda: not left())


# Torque


def test_torque_is_another_dialect(torque: StandInPbs, work: Path) -> None:
    assert torque.tried("qstat", "--version")[1:] == (
        "",
        "Version: 6.1.2\nCommit: 661e092552de43a785c15d39a3634a541d86898e\n",
    )
    assert torque.tried("qstat", "-f", "-F", "json")[0] == 2
    assert torque.tried("qstat", "9999") == (153, "", "qstat: Unknown Job Id Error 9999.pbsctl\n")
    refused, _, err = torque.tried("qsub", "-l", "nodes=9", script(work, "true\n"), folder=work)
    assert refused == 188 and "cannot locate feasible nodes" in err


def test_job_of_torque(torque: StandInPbs, work: Path) -> None:
    task = "echo $PBS_VNODENUM $PBS_NODENUM; ls $PBS_NODEFILE /var/spool/pbs/aux"
    text = f"env\nsort $PBS_GPUFILE\ncat $PBS_NODEFILE\npbsdsh -h pbs02 sh -c '{task}'\npbsdsh -u hostname\n"
    known = ended(torque, work, TWO_OF_TORQUE + text)
    assert (known["job_state"], known["exit_status"], known["exec_host"]) == ("C", "0", "pbs01/0-1+pbs02/0-1")
    out = (work / "out").read_text()
    env = environment(out)
    assert (env["PBS_NUM_NODES"], env["PBS_NUM_PPN"], env["PBS_VNODENUM"]) == ("2", "2", "0")
    lines = [line for line in out.splitlines() if "=" not in line]
    assert lines[:6] == ["pbs01-gpu0", "pbs02-gpu0", "pbs01", "pbs01", "pbs02", "pbs02"]
    assert lines[6] == "2 1" and sorted(lines[7:]) == ["pbs01", "pbs02"]


def test_torque_forgets(torque: StandInPbs, work: Path) -> None:
    torque.set(keep_completed=0.5)
    job = torque.qsub(script(work, "exit 3\n"), folder=work)
    torque.wait_until("it to be forgotten", lambda: not torque.job(job))


def test_torque_walltime_and_array(torque: StandInPbs, work: Path) -> None:
    known = ended(torque, work, TRAPS, "-l", "walltime=1")
    assert known["exit_status"] == "-11"
    array = torque.qsub("-t", "1-2", "-N", "many", script(work, "echo $PBS_ARRAYID\n"), folder=work)
    torque.wait_for_state(array)
    number = array.partition("[")[0]
    assert {path.name for path in work.glob("many*.o*")} == {f"many-{index}.o{number}-{index}" for index in (1, 2)}
