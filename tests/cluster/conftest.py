"""Real clusters for the tests of this folder; those of one cluster run in one worker of pytest-xdist, in turn."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from needed import need
from nodes import Network, why_no_nodes
from slurm_cluster import SlurmCluster
from slurm_conf import Shape
from slurm_daemons import why_no_slurm
from ssh_nodes import SshNodes, why_no_sshd

HERE = Path(__file__).parent
CLUSTERS = """\
lab: {kind: slurm, resources: {time: 5min}, launch: {backend: gloo}}
"""
SLURM_FIXTURES = {"slurm", "slurm_with_accounting"}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of one cluster together, Slurm or bare nodes, so that it serves them all (needs --dist loadgroup)."""
    for item in items:
        if HERE in item.path.parents:
            is_bare = isinstance(item, pytest.Function) and "network" in item.fixturenames
            item.add_marker(pytest.mark.xdist_group("nodes" if is_bare else "cluster"))


def _up(tmp_path_factory: pytest.TempPathFactory, shape: Shape) -> Iterator[SlurmCluster]:
    need("Slurm cluster", why_no_slurm(shape))
    folder = tmp_path_factory.mktemp("slurm")
    with SlurmCluster(folder, shape) as cluster:
        yield cluster
    shutil.rmtree(folder)  # After failures too: the failed test has shown what there is to see.


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Give a cluster of 4 nodes with 4 GPUs each, without accounting; idle when a test begins."""
    yield from _up(tmp_path_factory, Shape())


@pytest.fixture(scope="session")
def slurm_with_accounting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Give such a cluster with slurmdbd: account ``lab``, QOS ``normal``, ``urgent`` and ``brief``."""
    yield from _up(tmp_path_factory, Shape(accounting=True))


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Give four nodes, gpu01 to gpu04, with networks of their own and no scheduler."""
    need("network of nodes", why_no_nodes())
    network = Network(tmp_path_factory.mktemp("nodes"), [f"gpu{number:02}" for number in range(1, 5)])
    network.start()
    yield network
    network.stop()


@pytest.fixture(scope="module")
def ssh_nodes(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNodes]:
    """Give an sshd on each of the four nodes, and a user's ``ssh`` that reaches them (``ssh_nodes.env``)."""
    need("sshd", why_no_sshd())
    ssh_nodes = SshNodes(network, tmp_path_factory.mktemp("ssh"))
    ssh_nodes.start()
    yield ssh_nodes
    ssh_nodes.stop()


@pytest.fixture
def ssh(ssh_nodes: SshNodes, allranks: Any) -> Any:
    """Give the command, with an ssh that reaches the nodes."""
    allranks.env = ssh_nodes.env({**allranks.env, "OMP_NUM_THREADS": "1"})
    return allranks


@pytest.fixture
def mended(network: Network, ssh_nodes: SshNodes) -> Iterator[Network]:
    """Give the nodes to a test that breaks one; they are whole again afterwards."""
    yield network
    for name, node in network.nodes.items():
        if node.is_alive:
            network.mend(name)
        else:
            network.start_nodes([name])
            ssh_nodes.restart(name)


@pytest.fixture(autouse=True)
def _idle_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave each cluster as the next test expects it: all nodes alive and idle, no jobs."""
    used = [request.getfixturevalue(name) for name in sorted(SLURM_FIXTURES & {*request.fixturenames})]
    yield
    for cluster in used:
        cluster.reset()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Give an empty folder to submit from; all nodes see it."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def lab(slurm: SlurmCluster, allranks: Any) -> Any:
    """Give the command in a folder that knows the test cluster as ``lab``."""
    return knowing(slurm, allranks)


@pytest.fixture
def lab_with_accounting(slurm_with_accounting: SlurmCluster, allranks: Any) -> Any:
    """Give the command in a folder that knows the cluster with slurmdbd as ``lab``."""
    return knowing(slurm_with_accounting, allranks)


def knowing(cluster: SlurmCluster, allranks: Any) -> Any:
    """Return the command, in its folder, with a cluster ``lab`` that is this one."""
    allranks.env.update(cluster.env)
    allranks.script(CLUSTERS, "clusters.yaml")
    return allranks
