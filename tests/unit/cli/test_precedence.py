"""Flag, environment variable, job file, cluster file, default: the first that gives a value counts."""

from __future__ import annotations

import json

JOB = "script: train.py\n"


def source_of(allranks, *flags: str, **env: str) -> tuple[object, str]:
    result = allranks("plan", "--sources", "--json", *flags, **env)
    assert (result.rc, result.stderr) == (0, "")
    found = json.loads(result.stdout)["launch.nproc_per_node"]
    return found["value"], found["source"]


def test_order_of_precedence(allranks):
    allranks.script("")
    allranks.job(JOB)
    assert source_of(allranks) == ("auto", "default")
    config = allranks.folder.parent / "home" / ".config" / "allranks"
    config.mkdir(parents=True)
    (config / "clusters.yaml").write_text("local:\n  kind: local\n  launch: {nproc_per_node: 2}\n")
    assert source_of(allranks) == (2, f"cluster file {config}/clusters.yaml:3")
    allranks.job("local:\n  kind: local\n\n  launch: {nproc_per_node: 3}\n", "clusters.yaml")
    assert source_of(allranks) == (3, "cluster file clusters.yaml:4")
    allranks.job(f"{JOB}launch:\n  nproc_per_node: 4\n")
    assert source_of(allranks) == (4, "job file job.yaml:3")
    assert source_of(allranks, NPROC_PER_NODE="5") == (5, "environment NPROC_PER_NODE")
    both = {"NPROC_PER_NODE": "5", "ALLRANKS_NPROC_PER_NODE": "6"}
    assert source_of(allranks, **both) == (6, "environment ALLRANKS_NPROC_PER_NODE")
    assert source_of(allranks, "--nproc-per-node", "7", **both) == (7, "flag --nproc-per-node")


def test_what_counts_is_what_runs(allranks):
    allranks.script("import os, sys\nprint(os.environ['WORLD_SIZE'], os.environ['V'], sys.argv[1:])\n")
    allranks.job(
        "script: train.py\nargs: [file]\nlaunch: {nproc_per_node: 4}\nenvironment:\n  variables: {V: file, W: file}\n"
    )
    result = allranks("run", "--env", "V=flag", "--", "a", "--b", NPROC_PER_NODE="2")
    assert (result.rc, result.by_rank) == (0, {rank: ["2 flag ['a', '--b']"] for rank in (0, 1)})
    record = (allranks.run() / "job.yaml").read_text()
    assert "nproc_per_node: 2\n" in record
    assert "    V: flag\n    W: file\n" in record


def test_sources_are_aligned_and_complete(allranks):
    allranks.script("")
    allranks.job(f"{JOB}environment:\n  variables: {{MY_KEY: abcdefgh12345, N: 1}}\n")
    lines = allranks("plan", "--sources").stdout.splitlines()
    rows = {line.split()[0]: line.split()[1:] for line in lines}
    assert lines[0].split() == ["KEY", "VALUE", "FROM"]
    assert rows["script"] == ["train.py", "job", "file", "job.yaml:1"]
    assert rows["environment.variables.MY_KEY"] == ["<secret>", "job", "file", "job.yaml:3"]
    assert rows["environment.variables.N"] == ["1", "job", "file", "job.yaml:3"]
    assert rows["launch.backend"] == ["-", "default"]


def test_a_rank_of_a_run_does_not_hand_its_master_on(allranks):
    """A script may itself start allranks: what it finds about its own run is no wish for the next."""
    allranks.script("print('inner')\n", "inner.py")
    allranks.script(
        "import os, subprocess, sys\n"
        "env = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}\n"
        "command = [sys.executable, '-m', 'allranks', 'run', 'inner.py']\n"
        "done = subprocess.run(command, capture_output=True, text=True, env=env)\n"
        "print(done.stdout, done.returncode)\n"
    )
    result = allranks("run", "train.py")
    assert (result.rc, result.stdout) == (0, "[0] [0] inner\n[0]  0\n")


def test_plan_shows_the_arguments_and_who_gave_them(allranks) -> None:
    allranks.script("")
    allranks.job("script: train.py\nargs: [--epochs, '8']\n")
    rows = [
        allranks("plan", "job.yaml", *flags).stdout.splitlines()[4].split() for flags in ([], ["--", "--lr", "a b"])
    ]
    assert rows == [
        ["arguments", "--epochs", "8", "job", "file", "job.yaml:2"],
        ["arguments", "--lr", "'a", "b'", "flag", "command", "line"],
    ]
