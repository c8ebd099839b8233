"""Which environment variables the ranks get from us, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from allranks.job.secrets import secret_names
from allranks.job.units import format_count
from allranks.plan.layout import Layout
from allranks.plan.plan import Reason

if TYPE_CHECKING:
    from allranks.job.spec import Job

_DEBUG = {
    "NCCL_DEBUG": "INFO",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_CPP_LOG_LEVEL": "INFO",
    "TORCH_SHOW_CPP_STACKTRACES": "1",
    "PYTHONFAULTHANDLER": "1",
}
_LOOPBACK = "lo"


def settings(job: Job, layout: Layout, environ: Mapping[str, str]) -> tuple[Reason, ...]:
    """Return the variables that we set, with reasons; what the job or its user has set stays as it is."""
    given = job.environment.variables
    decided = [reason for reason in _decide(job, layout) if reason.subject not in given]
    return tuple(reason for reason in decided if reason.subject not in environ) + _given(job)


def kept(job: Job, layout: Layout, environ: Mapping[str, str]) -> tuple[Reason, ...]:
    """Return what we would have set, had the calling environment not set it already."""
    names = [reason.subject for reason in _decide(job, layout) if reason.subject in environ]
    return tuple(Reason(name, environ[name], "set in your environment") for name in names)


def secrets(job: Job) -> tuple[str, ...]:
    """Return the names of the job's variables whose values are written nowhere."""
    return secret_names(job.environment.variables)


def _decide(job: Job, layout: Layout) -> Iterator[Reason]:
    cpus, ranks = layout.cpus, layout.nproc_per_node
    why = f"{format_count(cpus, 'CPU')} for {format_count(ranks, 'rank')}"
    yield Reason("OMP_NUM_THREADS", str(max(1, cpus // ranks)), why)
    if job.launch.interface:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            yield Reason(name, job.launch.interface, "launch.interface")
    elif job.launch.master_addr is None:
        yield Reason("GLOO_SOCKET_IFNAME", _LOOPBACK, "all ranks are on this machine")
    if job.resources.gpus_per_node == 0:
        yield Reason("CUDA_VISIBLE_DEVICES", "", "gpus_per_node is 0")
    if job.debug:
        for name, value in _DEBUG.items():
            yield Reason(name, value, "debug is on", is_debug=True)


def _given(job: Job) -> tuple[Reason, ...]:
    hidden = secrets(job)
    return tuple(
        Reason(name, value, "environment.variables")
        for name, value in job.environment.variables.items()
        if name not in hidden
    )
