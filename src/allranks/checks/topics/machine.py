"""What each node has: CPUs, memory, disk space, limits, and what is left of earlier runs."""

from __future__ import annotations

from typing import Any

from allranks.checks.model import Finding, Grade, Node, Seen, failed, passed, warned
from allranks.checks.registry import on_each_node
from allranks.job.units import format_count, format_size
from allranks.plan.layout import CROWDED, MOST_RANKS_PER_CPU

#: A batch of 64 images of 224 x 224 x 3 as float32 takes 39 MB, and a worker has two of them under way: room for three
#: workers. Docker gives 64 MiB.
_SHM_LOW = 256 << 20
#: Memory that a rank takes which has imported torch and done nothing, about.
_MEMORY_OF_A_RANK = 250 << 20
#: No rank takes less: an interpreter that has imported nothing.
_MEMORY_LEAST = 16 << 20
_ROOM_LOW, _FILES_LOW = 1 << 30, 1000
#: Even where GPUs talk to the device directly, NCCL sends short messages to each peer from 512 KiB in the memory of the
#: host, which are locked. Where they do not, it is megabytes for each; systemd gives 8 MiB, older kernels gave 64 KiB.
_MEMLOCK_LEAST = 512 << 10
#: What NCCL_NET may say where NCCL's own InfiniBand is to be used.
_NETS = ("", "IB")
#: A data loader's worker has several open for each batch under way, a rank one for each peer.
_OPEN_LOW = 4096
#: Ranks, workers of their data loaders, and the threads of both.
_PROCESSES_PER_RANK = 256
_LEFT_NAMED = 3


@on_each_node("cpus", why="ranks that share a CPU, or workers without one, keep the GPUs waiting", fact="cpus")
def cpus(fact: Any, node: Node, seen: Seen) -> Finding:
    """Compare the CPUs that a node gives with those that are requested, and with its ranks."""
    given, requested, ranks = fact["allowed"], seen.job.resources.cpus_per_node, seen.plan.nproc_per_node
    what = f"{given} of {format_count(fact['all'], 'CPU')} may be used"
    if requested and given < requested:
        return warned(f"{what}, and {requested} are requested", fix=f"--cpus-per-node {given}, or a node with more")
    if ranks > given * MOST_RANKS_PER_CPU and seen.plan.backend != "nccl":
        fix = f"--nproc-per-node {given}; --no-check starts them regardless"
        return failed(f"{what}, by {format_count(ranks, 'rank')}", fix=fix, why=CROWDED)
    if given < ranks:
        return warned(f"{what}, by {format_count(ranks, 'rank')}", fix=f"--nproc-per-node {given}, or more CPUs")
    return passed(what)


@on_each_node("memory", why="the kernel kills a rank when there is no memory left", fact="memory")
def memory(fact: Any, node: Node, seen: Seen) -> Finding:
    """Compare the memory that is free on a node with what is requested, and with what bare ranks take."""
    limit, free, requested = fact["limit"], fact["available"], seen.job.resources.memory
    bound = f", of which this process may use {format_size(limit)}" if limit else ""
    what = f"{format_size(free)} of {format_size(fact['total'])} free{bound}"
    usable, fix = min(free, limit or free), "see what uses it: ps aux --sort=-rss | head"
    if requested and usable < requested:
        return warned(f"{what}; {format_size(requested)} are requested", fix=fix)
    ranks, most = seen.plan.nproc_per_node, min(fact["total"], limit or fact["total"])
    fewer = f"--nproc-per-node {max(1, most // _MEMORY_OF_A_RANK)}, or a node with more"
    if most < ranks * _MEMORY_LEAST:
        what = f"{what}; {format_count(ranks, 'rank')} take {format_size(ranks * _MEMORY_LEAST)} at least"
        return failed(what, fix=fewer)
    if usable >= ranks * _MEMORY_OF_A_RANK:
        return passed(what)
    if most < ranks * _MEMORY_OF_A_RANK:  # It would not do if nothing else ran there.
        fix = fewer
    return warned(f"{what}; the ranks ({ranks}) take about {format_size(ranks * _MEMORY_OF_A_RANK)}", fix=fix)


@on_each_node(
    "shm", why="data loader workers pass batches through /dev/shm, and die of SIGBUS when it is full", fact="shm"
)
def shm(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check the space for shared memory."""
    if fact is None:
        return warned("there is no /dev/shm", fix="mount a tmpfs there, or use data loaders without workers")
    what = f"{format_size(fact['free'])} of {format_size(fact['all'])} free"
    if fact["free"] < _SHM_LOW:
        fix = "make it larger (mount -o remount,size=8G /dev/shm; docker run --shm-size), or free it: ls -l /dev/shm"
        return warned(what, fix=fix)
    return passed(what)


@on_each_node("room", why="a run cannot save checkpoints to a full disk", fact="disks")
def room(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check the directories that a job writes to: the run's, those of its checkpoints, the one for temporary files."""
    return max((_room(*each) for each in fact.items()), key=lambda found: [*Grade].index(found.grade))


def _room(purpose: str, disk: Any) -> Finding:
    what = f"{format_size(disk['free'])} free in {disk['path']} ({purpose})"
    if disk["error"] and purpose == "runs":
        return failed(f"{disk['path']} cannot be written: {disk['error']}", fix="free some space, or --runs-folder DIR")
    if disk["error"]:
        return warned(f"{disk['path']} ({purpose}) cannot be written: {disk['error']}", fix="free some space there")
    # File systems that make room for files as they need it report 0 free of 0.
    if disk["free"] < _ROOM_LOW or 0 < disk["files"] < _FILES_LOW:
        return warned(f"{what}, for {disk['files']} files", fix=f"free some: du -xh {disk['there']} | sort -h | tail")
    return passed(what)


@on_each_node(
    "memlock",
    why="InfiniBand needs locked memory: NCCL fails without it",
    fact="limits",
    also=("infiniband", "variables"),
)
def memlock(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check how much memory may be locked, where NCCL uses InfiniBand or RoCE."""
    soft, _ = fact["memlock"]
    what = "unlimited" if soft is None else format_size(soft)
    if soft is not None and fact["locks_any"]:
        return passed(f"{what}, which does not bind a process with CAP_IPC_LOCK")
    values = node.facts.get("variables", {}).get("values", {})
    sockets = values.get("NCCL_IB_DISABLE", "") not in ("", "0") or values.get("NCCL_NET", "").lower() == "socket"
    ports = [port for port in node.facts.get("infiniband") or () if port["state"] == "ACTIVE"]
    if soft is None or sockets or not ports or not fact["verbs"] or seen.plan.backend != "nccl" or len(seen.nodes) < 2:
        return passed(what)
    port = min(ports, key=lambda port: port["layer"] != "InfiniBand")
    # It is sure that NCCL goes by that port where nothing that is set, or not yet, may have it go another way.
    is_chosen = values.get("NCCL_IB_HCA") or values.get("NCCL_NET_PLUGIN") or values.get("NCCL_NET", "") not in _NETS
    is_sure = port["layer"] == "InfiniBand" and "variables" in node.facts and seen.is_prepared and not is_chosen
    fix = "'memlock unlimited' in /etc/security/limits.conf, LimitMEMLOCK=infinity for slurmd or sshd"
    make = failed if soft < _MEMLOCK_LEAST and is_sure else warned
    return make(f"{what}, and {port['device']} is active", fix=fix)


@on_each_node(
    "open-files", why="data loaders with workers, and many peers, exhaust the limit on open files", fact="limits"
)
def open_files(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check how many files a process may have open; it can raise its own limit to the hard one."""
    soft, hard = fact["nofile"]
    what = "unlimited" if soft is None else f"{soft}, at most {hard or 'unlimited'}"
    if hard is not None and hard < _OPEN_LOW:
        return warned(what, fix="'nofile 65536' in /etc/security/limits.conf, LimitNOFILE=65536 for slurmd or sshd")
    return passed(what)


@on_each_node("processes", why="ranks and the workers of their data loaders cannot start", fact="limits")
def processes(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check how many processes and threads the user may have."""
    soft, tasks = fact["nproc"][0], fact["tasks"]
    bounds = [each for each in (soft, tasks) if each is not None]
    what = str(min(bounds)) if bounds else "unlimited"
    most = min((each for each in (*bounds, fact.get("kernel")) if each is not None), default=None)
    if most is not None and most < seen.plan.nproc_per_node:
        ranks = format_count(seen.plan.nproc_per_node, "rank")
        return failed(f"{most} at most, and {ranks} are requested", fix=f"--nproc-per-node {most} or fewer")
    if bounds and min(bounds) < seen.plan.nproc_per_node * _PROCESSES_PER_RANK:
        of_group = "TasksMax=infinity for slurmd or sshd, docker run --pids-limit -1"
        return warned(what, fix=of_group if min(bounds) == tasks else "'nproc unlimited' in /etc/security/limits.conf")
    return passed(what)


@on_each_node("leftovers", why="processes left by an earlier run occupy GPUs, memory and ports", fact="leftovers")
def leftovers(fact: Any, node: Node, seen: Seen) -> Finding:
    """Check for processes of the user's earlier runs that nothing watches any more."""
    if not fact:
        return passed("none")
    reported = [f"{each['pid']} ({each['command']}, {format_size(each['memory'])})" for each in fact[:_LEFT_NAMED]]
    more = f" and {len(fact) - _LEFT_NAMED} more" if len(fact) > _LEFT_NAMED else ""
    pids = " ".join(str(each["pid"]) for each in fact)
    what = f"{len(fact)} of {fact[0]['run']}: {', '.join(reported)}{more}"
    return warned(what, fix=f"kill {pids}" if len(seen.nodes) == 1 else f"ssh {node.host} kill {pids}")
