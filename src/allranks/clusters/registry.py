"""The kinds of cluster, loaded when they are needed; other packages add theirs by entry point."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING

from allranks import contract
from allranks.clusters.base import ClusterKind
from allranks.errors import JobError
from allranks.system import plugins, schedulers

if TYPE_CHECKING:
    from allranks.job.load import LoadedJob

_BUILT_IN = {
    "local": "allranks.clusters.local:LocalCluster",
    "ssh": "allranks.clusters.ssh:SshCluster",
    "pdsh": "allranks.clusters.pdsh:PdshCluster",
    **{kind: cluster for kind, (cluster, _) in schedulers.KINDS.items()},
}


def kind_for(loaded: LoadedJob, environ: Mapping[str, str]) -> ClusterKind:
    """Return the kind that a job runs on.

    It is the one that is named, else ssh for a job that names machines, else that of the allocation that this is in,
    else this machine.

    Raises:
        JobError: there is no such kind, or a scheduler is meant and none is named.
    """
    is_open, resources = loaded.sources["cluster"].kind == "default", loaded.job.resources
    if is_open and (resources.hosts or resources.hostfile):
        return load_kind("ssh")
    if is_open and contract.RUN_DIR not in environ:
        for name, scheduler in schedulers.environments():
            if scheduler.job(environ):
                return load_kind(name)
    if is_open:
        _refuse_on_login_node(loaded, environ)
    return load_kind(loaded.cluster.kind)


def _refuse_on_login_node(loaded: LoadedJob, environ: Mapping[str, str]) -> None:
    """Raise if a scheduler's flag was typed where it has a command: the job would run on this machine instead."""
    sources = loaded.sources.items()
    typed = [each.where for path, each in sources if path.startswith("scheduler.") and each.kind == "flag"]
    if not typed:
        return
    from shutil import which  # Not for all that need no scheduler.

    from allranks.clusters.batch.cluster import BatchCluster

    kinds = [load_kind(name) for name in dict.fromkeys((*schedulers.KINDS, *schedulers.kinds()))]
    batch = [kind.scheduler for kind in kinds if isinstance(kind, BatchCluster)]
    if here := [each for each in batch if which(each.submit, path=environ.get("PATH"))]:
        named = " or ".join(each.name for each in here if each.submit == here[0].submit)
        raise JobError(
            f"{typed[0]} is for a scheduler, and no cluster is given",
            why=f"the job would run on this machine, and {here[0].submit} is here",
            fix=f"--on lab, and in clusters.yaml: {{lab: {{kind: {named}}}}}; or leave {typed[0]} out",
        )


def load_kind(name: str) -> ClusterKind:
    """Return the kind of that name; raise a JobError if there is none."""
    if name in _BUILT_IN:
        module, _, attribute = _BUILT_IN[name].partition(":")
        kind: ClusterKind = getattr(import_module(module), attribute)()
        return kind
    found = {point.name: point for point in plugins.points(schedulers.CLUSTERS)}
    if name in found:
        other: ClusterKind = plugins.load(found[name], "kind of cluster")()
        return other
    why = f"the kinds are: {', '.join(schedulers.kinds())}"
    raise JobError(f"there is no kind of cluster {name!r}", why=why, fix="install the package that adds it again")
