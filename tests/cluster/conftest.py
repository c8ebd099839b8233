"""Real clusters for the tests of this directory; those of one cluster run in one worker of pytest-xdist, in turn."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cluster_tools import missing_commands
from grid_engine_cluster import GridEngineCluster, why_no_grid_engine
from needed import need
from nodes import Network, why_no_nodes
from pbs_cluster import PbsCluster, RealPbs, StandInPbs, has_real_pbs
from sites import FIXTURES, KINDS, Site
from slurm_cluster import SlurmCluster
from slurm_conf import Shape
from slurm_daemons import why_no_slurm
from ssh_nodes import SshNodes, why_no_sshd

from terminals import Terminal

HERE = Path(__file__).parent
CLUSTERS = """\
lab: {kind: slurm, resources: {time: 5min}, launch: {backend: gloo}}
"""
SLURM_FIXTURES = {"slurm", "slurm_with_accounting"}
#: Sums are rounded as their parts are shared by threads: a variable of the shell goes no further than to this machine.
SSH_CLUSTERS = """\
lab:
  kind: ssh
  resources: {hosts: 'gpu[01-04]'}
  launch: {nproc_per_node: 1}
  environment: {variables: {OMP_NUM_THREADS: 1}}
"""
PBS_CLUSTERS = CLUSTERS.replace("slurm", "pbs")
PBS_FIXTURES = {"pbs", "standin", "torque"}
GRID_ENGINE_FIXTURES = {"grid_engine"}
GRID_ENGINE_CLUSTERS = """\
lab:
  kind: grid_engine
  resources: {time: 5min, cpus_per_node: 4}
  launch: {backend: gloo}
  scheduler: {parallel_environment: four}
  environment: {variables: {OMP_NUM_THREADS: 1}}
"""


#: Groups of tests that run beside each other, each with clusters of its own; the longest come first.
GROUPS = ("slurm-waits", "ssh-checks", "slurm", "pbs", "ssh-runs", "bare", "torque", "grid-engine")
#: What mostly waits for Slurm to requeue a job or to notice a dead node.
WAITS_FOR_SLURM = re.compile(r"test_(scenarios_of|resume_on_slurm|dependent_on_slurm|direct_on_slurm|elastic_on_slurm)")
CHECKS_OVER_SSH = re.compile(r"test_(check|trial|faults_over_ssh)")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep tests of one cluster together, so that it serves them all, and start with them (needs --dist loadgroup)."""
    groups = {item: _group(item) for item in items if HERE in item.path.parents}
    for item, group in groups.items():
        item.add_marker(pytest.mark.xdist_group(group))
    items.sort(key=lambda item: GROUPS.index(groups[item]) if item in groups else len(GROUPS))


def _group(item: pytest.Item) -> str:
    used = {*item.fixturenames} if isinstance(item, pytest.Function) else set[str]()
    if isinstance(item, pytest.Function) and hasattr(item, "callspec"):
        used |= {*FIXTURES.get(item.callspec.params.get("site"), ())}
    if "bare_network" in used:
        return "bare"
    if "network" in used:
        return "ssh-checks" if CHECKS_OVER_SSH.match(item.path.name) else "ssh-runs"
    if PBS_FIXTURES & used:
        return "torque" if "torque" in used else "pbs"
    if GRID_ENGINE_FIXTURES & used:
        return "grid-engine"
    return "slurm-waits" if WAITS_FOR_SLURM.match(item.path.name) else "slurm"


def _up(tmp_path_factory: pytest.TempPathFactory, shape: Shape) -> Iterator[SlurmCluster]:
    need("Slurm cluster", why_no_slurm(shape))
    folder = tmp_path_factory.mktemp("slurm")
    with SlurmCluster(folder, shape) as cluster:
        yield cluster
    shutil.rmtree(folder)  # After failures too: the failed test has shown what there is to see.


@pytest.fixture(scope="session")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Give a cluster of 4 nodes with 4 GPUs each, without accounting; idle when a test starts."""
    yield from _up(tmp_path_factory, Shape())


@pytest.fixture(scope="session")
def slurm_with_accounting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    """Give such a cluster with slurmdbd: account ``lab``, QOS ``normal``, ``urgent`` and ``brief``."""
    yield from _up(tmp_path_factory, Shape(accounting=True))


def _stand_in(tmp_path_factory: pytest.TempPathFactory, flavour: str) -> Iterator[StandInPbs]:
    need("stand-in for PBS", why_no_nodes())
    folder = tmp_path_factory.mktemp(flavour)
    with StandInPbs(folder, flavour) as cluster:
        yield cluster
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def standin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInPbs]:
    """Give the stand-in of OpenPBS: 4 nodes with 8 CPUs and 4 GPUs each; idle when a test starts."""
    yield from _stand_in(tmp_path_factory, "openpbs")


@pytest.fixture(scope="session")
def torque(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StandInPbs]:
    """Give the stand-in of Torque, with such nodes."""
    yield from _stand_in(tmp_path_factory, "torque")


@pytest.fixture(scope="session")
def grid_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GridEngineCluster]:
    """Give a Grid Engine cluster of 4 nodes with 8 slots and 4 GPUs each; idle when a test starts."""
    need("Grid Engine cluster", why_no_grid_engine())
    folder = tmp_path_factory.mktemp("ge")
    with GridEngineCluster(folder) as cluster:
        yield cluster
    shutil.rmtree(folder)


@pytest.fixture(scope="session")
def pbs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PbsCluster:
    """Give the real OpenPBS of this machine if there is one, or its stand-in."""
    if not has_real_pbs():
        standin: StandInPbs = request.getfixturevalue("standin")
        return standin
    cluster = RealPbs(tmp_path_factory.getbasetemp())
    if not cluster.sees():
        pytest.fail(
            "the nodes of the real PBS do not see pytest's directory: give it one with --basetemp", pytrace=False
        )
    return cluster


def _four_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    need("network of nodes", why_no_nodes())
    network = Network(tmp_path_factory.mktemp("nodes"), [f"gpu{number:02}" for number in range(1, 5)])
    network.start()
    yield network
    network.stop()


@pytest.fixture(scope="session")
def network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Give four nodes, gpu01 to gpu04, with networks of their own and no scheduler; see ``ssh_nodes``."""
    yield from _four_nodes(tmp_path_factory)


@pytest.fixture(scope="session")
def bare_network(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Network]:
    """Give four other such nodes, without sshds, to tests that end all processes of a node or all nodes."""
    yield from _four_nodes(tmp_path_factory)


@pytest.fixture(scope="session")
def ssh_nodes(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Iterator[SshNodes]:
    """Give an sshd on each of the four nodes, and a user's ``ssh`` that reaches them (``ssh_nodes.env``).

    It serves all tests of a session: one that breaks a node has it put right by ``mended`` or ``undo``.
    """
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
def ssh_lab(ssh: Any) -> Any:
    """Give the command in a directory that knows the four nodes as ``lab``, each reached over SSH."""
    ssh.script(SSH_CLUSTERS, "clusters.yaml")
    return ssh


@pytest.fixture
def pdsh_lab(ssh: Any) -> Any:
    """Give the command in a directory that knows the nodes as ``lab``, at a site where pdsh uses ssh."""
    need("pdsh", missing_commands({"pdsh": "pdsh"}))
    ssh.env["PDSH_RCMD_TYPE"] = "ssh"
    ssh.script(SSH_CLUSTERS.replace("kind: ssh", "kind: pdsh"), "clusters.yaml")
    return ssh


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


@pytest.fixture
def undo(mended: Network) -> Iterator[Callable[..., object]]:
    """Give what takes a node and a command that puts something right there when the test is over."""
    with ExitStack() as stack:
        yield lambda node, command: stack.callback(node.run, command)


@pytest.fixture(autouse=True)
def _idle_again(request: pytest.FixtureRequest) -> Iterator[None]:
    """Leave each cluster as the next test expects it: all nodes alive and idle, no jobs."""
    names = (SLURM_FIXTURES | PBS_FIXTURES | GRID_ENGINE_FIXTURES) & {*request.fixturenames}
    used = [request.getfixturevalue(name) for name in sorted(names)]
    yield
    for cluster in used:
        cluster.reset()


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Give an empty directory to submit from; all nodes see it."""
    folder = tmp_path / "work"
    folder.mkdir()
    return folder


@pytest.fixture
def terminals() -> Iterator[list[Terminal]]:
    """Give a list for terminals, whose commands are ended after the test."""
    found: list[Terminal] = []
    yield found
    for terminal in found:
        terminal.close()
        terminal.process.kill()
        terminal.process.wait()


@pytest.fixture
def lab(slurm: SlurmCluster, allranks: Any) -> Any:
    """Give the command in a directory that knows the test cluster as ``lab``."""
    return knowing(slurm, allranks)


@pytest.fixture
def lab_with_accounting(slurm_with_accounting: SlurmCluster, allranks: Any) -> Any:
    """Give the command in a directory that knows the cluster with slurmdbd as ``lab``."""
    return knowing(slurm_with_accounting, allranks)


@pytest.fixture
def pbs_lab(pbs: PbsCluster, allranks: Any) -> Any:
    """Give the command in a directory that knows PBS, real or not, as ``lab``."""
    return knowing(pbs, allranks, PBS_CLUSTERS)


@pytest.fixture
def standin_lab(standin: StandInPbs, allranks: Any) -> Any:
    """Give the command in a directory that knows the stand-in of OpenPBS as ``lab``."""
    return knowing(standin, allranks, PBS_CLUSTERS)


@pytest.fixture
def torque_lab(torque: StandInPbs, allranks: Any) -> Any:
    """Give the command in a directory that knows the stand-in of Torque as ``lab``."""
    return knowing(torque, allranks, PBS_CLUSTERS)


@pytest.fixture
def grid_engine_lab(grid_engine: GridEngineCluster, allranks: Any) -> Any:
    """Give the command in a directory that knows Grid Engine as ``lab``."""
    return knowing(grid_engine, allranks, GRID_ENGINE_CLUSTERS)


def knowing(cluster: SlurmCluster | PbsCluster | GridEngineCluster, allranks: Any, clusters: str = CLUSTERS) -> Any:
    """Return the command, in its directory, with a cluster ``lab`` that is this one."""
    allranks.env.update(cluster.env)
    allranks.script(clusters, "clusters.yaml")
    return allranks


@pytest.fixture
def site(request: pytest.FixtureRequest) -> Iterator[Site]:
    """Give a cluster of the kind that a scenario names as its parameter; idle again afterwards."""
    kind: str = request.param
    lab, cluster = map(request.getfixturevalue, FIXTURES[kind])
    site = KINDS[kind](kind, lab, cluster)
    yield site
    site.close()
