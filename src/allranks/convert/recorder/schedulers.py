"""Plays what starts tasks on the hosts of an allocation: srun, mpirun, pbsdsh, pbs_tmrsh, qrsh; and scontrol."""

from __future__ import annotations

import os
import re

from allranks.convert.recorder.common import FACTS, HOST, VIA, WITHIN, Env, number, options, start, text_of
from allranks.convert.recorder.hosts import hosts_in, on, place_of, spread, tasks
from allranks.convert.recorder.remote import login, shell
from allranks.system.hostlist import expand

_OF_STEP = """
    SLURM_PROCID={rank} SLURM_LOCALID={local} SLURM_NODEID={node} SLURMD_NODENAME={host} SLURM_STEP_ID=0
    SLURM_NTASKS={total} SLURM_NPROCS={total} SLURM_STEP_NUM_TASKS={total} SLURM_NNODES={nodes}
    SLURM_STEP_NODELIST={hosts} SLURM_TASKS_PER_NODE={count}
"""
_OF_MPI = """
    OMPI_COMM_WORLD_RANK={rank} OMPI_COMM_WORLD_SIZE={total} OMPI_COMM_WORLD_LOCAL_RANK={local}
    OMPI_COMM_WORLD_LOCAL_SIZE={count} PMI_RANK={rank} PMI_SIZE={total} MPI_LOCALRANKID={local}
"""


def srun(words: list[str], env: Env, cwd: str) -> int:
    """Play srun in the allocation."""
    given, rest = options("srun", words[1:])
    named, total = given.get("--nodelist"), given.get("--ntasks")
    hosts = [*expand(named)] if named else FACTS.hosts[number(given.get("--relative"), 0) :]
    asked = given.get("--nodes") or (None if named else env.get("SLURM_NNODES"))
    hosts = hosts[: number(asked, len(hosts))]
    per_node = given.get("--ntasks-per-node") or env.get("SLURM_NTASKS_PER_NODE")
    if per_node and not total:
        counts = [(host, number(per_node, 1)) for host in hosts]
    else:
        total = total or (None if given.get("--nodes") else env.get("SLURM_NTASKS"))
        counts = spread(number(total, len(hosts)), hosts)
    counts = [each for each in counts if each[1]]
    sets = dict(each.split("=", 1) for each in given.get("--export", "").split(",") if "=" in each)
    env, cwd = {**env, VIA: "srun", **sets, **container_of(given)}, os.path.join(cwd, given.get("--chdir") or cwd)
    return tasks(counts, rest, env, cwd, _OF_STEP, {"hosts": ",".join(host for host, _ in counts)})


def container_of(given: dict[str, str]) -> Env:
    """Return what says that a step of srun runs in a container; empty if it does not."""
    image = given.get("--container-image")
    return {WITHIN: f"--container-image={image}"} if image else {}


def mpirun(words: list[str], env: Env, cwd: str) -> int:
    """Play mpirun of Open MPI and of Hydra, with as many tasks on each host."""
    given, rest = options("mpirun", words[1:])
    if given.get("-H"):
        named = (each.partition(":") for each in given["-H"].split(","))
        here = env.get(HOST, "")
        slots = [(here if host == "localhost" else host, number(count, 0)) for host, _, count in named]
    elif given.get("--hostfile"):
        slots = hosts_in(given["--hostfile"], cwd)
    else:
        slots = [(host, 0) for host in FACTS.hosts]
    per_node, total = number(given.get("--npernode"), 0), number(given.get("-n"), 0)
    if found := re.match(r"ppr:(\d+):node", given.get("--map-by", "")):
        per_node = int(found[1])
    if per_node:
        counts = [(host, per_node) for host, _ in slots[: -(-total // per_node) or None]]
    elif total:
        counts = spread(total, [host for host, _ in slots])
    else:
        counts = [(host, count or FACTS.tasks or 1) for host, count in slots]
    sets = dict(each.split("=", 1) for each in given.get("-x", "").split("\n") if "=" in each)
    cwd = os.path.join(cwd, given.get("-wdir") or cwd)
    return tasks([each for each in counts if each[1]], rest, {**env, **sets, VIA: "mpirun"}, cwd, _OF_MPI, {})


def pbsdsh(words: list[str], env: Env, cwd: str) -> int:
    """Play pbsdsh: a command for each line of the node file, with an environment that has only the job's variables."""
    given, rest = options("pbsdsh", words[1:])
    lines = text_of(env["PBS_NODEFILE"], cwd).split()
    hosts = list(dict.fromkeys(lines)) if "-u" in given else lines
    for host in [hosts[number(given["-n"], 0)]] if given.get("-n") else hosts:
        at = {"PBS_NODENUM": str(place_of(host)), "PBS_VNODENUM": str(hosts.index(host)), VIA: "pbsdsh"}
        start(rest, login(host, **of_pbs(env), **at), env["HOME"])
    return 0


def on_a_host(words: list[str], env: Env, cwd: str) -> int:
    """Play pbs_tmrsh, blaunch, and ``qrsh -inherit``."""
    host, *rest = (word for word in words[1:] if word not in ("-inherit", "-nostdin", "-V", "-n"))
    name = os.path.basename(words[0])
    if name == "pbs_tmrsh":
        return shell([host], " ".join(rest), of_pbs(env))
    return start(rest, {**on(host, env), VIA: name}, cwd)


def of_pbs(env: Env) -> Env:
    """Return the variables that PBS sets for a job."""
    return {name: value for name, value in env.items() if name.startswith("PBS_")}


def scontrol(words: list[str], env: Env, cwd: str) -> int:
    """Print hosts one by one."""
    if words[1:3] in (["show", "hostnames"], ["show", "hostname"]):
        hosts = words[3] if len(words) > 3 else env.get("SLURM_JOB_NODELIST", "")
        print(*(expand(hosts) if hosts else ()), sep="\n")
    return 0
