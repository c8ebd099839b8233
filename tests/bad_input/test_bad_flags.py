"""Flags, verbs and numbers that make no sense, each with what to type instead."""

from __future__ import annotations

import pytest

NPROC = {
    "0": ("it must be at least 1", "write gpu for a rank per GPU, or auto"),
    "-1": ("it must be at least 1", "write gpu for a rank per GPU, or auto"),
    "eight": ("it must be a number, gpu, cpu or auto", None),
    "1.5": ("it must be a number, gpu, cpu or auto", None),
    "": ("it must be a number, gpu, cpu or auto", None),
}


def refused(allranks, *args, error: str, rc: int = 2, **env) -> None:
    result = allranks(*args, **env)
    assert (result.rc, result.stdout) == (rc, "")
    assert result.stderr == error
    assert allranks.runs() == []


@pytest.mark.parametrize("value", NPROC)
def test_number_of_ranks(allranks, value: str):
    allranks.script("")
    why, fix = NPROC[value]
    error = f"error: --nproc-per-node: cannot be '{value}'\n  why: {why}\n" + (f"  fix: {fix}\n" if fix else "")
    refused(allranks, "run", "train.py", f"--nproc-per-node={value}", error=error)


def test_number_of_ranks_from_the_environment(allranks):
    allranks.script("")
    error = "error: NPROC_PER_NODE: cannot be 'many'\n  why: it must be a number, gpu, cpu or auto\n"
    refused(allranks, "run", "train.py", error=error, NPROC_PER_NODE="many")


def test_more_ranks_than_gpus_with_nccl(allranks):
    allranks.script("")
    error = (
        "error: 3 ranks on 2 GPUs with backend nccl\n"
        "  why: nccl takes one GPU for each rank; GPUs: CUDA_VISIBLE_DEVICES=0,1\n"
        "  fix: --nproc-per-node 2, or --backend gloo to run on the CPU\n"
    )
    refused(allranks, "run", "train.py", "--nproc-per-node", "3", rc=3, error=error, CUDA_VISIBLE_DEVICES="0,1")


def test_nccl_without_gpus(allranks):
    allranks.script("")
    error = (
        "error: 1 rank on 0 GPUs with backend nccl\n"
        "  why: nccl takes one GPU for each rank; GPUs: CUDA_VISIBLE_DEVICES=\n"
        "  fix: --backend gloo to run on the CPU\n"
    )
    refused(allranks, "run", "train.py", "--backend", "nccl", rc=3, error=error, CUDA_VISIBLE_DEVICES="")


def test_more_gpus_than_there_are(allranks):
    allranks.script("")
    error = "error: 2 GPUs requested, 1 can be used\n  why: CUDA_VISIBLE_DEVICES=0,-1,1\n  fix: --gpus-per-node 1\n"
    refused(allranks, "run", "train.py", "--gpus-per-node", "2", rc=3, error=error, CUDA_VISIBLE_DEVICES="0,-1,1")


def test_a_rank_per_gpu_without_gpus(allranks):
    allranks.script("")
    error = (
        "error: one rank per GPU was requested\n"
        "  why: CUDA_VISIBLE_DEVICES=\n"
        "  fix: --nproc-per-node 2 --backend gloo\n"
    )
    refused(allranks, "run", "train.py", "--nproc-per-node", "gpu", rc=3, error=error, CUDA_VISIBLE_DEVICES="")


@pytest.mark.parametrize("verb", ["run", "plan"])
@pytest.mark.parametrize("flag", ["--epochs", "--batch_size", "--lr", "-e"])
def test_flags_of_the_script_go_after_two_hyphens(allranks, verb: str, flag: str):
    allranks.script("")
    error = (
        f"error: no such option {flag}\n"
        f"  fix: if {flag} is the script's, put it after --: allranks {verb} ... -- {flag}\n"
    )
    refused(allranks, verb, "train.py", flag, "3", error=error)


def test_flag_that_is_nearly_one_of_ours(allranks):
    error = (
        "error: no such option --nproc_per_nod\n"
        "  fix: did you mean --nproc-per-node? If --nproc_per_nod is the script's, put it after --: "
        "allranks run ... -- --nproc_per_nod\n"
    )
    refused(allranks, "run", "train.py", "--nproc_per_nod=2", error=error)


def test_flag_of_a_verb_that_takes_no_job(allranks):
    refused(allranks, "ps", "--jsn", error="error: no such option --jsn\n  fix: did you mean --json?\n")
    refused(allranks, "ps", "--zzz", error="error: no such option --zzz\n  fix: allranks ps --help\n")


def test_arguments_of_the_script_go_after_two_hyphens(allranks):
    error = (
        "error: got unexpected extra argument (data)\n"
        "  fix: the script's own arguments follow --: allranks run train.py -- ...\n"
    )
    refused(allranks, "run", "train.py", "data", error=error)


VERBS = {
    "stat": "did you mean allranks status?",
    "statsu": "did you mean allranks status?",
    "cancle": "did you mean allranks cancel?",
    "log": "did you mean allranks logs?",
    "my job.yaml": "allranks run 'my job.yaml'",
    "train.py": "allranks run train.py",
    "start": "allranks run starts a job, allranks resume starts a run again",
    "launch": "allranks run starts a job",
    "submit": "allranks run submits a job and follows it, with --detach it returns at once",
    "attach": "allranks logs -f follows a run",
    "doctor": "allranks check",
    "rm": "allranks prune removes old runs: allranks prune --older-than 30d",
    "xyzzy": "the commands are init, plan, run, resume, cancel, ps, status, logs, stacks, why, top, check, test, "
    "shell, node, checkpoint, prune, schema, completion; allranks --help says what they do",
}


@pytest.mark.parametrize("verb", VERBS)
def test_unknown_verb(allranks, verb: str):
    shown = f"'{verb}'" if " " in verb else verb
    refused(allranks, verb, error=f"error: no such command {shown}\n  fix: {VERBS[verb]}\n")


@pytest.mark.parametrize("verb", ["rnu", "resum", "nod", "tets", "shel"])
def test_no_verb_that_starts_something_is_guessed(allranks, verb: str):
    result = allranks(verb)
    assert (result.rc, result.stdout) == (2, "")
    assert result.stderr.startswith(f"error: no such command {verb}\n  fix: the commands are init, plan,")


SAME = {
    ("ls", "--json"): ("ps", "--json"),
    ("list", "--json"): ("ps", "--json"),
    ("stop",): ("cancel",),
    ("kill", "nope"): ("cancel", "nope"),
    ("help",): ("--help",),
    ("help", "run"): ("run", "--help"),
    ("help", "ls"): ("ps", "--help"),
    ("version",): ("--version",),
    ("-V",): ("--version",),
}


@pytest.mark.parametrize("typed", SAME, ids=" ".join)
def test_words_of_other_tools_that_mean_the_same(allranks, typed: tuple[str, ...]):
    assert allranks(*typed) == allranks(*SAME[typed])


_SHOWN = "not needed: leave it out; the output of all ranks is shown and kept, allranks logs --rank N shows one rank's"
_RANKS = "--nproc-per-node N is the number of ranks on each node. If {0} is the script's, put it after --: {1}"
NAMES_OF_OTHERS = {
    "--standalone": "not needed: leave it out",
    "--tee=3": _SHOWN,
    "--redirects=3": _SHOWN,
    "--rdzv_backend=c10d": "not needed: leave it out",
    "--rdzv-id=7": "not needed: leave it out",
    "--rdzv-conf=timeout=9": "not needed: leave it out",
    "--rdzv-endpoint=gpu1:29500": "not needed: leave it out, or name the place to meet with --master-addr and "
    "--master-port",
    "--num_processes=2": _RANKS,
    "--ntasks-per-node=2": _RANKS,
    "-np": _RANKS,
    "-n": _RANKS,
}


@pytest.mark.parametrize("verb", ["run", "plan"])
@pytest.mark.parametrize("flag", NAMES_OF_OTHERS)
def test_flags_of_other_launchers(allranks, verb: str, flag: str):
    allranks.script("")
    name = flag.partition("=")[0]
    fix = NAMES_OF_OTHERS[flag].format(name, f"allranks {verb} ... -- {name}")
    refused(allranks, verb, flag, "train.py", error=f"error: no such option {name}\n  fix: {fix}\n")


def test_a_flag_of_another_launcher_where_the_script_has_no_arguments(allranks):
    error = "error: no such option -np\n  fix: --nproc-per-node N is the number of ranks on each node\n"
    refused(allranks, "test", "-np", "2", error=error)


def test_no_verb_shows_the_help(allranks):
    result = allranks()
    assert (result.rc, result.stdout) == (2, "")
    assert result.stderr == allranks("--help").stdout


def test_underscores_in_flags(allranks):
    allranks.script("")
    result = allranks("plan", "train.py", "--nproc_per_node", "2", "--max_restarts=3", "--sources")
    lines = [line.split() for line in result.stdout.splitlines()]
    assert ["launch.nproc_per_node", "2", "flag", "--nproc-per-node"] in lines
    assert ["launch.max_restarts", "3", "flag", "--max-restarts"] in lines


def test_nothing_to_run(allranks):
    error = (
        "error: the job has no script, module or binary\n"
        "  why: there is no job.yaml in this directory, and no script was given\n"
        "  fix: allranks init writes a job.yaml, or allranks run train.py (or -m MODULE, --binary FILE)\n"
    )
    refused(allranks, "run", error=error)


def test_script_and_module(allranks):
    allranks.script("")
    result = allranks("run", "train.py", "-m", "train")
    assert result.rc == 2
    assert "script and module are given, but a job has only one of them" in result.stderr
    assert allranks.runs() == []


def test_several_nodes_on_one_machine(allranks):
    allranks.script("")
    error = (
        "error: 2 nodes were requested, and cluster local is this one machine\n"
        "  fix: --nodes 1, or --on a cluster that has them\n"
    )
    refused(allranks, "run", "train.py", "--nodes", "2", error=error)


def test_results_that_cannot_be_written(allranks):
    """A full disk behind stdout is no bug in allranks."""
    import subprocess
    import sys

    allranks.script("")
    with open("/dev/full", "wb") as full:
        result = subprocess.run(
            [sys.executable, "-m", "allranks", "plan", "train.py"],
            cwd=allranks.folder,
            env=allranks.env,
            stdout=full,
            stderr=subprocess.PIPE,
            check=False,
        )
    error = b"error: cannot write to stdout\n  why: No space left on device\n"
    assert (result.returncode, result.stderr) == (1, error)


NODES = {
    ("--nnodes", "2", "--node-rank", "0"): (
        "--master-addr is not given\n  why: the nodes rendezvous at the first one, and need its address\n"
        "  fix: --master-addr with an address of the first node, on each node alike\n"
    ),
    ("--nnodes", "2", "--node-rank", "2", "--master-addr", "gpu1"): (
        "--node-rank 2: there is no such node\n  why: of 2 the ranks are 0 to 1\n"
        "  fix: --nnodes says how many there are, on each node alike\n"
    ),
    ("--node-rank", "-1"): (
        "--node-rank -1: there is no such node\n  why: the job has one node, of rank 0\n"
        "  fix: --nnodes says how many there are, on each node alike\n"
    ),
    ("--nnodes", "2:4", "--node-rank", "0", "--master-addr", "gpu1"): (
        "--nnodes 2:4: nodes started by hand need a fixed number\n  fix: --nnodes 4 on each\n"
    ),
    ("--nnodes", "2"): (
        "--node-rank is not given\n  why: each node needs its number\n"
        "  fix: --node-rank 0 on the first node, 1 on the next\n"
    ),
}


@pytest.mark.parametrize("flags", NODES, ids=" ".join)
def test_a_place_among_nodes_that_makes_no_sense(allranks, flags: tuple[str, ...]):
    allranks.script("")
    refused(allranks, "node", "train.py", *flags, error=f"error: {NODES[flags]}")


@pytest.mark.parametrize(
    ("typed", "why"),
    [
        ("nan", "invalid number of seconds: nan"),
        ("inf", "inf is not in the range {}<=x<=604800"),
        ("1e300", "1e+300 is not in the range {}<=x<=604800"),
    ],
)
@pytest.mark.parametrize(("verb", "option", "least"), [("test", "--timeout", 1), ("check", "--wait", 0)])
def test_seconds_that_nobody_can_wait(allranks, verb: str, option: str, least: int, typed: str, why: str):
    error = f"error: invalid value for '{option}': {why.format(least)}\n  fix: allranks {verb} --help\n"
    refused(allranks, verb, option, typed, error=error)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--nproc-per-node", "100000"),
            ("error: cpus on ", "by 100000 ranks\n  why: more than 16 ranks on each CPU", "; --no-check starts them"),
        ),
        (("--interface", "nope0"), (": there is no interface nope0\n", "  fix: launch.interface (--interface): ")),
    ],
)
def test_what_this_machine_cannot_do_is_not_started(allranks, checked, flags: tuple[str, ...], said: tuple[str, ...]):
    allranks.script("")
    result = allranks("run", "train.py", *flags)
    assert (result.rc, result.stdout) == (3, "")
    assert [text for text in said if text not in result.stderr] == []
    assert not [*allranks.run().glob("attempts/*/*/agent.*")]


def test_an_interface_that_this_machine_has(allranks, checked):
    allranks.script("")
    assert allranks("run", "train.py", "--interface", "lo").rc == 0


def test_a_variable_of_ours_that_nothing_reads(allranks):
    allranks.script("")
    note = "allranks: note: nothing reads ALLRANKS_NPROC_PER_NOD; did you mean ALLRANKS_NPROC_PER_NODE?\n"
    for verb in ("plan", "run"):
        result = allranks(verb, "train.py", ALLRANKS_NPROC_PER_NOD="2", ALLRANKS_SITE="x", ALLRANKS_RUN_ID="y")
        assert (result.rc, result.stderr.count("nothing reads")) == (0, 1)
        assert note in result.stderr
