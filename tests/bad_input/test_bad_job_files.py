"""Job files that are wrong, through the command; what each check says is in tests/unit/job."""

from __future__ import annotations

import pytest

FILES = {
    "empty": (
        "",
        "job.yaml: the file says nothing\n"
        "  why: it is empty or holds only comments\n"
        "  fix: allranks init writes one to start from\n",
    ),
    "no YAML": (
        "script: [train.py\n",
        "job.yaml:2: this is not YAML, at column 1\n"
        "  why: a bracket is not closed\n"
        "  fix: compare with the job file that allranks init writes\n",
    ),
    "no mapping": (
        "- train.py\n",
        "job.yaml:1: the file must hold keys and values, not a list\n"
        "  fix: write lines such as 'name: value'; allranks init writes one to start from\n",
    ),
    "wrong type": (
        "script: train.py\nlaunch:\n  max_restarts: often\n",
        "job.yaml:3: launch.max_restarts cannot be 'often'\n  why: it must be a whole number\n",
    ),
    "unknown key": (
        "script: train.py\nlaunch:\n  nproc_per_nod: 2\n",
        "job.yaml:3: unknown key 'nproc_per_nod' in launch\n  fix: did you mean 'nproc_per_node'?\n",
    ),
    "duplicate key": (
        "script: train.py\nscript: other.py\n",
        "job.yaml:2: the key 'script' is given twice\n  why: it is also in line 1\n  fix: remove one of the two\n",
    ),
    "tab": (
        "script: train.py\nlaunch:\n\tmax_restarts: 1\n",
        "job.yaml:3: a tab stands here\n  why: YAML takes no tabs\n  fix: write spaces instead of the tab\n",
    ),
}


@pytest.mark.parametrize("kind", FILES)
def test_job_file(allranks, kind: str):
    text, error = FILES[kind]
    allranks.script("")
    allranks.job(text)
    result = allranks("run", "job.yaml")
    assert (result.rc, result.stdout, result.stderr) == (2, "", f"error: {error}")
    assert allranks.runs() == []


def test_missing_job_file(allranks):
    allranks.job("script: train.py\n")
    result = allranks("run", "jbo.yaml")
    assert result.rc == 2
    assert result.stderr == "error: jbo.yaml: there is no such job file\n  fix: did you mean 'job.yaml'?\n"


def test_unknown_cluster(allranks):
    allranks.script("")
    result = allranks("run", "train.py", "--on", "big")
    fix = "describe it in clusters.yaml: {big: {kind: slurm}}, or pbs, grid_engine, ssh"
    expected = f"error: --on: there is no cluster 'big'\n  why: known clusters: local\n  fix: {fix}\n"
    assert (result.rc, result.stderr) == (2, expected)


def test_unknown_kind_of_cluster(allranks):
    allranks.script("")
    allranks.job("big:\n  kind: locl\n", "clusters.yaml")
    result = allranks("run", "train.py", "--on", "big")
    assert (result.rc, allranks.runs()) == (2, [])
    assert "there is no kind of cluster 'locl'" in result.stderr
    assert "did you mean 'local'?" in result.stderr
