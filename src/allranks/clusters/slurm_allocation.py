"""A job that is started inside an allocation: of salloc, or of a batch script of the user's own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters import slurm_jobs
from allranks.clusters.queued_plan import Gpus, settled_already
from allranks.errors import LaunchError, PreflightError
from allranks.job.units import format_count

if TYPE_CHECKING:
    from allranks.job.spec import Job

#: The controller is asked for what a job may do without: a command that is typed does not wait long for that.
_SECONDS = 20.0
#: What an allocation has on some of its nodes, and the GPUs among that: ``gpu:2(IDX:0-1)``, ``gpu:a100:4(IDX:0-3)``.
_ON_NODES = re.compile(r"^ +Nodes=\S+ .*\bGRES=(\S*)", re.MULTILINE)
_GPU = re.compile(r"(?:^|,)gpu:(?:[^:,()]+:)?(\d+)")


def is_inside(environ: Mapping[str, str]) -> bool:
    """Tell whether a command typed here is inside an allocation that nobody uses yet, not in a rank of ours."""
    return bool(environ.get("SLURM_JOB_ID")) and contract.RUN_DIR not in environ


def name_of(environ: Mapping[str, str]) -> str:
    """Return what to call the allocation that this is inside of."""
    return f"allocation {environ['SLURM_JOB_ID']}"


def within(job: Job, environ: Mapping[str, str]) -> tuple[Job, Gpus]:
    """Return the job with what it leaves open taken from the allocation, and the GPUs that it has there.

    Raises:
        PreflightError: it asks for more nodes than there are.
    """
    resources, there = job.resources, int(environ.get("SLURM_JOB_NUM_NODES") or 1)
    least, most = resources.nodes if "nodes" in resources.model_fields_set else (there, there)
    if least > there:
        raise PreflightError(
            f"{format_count(least, 'node')} were asked for, and this allocation has {there}",
            why=f"SLURM_JOB_ID is {environ['SLURM_JOB_ID']}: the command was typed inside an allocation",
            fix=f"--nodes {there}, or salloc --nodes={least}, or env -u SLURM_JOB_ID allranks ... for a job of its own",
        )
    gpus = _gpus(job, environ)
    nodes = resources.model_copy(update={"nodes": (least, min(most, there))})
    # Before the user's own options: there the last one counts.
    options = (*_asking(gpus), *job.launch.launcher_args)
    launch = job.launch.model_copy(update={"launcher_args": options})
    return job.model_copy(update={"resources": nodes, "launch": launch}), gpus


def _asking(gpus: Gpus) -> Iterator[str]:
    if gpus.must_be_asked and gpus.count:
        yield f"--gpus-per-node={gpus.count}"


def _gpus(job: Job, environ: Mapping[str, str]) -> Gpus:
    # A step of an allocation of --gpus-per-task has one task on each node, and would get the GPUs of one.
    by_task = bool(environ.get("SLURM_GPUS_PER_TASK"))
    if (asked := job.resources.gpus_per_node) is not None:
        return Gpus(asked, f"gpus_per_node is {asked}", by_task)
    if (told := _told(environ)) is not None:
        return Gpus(told, f"this allocation has {told or 'none'}{' on each node' if told else ''}", by_task)
    return _asked_for(environ, by_task)


def _told(environ: Mapping[str, str]) -> int | None:
    """Return the GPUs of each node, from the variables that salloc and sbatch set: ``4``, ``a100:4``."""
    may_differ = environ.get("SLURM_GPUS") or environ.get("SLURM_GPUS_PER_TASK")
    here = () if may_differ and environ.get("SLURM_JOB_NUM_NODES", "1") != "1" else ("SLURM_GPUS_ON_NODE",)
    for name in (*here, "SLURM_GPUS_PER_NODE"):
        count = environ.get(name, "").rpartition(":")[2]
        if count.isdecimal():
            return int(count)
    return None


def _asked_for(environ: Mapping[str, str], by_task: bool) -> Gpus:
    """Ask Slurm for the GPUs of the allocation, node by node."""
    scontrol, *show = slurm_jobs.show_command(environ["SLURM_JOB_ID"])
    try:
        counts = parse_gpus(slurm_jobs.ask((scontrol, "--details", *show), environ, seconds=_SECONDS))
        problem = "Slurm does not tell"
    except LaunchError as error:
        counts, problem = set(), error.in_a_line
    if not counts:
        note = f"the GPUs of this allocation are not known, and not used: {problem}; --gpus-per-node N uses them"
        return Gpus(0, "those of this allocation are not known", note=note)
    least, most = min(counts), max(counts)
    if least == most:
        return Gpus(least, f"this allocation has {least or 'none'}{' on each node' if least else ''}", by_task)
    note = (
        f"the nodes of this allocation have {least} to {most} GPUs, of which {least} on each are used: "
        "salloc --gpus-per-node gives all nodes the same number"
    )
    return Gpus(least, f"the nodes of this allocation have {least} to {most}", must_be_asked=True, note=note)


def parse_gpus(text: str) -> set[int]:
    """Read the answer to ``scontrol --details show job``: the different numbers of GPUs that its nodes have."""
    return {sum(map(int, _GPU.findall(gres))) for gres in _ON_NODES.findall(text)}


def notes(job: Job, gpus: Gpus) -> Iterator[str]:
    """Yield what the job asks for and an allocation has settled already, and what is odd about its GPUs."""
    yield from settled_already(job)
    if gpus.note:
        yield gpus.note
