"""Plays allranks' own supervisor of a batch job and the agent of a node: the job file's side of a comparison."""

from __future__ import annotations

import json

from allranks.convert.recorder.common import FACTS, HOST, VIA, Env, options, text_of
from allranks.convert.recorder.hosts import OF_RANK, meeting, tasks
from allranks.convert.recorder.schedulers import container_of

_OF_NODE = """
    ALLRANKS_ATTEMPT=0 ALLRANKS_RDZV_HOST={first} ALLRANKS_RDZV_PORT=20000 ALLRANKS_NODE_COUNT={nodes}
    ALLRANKS_NODE_NPROC={nproc} ALLRANKS_NODE_RANK={node}
"""
_OF_SLURM = "SLURMD_NODENAME={host} SLURM_PROCID={node} SLURM_NODEID={node} SLURM_LOCALID=0 SLURM_GPUS_ON_NODE={gpus}"


def supervise(env: Env, cwd: str) -> int:
    """Play the supervisor of a batch job: it starts node.sh on each host."""
    folder, hosts = env["ALLRANKS_RUN_DIR"], FACTS.hosts
    spec, batch = (json.loads(text_of(f"{folder}/{name}.json", cwd)) for name in ("node", "supervisor"))
    given, _ = options("srun", batch["options"])
    of_node = {"first": hosts[0], "nproc": spec["nproc_per_node"], "gpus": FACTS.gpus}
    variables = _OF_NODE + (_OF_SLURM if "SLURM_JOB_ID" in env else "")
    words, env = ["bash", f"{folder}/node.sh"], {**env, **container_of(given)}
    return tasks([(host, 1) for host in hosts], words, env, cwd, variables, of_node)


def agent(path: str, interpreter: list[str], env: Env, cwd: str) -> int:
    """Play a node's agent: it starts the ranks."""
    spec = json.loads(text_of(path, cwd))
    names = {"NODE_RANK": "node", "NODE_COUNT": "nnodes", "NODE_NPROC": "nproc_per_node"}
    node, nodes, nproc = (int(env.get(f"ALLRANKS_{name}") or spec[key]) for name, key in names.items())
    before = {"script": interpreter, "module": [*interpreter, "-m"], "binary": []}[spec["kind"]]
    address, port = env.get("ALLRANKS_RDZV_HOST"), env.get("ALLRANKS_RDZV_PORT")
    place = meeting(address or spec["master_addr"], port or spec["master_port"])
    words, counts = [*before, spec["target"], *spec["args"]], [(env.get(HOST, ""), nproc)]
    return tasks(counts, words, {**env, VIA: "allranks"}, cwd, OF_RANK, place, node=node, nodes=nodes)
