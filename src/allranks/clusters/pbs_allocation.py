"""A job that is started inside an allocation of PBS: of qsub -I, or of a batch script of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.queued_plan import Gpus
from allranks.errors import PreflightError
from allranks.job.units import format_count
from allranks.plan.machine import this_machine

if TYPE_CHECKING:
    from allranks.job.spec import Job


def is_inside(environ: Mapping[str, str]) -> bool:
    """Tell whether a command typed here is inside an allocation that nobody uses yet, not in a rank of ours."""
    return bool(environ.get("PBS_JOBID")) and contract.RUN_DIR not in environ


def name_of(environ: Mapping[str, str]) -> str:
    """Return what to call the allocation that this is inside of."""
    return f"allocation {environ['PBS_JOBID']}"


def within(job: Job, environ: Mapping[str, str]) -> tuple[Job, Gpus]:
    """Return the job with what it leaves open taken from the allocation, and the GPUs that it has there.

    Raises:
        PreflightError: it asks for more nodes than there are, or this is not the allocation's first node.
    """
    resources, there = job.resources, len(_hosts(environ))
    nodes = resources.nodes[1] if "nodes" in resources.model_fields_set else there
    if nodes != there:
        raise PreflightError(
            f"{format_count(nodes, 'node')} were asked for, and this allocation has {there}",
            why=f"PBS_JOBID is {environ['PBS_JOBID']}: the command was typed inside an allocation",
            fix=f"--nodes {there}, or qsub -I -l select={nodes}:... -l place=scatter, or "
            "env -u PBS_JOBID allranks ... for a job of its own",
        )
    whole = job.model_copy(update={"resources": resources.model_copy(update={"nodes": (there, there)})})
    if (asked := resources.gpus_per_node) is not None:
        return whole, Gpus(asked, f"gpus_per_node is {asked}")
    here = this_machine(environ)
    return whole, Gpus(here.gpus, f"on this first node of the allocation, {here.gpus_from}")


def _hosts(environ: Mapping[str, str]) -> list[str]:
    """Return the different hosts of the allocation.

    Raises:
        PreflightError: the file that names them is not here.
    """
    named = environ.get("PBS_NODEFILE")
    try:
        return list(dict.fromkeys(Path(named or "").read_text().split()))
    except OSError as error:
        what = f"{named}: {error.strerror}" if named else "not set"
        raise PreflightError(
            "the nodes of this allocation cannot be found out",
            why=f"PBS_NODEFILE is {what}; the first node alone has it",
            fix="type the command on the first node of the allocation, where qsub -I gives its shell",
        ) from error
