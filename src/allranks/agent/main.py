"""A node's agent, from its spec to its exit code.

``python <run>/code <run>/node-000.json`` starts it. The agent imports torch if the ranks need it, then forks the fork
server. Only after that does the agent start threads and open connections, so the fork server has none.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from allranks import contract
from allranks.agent.heartbeat import complain
from allranks.agent.node import Agent, Start
from allranks.agent.stop import SIGNALS, WARNINGS, StopRequest
from allranks.agent.stores import BACKLOG
from allranks.agent.workers import fork_policy
from allranks.agent.workers.fork_server import ForkServer
from allranks.agent.workers.rank import become
from allranks.errors import AllranksError, LaunchError
from allranks.record.spec import NodeSpec
from allranks.system import routes

if TYPE_CHECKING:
    from allranks.agent.network import NetworkSetting

#: Set when this process found after importing torch that it must not fork ranks, and executed itself again: the reason.
_PLAIN = "ALLRANKS_PLAIN_BECAUSE"
_HIGHEST_PORT = 65535


def main(argv: list[str]) -> NoReturn:
    """Run the agent of the node whose spec is the file ``argv[1]``; exit with this node's exit code."""
    began = time.time()
    gc.disable()  # Until the imports are done: each collection of torch's objects takes 0.1 s.
    spec = NodeSpec.from_json(Path(argv[1]).read_text(encoding="utf-8"))
    try:
        node = placed(spec, os.environ)
    except AllranksError as error:
        complain(f"error: {error}")  # Without its node number the agent has no directory to record in.
        os._exit(error.exit_code)
    stop = StopRequest(lambda stop: Agent(node).stop_early(stop))
    stop.listen()
    listener = None
    if node.nnodes > 1 and node.node == 0:
        try:  # Before the import of torch, so that agents of other nodes can connect meanwhile.
            listener = routes.listen_for(node.master_addr, node.master_port or 0, BACKLOG)
        except OSError as error:
            what = f"cannot listen on port {node.master_port or 0} of this machine"
            fix = "launch.master_port (--master-port) must be a free port of node 0"
            Agent(node).fail_early(LaunchError(what, why=error.strerror or str(error), fix=fix))
    settings = _settings(node)
    plain = os.environ.pop(_PLAIN, None) or fork_policy.why_plain(node)
    needs_torch = fork_policy.needs_torch(node)
    if plain is None and needs_torch:
        plain = _warm_up(node, argv, settings)
    if os.environ.get(contract.LIFELINE) == contract.HELD and not os.read(0, 1):
        os._exit(0)  # The launcher died before it released the run.
    channel = fork_server(node, None if plain is None else (sys.executable, *node.python_options), listener)
    outcome = Agent(node).run(Start(channel, plain, needs_torch, began, stop, listener, settings))
    # Skip the interpreter's shutdown, which takes 0.1 s once torch is imported.
    os._exit(outcome.exit_code)


def _settings(node: NodeSpec) -> list[NetworkSetting]:
    """Decide and apply network and thread settings before torch is imported, which reads some of them."""
    if node.nnodes == 1 and not is_placed(os.environ):
        return []  # This machine's node.sh has set them.
    from allranks.agent import network

    settings = network.decide(node.master_addr, node.nnodes, node.nproc_per_node, os.environ)
    network.apply(settings, os.environ)
    return settings


def _warm_up(node: NodeSpec, argv: list[str], settings: list[NetworkSetting]) -> str | None:
    """Import torch; if forking is then unsafe, execute the agent again without it.

    Returns:
        Why ranks start as plain interpreters; None if they are forked.
    """
    try:
        import torch

        if fork_policy.makes_optimizers(node):
            import torch._dynamo  # noqa: F401
    except Exception:  # noqa: BLE001 - a library of torch's that is missing or broken raises anything
        return "torch cannot be imported"  # The agent reports details when it imports torch itself.
    unsafe = fork_policy.why_unsafe_to_fork()
    if unsafe:
        os.environ[_PLAIN] = unsafe
        for setting in settings:
            os.environ.pop(setting.name, None)  # Decided and recorded again by the new process.
        signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *WARNINGS))  # Until the new process handles them.
        os.execv(sys.executable, [sys.executable, *sys.orig_argv[1:-1], argv[1]])
    return None


def fork_server(node: NodeSpec, python: tuple[str, ...] | None, listener: socket.socket | None = None) -> socket.socket:
    """Fork the fork server; return the agent's end of the socket to it.

    ``python`` is the interpreter command that each rank executes; None if ranks run in the forked process.
    """
    ours, theirs = socket.socketpair()
    signal.pthread_sigmask(signal.SIG_BLOCK, (*SIGNALS, *WARNINGS))  # Until the fork server ignores them.
    if os.fork() == 0:
        ours.close()
        if listener:
            listener.close()  # Else the fork server would keep the port open after the agent's death.
        _serve(theirs, node, python)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (*SIGNALS, *WARNINGS))
    theirs.close()
    return ours


def _serve(channel: socket.socket, node: NodeSpec, python: tuple[str, ...] | None) -> NoReturn:
    try:
        start = ForkServer(channel, node.stop_timeout).serve()
        os.environ.pop(contract.LIFELINE, None)  # STDIN stays: the rank connects it.
    except BaseException:  # noqa: BLE001 - neither the fork server nor a rank may continue as an agent
        complain()
        os._exit(1)
    if start is None:
        os._exit(0)
    # This process is a rank now: it must exit like an interpreter, not return to the agent's code.
    become(node, python, start)


# --- the place of this node: the environment gives it, since all nodes of a run share one spec ---


def is_placed(environ: Mapping[str, str]) -> bool:
    """Return whether the environment gives this node's place."""
    return any(environ.get(name) for name in contract.OF_A_NODE)


def placed(spec: NodeSpec, environ: Mapping[str, str]) -> NodeSpec:
    """Return the spec with this node's place from the environment; raise a LaunchError if that is invalid."""
    if not is_placed(environ):
        return spec
    needed = (*contract.OF_A_NODE, contract.ATTEMPT)
    if missing := [name for name in needed if not environ.get(name)]:
        raise _invalid(f"{' and '.join(missing)} not set", f"{len(needed) - len(missing)} of {len(needed)} are")
    nodes = _number(environ, contract.NODE_COUNT, 1)
    if nodes < spec.min_nodes:
        raise LaunchError(
            f"{nodes} of at least {spec.min_nodes} nodes are here",
            why=f"{contract.NODE_COUNT} is {nodes}",
            fix="ask for more nodes, or for fewer at least: resources.nodes (--nodes)",
        )
    is_name = spec.kind == "module" or (spec.kind == "binary" and os.sep not in spec.target)
    mine = spec._replace(
        run_dir=environ.get(contract.RUN_DIR) or spec.run_dir,  # Each task of a job array has its own directory.
        attempt=_number(environ, contract.ATTEMPT, 0),
        node=_number(environ, contract.NODE_RANK, 0, nodes - 1),
        nnodes=nodes,
        nproc_per_node=_number(environ, contract.NODE_NPROC, 1),
        # Relative to the working directory, of which each node has a copy.
        target=spec.target if is_name else str(Path.cwd() / spec.target),
    )
    port = _number(environ, contract.RDZV_PORT, 1, _HIGHEST_PORT)
    # The ranks of a single node use the spec's rendezvous.
    return mine if nodes == 1 else mine._replace(master_addr=environ[contract.RDZV_HOST], master_port=port)


def _number(environ: Mapping[str, str], name: str, least: int, most: int | None = None) -> int:
    text = environ[name]
    if text.isdecimal() and least <= int(text) and (most is None or int(text) <= most):
        return int(text)
    limits = f"of {least} or more" if most is None else f"from {least} to {most}"
    raise _invalid(f"{name}={text} (expected a number {limits})")


def _invalid(what: str, why: str | None = None) -> LaunchError:
    return LaunchError(
        f"agent on {socket.gethostname()}: invalid node environment: {what}",
        why=why,
        fix=f"set {', '.join((*contract.OF_A_NODE, contract.ATTEMPT))}, as the run's script does, or none of them",
    )
