"""Nothing of a cluster is left, however its owner ends; and what cannot be brought up says why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from cgroups import CONTROLLERS, ROOT, why_no_cgroups
from cluster_tools import ClusterError, missing_commands, wait_until
from left_behind import command_lines_with
from nodes import Network, why_no_nodes
from slurm_cluster import SlurmCluster
from slurm_conf import Shape

from waiting import PATIENCE

HERE = Path(__file__).parent


def processes_in(folder: Path) -> list[str]:
    """Return the command lines that name a directory."""
    return command_lines_with(os.fsencode(folder))


def links() -> set[str]:
    return {path.name for path in Path("/sys/class/net").glob("allranks*")}


@pytest.fixture
def short(slurm: SlurmCluster, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give a directory with a short name, where a cluster is possible at all."""
    return tmp_path_factory.mktemp("c")


@pytest.fixture
def by_hand(short: Path) -> Iterator[subprocess.Popen[str]]:
    """Give what `make cluster` starts, as far as it has said how to use it."""
    command = [sys.executable, str(HERE), "--nodes=1"]
    env = {**os.environ, "TMPDIR": str(short)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=env, text=True) as process:
        assert process.stdout
        yield process
        process.kill()


def until_said(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout
    for line in process.stdout:
        if text in line:
            return line.strip()
    raise AssertionError(f"it did not say {text}: {process.stderr and process.stderr.read()}")


def test_by_hand_until_interrupted(by_hand: subprocess.Popen[str], short: Path) -> None:
    conf = until_said(by_hand, "SLURM_CONF=").partition("=")[2]
    env = {**os.environ, "SLURM_CONF": conf}
    assert subprocess.check_output(["srun", "hostname"], env=env, text=True) == "node01\n"
    by_hand.send_signal(signal.SIGINT)
    assert by_hand.wait(PATIENCE) == 0
    assert [*short.iterdir()] == [] == processes_in(short)


def test_killed_owner(by_hand: subprocess.Popen[str], short: Path) -> None:
    until_said(by_hand, "Ctrl-C")
    hosts = next(short.glob("*/hosts")).read_text()
    mine = {f"allranks{hosts.partition('198.18.')[2].partition('.')[0]}"}
    assert mine <= links()
    by_hand.kill()
    wait_until("the processes to be gone", lambda: not processes_in(short) or None)
    wait_until("the link to be gone", lambda: not mine & links() or None)


def test_control_groups(short: Path) -> None:
    if why := why_no_cgroups():
        pytest.skip(why)
    with SlurmCluster(short, Shape(nodes=1, cgroups=True)) as cluster:
        escapes = "python -c 'import os; os.fork() and os._exit(0); os.setsid(); os.fork() and os._exit(0)\nwhile 1: 0'"
        escaped = cluster.sbatch("--wrap", f"{escapes}; sleep 600", folder=short)
        job = cluster.sbatch("--mem=50", "--wrap=python -c 'bytearray(200 << 20)'", folder=short)
        assert cluster.wait_for_state(job)["JobState"] == "OUT_OF_MEMORY"
        cluster.wait_for_state(escaped, "RUNNING")
        cluster.run("scancel", str(escaped))
        cluster.wait_until("all of it to be dead", lambda: "while 1" not in cluster.run_on("node01", "ps ax") or None)
    assert not [group for name in CONTROLLERS for group in (ROOT / name).glob(f"allranks-{os.getpid()}-*")]


def test_a_daemon_that_does_not_start(short: Path) -> None:
    with pytest.raises(ClusterError, match=r"the daemon slurmctld ended with 1: see .*\n.*unrecognized key: Nonsense"):
        SlurmCluster(short, Shape(extra="Nonsense=1")).start()
    assert processes_in(short) == []


def test_a_folder_that_slurm_cannot_use(short: Path) -> None:
    for folder in (short / ("long" * 20), short / "a b"):
        with pytest.raises(ClusterError, match="at most 70 plain characters"):
            SlurmCluster(folder).start()


def test_what_is_missing_is_named() -> None:
    said = missing_commands({"sh": "dash", "slurmctld-of-mars": "mars", "munged-of-mars": "mars"})
    assert said == "no slurmctld-of-mars, munged-of-mars here: apt-get install --no-install-recommends mars"


def test_many_nodes_and_networks(tmp_path: Path) -> None:
    if why := why_no_nodes():
        pytest.skip(why)
    folders = [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    networks = [Network(folder, [f"n{number}" for number in range(10)]) for folder in folders]
    try:
        for network in networks:
            network.start()
        nodes = networks[0].nodes
        assert nodes["n9"].run("hostname && getent hosts n7").split() == ["n9", nodes["n7"].ip, "n7"]
        assert "Connection refused" in nodes["n9"].run("bash -c '</dev/tcp/n7/9' 2>&1 || true")
        assert networks[0].subnet != networks[1].subnet
        mine = {network.link for network in networks}
        assert mine <= links()
    finally:
        for network in networks:
            network.stop()
    assert not mine & links()
