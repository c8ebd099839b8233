"""The kinds of cluster, loaded when they are asked for; other packages add theirs by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.base import ClusterKind
from allranks.errors import JobError
from allranks.job.problems import did_you_mean

if TYPE_CHECKING:
    from allranks.job.load import LoadedJob

_BUILT_IN = {
    "local": "allranks.clusters.local:LocalCluster",
    "ssh": "allranks.clusters.ssh:SshCluster",
    "pdsh": "allranks.clusters.pdsh:PdshCluster",
    "slurm": "allranks.clusters.slurm:SlurmCluster",
    "pbs": "allranks.clusters.pbs:PbsCluster",
}
_GROUP = "allranks.clusters"
#: What tells that a process is inside an allocation of a scheduler, and the kind that can use it.
_ALLOCATIONS = {"SLURM_JOB_ID": "slurm", "PBS_JOBID": "pbs"}


def kind_for(loaded: LoadedJob, environ: Mapping[str, str]) -> ClusterKind:
    """Return the kind that a job runs on: the one that is named, else ssh for a job that names machines, else the
    allocation that we are in, else this machine.

    Raises:
        JobError: there is no such kind.
    """
    is_open, resources = loaded.sources["cluster"].kind == "default", loaded.job.resources
    if is_open and (resources.hosts or resources.hostfile):
        return load_kind("ssh")
    if is_open and contract.RUN_DIR not in environ:
        for variable, name in _ALLOCATIONS.items():
            if environ.get(variable):
                return load_kind(name)
    return load_kind(loaded.cluster.kind)


def load_kind(name: str) -> ClusterKind:
    """Return the kind of that name.

    Raises:
        JobError: there is none.
    """
    if name in _BUILT_IN:
        return _load(_BUILT_IN[name])
    from importlib.metadata import entry_points  # Not at the top: it reads what every package has installed.

    found = {point.name: point.value for point in entry_points(group=_GROUP)}
    if name in found:
        return _load(found[name])
    known = sorted({*_BUILT_IN, *found})
    raise JobError(
        f"there is no kind of cluster {name!r}",
        why=f"the kinds are: {', '.join(known)}",
        fix=did_you_mean(name, known),
    )


def _load(reference: str) -> ClusterKind:
    module, _, attribute = reference.partition(":")
    kind: ClusterKind = getattr(import_module(module), attribute)()
    return kind
