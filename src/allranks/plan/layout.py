"""How many ranks, and over which process-group backend."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from allranks.errors import PreflightError
from allranks.job.units import format_count
from allranks.plan.machine import Machine
from allranks.plan.plan import Reason

if TYPE_CHECKING:
    from allranks.job.spec import Job


@dataclass(frozen=True)
class Layout:
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
    backend, backend_why = _backend(job, gpus, gpus_why)
    if backend == "nccl" and nproc > gpus:
        raise PreflightError(
            f"{format_count(nproc, 'rank')} on {format_count(gpus, 'GPU')} with backend nccl",
            why=f"nccl takes one GPU for each rank; GPUs: {gpus_why}",
            fix=(f"--nproc-per-node {gpus}, or " if gpus else "") + "--backend gloo to run on the CPU",
        )
    reasons = (Reason("ranks", str(nproc), nproc_why), Reason("backend", backend, backend_why))
    return Layout(nproc, backend, job.resources.cpus_per_node or machine.cpus, reasons)


def _gpus(job: Job, machine: Machine) -> tuple[int, str]:
    asked = job.resources.gpus_per_node
    if asked is None:
        return machine.gpus, machine.gpus_from
    if asked > machine.gpus:
        raise PreflightError(
            f"{format_count(asked, 'GPU')} asked for, {machine.gpus} can be used",
            why=machine.gpus_from,
            fix=f"--gpus-per-node {machine.gpus}",
        )
    return asked, f"gpus_per_node is {asked}"


def _nproc(job: Job, gpus: int, gpus_why: str, machine: Machine) -> tuple[int, str]:
    asked = job.launch.nproc_per_node
    if isinstance(asked, int):
        return asked, "as asked"
    if asked == "cpu":
        return machine.cpus, f"one for each CPU: {machine.cpus}"
    if gpus:
        return gpus, f"one for each GPU: {gpus_why}"
    if asked == "gpu":
        raise PreflightError(
            "one rank for each GPU was asked for", why=gpus_why, fix="--nproc-per-node 2 --backend gloo"
        )
    return 1, f"one: {gpus_why}"


def _backend(job: Job, gpus: int, gpus_why: str) -> tuple[str, str]:
    if job.launch.backend:
        return job.launch.backend, "as asked"
    return ("nccl", f"GPUs: {gpus_why}") if gpus else ("gloo", gpus_why)
