"""Which environment variables the ranks get from us, and why."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from allranks.job.units import format_count
from allranks.job.variables import secret_names
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
#: What an agent decides on its node, unless it is set, and by which rule.
_DECIDED_ON_NODES = {
    "GLOO_SOCKET_IFNAME": "the interface that carries the route to the first node",
    "NCCL_SOCKET_IFNAME": "likewise; not set where an InfiniBand or RoCE port is active: NCCL finds it",
    "OMP_NUM_THREADS": "the CPUs that the node gives, shared by its ranks",
}


def settings(job: Job, layout: Layout | None, environ: Mapping[str, str]) -> tuple[Reason, ...]:
    """Return the variables that we set, with reasons; what the job or its user has set stays as it is.

    ``layout`` is None for a job whose nodes decide what depends on it.
    """
    given = job.environment.variables
    decided = [reason for reason in _decide(job, layout) if reason.subject not in given]
    hidden = secrets(job)
    requested = [Reason(name, value, "environment.variables") for name, value in given.items() if name not in hidden]
    return (*(reason for reason in decided if reason.subject not in environ), *requested)


def kept(job: Job, layout: Layout | None, environ: Mapping[str, str]) -> tuple[Reason, ...]:
    """Return what we would have set, had the calling environment not set it already."""
    ours = [reason.subject for reason in _decide(job, layout)]
    ours += [name for name in _DECIDED_ON_NODES if layout is None and name not in ours]
    return tuple(Reason(name, environ[name], "set in your environment") for name in ours if name in environ)


def secrets(job: Job) -> tuple[str, ...]:
    """Return the names of the job's variables whose values are never written to disk."""
    return secret_names(job.environment.variables)


def decided_on_nodes(job: Job, environ: Mapping[str, str]) -> tuple[Reason, ...]:
    """Return the variables that each node decides on for itself, with the rule that it goes by."""
    taken = {*environ, *job.environment.variables, *(reason.subject for reason in _decide(job, None))}
    rules = _DECIDED_ON_NODES.items()
    return tuple(Reason(name, "decided on each node", why) for name, why in rules if name not in taken)


def _decide(job: Job, layout: Layout | None) -> Iterator[Reason]:
    if layout:
        cpus, ranks = layout.cpus, layout.nproc_per_node
        why = f"{format_count(cpus, 'CPU')} for {format_count(ranks, 'rank')}"
        yield Reason("OMP_NUM_THREADS", str(max(1, cpus // ranks)), why)
    if job.launch.interface:
        for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
            yield Reason(name, job.launch.interface, "launch.interface")
    elif layout and job.launch.master_addr is None:
        yield Reason("GLOO_SOCKET_IFNAME", _LOOPBACK, "all ranks are on this machine")
    if job.resources.gpus_per_node == 0:
        yield Reason("CUDA_VISIBLE_DEVICES", "", "gpus_per_node is 0")
    if job.debug:
        for name, value in _DEBUG.items():
            yield Reason(name, value, "debug is on", is_debug=True)
