"""The files that a Slurm cluster reads, as text: nothing here touches the machine."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: Slurm puts sockets below the spool directory, and the kernel takes 107 bytes for the path of one.
LONGEST_FOLDER = 70


@dataclass(frozen=True)
class Layout:
    """Where the files of one cluster are, all in one directory."""

    folder: Path

    @property
    def conf(self) -> Path:
        return self.folder / "etc" / "slurm.conf"

    @property
    def dbd_conf(self) -> Path:
        return self.folder / "etc" / "slurmdbd.conf"

    @property
    def munge_key(self) -> Path:
        return self.folder / "munge" / "munge.key"

    @property
    def munge_socket(self) -> Path:
        return self.folder / "munge" / "munge.socket"

    @property
    def database(self) -> Path:
        return self.folder / "db"

    def spool(self, node: str) -> Path:
        return self.folder / "spool" / node

    def log(self, name: str) -> Path:
        return self.folder / "log" / f"{name}.log"

    def gpu(self, node: str, number: int | str) -> Path:
        return self.folder / "dev" / node / f"gpu{number}"


@dataclass(frozen=True)
class Shape:
    """What a cluster looks like.

    Attributes:
        nodes: how many nodes.
        gpus: how many GPUs each has; only Slurm believes in them.
        gpu_type: their type, as in ``--gres=gpu:TYPE:2``; none by default.
        cpus: how many CPUs Slurm believes each to have.
        memory: its memory in MB, likewise.
        accounting: whether there is slurmdbd, with associations and QOS enforced.
        cgroups: whether Slurm holds jobs together, and to their memory, by control groups, as most sites do. Without,
            what leaves the process tree of its job outlives it, and there is no OUT_OF_MEMORY.
        extra: lines added to slurm.conf. Of a setting that is listed twice, the last counts.
    """

    nodes: int = 4
    gpus: int = 4
    gpu_type: str = ""
    cpus: int = 8
    memory: int = 32000
    accounting: bool = False
    cgroups: bool = False
    extra: str = ""


# sched_interval, batch_sched_delay, bf_interval, defer: jobs start at once, not at the next of the usual rounds.
# cred_expire: a requeued job waits for the credential of its last start to expire, 121 seconds by default.
# KillWait: between SIGTERM and SIGKILL at the time limit. SlurmdTimeout: until a silent node is DOWN.
# MinJobAge: jobs are remembered long enough for every test; SlurmCluster.forget_jobs() forgets them.
SLURM_CONF = """\
ClusterName=allranks
SlurmctldHost=ctl({addresses[ctl]})
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket},cred_expire=10
StateSaveLocation={layout.folder}/state
SlurmdSpoolDir={layout.folder}/spool/%n
SlurmctldPidFile={layout.folder}/state/slurmctld.pid
SlurmdPidFile={layout.folder}/spool/%n/slurmd.pid
SlurmctldLogFile={layout.folder}/log/slurmctld.log
SlurmdLogFile={layout.folder}/log/%n.log
SlurmctldDebug=info
SlurmdDebug=info
LogTimeFormat=iso8601_ms

{tracking}
MpiDefault=none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/linux
JobAcctGatherFrequency=task=1

SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu
DefMemPerCPU=4000
SchedulerType=sched/backfill
SchedulerParameters=batch_sched_delay=0,sched_interval=1,sched_min_interval=0,bf_interval=1,bf_min_age_reserve=0
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal

JobRequeue=1
ReturnToService=2
SlurmdTimeout=8
KillWait=30
MinJobAge=300
{accounting}
NodeName=DEFAULT CPUs={shape.cpus} RealMemory={shape.memory} State=UNKNOWN {gres}
{nodes}
PartitionName=DEFAULT Nodes=ALL State=UP MaxTime=60 DefaultTime=10 OverSubscribe=NO PreemptMode=OFF
PartitionName=main Default=YES PriorityTier=10
PartitionName=short MaxTime=1 DefaultTime=1 PriorityTier=10
PartitionName=low PriorityTier=1 PreemptMode=REQUEUE GraceTime=10
PartitionName=high PriorityTier=20
PartitionName=two MaxNodes=2 PriorityTier=10
PartitionName=closed State=DOWN
{shape.extra}
"""
BY_CGROUPS = """\
ProctrackType=proctrack/cgroup
TaskPlugin=task/cgroup"""
BY_PROCESS_TREE = """\
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherParams=OverMemoryKill"""
ACCOUNTING = """
AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost={addresses[ctl]}
AccountingStoragePass={layout.munge_socket}
AccountingStorageEnforce=associations,limits,qos
AccountingStorageTRES=gres/gpu
"""
DBD_CONF = """\
DbdHost=ctl
DbdAddr={addresses[ctl]}
SlurmUser=root
AuthType=auth/munge
AuthInfo=socket={layout.munge_socket}
PidFile={layout.folder}/state/slurmdbd.pid
LogFile={layout.folder}/log/slurmdbd.log
DebugLevel=info
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StorageUser=root
StorageLoc=slurm
"""
CGROUP_CONF = """\
CgroupPlugin=cgroup/{version}
ConstrainCores=no
ConstrainDevices=no
ConstrainRAMSpace={constrained}
ConstrainSwapSpace=no
"""


def files(shape: Shape, layout: Layout, addresses: dict[str, str], cgroup_v2: bool) -> dict[str, str]:
    """Return the text of each configuration file, by name. ``addresses`` has ``ctl`` and the nodes."""
    nodes = [name for name in addresses if name != "ctl"]
    last = shape.gpus - 1
    gpu = f"gpu:{shape.gpu_type}" if shape.gpu_type else "gpu"
    kind = f"Type={shape.gpu_type} " if shape.gpu_type else ""
    given = {
        "shape": shape,
        "layout": layout,
        "addresses": addresses,
        "accounting": ACCOUNTING.format(addresses=addresses, layout=layout) if shape.accounting else "",
        "tracking": BY_CGROUPS if shape.cgroups else BY_PROCESS_TREE,
        "gres": f"Gres={gpu}:{shape.gpus}" if shape.gpus else "",
        "nodes": "\n".join(f"NodeName={name} NodeAddr={addresses[name]}" for name in nodes),
    }
    gres = [f"NodeName={name} Name=gpu {kind}File={layout.gpu(name, f'[0-{last}]')}\n" for name in nodes if shape.gpus]
    cgroup = {"version": "v2" if cgroup_v2 else "v1", "constrained": "yes" if shape.cgroups else "no"}
    found = {
        "slurm.conf": SLURM_CONF.format(**given),
        "gres.conf": "AutoDetect=off\n" + "".join(gres),
        "cgroup.conf": CGROUP_CONF.format(**cgroup) + "IgnoreSystemd=yes\n" * cgroup_v2,
    }
    return {**found, "slurmdbd.conf": DBD_CONF.format(**given)} if shape.accounting else found
