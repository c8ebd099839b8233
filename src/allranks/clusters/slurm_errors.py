"""What Slurm's commands say when they fail, in words that help: what happened, why, and what to do."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from allranks.errors import LaunchError

if TYPE_CHECKING:
    from allranks.plan.plan import Reason


#: Said by scontrol and squeue of a job that the controller never knew, or has forgotten: some minutes after its end.
NO_SUCH_JOB = "Invalid job id specified"

_UNREACHABLE = "Slurm cannot be reached"
_REFUSED = "Slurm refuses the job"
_ASSOCIATIONS = "see yours with sacctmgr show associations user=$USER format=Account,Partition,QOS"

#: What is found in what a command said, what that means, and what to do; the first that is found counts. Where it is
#: one of many things that sbatch may not like, Slurm's own words say why.
_KNOWN: tuple[tuple[str, str, str], ...] = (
    (
        r"Unable to contact slurm controller|backup controller in standby|controller is in standby|"
        r"Socket timed out|Zero Bytes were transmitted",
        _UNREACHABLE,
        "see scontrol ping, and try again when it is up",
    ),
    (
        r"Could not establish a configuration source|Unable to process configuration file",
        _UNREACHABLE,
        "run this where sbatch works, such as the login node, or set SLURM_CONF to the path of its slurm.conf",
    ),
    (
        r"(?i)munge|authentication (error|credential|agent)",
        _UNREACHABLE,
        "ask the site's support: munge must run, with the cluster's key",
    ),
    (r"Incompatible versions", _UNREACHABLE, "use the Slurm commands that belong to the cluster"),
    (r"(?i)invalid account", _REFUSED, f"change scheduler.account; {_ASSOCIATIONS}"),
    (r"(?i)partition", _REFUSED, "set scheduler.partition to one that sinfo --summarize lists and you may use"),
    (r"(?i)invalid qos|QOS usage", _REFUSED, f"change scheduler.qos; {_ASSOCIATIONS}"),
    (
        r"accounting/QOS policy",
        _REFUSED,
        f"ask for less time or fewer nodes, or wait for your other jobs; {_ASSOCIATIONS}",
    ),
    (
        r"(?i)generic resource|\bgres\b",
        _REFUSED,
        "change resources.gpu_type or resources.gpus_per_node; see sinfo --Format=NodeList,Gres",
    ),
    (r"Memory (specification|required)", _REFUSED, "lower resources.memory; see sinfo --Format=NodeList,Memory"),
    (r"CPU count|More processors", _REFUSED, "lower resources.cpus_per_node; see sinfo --Format=NodeList,CPUs"),
    (
        r"Requested node configuration is not available",
        _REFUSED,
        "no node has all that is asked for: lower resources; see sinfo --Format=NodeList,CPUs,Memory,Gres",
    ),
    (r"Invalid node name", _REFUSED, "change scheduler.include or scheduler.exclude; see sinfo --Node"),
    (r"(?i)node count", _REFUSED, "change resources.nodes"),
    (r"(?i)feature", _REFUSED, "change scheduler.constraint; see sinfo --Format=NodeList,Features"),
    (r"(?i)reservation", _REFUSED, "change scheduler.reservation; see scontrol show reservation"),
    (r"(?i)job array", _REFUSED, "change scheduler.array; see scontrol show config for MaxArraySize"),
    (r"(?i)time limit|--time", _REFUSED, "change resources.time"),
    (r"(?i)licen[cs]e", _REFUSED, "change --licenses in scheduler.directives; see scontrol show licenses"),
    (r"(?i)Invalid --|unrecognized option|Invalid (numeric )?specification", _REFUSED, "change scheduler.directives"),
    (r"Unable to open file|not look like a batch script", _REFUSED, "name a script that exists and begins with #!"),
)


def refusal(command: Sequence[str], code: int, said: str) -> LaunchError:
    """Explain a command of Slurm's that failed.

    Args:
        command: the command.
        code: what it ended with.
        said: what it said.
    """
    why = _own_words(command[0], said) or f"{command[0]} ended with {code} and said nothing"
    for pattern, what, fix in _KNOWN:
        if re.search(pattern, said) and (what == _UNREACHABLE or command[0] == "sbatch"):
            return LaunchError(what, why=why, fix=fix)
    what = _REFUSED if command[0] == "sbatch" else f"{command[0]} failed"
    return LaunchError(what, why=why)


def with_values(error: LaunchError, reasons: Iterable[Reason]) -> LaunchError:
    """Return the error with the values of those keys of the job that it says to change.

    Args:
        error: why a job was refused.
        reasons: of its plan; for a directive they say which key asks for it.
    """
    values = {reason.why: f"{reason.why} ({reason.value})" for reason in reasons if reason.value}
    fix = error.fix and re.sub(r"\b(scheduler|resources)\.\w+", lambda key: values.get(key[0], key[0]), error.fix)
    return LaunchError(error.what, why=error.why, fix=fix, see=error.see)


def not_there(name: str, error: OSError) -> LaunchError:
    """Explain that a command cannot be executed."""
    return LaunchError(
        f"there is no Slurm here: {name} cannot be started",
        why=error.strerror,
        fix=f"run this where {name} is in PATH, such as the cluster's login node; some sites need module load slurm",
    )


def no_answer(name: str, seconds: float) -> LaunchError:
    """Explain that a command did not end in time."""
    return LaunchError(
        f"{_UNREACHABLE}: {name} gave no answer for {seconds:g} s",
        fix="see scontrol ping, and try again; squeue --me tells whether a job was submitted nevertheless",
    )


def _own_words(name: str, said: str) -> str:
    """Return what a command said, without what it puts before each line, and each thing once."""
    before = re.compile(
        rf"^({re.escape(name)}: )?((slurm_load_jobs )?(error|fatal): )?(Batch job submission failed: )?"
    )
    lines = (before.sub("", line).strip() for line in said.splitlines())
    return "; ".join(dict.fromkeys(line for line in lines if line))
