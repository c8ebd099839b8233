"""Plays Python, and what starts ranks of PyTorch on a node: torchrun, accelerate, deepspeed."""

from __future__ import annotations

import os
import re

from allranks.convert.recorder.allranks_job import agent, supervise
from allranks.convert.recorder.common import FACTS, HOST, LAUNCHERS, VIA, Env, find, number, options, rank, text_of
from allranks.convert.recorder.hosts import LOCAL, OF_RANK, hosts_in, meeting, place_of, tasks


def python(words: list[str], env: Env, cwd: str) -> int:
    """Play an interpreter, and the launchers that are modules of it."""
    found, rest = find(words[0], env, cwd), list(words[1:])
    flags: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-":
        flag = rest.pop(0)
        if flag == "-m" and rest:
            name = FACTS.modules.get(rest[0])
            if name:
                return launch(name, rest[1:], [found, *flags], env, cwd)
            return rank("module", rest[0], rest[1:], [found, *flags], env, cwd)
        if flag == "-c":
            return answer(rest[0] if rest else "")
        flags += [flag, *([rest.pop(0)] if flag in ("-W", "-X") and rest else [])]
    if not rest or rest[0] == "-":
        return 0
    if "ALLRANKS_RUN_DIR" in env and rest[0] == env["ALLRANKS_RUN_DIR"] + "/code":
        return supervise(env, cwd) if rest[1] == "--supervise" else agent(rest[1], [found, *flags], env, cwd)
    name = os.path.basename(rest[0])
    if name in LAUNCHERS:
        return launch(name, rest[1:], [found, *flags], env, cwd)
    return rank("script", rest[0], rest[1:], [found, *flags], env, cwd)


def answer(code: str) -> int:
    """Answer a line of Python that a script asks, as far as one can guess what: GPUs, a port, or an address."""
    if "device_count" in code:
        print(FACTS.gpus or 1)  # On a machine without GPUs the job has one rank.
    elif "socket" in code or "port" in code:
        print(29500)
    return 0


def by_name(words: list[str], env: Env, cwd: str) -> int:
    """Play a launcher that is called by its name: its interpreter is beside it, but for ``pip install --user``."""
    path = find(words[0], env, cwd)
    is_beside = "/" in path and "/.local/bin/" not in path
    beside = os.path.join(os.path.dirname(path), "python") if is_beside else find("python", env, cwd)
    return launch(os.path.basename(words[0]), words[1:], [beside], env, cwd)


def launch(name: str, words: list[str], interpreter: list[str], env: Env, cwd: str) -> int:
    """Play torchrun and its like on one node: start each of its ranks."""
    if name == "accelerate":
        if words[:1] != ["launch"] and words and words[0] in ("config", "env", "test", "estimate-memory"):
            return 0
        words = words[1:] if words[:1] == ["launch"] else words
    given, rest = options(name, words)
    if not rest:
        return 2
    before = [] if "--no-python" in given else interpreter
    if "--module" in given or "-m" in given:
        before = [*interpreter, "-m"]
    starts = {"accelerate": accelerate, "deepspeed": deepspeed}.get(name, torchrun)
    return starts(given, before, rest, {**env, VIA: name}, cwd)


def torchrun(given: dict[str, str], before: list[str], rest: list[str], env: Env, cwd: str) -> int:
    """Play torchrun, or torch.distributed.launch, on its node."""

    def value(key: str) -> str | None:
        return given.get(f"--{key.replace('_', '-')}") or env.get(f"PET_{key.upper()}")

    nodes, wanted, endpoint = number(value("nnodes"), 1), value("nproc_per_node"), value("rdzv_endpoint")
    if ":" in (value("nnodes") or ""):  # From as many as there are on.
        nodes = min(nodes, max(len(FACTS.hosts), number((value("nnodes") or "").partition(":")[0], 1)))
    count = FACTS.cpus if wanted == "cpu" else FACTS.gpus or 1 if wanted in ("gpu", "auto") else number(wanted, 1)
    if "--standalone" not in given and value("rdzv_backend") in (None, "", "static"):
        node = number(value("node_rank"), 0)
    else:
        node = place_of(env.get(HOST, "")) if nodes > 1 else 0
    address, _, port = (endpoint or "").partition(":")
    master = (address, port) if endpoint else (given.get("--master-addr"), given.get("--master-port"))
    inserted = [f"--local-rank={LOCAL}"] if env[VIA].endswith(".launch") and "--use-env" not in given else []
    words, counts = [*before, rest[0], *inserted, *rest[1:]], [(env.get(HOST, ""), count)]
    return tasks(counts, words, env, cwd, OF_RANK, meeting(*master), node=node, nodes=nodes)


def accelerate(given: dict[str, str], before: list[str], rest: list[str], env: Env, cwd: str) -> int:
    """Play accelerate launch on its node."""
    config = config_in(text_of(given["--config-file"], cwd)) if given.get("--config-file") else {}

    def value(key: str) -> str | None:
        return given.get(f"--{key.replace('_', '-')}") or (config.get(key) if config.get(key) != "no" else None)

    if precision := value("mixed_precision"):
        env["ACCELERATE_MIXED_PRECISION"] = precision
    if (gpus := value("gpu_ids")) and gpus != "all":
        env["CUDA_VISIBLE_DEVICES"] = gpus
    nodes, node = number(value("num_machines"), 1), number(value("machine_rank"), 0)
    if nodes > 1 and value("rdzv_backend") not in (None, "static"):  # Nodes are then numbered when they meet.
        node = place_of(env.get(HOST, ""))
    count = number(value("num_processes"), (FACTS.gpus or 1) * nodes) // nodes
    counts, master = [(env.get(HOST, ""), count)], meeting(value("main_process_ip"), value("main_process_port"))
    return tasks(counts, [*before, *rest], env, cwd, OF_RANK, master, node=node, nodes=nodes)


def config_in(text: str) -> dict[str, str]:
    """Return the top level of the file of ``accelerate config``."""
    return {key: value.strip("\"' \r") for key, value in re.findall(r"^(\w+):[ \t]*([^#\n]*)", text, re.MULTILINE)}


def deepspeed(given: dict[str, str], before: list[str], rest: list[str], env: Env, cwd: str) -> int:
    """Play deepspeed, which starts the ranks of all nodes."""
    slots = hosts_in(given["--hostfile"], cwd) if given.get("--hostfile") else [(env.get(HOST, ""), 0)]
    slots = slots[: number(given.get("--num-nodes"), len(slots))]
    count = number(given.get("--num-gpus"), slots[0][1] or FACTS.gpus or 1)
    inserted = [] if "--no-local-rank" in given else [f"--local_rank={LOCAL}"]
    words, master = (
        [*before, rest[0], *inserted, *rest[1:]],
        meeting(given.get("--master-addr"), given.get("--master-port")),
    )
    return tasks([(host, count) for host, _ in slots], words, env, cwd, OF_RANK, master)
