"""Decides the number of ranks and the backend, and makes the configurations of agents and notifications."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from allranks import contract
from allranks.errors import PreflightError
from allranks.job.units import format_count
from allranks.plan.plan import PlanFile, Reason
from allranks.record.spec import NodeSpec
from allranks.system.cgroups import usable_cpus

if TYPE_CHECKING:
    from allranks.job.spec import Job
    from allranks.plan.entry import Program

#: One of these exists if NVIDIA's driver is loaded; the second under WSL.
_DRIVERS = (Path("/dev/nvidiactl"), Path("/dev/dxg"))

#: Tests may run up to this many ranks per CPU; more are a typing error. Ranks on GPUs are limited by the GPUs.
MOST_RANKS_PER_CPU = 16
CROWDED = f"more than {MOST_RANKS_PER_CPU} ranks on each CPU make no progress"


class Machine(NamedTuple):
    """CPUs and GPUs that a process on a machine may use, and the source of the number of GPUs."""

    cpus: int
    gpus: int
    gpus_from: str


def this_machine(environ: Mapping[str, str]) -> Machine:
    """Return CPUs and GPUs that this process may use (affinity, container, visible devices)."""
    cpus, visible = usable_cpus(), environ.get("CUDA_VISIBLE_DEVICES")
    count = 0
    if visible is not None:
        for device in filter(None, (part.strip() for part in visible.split(","))):
            if device.startswith("-"):  # As in CUDA, it hides the devices after it.
                break
            count += 1
        return Machine(cpus, count, f"CUDA_VISIBLE_DEVICES={visible}")
    if any(driver.exists() for driver in _DRIVERS):
        from allranks.system.gpus import Gpus  # Imported only on machines with a driver.

        count = Gpus().count
    return Machine(cpus, count, f"{count} on this machine" if count else "no GPU on this machine")


class Layout(NamedTuple):
    """Ranks per node and their backend."""

    nproc_per_node: int
    backend: str
    cpus: int
    reasons: tuple[Reason, ...]


def lay_out(job: Job, machine: Machine) -> Layout:
    """Decide ranks and backend for nodes like ``machine``.

    Raises:
        PreflightError: more GPUs or more ranks over nccl than the machine has GPUs.
    """
    gpus, gpus_why = _gpus(job, machine)
    nproc, nproc_why = _nproc(job, gpus, gpus_why, machine)
    backend, backend_why = job.launch.backend, "as asked"
    if not backend:
        backend, backend_why = ("nccl", f"GPUs: {gpus_why}") if gpus else ("gloo", gpus_why)
    if backend == "nccl" and nproc > gpus:
        raise PreflightError(
            f"{format_count(nproc, 'rank')} on {format_count(gpus, 'GPU')} with backend nccl",
            why=f"nccl takes one GPU for each rank; GPUs: {gpus_why}",
            fix=(f"--nproc-per-node {gpus}, or " if gpus else "") + "--backend gloo to run on the CPU",
        )
    reasons = (Reason("ranks", str(nproc), nproc_why), Reason("backend", backend, backend_why))
    return Layout(nproc, backend, job.resources.cpus_per_node or machine.cpus, reasons)


def _gpus(job: Job, machine: Machine) -> tuple[int, str]:
    requested = job.resources.gpus_per_node
    if requested is None:
        return machine.gpus, machine.gpus_from
    if requested > machine.gpus:
        raise PreflightError(
            f"{format_count(requested, 'GPU')} requested, {machine.gpus} can be used",
            why=machine.gpus_from,
            fix=f"--gpus-per-node {machine.gpus}" if machine.gpus else f"--nproc-per-node {requested} --backend gloo",
        )
    return requested, f"gpus_per_node is {requested}"


def _nproc(job: Job, gpus: int, gpus_why: str, machine: Machine) -> tuple[int, str]:
    requested = job.launch.nproc_per_node
    if isinstance(requested, int):
        return requested, "as asked"
    if requested == "cpu":
        return machine.cpus, f"one for each CPU: {machine.cpus}"
    if gpus:
        return gpus, f"one for each GPU: {gpus_why}"
    if requested == "gpu":
        raise PreflightError("one rank per GPU was requested", why=gpus_why, fix="--nproc-per-node 2 --backend gloo")
    return 1, f"one: {gpus_why}"


def random_port() -> int:
    """Return a random port for a run, which other users cannot guess."""
    return contract.FIRST_PORT + secrets.randbelow(contract.PORTS)


def agent_config(
    job: Job,
    run_dir: Path,
    entry: Program,
    layout: Layout,
    python: Sequence[str],
    *,
    nodes: tuple[int, int],
    node: int = 0,
    spares: int = 0,
) -> NodeSpec:
    """Return the configuration of a node's agent in the first attempt; nodes differ only in their place.

    ``nodes`` are the fewest and most nodes that take part; ``spares`` more wait to replace a lost one.
    """
    launch, (least, most) = job.launch, nodes
    return NodeSpec(
        run_id=run_dir.name,
        run_dir=str(run_dir),
        attempt=0,
        node=node,
        nnodes=most + spares,
        nproc_per_node=layout.nproc_per_node,
        kind=entry.kind,
        target=entry.target,
        args=job.args,
        python_options=tuple(python[1:]),
        warm=launch.warm,
        max_restarts=launch.max_restarts,
        restart_delay=launch.restart_delay,
        stop_timeout=launch.stop_timeout,
        master_addr=launch.master_addr or "127.0.0.1",  # The rendezvous of several nodes is on the first one.
        master_port=launch.master_port,
        file_mode=0o640 if job.runs.group_readable else 0o600,
        min_nodes=least,
        spares=spares,
        hang_timeout=launch.hang_timeout,
        on_hang=launch.on_hang,
    )


def notify_config(job: Job) -> dict[str, Any] | None:
    """Return the configuration of notifications; None without any. The webhook's URL is passed as a variable."""
    wanted = job.notify
    if not (wanted.command or wanted.webhook) or not wanted.on:
        return None
    return {"on": [*wanted.on], "command": [*wanted.command], "webhook": wanted.webhook is not None}


def notify_files(job: Job, mode: int) -> tuple[PlanFile, ...]:
    """Return the file for :func:`notify_config` with permission bits ``mode``; empty without notifications."""
    config = notify_config(job)
    return (PlanFile(contract.NOTIFY_FILE, json.dumps(config, indent=2) + "\n", mode),) if config else ()


def notify_reasons(job: Job) -> tuple[Reason, ...]:
    """Return the plan's line on notifications, without the URL of a webhook, which is a secret."""
    if not (config := notify_config(job)):
        return ()
    ways = [shlex.join(job.notify.command)] if job.notify.command else []
    ways += ["webhook"] if job.notify.webhook else []
    return (Reason("notify", " and ".join(ways), f"notify.on: {', '.join(config['on'])}"),)
