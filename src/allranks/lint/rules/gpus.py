"""Ranks and the GPUs that they get."""

from __future__ import annotations

import re
from collections.abc import Iterator

from allranks.lint.launches import Launch
from allranks.lint.model import Assignment
from allranks.lint.reading import View
from allranks.lint.rules.base import SBATCH, TORCHRUN, Found, fatal, hint, likely
from allranks.lint.syntax import read_call

#: Options that give GPUs to a job or a step, or may do so.
_GIVE_GPUS = (
    *("gres", "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "exclusive", "tres-per-task", "constraint"),
)
#: What one process does that uses all GPUs of a node, anywhere in a script, and among its arguments.
_USES_ALL = re.compile(
    rb"device[-_]map|(?:tensor|pipeline|model|(?<!distributed)(?<!distributed[-_ ])data)[-_ ]?parallel|vllm|sglang|grpo"
)
_OF_GPUS = re.compile(
    r"--(?:tp|pp|gpus?|devices?|n_?gpus?|num_?gpus?)\b|(?:tp|pp)[-_]size|multi[-_]?gpu", re.IGNORECASE
)
#: Names of Python scripts that spread one model over the GPUs.
_IN_PARTS = re.compile(r"split|pipe|shard|parallel")
_ACCELERATOR = re.compile(r"--(?:trainer\.)?accelerator[= ](?:gpu|cuda)\b")
#: What counts the GPUs of a node.
_COUNT = re.compile(rb"nvidia-smi|cuda\.device_count")
#: Values of --gpu-bind that show a task one GPU.
_HIDING = ("single", "per_task", "map_gpu", "closest")


def _shown(view: View, launch: Launch) -> Assignment | None:
    """Return the assignment to CUDA_VISIBLE_DEVICES that holds for a launcher; None if there is none."""
    # A scheduler exports the devices that it gives.
    is_exported = view.script.kind != "plain" or "CUDA_VISIBLE_DEVICES" in view.script.exported
    before = [
        assignment
        for assignment in view.script.assigned("CUDA_VISIBLE_DEVICES")
        if is_exported and not assignment.is_prefix and assignment.order < launch.command.order
    ]
    own = [assignment for assignment in launch.command.sets if assignment.name == "CUDA_VISIBLE_DEVICES"]
    return next(reversed(before + own), None)


def _visible(view: View, launch: Launch) -> tuple[list[int], str]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves to a launcher, and its text; none if it has no numbers."""
    shown = _shown(view, launch)
    text = (shown and shown.value) or ""
    devices = [device for device in text.split(",") if device]
    return [int(device) for device in devices] if all(device.isdecimal() for device in devices) else [], text


@fatal(
    "AR107 more-ranks-than-visible-gpus",
    "{ranks} ranks start, and CUDA_VISIBLE_DEVICES={devices} shows them {gpus} GPUs: invalid device ordinal",
    fix="list as many devices as there are ranks, or leave CUDA_VISIBLE_DEVICES out",
    source="docs.nvidia.com/cuda/cuda-c-programming-guide, CUDA environment variables",
)
def _fewer_visible(view: View) -> Iterator[Found]:
    for launch in view.launches:
        visible, devices = _visible(view, launch)
        if launch.nproc and 0 < len(visible) < launch.nproc and launch.name != "deepspeed":  # Its rule is AR123.
            yield Found(launch.command.at, {"ranks": launch.nproc, "gpus": len(visible), "devices": devices})


@likely(
    "AR125 device-of-another-job",
    "the job has {gpus} GPUs, numbered from 0: CUDA_VISIBLE_DEVICES={devices} leaves it {left}",
    fix="numbers below {gpus}, or leave CUDA_VISIBLE_DEVICES out",
    source="docs.nvidia.com/cuda/cuda-c-programming-guide, CUDA environment variables; slurm.schedmd.com/gres.html",
)
def _no_such_device(view: View) -> Iterator[Found]:
    given = view.script.options("gres", "gpus-per-node", "gpus")
    for launch in view.launches if given and not view.script.options("exclusive") else ():
        shown, (visible, devices) = _shown(view, launch), _visible(view, launch)
        gpus = view.resources.gpus
        first = next((at for at, device in enumerate(visible) if gpus and device >= gpus), None)
        if shown and first is not None:
            left = f"the first {first}" if first else "none"
            yield Found(shown.at, {"gpus": gpus, "devices": devices, "left": left})


@likely(
    "AR123 visible-devices-ignored",
    "deepspeed ignores CUDA_VISIBLE_DEVICES where {option} is given",
    fix="one of the two: CUDA_VISIBLE_DEVICES, or --include localhost:0,1",
    source="deepspeed/launcher/runner.py of DeepSpeed 0.18",
)
def _ignored_devices(view: View) -> Iterator[Found]:
    for launch in view.launches:
        shown, given = _shown(view, launch), launch.call.get("--num-gpus", "--include", "--exclude")
        if launch.name != "deepspeed" or not shown or not given or launch.call.get("--hostfile"):
            continue
        wanted = None  # The devices that the option takes.
        if given.name == "--include" and given.value.value:
            wanted = given.value.value.rpartition(":")[2]
        elif given.name == "--num-gpus" and given.value.number:
            wanted = ",".join(map(str, range(given.value.number)))
        is_known = shown.value is not None and wanted is not None
        if wanted != shown.value if is_known else view.script.kind == "plain":
            yield Found(given.at, {"option": given.typed})


@fatal(
    "AR124 count-for-each-gpu",
    "nvidia-smi prints the count once for each GPU: with four of them this is 4 4 4 4",
    fix="nvidia-smi --list-gpus | wc -l",
    source="nvidia-smi --help-query-gpu, count",
)
def _counts(view: View) -> Iterator[Found]:
    for command in view.script.named("nvidia-smi"):
        is_one = any(value.startswith(("-i", "--id")) for value in command.values)
        is_kept = command.context.is_substitution and not command.context.pipe
        if "--query-gpu=count" in command.values and is_kept and not is_one:
            yield Found(command.at)


@hint(
    "AR109 idle-visible-gpus",
    "CUDA_VISIBLE_DEVICES={devices} shows {gpus} GPUs, and {ranks} ranks start",
    fix="list as many devices as there are ranks",
    source=f"{TORCHRUN} --nproc-per-node",
)
def _more_visible(view: View) -> Iterator[Found]:
    for launch in view.torchrun:
        visible, devices = _visible(view, launch)
        if launch.nproc and len(visible) > launch.nproc:
            yield Found(launch.command.at, {"ranks": launch.nproc, "gpus": len(visible), "devices": devices})


def _gpus(view: View, launch: Launch) -> int | None:
    """Return the GPUs of each node of a launcher, unless its step asks for its own."""
    step = read_call(launch.starter)
    is_own = launch.starter_name == "srun" and step.get("--gres", "--gpus", "--gpus-per-node", "--gpus-per-task")
    return None if is_own else view.resources.gpus


@fatal(
    "AR106 more-ranks-than-gpus",
    "{ranks} ranks start on each node, which has {gpus} GPUs: invalid device ordinal, or two ranks on one GPU",
    fix="make --nproc-per-node, --num_gpus of deepspeed, or --num_processes of accelerate for each machine, equal to "
    "the GPUs that are requested for a node",
    source=f"{SBATCH} --gres, --gpus-per-node; NCCL: Duplicate GPU detected",
)
def _more_ranks_than_gpus(view: View) -> Iterator[Found]:
    for launch in view.launches:
        gpus = None if launch.is_python or launch.call.get("--cpu") else _gpus(view, launch)
        if launch.nproc and gpus and launch.nproc > gpus:
            yield Found(launch.command.at, {"ranks": launch.nproc, "gpus": gpus})


@likely(
    "AR108 idle-gpus",
    "{gpus} GPUs are requested for each node, and {ranks} of them used",
    fix="make --nproc-per-node equal to the GPUs that are requested for a node",
    source=f"{TORCHRUN} --nproc-per-node, default 1",
)
def _idle_gpus(view: View) -> Iterator[Found]:
    idle = []
    for launch in view.launches:
        context = launch.command.context
        is_beside = bool(context.loops) or (context.is_background and len(view.launches) > 1)
        gpus = _gpus(view, launch) if launch.tasks_per_node == 1 and not is_beside else None
        is_total = launch.name == "accelerate" and launch.call.number("--num-processes") == gpus  # That is AR117.
        if not launch.nproc or not gpus or launch.nproc >= gpus or is_total or _uses_all(view, launch):
            return  # One that needs all GPUs, or may run beside others.
        idle.append(Found(launch.command.at, {"ranks": launch.nproc, "gpus": gpus}))
    yield from idle[:1]


@likely(
    "AR127 counted-gpus-unused",
    "the script counts the GPUs of the node in {name}, and torchrun starts one rank there",
    fix='--nproc-per-node="${name}"',
    source=f"{TORCHRUN} --nproc-per-node, default 1",
)
def _counted(view: View) -> Iterator[Found]:
    script = view.script
    if not _COUNT.search(script.text.data):
        return
    counts = [each.name for each in script.assignments if _counts_gpus("".join(part.text for part in each.parts or ()))]
    launches = [launch for launch in view.torchrun if not launch.call.get("--nproc-per-node")] if counts else []
    if launches and not (script.sets("PET_NPROC_PER_NODE") or _is_passed_on(view, counts[0])):
        for launch in launches:
            if not _uses_all(view, launch):
                yield Found(launch.command.at, {"name": counts[0]})


def _counts_gpus(text: str) -> bool:
    return "cuda.device_count(" in text or ("nvidia-smi" in text and "wc " in text)


def _is_passed_on(view: View, name: str) -> bool:
    """Return whether a variable goes into more than messages and tests."""
    if name in view.script.exported:
        return True
    parts = [part for each in view.script.assignments for part in each.parts or ()]
    for command in view.script.commands:
        parts += command.variables if command.name not in ("echo", "printf", "[", "[[", "test") else ()
    return any(part.kind == "variable" and part.text == name for part in parts)


def _uses_all(view: View, launch: Launch) -> bool:
    """Return whether one process may use all GPUs of a node."""
    words = [word.shown for word in launch.call.rest]
    is_in_parts = bool(words) and _IN_PARTS.search(words[0]) is not None
    return is_in_parts or bool(_OF_GPUS.search(" ".join(words)) or _USES_ALL.search(view.script.text.data.lower()))


@hint(
    "AR110 no-gpus-requested",
    "{use}, and the directives request no GPU",
    fix="request them: #SBATCH --gpus-per-node=N, or --gres=gpu:N",
    source=f"{SBATCH} --gres",
)
def _no_gpus(view: View) -> Iterator[Found]:
    if view.script.kind != "slurm" or view.script.options(*_GIVE_GPUS):
        return
    for launch in view.launches:
        match = _ACCELERATOR.search(launch.command.text) if launch.is_python else None
        if read_call(launch.starter).get(*(f"--{name}" for name in _GIVE_GPUS)):
            continue
        if launch.is_torch and launch.nproc and launch.nproc > 1 and _gpus(view, launch) is None:
            use = f"{launch.nproc} ranks start on each node"
        elif match:
            use = f"Lightning gets {match[0]}"
        else:
            continue
        yield Found(launch.command.at, {"use": use})
        return


@likely(
    "AR111 gpus-hidden-by-binding",
    "{option} shows each task one GPU: cuda:LOCAL_RANK is then an invalid device ordinal, and NCCL loses peer-to-peer",
    fix="leave --gpu-bind out, so that each rank sees all GPUs of the node and takes that of its local rank",
    source=f"{SBATCH} --gpu-bind",
)
def _hidden_gpus(view: View) -> Iterator[Found]:
    for directive in view.script.options("gpu-bind") if view.started_by("srun") else ():
        if directive.value.startswith(_HIDING):
            yield Found(directive.at, {"option": f"--gpu-bind={directive.value}"})
    for _, call in view.calls("srun"):
        given = call.get("--gpu-bind")
        if given and given.value.prefix.startswith(_HIDING):
            yield Found(given.at, {"option": f"--gpu-bind={given.value.shown}"})


@hint(
    "AR112 gpus-per-task",
    "--gpus-per-task also binds each task to its GPU, which hides the others from it",
    fix="request --gpus-per-node, or set --gpu-bind=none",
    source=f"{SBATCH} --gpus-per-task: implicitly sets --gpu-bind",
    versions="Slurm 21.08 and newer",
)
def _gpus_per_task(view: View) -> Iterator[Found]:
    is_shared = (view.resources.tasks_per_node or 0) > 1 and not view.script.options("gpu-bind")
    for directive in view.script.options("gpus-per-task") if is_shared else ():
        yield Found(directive.at)


@likely(
    "AR121 tasks-share-one-gpu",
    "srun starts {tasks} times python on each node, which has one GPU: copies of one training, or ranks that share it",
    fix="--ntasks-per-node=1, or as many GPUs as tasks",
    source=f"{SBATCH} --ntasks-per-node, --gres; NCCL: Duplicate GPU detected",
)
def _one_gpu_for_tasks(view: View) -> Iterator[Found]:
    for launch in view.started_by("srun"):
        tasks = launch.tasks_per_node or 0
        if launch.is_python and launch.starter and tasks > 1 and _gpus(view, launch) == 1:
            yield Found(launch.starter.at, {"tasks": tasks})
