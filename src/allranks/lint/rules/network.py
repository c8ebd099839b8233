"""Environment variables of NCCL, torch and gloo: gone, misspelled, out of range, harmful."""

from __future__ import annotations

import re
from collections.abc import Iterator
from difflib import get_close_matches

from allranks.checks.known_variables import FAMILIES, KNOWN, OBSOLETE, OLDEST
from allranks.lint.model import MPI, Assignment
from allranks.lint.reading import View
from allranks.lint.rules.base import Found, fatal, hint, likely

_NCCL = "docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html"
_TORCH = "docs.pytorch.org/docs/stable/torch_nccl_environment_variables.html"
_DISTRIBUTED = "docs.pytorch.org/docs/stable/distributed.html"
_TAGS = "sources of NCCL v2.3.5 to v2.30.7, of torch 2.4 to 2.13"
_NAMES = frozenset(KNOWN) | {entry.name for entry in OBSOLETE}
#: Variables of CUDA and OpenMP that scripts set.
_OF_OTHERS = frozenset({"CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_ORDER", "OMP_NUM_THREADS"})
#: Variables of plugins of NCCL: rdma-sharp, Google's and Amazon's.
_OF_PLUGINS = re.compile("NCCL_(?:IBEXT|SHARP|FASTRAK|GPUDIRECTTCPX|UCX|OFI)_")
_NEAR_NCCL = re.compile("^(?:NCLL|NCL|NNCL|NCC|NLCC)_")
#: Smallest and largest value of variables that take a number.
_RANGES = {
    "NCCL_IB_TIMEOUT": (1, 31),
    "NCCL_IB_RETRY_CNT": (1, 7),
    "NCCL_SOCKET_NTHREADS": (1, 16),
    "NCCL_NSOCKS_PERTHREAD": (1, 16),
    "NCCL_CROSS_NIC": (0, 2),
    "NCCL_IB_SL": (0, 15),
    "NCCL_IB_QPS_PER_CONNECTION": (1, 128),
}
#: Words of variables that take one.
_WORDS = {
    "NCCL_DEBUG": ("VERSION", "WARN", "INFO", "TRACE", "ABORT", "NONE"),
    "TORCH_DISTRIBUTED_DEBUG": ("OFF", "INFO", "DETAIL"),
    "TORCH_CPP_LOG_LEVEL": ("INFO", "WARNING", "ERROR", "FATAL", "0", "1", "2", "3"),
}
#: Words of lists: after ^ those that NCCL does without.
_LISTS = {
    "NCCL_ALGO": ("TREE", "RING", "COLLNETDIRECT", "COLLNETCHAIN", "NVLS", "NVLSTREE", "PAT"),
    "NCCL_PROTO": ("LL", "LL128", "SIMPLE"),
}
_OFF = {
    "NCCL_P2P_DISABLE": "peer-to-peer over NVLink and PCIe",
    "NCCL_SHM_DISABLE": "shared memory between the GPUs of a node",
}
#: Variables that Slurm sets only if their option was given.
_IF_REQUESTED = {
    "SLURM_NTASKS_PER_NODE": ("ntasks-per-node",),
    "SLURM_CPUS_PER_TASK": ("cpus-per-task",),
    "SLURM_GPUS_PER_NODE": ("gpus-per-node",),
    "SLURM_GPUS": ("gpus",),
    "SLURM_GPUS_PER_TASK": ("gpus-per-task",),
    "SLURM_MEM_PER_NODE": ("mem",),
    "SLURM_NTASKS": ("ntasks", "ntasks-per-node", "ntasks-per-gpu"),
}


def _named(view: View, *names: str) -> Iterator[tuple[Assignment, str]]:
    """Yield the assignments to these variables, with their values; empty if not known."""
    return ((assignment, assignment.value or "") for assignment in view.script.assigned(*names))


def _set_to(view: View, pattern: str, *names: str) -> Iterator[Found]:
    """Find these variables where they get a value of a pattern."""
    for assignment, value in _named(view, *names):
        if re.fullmatch(pattern, value, re.DOTALL):
            yield Found(assignment.at, {"name": assignment.name, "value": value})


def _obsolete(view: View, *, is_read: bool, text: str) -> Iterator[Found]:
    """Find variables that the oldest library here does not read any more, or those that are deprecated."""
    table = {entry.name: entry for entry in OBSOLETE if entry.is_read == is_read}
    for assignment in view.script.assigned(*table):
        entry = table[assignment.name]
        if is_read or entry.since <= OLDEST[entry.of]:
            version = ".".join(map(str, entry.since))
            what = entry.text or text.format(name=entry.name, library=entry.of, version=version)
            yield Found(assignment.at, {"what": what, "instead": entry.instead or "leave it out"})


@hint("AR501 variable-is-gone", "{what}", fix="{instead}", source=f"{_NCCL}; {_TAGS}")
def _gone(view: View) -> Iterator[Found]:
    yield from _obsolete(view, is_read=False, text="{library} does not read {name} since {version}: it has no effect")


@hint("AR502 variable-is-deprecated", "{what}", fix="{instead}", source=f"{_NCCL}; {_TORCH}")
def _old(view: View) -> Iterator[Found]:
    yield from _obsolete(view, is_read=True, text="{name} is deprecated since {library} {version}")


@likely("AR503 misspelled-setting", "no library reads {name}", fix="{near}", source=_TAGS)
def _unknown(view: View) -> Iterator[Found]:
    for assignment in view.script.assignments:
        name = assignment.name
        meant = _NEAR_NCCL.sub("NCCL_", name)
        if meant != name and meant in _NAMES:
            yield Found(assignment.at, {"name": name, "near": meant})
        elif (
            meant.startswith((*FAMILIES, "CUDA_", "OMP_"))
            and not _OF_PLUGINS.match(name)
            and name not in _NAMES | _OF_OTHERS
            and name not in view.script.used
        ):
            for near in get_close_matches(name, (*KNOWN, *_OF_OTHERS), n=1, cutoff=0.87):
                yield Found(assignment.at, {"name": name, "near": near})
                break
            else:
                if meant.startswith("NCCL_") and assignment.value in _WORDS["NCCL_DEBUG"]:
                    yield Found(assignment.at, {"name": name, "near": "NCCL_DEBUG"})
                elif name.startswith("TORCH_DISTRIBUTED_") and assignment.value in ("DEBUG", "DETAIL", "INFO"):
                    yield Found(assignment.at, {"name": name, "near": "TORCH_DISTRIBUTED_DEBUG=DETAIL"})


@likely(
    "AR504 setting-out-of-range",
    "{name}={value} is out of its range, {least} to {most}",
    fix="a value from {least} to {most}",
    source=_NCCL,
)
def _out_of_range(view: View) -> Iterator[Found]:
    for assignment, value in _named(view, *_RANGES):
        least, most = _RANGES[assignment.name]
        if value.isdecimal() and not least <= int(value) <= most:
            yield Found(assignment.at, {"name": assignment.name, "value": value, "least": least, "most": most})


@likely(
    "AR505 invalid-setting", "{name} does not take {value}", fix="one of {words}", source=f"{_NCCL}; {_DISTRIBUTED}"
)
def _unknown_word(view: View) -> Iterator[Found]:
    for assignment, value in _named(view, *_WORDS):
        words = _WORDS[assignment.name]
        if value and value.upper() not in words:
            yield Found(assignment.at, {"name": assignment.name, "value": value, "words": ", ".join(words)})
    for assignment, value in _named(view, *_LISTS):
        words = _LISTS[assignment.name]
        given = value.upper().removeprefix("^").split(",")
        if re.fullmatch(r"[\^\w,]+", value) and not any(word.startswith(words) or word == "COLLNET" for word in given):
            yield Found(assignment.at, {"name": assignment.name, "value": value, "words": ", ".join(words)})


@hint(
    "AR506 debug-left-on",
    "{name}={value} writes much to each log, and costs time",
    fix="leave it out once the training runs",
    source=f"{_NCCL}; {_DISTRIBUTED}",
)
def _debug(view: View) -> Iterator[Found]:
    if view.launches:
        names = ("NCCL_DEBUG", "TORCH_DISTRIBUTED_DEBUG", "TORCH_CPP_LOG_LEVEL")
        yield from _set_to(view, r"(?i:INFO|TRACE|DETAIL)", *names)


@likely(
    "AR507 launches-block",
    "CUDA_LAUNCH_BLOCKING=1 has the CPU wait for each kernel: training becomes much slower",
    fix="leave it out once the error is found",
    source="docs.nvidia.com/cuda/cuda-c-programming-guide, CUDA environment variables",
)
def _blocking(view: View) -> Iterator[Found]:
    if view.launches or any(view.script.named("srun")):
        yield from _set_to(view, "1", "CUDA_LAUNCH_BLOCKING")


@hint(
    "AR508 transport-switched-off",
    "{name}=1 switches off {what}",
    fix="leave it out, unless this machine needs it",
    source=_NCCL,
)
def _off(view: View) -> Iterator[Found]:
    for assignment, value in _named(view, *_OFF):
        if value == "1":
            yield Found(assignment.at, {"name": assignment.name, "what": _OFF[assignment.name]})


@hint(
    "AR509 infiniband-switched-off",
    "NCCL_IB_DISABLE=1 has NCCL use sockets where there is InfiniBand or RoCE",
    fix="leave it out: NCCL uses sockets by itself where there is none",
    source=_NCCL,
)
def _no_infiniband(view: View) -> Iterator[Found]:
    return _set_to(view, "1", "NCCL_IB_DISABLE")


@hint("AR510 setting-is-the-default", "{name}=0 is the default, and changes nothing", fix="leave it out", source=_NCCL)
def _default(view: View) -> Iterator[Found]:
    return _set_to(view, "0", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE", "NCCL_IB_DISABLE")


@fatal(
    "AR511 loopback-for-many-nodes",
    "{name}=lo binds to the loopback interface, which reaches no other node",
    fix="the interface that leads to the other nodes",
    source=_NCCL,
)
def _loopback(view: View) -> Iterator[Found]:
    if view.has_many_nodes or any(launch.has_many_nodes for launch in view.launches):
        yield from _set_to(view, "=?lo", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@likely(
    "AR512 virtual-interface",
    "{name}={value} is an interface of containers, virtual machines or Wi-Fi",
    fix="the interface that leads to the other nodes",
    source=_NCCL,
)
def _virtual(view: View) -> Iterator[Found]:
    return _set_to(view, r"=?(?:docker|virbr|veth|br-|wlan|wlp).*", "NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")


@fatal(
    "AR513 gloo-takes-names",
    "{name} takes names only: {value} is no interface",
    fix="the name of one interface",
    source=f"{_DISTRIBUTED}, network interface",
)
def _gloo_excludes(view: View) -> Iterator[Found]:
    return _set_to(view, r"[\^=].*", "GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME")


@fatal(
    "AR514 blanks-between-devices",
    "CUDA_VISIBLE_DEVICES={value}: devices after a blank are lost",
    fix="no blanks: 0,1,2,3",
    source="bash(1); CUDA environment variables",
)
def _split_devices(view: View) -> Iterator[Found]:
    return _set_to(view, r".*,|.*\d\s*,\s+\d.*", "CUDA_VISIBLE_DEVICES")


@likely(
    "AR515 variable-of-an-option",
    "Slurm sets {name} only if --{option} is given, which it is not: it is empty",
    fix="#SBATCH --{option}=N, or ${{{name}:-N}}",
    source="slurm.schedmd.com/sbatch.html, output environment variables",
)
def _not_requested(view: View) -> Iterator[Found]:
    for use in view.script.uses if view.script.kind == "slurm" else ():
        options = _IF_REQUESTED.get(use.name)
        if not options or use.has_default or use.level or view.script.options(*options) or view.script.sets(use.name):
            continue
        is_given_up = bool(view.resources.gpus) and _ends_without(view, use.name)
        if (is_given_up or not _is_tested(view, use.name)) and not view.is_printed(use.at):
            yield Found(use.at, {"name": use.name, "option": options[0]})


def _is_tested(view: View, name: str) -> bool:
    """Return whether the script reads the variable with a default, or in a test, anywhere."""
    data = view.script.text.data
    return any(use.name == name and use.has_default for use in view.script.uses) or bool(
        re.search(rb"(?:-[nz] *|\[\[ *|v +)\"?\$?\{?" + name.encode() + rb"\b", data)
    )


def _ends_without(view: View, name: str) -> bool:
    """Return whether the script ends where a variable of GPUs is empty."""
    test = rb"if \[+ -z \"?\$\{?" + name.encode() + rb"\b(?:(?!\bfi\b|\belse\b|\belif\b).)*\bexit\b"
    return "_GPUS" in name and bool(re.search(test, view.script.text.data, re.DOTALL))


@hint(
    "AR516 devices-of-the-scheduler",
    "CUDA_VISIBLE_DEVICES={value} replaces what the scheduler gave this job",
    fix="leave it out",
    source="slurm.schedmd.com/gres.html",
)
def _own_devices(view: View) -> Iterator[Found]:
    script = view.script
    if script.options("exclusive") or not script.options("gres", "gpus", "gpus-per-node", "gpus-per-task"):
        return
    for assignment, value in _named(view, "CUDA_VISIBLE_DEVICES"):
        if value.replace(",", "").isdecimal() and not assignment.level:
            yield Found(assignment.at, {"value": value})


@hint(
    "AR517 too-many-threads",
    "{ranks} ranks with {threads} threads each share {cpus} CPUs",
    fix="OMP_NUM_THREADS=$((SLURM_CPUS_PER_TASK / RANKS))",
    source="torchrun: OMP_NUM_THREADS",
)
def _threads(view: View) -> Iterator[Found]:
    cpus = view.resources.cpus_per_task or 0
    ranks = [launch.nproc or 1 for launch in view.torchrun if launch.tasks_per_node == 1]
    for assignment, value in _named(view, "OMP_NUM_THREADS") if cpus else ():
        for nproc in ranks:
            if nproc > 1 and value.isdecimal() and int(value) * nproc > cpus:
                yield Found(assignment.at, {"threads": value, "ranks": nproc, "cpus": cpus})
                return


@likely(
    "AR518 caret-inside-a-list",
    "^ counts at the start of {name} only, for the whole list: in {value} the later ones name nothing",
    fix="one ^ at the start: ^lo,docker0",
    source=f"{_NCCL}, NCCL_SOCKET_IFNAME",
)
def _later_caret(view: View) -> Iterator[Found]:
    names = ("NCCL_SOCKET_IFNAME", "NCCL_IB_HCA")
    yield from _set_to(view, r".+,\s*\^.*", *names)
    for command in view.script.named(*MPI):
        for word in command.args:
            name, _, value = word.shown.partition("=")
            if name in names and re.fullmatch(r".+,\s*\^.*", value):
                yield Found(word.at, {"name": name, "value": value})
