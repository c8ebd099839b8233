"""Every command of the sandbox that is not harmless: it does nothing, and records what it would have started.

Commands that start others (srun, mpirun, ssh, torchrun, …) start these, once for each task or rank, with the variables
that they set. What comes out at the end, a Python or a program, is recorded as a rank, and not started. allranks' own
supervisor and agent are recorders here too, so that the job file's side is what its plan starts.

The standard library alone: it is copied into the sandbox.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

Env = dict[str, str]
Part = Callable[[list[str], Env, str], int]
Counts = Sequence[tuple[str, int]]

HERE = "/.allranks"
RECORDS = "/.allranks-records/all"
#: The host that a command runs on, what it runs in (a container, ``uv run``), and who started it.
HOST, WITHIN, VIA = "_RECORDER_HOST", "_RECORDER_WITHIN", "_RECORDER_VIA"
PYTHON = re.compile(r"python(?:\d(?:\.\d+)?)?|ipython3?")
#: First on PATH: what environments that are active where allranks runs have too, one of them as a recorder.
FIRST = f"{HERE}/first"
BINS = (FIRST, "/bin", "/usr/bin", "/usr/local/bin", "/sbin", "/usr/sbin")
#: Of a login.
PATH = "/usr/local/bin:/usr/bin:/bin"
WRAPPERS = ("numactl", "taskset", "stdbuf", "unbuffer", "ionice", "time", "catchsegv", "nsys")
LOOSE = ("singularity", "apptainer", "docker", "podman", "shifter", "sarus", "enroot", "conda", "mamba", "micromamba")
RUNNERS = ("uv", "poetry", "pipenv", "pixi")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
#: They print, wait, or end other processes: no job needs them.
_QUIET_NAMES = """
    sleep squeue sinfo sacct clear tput ps pgrep pkill killall kill uptime free df du lscpu lspci nvcc ip ifconfig
    ibstat ibv_devinfo rocm-smi module ml ulimit nvidia-cuda-mps-control scancel sync qstat pbsnodes
"""
QUIET = frozenset(_QUIET_NAMES.split())
FACTS: dict[str, Any] = {}


def record(**what: object) -> None:
    """Add an object to what is recorded, in one piece."""
    line = (json.dumps(what) + "\n").encode()
    file = os.open(RECORDS, os.O_WRONLY | os.O_APPEND)
    os.write(file, line)
    os.close(file)


def options(name: str, words: Sequence[str]) -> tuple[dict[str, str], list[str]]:
    """Return the options of a command, by their usual names, each with its last value, and the words that follow."""
    valued, same, attaches = FACTS["options"].get(name, [[], {}, False])
    given: dict[str, str] = {}
    words = list(words)
    while words and words[0].startswith("-") and words[0] != "-":
        word = words.pop(0)
        if word == "--":
            break
        typed, equals, value = word.partition("=")
        if attaches and not word.startswith("--"):
            typed, equals, value = word[:2], word[2:], word[2:].removeprefix("=")
        typed = "--" + typed[2:].replace("_", "-") if typed.startswith("--") else typed
        key = same.get(typed, typed)
        if key in ("--mca", "-mca", "--gmca", "--prtemca"):
            del words[:2]
        elif key in ("-genv", "-env"):
            given["-x"] = given.get("-x", "") + "=".join(words[:2]) + "\n"
            del words[:2]
        elif key == "-x" and name.startswith(("mpi", "orte")):
            given["-x"] = given.get("-x", "") + words.pop(0) + "\n"
        else:
            given[key] = value if equals else words.pop(0) if key in valued and words else ""
    return given, words


def number(text: str | None, otherwise: int) -> int:
    """Return the last number of ``2``, ``1:2`` or ``1-2``."""
    found = re.fullmatch(r"(?:\d+[:-])?(\d+)", (text or "").strip())
    return int(found[1]) if found else otherwise


def expand(text: str) -> list[str]:
    """Return the hosts of ``n[01-03,07],m1``."""
    hosts = []
    for name in re.findall(r"(?:[^,\[\]\s]|\[[^\]]*\])+", text):
        found = re.fullmatch(r"([^\[]*)\[([^\]]*)\](.*)", name)
        if found is None:
            hosts.append(name)
            continue
        for part in found[2].split(","):
            first, _, last = part.partition("-")
            for each in range(int(first), int(last or first) + 1):
                hosts += expand(f"{found[1]}{each:0{len(first)}}{found[3]}")
    return hosts


def hosts_in(path: str, cwd: str) -> list[tuple[str, int]]:
    """Return the hosts of a file, each with its slots; 0 where it has none."""
    lines = [line.split("#")[0].split() for line in Path(cwd, os.path.expanduser(path)).read_text().splitlines()]
    found: dict[str, int] = {}
    for words in filter(None, lines):
        host, _, count = words[0].rpartition("@")[2].partition(":")
        slots = next((word.partition("=")[2] for word in words[1:] if word.startswith("slots=")), count)
        found[host] = int(slots) if slots else 0
    return list(found.items())


def place_of(host: str) -> int:
    """Return the number of a host among those of the allocation."""
    hosts = FACTS["hosts"]
    return hosts.index(host) if host in hosts else len(hosts)


def login(host: str, **more: str) -> Env:
    """Return the environment of a new login on a host."""
    kept = {name: os.environ[name] for name in ("HOME", "USER", "BASH_ENV", "LC_ALL") if name in os.environ}
    return {**kept, "PATH": PATH, HOST: host, "HOSTNAME": host, **more}


def on(host: str, env: Env) -> Env:
    """Return an environment that a command takes along to a host."""
    return {**env, HOST: host, "HOSTNAME": host}


def find(name: str, env: Env, cwd: str) -> str:
    """Return where the shell would have found a command outside of the sandbox; its name if on the usual path."""
    if "/" in name:
        return os.path.normpath(os.path.join(cwd, name))
    for folder in env.get("PATH", "").split(":"):
        path = os.path.join(folder, name)
        # A virtual environment that is not on this machine has the commands that it is activated for.
        is_elsewhere = folder == f"{env.get('VIRTUAL_ENV')}/bin" and not os.path.exists(f"{folder}/python")
        if folder.rstrip("/") not in BINS and (is_elsewhere or os.path.isfile(path)):
            return os.path.normpath(path)
    return name


def start(words: list[str], env: Env, cwd: str) -> int:
    """Start a command as another one does; a recorder in this process."""
    name = os.path.basename(words[0])
    if is_recorder(name):
        return play(words, env, cwd)
    path = Path(cwd, words[0])
    if "/" in words[0] and path.is_file() and not os.access(path, os.X_OK):
        first = path.read_bytes()[:200].split(b"\n")[0]
        if first.startswith(b"#!") and re.search(rb"(ba)?sh\b", first):
            words = ["bash", *words]
        elif first.startswith(b"#!") and b"python" in first:
            words = ["python", *words]
            return play(words, env, cwd)
    try:
        return subprocess.run(words, env=env, cwd=cwd).returncode
    except OSError:
        return rank("binary", words[0], words[1:], [], env, cwd)


def rank(kind: str, path: str, args: Sequence[str], python: list[str], env: Env, cwd: str) -> int:
    """Record a rank, or a command that is none: who reads the record decides."""
    if kind == "script":
        path = os.path.normpath(os.path.join(cwd, path))
    where = {"cwd": cwd, "host": env.get(HOST), "files": files_in(args, cwd)}
    record(kind=kind, path=path, args=list(args), python=python, env=env, **where)
    return 0


def files_in(args: Sequence[str], cwd: str) -> dict[str, str]:
    """Return the checksums of the files that arguments name; of large ones, which no script has just written, none."""
    paths = {word: Path(cwd, word.rpartition("=")[2]) for word in args}
    found = {word: path for word, path in paths.items() if path.is_file() and path.stat().st_size < 1_000_000}
    return {word: f"crc {zlib.crc32(path.read_bytes()):08x}" for word, path in found.items()}


def is_recorder(name: str) -> bool:
    """Return whether this file plays a command."""
    return bool(PYTHON.fullmatch(name)) or name in PARTS or name in QUIET


def play(words: list[str], env: Env, cwd: str) -> int:
    """Play the part of a command."""
    name = os.path.basename(words[0])
    if PYTHON.fullmatch(name):
        return python(words, env, cwd)
    if name in QUIET:
        return 0
    part = PARTS.get(name)
    if part is None:
        return rank("binary", words[0], words[1:], [], env, cwd)
    return part(words, env, cwd)


def python(words: list[str], env: Env, cwd: str) -> int:
    """Play an interpreter, and the launchers that are modules of it."""
    found, rest = find(words[0], env, cwd), list(words[1:])
    flags: list[str] = []
    while rest and rest[0].startswith("-") and rest[0] != "-":
        flag = rest.pop(0)
        if flag == "-m" and rest:
            name = FACTS["modules"].get(rest[0])
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
        print(FACTS["gpus"])
    elif "socket" in code or "port" in code:
        print(29500)
    return 0


def by_name(words: list[str], env: Env, cwd: str) -> int:
    """Play a launcher that is called by its name: its interpreter is the one beside it."""
    path = find(words[0], env, cwd)
    beside = os.path.join(os.path.dirname(path), "python") if "/" in path else "python"
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
    env, gpus = {**env, VIA: name}, FACTS["gpus"] or 1
    inserted: list[str] = []
    nodes, node, master = [env.get(HOST, "")], 0, (given.get("--master-addr"), given.get("--master-port"))
    if name == "accelerate":
        config = read_config(given.get("--config-file"), cwd)
        value = {key: given.get(f"--{key.replace('_', '-')}") or config.get(key) for key in (*CONFIG, *config)}
        count, node = number(value["num_machines"], 1), number(value["machine_rank"], 0)
        nproc = number(value["num_processes"], gpus * count) // count
        master = (value["main_process_ip"], value["main_process_port"])
        if value["mixed_precision"]:
            env["ACCELERATE_MIXED_PRECISION"] = value["mixed_precision"]
        if value["gpu_ids"] not in (None, "", "all"):
            env["CUDA_VISIBLE_DEVICES"] = value["gpu_ids"]
    elif name == "deepspeed":
        slots = hosts_in(given["--hostfile"], cwd) if given.get("--hostfile") else [(env.get(HOST, ""), 0)]
        slots = slots[: number(given.get("--num-nodes"), len(slots))]
        nodes, count = [host for host, _ in slots], len(slots)
        nproc = number(given.get("--num-gpus"), slots[0][1] or gpus)
        inserted = [] if "--no-local-rank" in given else ["--local_rank={}"]
    else:
        text = {key: given.get(f"--{key.replace('_', '-')}") or env.get(f"PET_{key.upper()}") for key in PET}
        count = number(text["nnodes"], 1)
        wanted = text["nproc_per_node"]
        nproc = gpus if wanted in ("gpu", "auto") else FACTS["cpus"] if wanted == "cpu" else number(wanted, 1)
        is_static = "--standalone" not in given and text["rdzv_backend"] in (None, "", "static")
        node = number(text["node_rank"], 0) if is_static else place_of(env.get(HOST, "")) if count > 1 else 0
        master = (text["rdzv_endpoint"] or "").partition(":")[::2] if text["rdzv_endpoint"] else master
        if name == "torch.distributed.launch" and "--use-env" not in given:
            inserted = ["--local-rank={}"]
    program = rest
    if "--module" in given or "-m" in given:
        program = [*interpreter, "-m", *rest]
    elif "--no-python" not in given:
        program = [*interpreter, *rest]
    at = len(program) - len(rest) + 1
    for number_of, host in enumerate(nodes, node):
        for local in range(nproc):
            words = [*program[:at], *(each.format(local) for each in inserted), *program[at:]]
            place = of_rank(number_of, local, nproc, count, *master)
            start(words, {**on(host, env), **place}, cwd)
    return 0


CONFIG = (
    "num_machines",
    "machine_rank",
    "num_processes",
    "main_process_ip",
    "main_process_port",
    "mixed_precision",
    "gpu_ids",
)
PET = ("nnodes", "nproc_per_node", "node_rank", "rdzv_backend", "rdzv_endpoint")


def read_config(path: str | None, cwd: str) -> dict[str, str]:
    """Return the top level of the file of ``accelerate config``."""
    if not path:
        return {}
    text = Path(cwd, os.path.expanduser(path)).read_text(errors="replace")
    found = re.findall(r"^(\w+):[ \t]*([^#\n]*)", text, re.MULTILINE)
    values = {key: value.strip("\"' \r") for key, value in found}
    return {key: "" if value == "no" else value for key, value in values.items()}


def of_rank(node: int, local: int, nproc: int, nodes: int, address: str | None, port: str | int | None) -> Env:
    """Return the variables that torchrun sets."""
    place = {
        **{"RANK": node * nproc + local, "LOCAL_RANK": local, "WORLD_SIZE": nproc * nodes, "LOCAL_WORLD_SIZE": nproc},
        **{
            "GROUP_RANK": node,
            "GROUP_WORLD_SIZE": nodes,
            "MASTER_ADDR": address or "localhost",
            "MASTER_PORT": port or 29500,
        },
    }
    return {name: str(value) for name, value in place.items()}


# --- what starts commands on other machines ---


def tasks(counts: Counts, words: list[str], env: Env, cwd: str, variables: Callable[..., dict[str, object]]) -> int:
    """Start a command as often on each host as ``counts`` says, with the variables of ``variables`` for each."""
    first, total, code = 0, sum(count for _, count in counts), 0
    for node, (host, count) in enumerate(counts):
        for local in range(count):
            place = variables(first + local, local, node, total, count)
            code = start(words, {**on(host, env), **{name: str(value) for name, value in place.items()}}, cwd) or code
        first += count
    return code


def srun(words: list[str], env: Env, cwd: str) -> int:
    """Play srun in the allocation."""
    given, rest = options("srun", words[1:])
    hosts = (
        expand(given["--nodelist"]) if given.get("--nodelist") else FACTS["hosts"][number(given.get("--relative"), 0) :]
    )
    asked = given.get("--nodes") or (None if given.get("--nodelist") else env.get("SLURM_NNODES"))
    per_node = given.get("--ntasks-per-node") or (None if given.get("--ntasks") else env.get("SLURM_NTASKS_PER_NODE"))
    nodes = min(number(asked, len(hosts)), len(hosts))
    if given.get("--ntasks") and not given.get("--nodes"):
        nodes = min(nodes, number(given["--ntasks"], nodes))
    asked = given.get("--ntasks") or (None if per_node or given.get("--nodes") else env.get("SLURM_NTASKS"))
    total = number(asked, number(per_node, 1) * nodes)
    each, more = divmod(total, max(nodes, 1))
    counts = [(host, each + (at < more)) for at, host in enumerate(hosts[:nodes])]
    if per_node:
        counts = [(host, number(per_node, 1)) for host, _ in counts]

    def place(rank: int, local: int, node: int, total: int, count: int) -> dict[str, object]:
        return {
            **{"SLURM_PROCID": rank, "SLURM_LOCALID": local, "SLURM_NODEID": node, "SLURM_NTASKS": total},
            **{"SLURM_NPROCS": total, "SLURM_STEP_ID": 0, "SLURM_STEP_NUM_TASKS": total, "SLURM_NNODES": nodes},
            "SLURMD_NODENAME": counts[node][0],
            **{"SLURM_STEP_NODELIST": ",".join(host for host, _ in counts), "SLURM_TASKS_PER_NODE": count},
        }

    cwd = os.path.join(cwd, given["--chdir"]) if given.get("--chdir") else cwd
    env = {**env, VIA: "srun", **named(given.get("--export"))}
    if given.get("--container-image"):
        env[WITHIN] = f"--container-image={given['--container-image']}"
    return tasks(counts, rest, env, cwd, place)


def named(text: str | None) -> Env:
    """Return the variables of ``ALL,NAME=value``."""
    return dict(each.split("=", 1) for each in (text or "").split(",") if "=" in each)


def mpirun(words: list[str], env: Env, cwd: str) -> int:
    """Play mpirun of Open MPI and of Hydra, with as many tasks on each host."""
    given, rest = options("mpirun", words[1:])
    if given.get("-H"):
        slots = [
            (host, number(count, 0)) for host, _, count in (each.partition(":") for each in given["-H"].split(","))
        ]
    else:
        slots = (
            hosts_in(given["--hostfile"], cwd) if given.get("--hostfile") else [(host, 0) for host in FACTS["hosts"]]
        )
    per_node = number(given.get("--npernode"), 0)
    if found := re.match(r"ppr:(\d+):node", given.get("--map-by", "")):
        per_node = int(found[1])
    total = number(given.get("-n"), 0)
    if per_node:
        slots = slots[: -(-total // per_node)] if total else slots
        counts = [(host, per_node) for host, _ in slots]
    elif not total:
        counts = [(host, count or FACTS["tasks"] or 1) for host, count in slots]
    else:
        each, more = divmod(total, len(slots))
        counts = [(host, each + (at < more)) for at, (host, _) in enumerate(slots)]
    counts = [(host, count) for host, count in counts if count]

    def place(rank: int, local: int, node: int, total: int, count: int) -> dict[str, object]:
        names = {"OMPI_COMM_WORLD_RANK": rank, "OMPI_COMM_WORLD_SIZE": total, "OMPI_COMM_WORLD_LOCAL_RANK": local}
        return {
            **names,
            "OMPI_COMM_WORLD_LOCAL_SIZE": count,
            "PMI_RANK": rank,
            "PMI_SIZE": total,
            "MPI_LOCALRANKID": local,
        }

    sets = dict(each.split("=", 1) for each in given.get("-x", "").split("\n") if "=" in each)
    cwd = os.path.join(cwd, given["-wdir"]) if given.get("-wdir") else cwd
    return tasks(counts, rest, {**env, **sets, VIA: "mpirun"}, cwd, place)


def shell(hosts: Iterable[str], command: str, env: Env | None = None) -> int:
    """Have a login shell on each host read a command; of stdin if there is none."""
    code = 0
    for host in hosts:
        words = ["bash", "-c", command.replace("%h", host)] if command else ["bash", "-s"]
        code = (
            subprocess.run(words, env=login(host, **(env or {}), **{VIA: "ssh"}), cwd=os.environ["HOME"]).returncode
            or code
        )
    return code


def ssh(words: list[str], env: Env, cwd: str) -> int:
    """Play ssh and rsh."""
    given, rest = options("ssh", words[1:])
    if not rest:
        return 255
    # Options may follow the host.
    _, command = options("ssh", rest[1:])
    return 0 if "-O" in given else shell([rest[0].rpartition("@")[2]], " ".join(command))


def pdsh(words: list[str], env: Env, cwd: str) -> int:
    """Play pdsh and clush."""
    given, rest = options("pdsh", words[1:])
    listed = given.get("-w", "") or env.get("WCOLL", "")
    hosts = [host for host, _ in hosts_in(listed[1:], cwd)] if listed.startswith("^") else expand(listed)
    return shell([host.rpartition("@")[2] for host in hosts], " ".join(rest))


def pbsdsh(words: list[str], env: Env, cwd: str) -> int:
    """Play pbsdsh: a command for each line of the node file, with an environment that has only the job's variables."""
    given, rest = options("pbsdsh", words[1:])
    lines = Path(env["PBS_NODEFILE"]).read_text().split()
    hosts = list(dict.fromkeys(lines)) if "-u" in given else lines
    chosen = [hosts[number(given["-n"], 0)]] if given.get("-n") else hosts
    of_job = {name: value for name, value in env.items() if name.startswith("PBS_")}
    for host in chosen:
        at = {"PBS_NODENUM": str(place_of(host)), "PBS_VNODENUM": str(hosts.index(host)), VIA: "pbsdsh"}
        start(rest, login(host, **of_job, **at), env["HOME"])
    return 0


def on_a_host(words: list[str], env: Env, cwd: str) -> int:
    """Play pbs_tmrsh, blaunch, and ``qrsh -inherit``."""
    name, rest = (
        os.path.basename(words[0]),
        [word for word in words[1:] if word not in ("-inherit", "-nostdin", "-V", "-n")],
    )
    if name == "pbs_tmrsh":
        of_job = {key: value for key, value in env.items() if key.startswith("PBS_")}
        return shell([rest[0]], " ".join(rest[1:]), of_job)
    return start(rest[1:], {**on(rest[0], env), VIA: name}, cwd)


# --- what runs a command here ---


def wrapper(words: list[str], env: Env, cwd: str) -> int:
    """Play a command that only changes how another one runs."""
    name = os.path.basename(words[0])
    given, rest = options(name, words[1:])
    if name == "taskset" and "-c" not in given and "--cpu-list" not in given:
        rest = rest[1:]
    if name == "taskset" and rest and re.fullmatch(r"[\d,-]+", rest[0]):
        rest = rest[1:]
    if name == "nsys":
        rest = rest[
            next((at for at, word in enumerate(rest) if PYTHON.fullmatch(os.path.basename(word)) or word in PARTS), 0) :
        ]
    return start(rest, env, cwd) if rest else 0


def within(words: list[str], env: Env, cwd: str) -> int:
    """Play a container, ``conda run`` and the like: the command begins at the first word that is one."""
    name = os.path.basename(words[0])
    at = next((at for at in range(1, len(words)) if is_command(words[at])), None)
    if at is None or (name in (*RUNNERS, "conda", "mamba", "micromamba") and words[1:2] != ["run"]):
        return 0 if name in LOOSE else rank("binary", name, words[1:], [], env, cwd)
    given = dict(itertools.pairwise(words[1:at]))
    chosen = given.get("-n") or given.get("--name") or given.get("-p") or given.get("--prefix")
    if name in ("conda", "mamba", "micromamba"):
        return start(words[at:], {**env, "CONDA_DEFAULT_ENV": chosen or ""}, cwd)
    return start(words[at:], {**env, WITHIN: shlex.join(words[:at])}, cwd)


def is_command(word: str) -> bool:
    """Return whether a word can be the command that a container runs."""
    name = os.path.basename(word)
    return bool(PYTHON.fullmatch(name)) or name in ("bash", "sh", *LAUNCHERS)


# --- what answers ---


def scontrol(words: list[str], env: Env, cwd: str) -> int:
    """Print hosts one by one."""
    if words[1:3] in (["show", "hostnames"], ["show", "hostname"]):
        print("\n".join(expand(words[3] if len(words) > 3 else env.get("SLURM_JOB_NODELIST", ""))))
    return 0


def hostname(words: list[str], env: Env, cwd: str) -> int:
    """Print the name, or the address, of the host."""
    host = env.get(HOST, "")
    print(address(host) if {"-i", "-I", "--ip-address", "--all-ip-addresses"} & {*words} else host)
    return 0


def address(host: str) -> str:
    """Return an address for a host."""
    return f"10.0.0.{place_of(host) + 1}"


def getent(words: list[str], env: Env, cwd: str) -> int:
    """Print the address of a host."""
    print(f"{address(words[-1])} {words[-1]}")
    return 0


def nvidia_smi(words: list[str], env: Env, cwd: str) -> int:
    """Print a line for each GPU."""
    for gpu in range(FACTS["gpus"]):
        print(f"GPU {gpu}: A GPU (UUID: GPU-{gpu})" if "-L" in words else gpu)
    return 0


def nproc(words: list[str], env: Env, cwd: str) -> int:
    """Print the number of CPUs."""
    print(FACTS["cpus"])
    return 0


def which(words: list[str], env: Env, cwd: str) -> int:
    """Print where commands are."""
    for name in words[1:]:
        path = find(name, env, cwd)
        print(path if "/" in path else f"/usr/bin/{name}")
    return 0


# --- allranks' own side ---


def supervise(env: Env, cwd: str) -> int:
    """Play the supervisor of a batch job: it starts node.sh on each host."""
    folder = Path(env["ALLRANKS_RUN_DIR"])
    spec, batch = (json.loads((folder / f"{name}.json").read_text()) for name in ("node", "supervisor"))
    given, _ = options("srun", batch["options"])
    if given.get("--container-image"):
        env = {**env, WITHIN: f"--container-image={given['--container-image']}"}
    hosts = FACTS["hosts"]
    of_run = {"ALLRANKS_ATTEMPT": 0, "ALLRANKS_RDZV_HOST": hosts[0], "ALLRANKS_RDZV_PORT": 20000}
    of_run |= {"ALLRANKS_NODE_COUNT": len(hosts), "ALLRANKS_NODE_NPROC": spec["nproc_per_node"]}

    def place(rank: int, local: int, node: int, total: int, count: int) -> dict[str, object]:
        slurm = {
            "SLURMD_NODENAME": hosts[node],
            "SLURM_PROCID": node,
            "SLURM_NODEID": node,
            "SLURM_LOCALID": 0,
            "SLURM_GPUS_ON_NODE": FACTS["gpus"],
        }
        return {**of_run, "ALLRANKS_NODE_RANK": node, **(slurm if "SLURM_JOB_ID" in env else {})}

    return tasks([(host, 1) for host in hosts], ["bash", env["ALLRANKS_RUN_DIR"] + "/node.sh"], env, cwd, place)


def agent(path: str, interpreter: list[str], env: Env, cwd: str) -> int:
    """Play a node's agent: it starts the ranks."""
    spec = json.loads(Path(path).read_text())
    node, nodes, nproc = (
        int(env.get(f"ALLRANKS_{name}") or spec[key])
        for name, key in (("NODE_RANK", "node"), ("NODE_COUNT", "nnodes"), ("NODE_NPROC", "nproc_per_node"))
    )
    before = {"script": interpreter, "module": [*interpreter, "-m"], "binary": []}[spec["kind"]]
    port = env.get("ALLRANKS_RDZV_PORT") or spec["master_port"]
    for local in range(nproc):
        place = of_rank(node, local, nproc, nodes, env.get("ALLRANKS_RDZV_HOST") or spec["master_addr"], port)
        start([*before, spec["target"], *spec["args"]], {**env, VIA: "allranks", **place}, cwd)
    return 0


PARTS: dict[str, Part] = {
    **dict.fromkeys(LAUNCHERS, by_name),
    **dict.fromkeys(WRAPPERS, wrapper),
    **dict.fromkeys((*LOOSE, *RUNNERS), within),
    **dict.fromkeys(("mpirun", "mpiexec", "mpirun.openmpi", "mpiexec.openmpi", "mpiexec.hydra", "orterun"), mpirun),
    **{"srun": srun, "ssh": ssh, "rsh": ssh, "pdsh": pdsh, "clush": pdsh, "pbsdsh": pbsdsh, "scontrol": scontrol},
    **dict.fromkeys(("pbs_tmrsh", "blaunch", "qrsh"), on_a_host),
    **{"hostname": hostname, "getent": getent, "nvidia-smi": nvidia_smi, "nproc": nproc, "which": which},
}

if __name__ == "__main__":
    FACTS.update(json.loads(Path(HERE, "facts.json").read_text()))
    own = sys.argv[2:] if sys.argv[1:2] == ["--as"] else sys.argv
    if os.path.dirname(own[0]) in BINS:  # The shell found it on PATH; where is known again from that.
        own = [os.path.basename(own[0]), *own[1:]]
    sys.exit(play(own, dict(os.environ), os.getcwd()))
