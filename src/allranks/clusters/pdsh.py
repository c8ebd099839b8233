"""Machines that pdsh reaches, in the way that is set up at a site: all else is as over SSH."""

from __future__ import annotations

from typing import TYPE_CHECKING

from allranks.clusters.pdsh_shell import OverPdsh
from allranks.clusters.ssh import SshCluster

if TYPE_CHECKING:
    from allranks.clusters.base import Request
    from allranks.plan.plan import Plan


class PdshCluster(SshCluster):
    """The kind ``pdsh``."""

    name = "pdsh"
    reach = OverPdsh()

    def plan(self, request: Request) -> Plan:
        """Decide what will be executed on the machines.

        Raises:
            JobError: the job asks for what cannot be had there, or its hosts cannot be read.
            PreflightError: ranks, GPUs and backend do not fit each other.
        """
        from allranks.clusters.pdsh_plan import make_plan

        return make_plan(request)
