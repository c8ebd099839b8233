"""Environments that are not activated, launchers that are deprecated, options that do not exist."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from difflib import get_close_matches

from allranks.lint.model import LAUNCHERS, MPI, Command
from allranks.lint.reading import View
from allranks.lint.rules.base import BASH, TORCHRUN, Found, fatal, hint, likely
from allranks.lint.syntax import read_call
from allranks.lint.unwrap import MODULES, SHELLS, is_python

_CONDA = "docs.conda.io, conda init and conda activate"
#: Options of torchrun that no script has for itself.
_OF_TORCHRUN = (
    *("--nproc-per-node", "--nnodes", "--node-rank", "--rdzv-endpoint", "--rdzv-backend", "--rdzv-id", "--standalone"),
)
#: Options and commands that the launchers have.
_OF_LAUNCHERS = re.compile(r"--(?:nproc|nnodes|standalone|num_|rdzv)|launch$")
_OF_ACCELERATE = ("launch", "config", "env", "test", "estimate-memory", "merge-weights", "tpu-config", "to-fsdp2")
#: Modules whose names are near to those of launchers, and that can be run.
_RUNNABLE = ("deepspeed.launcher.launch",)
#: Commands of launch scripts with two letters in the wrong order, or one left out.
_MISSPELLED = {
    wrong: name
    for name in ("source", "export", "module", "python", "sbatch")
    for at in range(1, len(name))
    for wrong in (name[: at - 1] + name[at] + name[at - 1] + name[at + 1 :], name[:at] + name[at + 1 :])
    if wrong != name
}
_SET_UP = re.compile(
    r"conda\.sh|mamba\.sh|shell\.\w+ hook|shell hook|conda shell|conda init"
    r"|\.bashrc|\.bash_profile|\.profile|/etc/profile|bin/activate"
)


@likely(
    "AR801 conda-not-set-up",
    "{program} activate fails in a script whose shell has not been set up: the training runs in another environment, "
    "or not at all",
    fix='source "$(conda info --base)/etc/profile.d/conda.sh" before it',
    source=_CONDA,
)
def _not_set_up(view: View) -> Iterator[Found]:
    script = view.script
    if re.search(r"\s-(?:\w*[li]|-login)", script.shebang) or "zsh" in script.shebang:
        return
    for command in script.named("conda", "mamba", "micromamba"):
        outer = command.started_by(*SHELLS)
        is_login = outer is not None and re.search(r"-\w*[li]", outer.first)
        if command.first != "activate" or command.context.function or is_login:
            continue
        if not any(_sets_up(other) for other in script.commands if other.order <= command.order):
            yield Found(command.at, {"program": command.name})
            return


def _sets_up(command: Command) -> bool:
    # A script that sources a file of its own may get conda from there.
    is_source = command.name in ("module", "ml", "spack", "source", ".", "eval", "setup_env")
    return is_source or bool(_SET_UP.search(" ".join(word.shown for word in command.words)))


@likely(
    "AR818 word-after-the-environment",
    "conda activate takes one environment, and fails at {word}: the training runs in another one",
    fix="leave {word} out; a comment starts with #",
    source=f"{_CONDA}: activate does not accept more than one argument",
)
def _second_environment(view: View) -> Iterator[Found]:
    for command in view.script.named("conda", "mamba", "source", "."):
        is_source = command.name in ("source", ".")
        starts = re.search(r"(?:^|conda\w*/bin/)activate$" if is_source else "^activate$", command.first)
        words = [word for word in command.args[1:] if not word.shown.startswith("-")] if starts else []
        if len(words) > 1 and "--stack" not in command.values:
            yield Found(words[1].at, {"word": words[1].shown})


@likely(
    "AR819 misspelled-command",
    "there is no program {word}: the shell goes on without it, or ends",
    fix="did you mean {near}?",
    source=f"{BASH}, COMMAND EXECUTION",
)
def _misspelled_command(view: View) -> Iterator[Found]:
    wrong = [command for command in view.script.commands if command.name in _MISSPELLED]
    functions = {command.context.function for command in view.script.commands} if wrong else ()
    for command in wrong:
        if command.name not in functions:
            yield Found(command.at, {"word": command.name, "near": _MISSPELLED[command.name]})


@hint(
    "AR802 source-activate",
    "source activate is deprecated since conda 4.4",
    fix="conda activate, after conda's own set-up",
    source=_CONDA,
)
def _old_activation(view: View) -> Iterator[Found]:
    for command in view.script.named("source", "."):
        if command.first == "activate":
            yield Found(command.at)
            return


@fatal(
    "AR803 activated-in-another-shell",
    "{file} runs in a shell of its own, and changes nothing in this one",
    fix="source {file}",
    source="bash(1), source; docs.python.org/3/library/venv.html",
)
def _activated_elsewhere(view: View) -> Iterator[Found]:
    for command in view.script.commands:
        words = command.args if command.name in SHELLS else command.words
        file = words[0].shown if words else ""
        if re.search(r"(?:^|/)bin/activate$", file) and not command.context.is_substitution:
            yield Found(command.at, {"file": file})


@hint(
    "AR804 bashrc-in-a-job",
    "the .bashrc of many systems returns at once in a shell that is not interactive",
    fix="source what is needed itself, such as etc/profile.d/conda.sh",
    source="bash(1), INVOCATION",
)
def _bashrc(view: View) -> Iterator[Found]:
    for command in view.script.named("source", ".") if view.script.kind != "plain" else ():
        if command.first.endswith("/.bashrc"):
            yield Found(command.at)
            return


@hint(
    "AR805 output-held-back",
    "conda run shows the output when the training has ended",
    fix="conda run --no-capture-output",
    source="docs.conda.io, conda run",
)
def _captured(view: View) -> Iterator[Found]:
    for command in view.script.named("conda", "mamba"):
        is_held = not {"--no-capture-output", "--live-stream", "-s"} & set(command.values)
        starts = any(launch.command.started_by(command.name) for launch in view.launches)
        if command.first == "run" and is_held and starts:
            yield Found(command.at)


@fatal(
    "AR817 no-such-launcher",
    "there is no {kind} {name}: nothing is started",
    fix="{meant}",
    source="runpy of Python; torch 2.13: neither torch nor torch.distributed can be run",
)
def _no_such_launcher(view: View) -> Iterator[Found]:
    functions = {command.context.function for command in view.script.commands} | {"deepspeed", "accelerate"}
    for command in view.script.commands:
        words = [word.value or "" for word in command.args[:3]]
        name = next((after for before, after in itertools.pairwise(words) if before == "-m"), "")
        if is_python(command.name) or not command.name:
            if meant := _meant_module(name):
                yield Found(command.at, {"kind": "module", "name": name, "meant": f"python -m {meant}"})
            elif is_python(command.name) and words and words[0] in MODULES and "." in words[0]:
                yield Found(command.at, {"kind": "file", "name": words[0], "meant": f"python -m {words[0]}"})
        elif command.name in MODULES and "." in command.name and not command.context.via:
            yield Found(command.at, {"kind": "program", "name": command.name, "meant": f"python -m {command.name}"})
        elif command.name not in functions | LAUNCHERS and any(map(_OF_LAUNCHERS.match, words)):
            for near in get_close_matches(command.name, ["torchrun", "accelerate", "deepspeed"], n=1, cutoff=0.8):
                yield Found(command.at, {"kind": "program", "name": command.name, "meant": near})
        elif command.name == "accelerate" and words and words[0] not in _OF_ACCELERATE:
            for near in get_close_matches(words[0], ["launch"], n=1, cutoff=0.7):
                yield Found(
                    command.at, {"kind": "command", "name": f"accelerate {words[0]}", "meant": f"accelerate {near}"}
                )


def _meant_module(name: str) -> str:
    """Return the launcher that is meant by the name of a module that cannot be run; empty if it can, or is another."""
    if name in ("torch", "torch.distributed", "torch.run", "torch.launch", "torchrun"):
        return "torch.distributed.run"
    if name in MODULES or name in _RUNNABLE or "." not in name:
        return ""
    near = get_close_matches(name.removesuffix(".py"), sorted(MODULES), n=1, cutoff=0.85)
    return near[0] if near else ""


@hint(
    "AR806 deprecated-launcher",
    "torch.distributed.launch is deprecated in favour of torchrun",
    fix="torchrun, and LOCAL_RANK from the environment in place of --local_rank",
    source="torch/distributed/launch.py of torch 2.13",
)
def _old_launcher(view: View) -> Iterator[Found]:
    for launch in view.launches:
        if launch.name == "torch.distributed.launch":
            yield Found(launch.command.at)


@fatal(
    "AR807 use-env",
    "torchrun has no --use_env, and exits with a usage error",
    fix="leave it out: torchrun always sets the environment",
    source=TORCHRUN,
)
def _use_env(view: View) -> Iterator[Found]:
    for launch, given in view.torchrun_given("--use-env"):
        if launch.name != "torch.distributed.launch":
            yield Found(given.at)


@fatal(
    "AR808 unknown-option",
    "{launcher} has no option {option}, and exits with a usage error",
    fix="{launcher} --help lists the options{meant}",
    source=f"{TORCHRUN}; runner.py of DeepSpeed 0.18; accelerate/commands/launch.py of Accelerate 1.15",
)
def _unknown_option(view: View) -> Iterator[Found]:
    for launch in view.launches:
        syntax, is_deepspeed = launch.call.syntax, launch.name == "deepspeed"
        if not (launch.is_torch or is_deepspeed or launch.name == "accelerate"):
            continue
        known = {*syntax.valued, *syntax.flags} - {"--use-env"}
        if is_deepspeed:  # Unlike torchrun it wants underscores.
            known = {f"--{name[2:].replace('-', '_')}" for name in known} | syntax.same.keys()
        for given in launch.call.given:
            name = given.typed if is_deepspeed else given.name
            is_option = name.startswith("--") or name == "-m"
            if not is_option or name in ("--", "--use-env") or " " in given.typed:
                continue
            if name in known:
                continue
            if launch.name != "accelerate" and sum(each.startswith(name) for each in known) == 1:
                continue  # Its beginning is enough.
            near = ["--module"] if name == "-m" else get_close_matches(name, sorted(known), n=1, cutoff=0.75)
            meant = f"; did you mean {near[0]}?" if near else ""
            launcher = "torchrun" if launch.is_torch else launch.name
            yield Found(given.at, {"launcher": launcher, "option": given.typed, "meant": meant})
            break  # What follows an unknown option may be its value.


@fatal(
    "AR809 option-after-the-script",
    "{option} stands after {script}: it goes to the script, and torchrun does not see it",
    fix="put it before {script}",
    source=f"{TORCHRUN}: what follows the script is its own",
)
def _after_script(view: View) -> Iterator[Found]:
    for launch in view.torchrun:
        call, program = launch.call, launch.program
        for word in call.rest[1:] if program and program.prefix.isascii() else ():
            typed = word.prefix.partition("=")[0]
            option = call.syntax.canonical(typed)
            if program and typed.startswith("--") and option in _OF_TORCHRUN and call.get(option) is None:
                yield Found(word.at, {"option": typed, "script": program.shown})


@fatal(
    "AR810 python-under-torchrun",
    "torchrun starts python {word}: {word} is taken for a script",
    fix="leave {word} out, or add --no-python",
    source=f"{TORCHRUN} --no-python",
)
def _runs_python(view: View) -> Iterator[Found]:
    for launch in view.torchrun:
        word = launch.program
        if word and is_python((word.value or "").rpartition("/")[2]) and not launch.call.get("--no-python"):
            yield Found(word.at, {"word": word.value})


@fatal(
    "AR811 no-script",
    "{launcher} gets no script to run",
    fix="name the script; a line that was cut loses it",
    source=TORCHRUN,
)
def _no_script(view: View) -> Iterator[Found]:
    for launch in view.torchrun:
        call, command = launch.call, launch.command
        is_called = not command.context.is_substitution and not command.context.is_condition
        is_known = all(word.value is not None for word in command.words)
        if not call.rest and not call.get("--help") and is_called and is_known and not launch.is_cut:
            yield Found(command.at, {"launcher": launch.name})


@hint(
    "AR812 mpi-environment",
    "mpirun may not take {name} to the other hosts",
    fix="mpirun -x {name} (Open MPI), or -genv",
    source="mpirun(1) of Open MPI 5, -x",
)
def _mpi_environment(view: View) -> Iterator[Found]:
    names = sorted(name for name in view.script.exported if re.match(r"(?:NCCL|MASTER|GLOO|OMP)_", name))
    for launch in view.started_by(*MPI) if names else ():
        starter = launch.starter
        call = read_call(starter)
        taken = {given.value.shown.partition("=")[0] for given in call.given if given.name == "-x"}
        missing = [name for name in names if name not in taken]
        is_direct = call.get("--hostfile", "-H") and launch.command.context.via[-1].name not in SHELLS
        has_hosts = is_direct or (view.has_many_nodes and taken)
        if starter and has_hosts and missing and "-genv" not in starter.text:
            yield Found(starter.at, {"name": missing[0]})


@likely("AR813 sudo-in-a-job", "sudo asks for a password in a job, and fails", fix="leave it out", source="sudo(8)")
def _sudo(view: View) -> Iterator[Found]:
    for command, call in view.calls("sudo") if view.script.kind != "plain" else ():
        if not call.get("-n", "-S"):  # It asks for nothing, or reads the password from its input.
            yield Found(command.at)
            return


@hint(
    "AR814 lightning-run-model",
    "lightning run model is now fabric run",
    fix="fabric run",
    source="lightning.ai/docs/fabric, CLI",
)
def _lightning_launcher(view: View) -> Iterator[Found]:
    for command in view.script.named("lightning"):
        if command.values[:2] == ["run", "model"]:
            yield Found(command.at)


#: ``YOUR_NUM_NODES``, for which a number is to be written.
_PLACEHOLDER = "[A-Z]+(?:_[A-Z]+)+"


@fatal(
    "AR815 invalid-count",
    "{option}={value} is no number of nodes or ranks",
    fix="a number of 1 or more; for ranks gpu, cpu or auto too",
    source=f"{TORCHRUN}, determine_local_world_size",
)
def _zero_ranks(view: View) -> Iterator[Found]:
    for name, words in (("--nproc-per-node", "|[A-Za-z]+"), ("--nnodes", "")):
        for _, given in view.torchrun_given(name):
            text = given.value.value
            is_count = re.fullmatch(rf"[1-9]\d*(?::[1-9]\d*)?{words}|{_PLACEHOLDER}", text or "")
            if text and given.value.is_literal and not is_count:
                yield Found(given.at, {"option": given.typed, "value": text})


@fatal(
    "AR816 module-that-is-a-file",
    "-m takes the name of a module, and {script} is a file",
    fix="leave -m out, or -m {module}",
    source="runpy of Python",
)
def _module_path(view: View) -> Iterator[Found]:
    for launch, _ in view.torchrun_given("--module"):
        program = launch.program
        if program and program.value and program.value.endswith(".py"):
            module = program.value[:-3].strip("./").replace("/", ".")
            yield Found(program.at, {"script": program.value, "module": module})
