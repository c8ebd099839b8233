"""The kinds of cluster, loaded when they are asked for; other packages add theirs by entry point."""

from __future__ import annotations

from importlib import import_module

from allranks.clusters.base import ClusterKind
from allranks.errors import JobError
from allranks.job.problems import did_you_mean

_BUILT_IN = {"local": "allranks.clusters.local:LocalCluster"}
_GROUP = "allranks.clusters"


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
