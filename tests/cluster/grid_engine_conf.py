"""The files that a Grid Engine cluster reads, as text: nothing here touches the machine."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

#: Daemons and commands as they are in Debian, without its wrappers, and the templates of configurations.
PROGRAMS = Path("/usr/lib/gridengine")
TEMPLATES = Path("/usr/share/gridengine")
#: The node of the qmaster; commands of this machine run in its network.
MASTER = "ctl"


@dataclass(frozen=True)
class GridEngineShape:
    """What a cluster looks like.

    Attributes:
        nodes: how many nodes.
        slots: slots of each node.
        gpus: how many of the consumable ``gpu`` each node has; no real ones.
        notify: seconds from the signal of ``qsub -notify`` until SIGKILL.
        reschedule: seconds until the jobs of a silent node are rescheduled; 0: never, the default of Grid Engine.
    """

    nodes: int = 4
    slots: int = 8
    gpus: int = 4
    notify: int = 15
    reschedule: int = 0


BOOTSTRAP = """\
admin_user none
default_domain none
ignore_fqdn true
spooling_method classic
spooling_lib libspoolc
spooling_params {common};{spool}
binary_path {programs}
qmaster_spool_dir {spool}
security_mode none
listener_threads 2
worker_threads 2
scheduler_threads 1
"""
GPU = """\
name gpu
shortcut gpu
type INT
relop <=
requestable YES
consumable YES
default 0
urgency 0
"""
EXEC_HOST = """\
hostname {name}
load_scaling NONE
complex_values gpu={shape.gpus},slots={shape.slots}
user_lists NONE
xuser_lists NONE
projects NONE
xprojects NONE
usage_scaling NONE
report_variables NONE
"""
PARALLEL_ENVIRONMENT = """\
pe_name {name}
slots 999
user_lists NONE
xuser_lists NONE
start_proc_args NONE
stop_proc_args NONE
allocation_rule {rule}
control_slaves {tight}
job_is_first_task {first}
urgency_slots min
accounting_summary {summary}
qsort_args NONE
"""
STAFF = "name staff\ntype ACL\nfshare 0\noticket 0\nentries nobody\n"
#: Slots on each host, whether `qrsh -inherit` may start tasks, whether the job's script takes a slot of its own host,
#: whether qacct has one record of a job (or one of each task too).
PARALLEL_ENVIRONMENTS = {
    "smp": ("$pe_slots", "TRUE", "TRUE", "TRUE"),
    "fill": ("$fill_up", "TRUE", "FALSE", "FALSE"),
    "round": ("$round_robin", "TRUE", "FALSE", "FALSE"),
    "one": ("1", "TRUE", "FALSE", "TRUE"),
    "four": ("4", "TRUE", "FALSE", "TRUE"),
    "first": ("1", "TRUE", "TRUE", "TRUE"),
    "loose": ("4", "FALSE", "FALSE", "TRUE"),
}
# flush_*: jobs start at once, not at the next of the usual rounds.
SCHEDULER = {
    "schedule_interval": "0:0:1",
    "queue_sort_method": "seqno",
    "job_load_adjustments": "NONE",
    "flush_submit_sec": "1",
    "flush_finish_sec": "1",
}
#: What each queue has of its own; they are used in this order.
QUEUES = {
    "main.q": {},
    "short.q": {"h_rt": "00:01:00"},
    "staff.q": {"user_lists": "staff"},
    "closed.q": {"initial_state": "disabled"},
}


def changed(template: str, values: Mapping[str, str]) -> str:
    """Return a configuration with other values of some settings, each of which must be in it."""
    for name, value in values.items():
        template, found = re.subn(
            rf"^({name}\s+).*$", lambda line, to=value: line[1] + to, template, flags=re.MULTILINE
        )
        assert found == 1, name
    return template


def configuration(shape: GridEngineShape, spool: Path, template: str) -> str:
    """Return the configuration of a cluster, from Debian's."""
    values = {
        "execd_spool_dir": str(spool),
        "mailer": "/bin/true",
        "administrator_mail": "none",
        "min_uid": "0",
        "min_gid": "0",
        "load_report_time": "00:00:01",
        "max_unheard": "00:00:08",  # Until a silent node is unknown.
        "reschedule_unknown": f"00:00:{shape.reschedule:02}",
        "loglevel": "log_info",
        "execd_params": "ENABLE_ADDGRP_KILL=TRUE",  # Nothing that a job has started outlives it.
        "reporting_params": "accounting=true reporting=false flush_time=00:00:01 accounting_flush_time=00:00:00 "
        "joblog=false sharelog=00:00:00",
    }
    return changed(template, values)


def queue(name: str, number: int, shape: GridEngineShape, tmp: Path, template: str) -> str:
    """Return a queue, from the template of ``qconf -sq``."""
    values = {
        "qname": name,
        "hostlist": "@allhosts",
        "seq_no": str(number),
        "load_thresholds": "NONE",  # A busy machine would get no jobs.
        "pe_list": " ".join(PARALLEL_ENVIRONMENTS),
        "slots": str(shape.slots),
        "tmpdir": str(tmp),
        "notify": f"00:00:{shape.notify:02}",
    }
    return changed(template, {**values, **QUEUES[name]})


def spooled(shape: GridEngineShape, names: Iterable[str]) -> dict[str, str]:
    """Return what the qmaster finds in its spool when it starts: the text of each file, by path."""
    nodes = [*names]
    environments = {
        name: PARALLEL_ENVIRONMENT.format(name=name, rule=rule, tight=tight, first=first, summary=summary)
        for name, (rule, tight, first, summary) in PARALLEL_ENVIRONMENTS.items()
    }
    return {
        "managers": "root\n",
        "centry/gpu": GPU,
        "usersets/staff": STAFF,
        "hostgroups/@allhosts": f"group_name @allhosts\nhostlist {' '.join(nodes)}\n",
        **{f"exec_hosts/{name}": EXEC_HOST.format(name=name, shape=shape) for name in nodes},
        **{f"{kind}_hosts/{name}": f"hostname {name}\n" for kind in ("admin", "submit") for name in (MASTER, *nodes)},
        **{f"pe/{name}": text for name, text in environments.items()},
    }
