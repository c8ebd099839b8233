"""The batch script for PBS: short, and every line that is not obvious explained."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from allranks import contract
from allranks.clusters import pbs_tasks
from allranks.clusters.pbs_directives import walltime
from allranks.plan import batch
from allranks.plan.directives import written
from allranks.plan.parts import Parts, rendezvous
from allranks.plan.script import comment, required


def batch_script(parts: Parts, logs: Sequence[str]) -> str:
    """Write the script.

    Args:
        parts: what it is made from.
        logs: words of shell for where it says what it has to say, from the start on: one file, or another one for
            errors; none: where its streams go.
    """
    job, run_dir = parts.job, parts.spec.run_dir
    mode = 0o750 if job.runs.group_readable else 0o700
    array = job.scheduler.array and not parts.inside
    task = "${PBS_ARRAY_INDEX:-$PBS_ARRAYID}" if array else None
    requeues = job.retry.requeue and not parts.inside
    return batch.joined(
        [
            ["#!/usr/bin/env bash", comment(parts.title), *written(parts.directives, "#PBS")],
            batch.strict(),
            _secrets(parts),
            batch.own_folder(run_dir, parts.spec.to_json(), mode, contract.PBS_SCRIPT) if parts.standalone else [],
            _logs(logs, mode) if logs else [],
            batch.attempt(run_dir, '"$PBS_JOBID"', mode, contract.PBS_SCRIPT, task),
            _logs_before(logs) if logs else [],
            batch.ending(parts.own_python, job.retry.max_attempts if requeues else None, _end_of_secrets(parts)),
            batch.once(parts.workdir, parts.environment),
            _nodes(parts),
            rendezvous(
                parts,
                find_host=[f"export {contract.RDZV_HOST}=${{nodes[0]}}"],
                number="(${PBS_JOBID%%[!0-9]*} + ${PBS_ARRAY_INDEX:-${PBS_ARRAYID:-0}})",
                count="${#nodes[@]}",
            ),
            _end_time(parts),
            _threads(),
            pbs_tasks.on_nodes(parts, mode),
            pbs_tasks.task(parts, mode),
            pbs_tasks.start(parts),
            pbs_tasks.wait(parts),
        ]
    )


def _secrets(parts: Parts) -> list[str]:
    """Return the block that unpacks the secrets; who submits the script by hand names them to qsub -v instead."""
    if not parts.secrets:
        return []
    file = shlex.quote(f"{parts.spec.run_dir}/{contract.SECRETS_FILE}")
    by_hand = f"submit this script with it: qsub -v {','.join(parts.secrets)}"
    _, *checks = required(parts.secrets, by_hand)
    why = comment("secrets: they come in a file that only you can read, and that goes when the run has ended")
    return [why, f"[ ! -r {file} ] || . {file}", *checks]


def _end_of_secrets(parts: Parts) -> list[str]:
    """Return the lines that remove the file of secrets where no other attempt may follow, and no other task."""
    if not parts.secrets or parts.job.scheduler.array or parts.inside:
        return []
    goes_on = f'grep -qs \'"again": true\' "$attempt/{contract.AGAIN}"'
    file = f'"${contract.RUN_DIR}/{contract.SECRETS_FILE}"'
    return [f'[ -e "$attempt/{contract.TERMINATED}" ] || {goes_on} || rm -f {file}']


def _logs(logs: Sequence[str], mode: int) -> list[str]:
    out, *err = logs
    return [
        ': "${PBS_JOBID:?is not set: qsub this script}"',
        comment("what this script says can be read at once: PBS brings a log at the end of a job"),
        f"({batch.umask(mode)} && : {' '.join(f'>>{log}' for log in logs)})",
        f"exec >>{out} 2>{f'>{err[0]}' if err else '&1'}",
    ]


def _logs_before(logs: Sequence[str]) -> list[str]:
    return [
        comment("a job that PBS runs again appends to its log: what is there by now is of an earlier attempt"),
        f"stat -c '%s %n' {' '.join(logs)} >\"$attempt/{contract.LOGS_BEFORE}\" || true",
    ]


def _nodes(parts: Parts) -> list[str]:
    """Return the block that finds the nodes."""
    wanted = parts.spec.nnodes
    fix = "ask for -l place=scatter" if wanted > 1 else "ask for one node"
    needed = f"{wanted} different ones" if wanted > 1 else "one"
    return [
        comment("the nodes are the different hosts of the job, in PBS's order; some may stand there several times"),
        "nodes=() lines=() line=0",
        "while read -r host; do",
        '  [[ " ${nodes[*]} " == *" $host "* ]] || nodes+=("$host") lines+=("$line")',
        "  line=$((line + 1))",
        'done <"$PBS_NODEFILE"',
        f'[ "${{#nodes[@]}}" -eq {wanted} ] || {{',
        f'  echo "allranks: PBS gave the hosts ${{nodes[*]}}, and the job needs {needed}: {fix}" >&2',
        "  exit 1",
        "}",
    ]


def _end_time(parts: Parts) -> list[str]:
    limit = parts.job.resources.time if not parts.inside else None
    asked = f"limit=${{limit:-{walltime(limit)}}}" if limit else None
    return [
        comment("when the job will be ended, in seconds since 1970: ranks save and leave before"),
        'told() { qstat -f "$PBS_JOBID" 2>/dev/null | sed -nE "s/^ *($1) = //p"; }',
        "limit=$(told Resource_List.walltime)",
        *([asked] if asked else []),
        "end=",
        'if [ -n "$limit" ]; then',
        '  IFS=: read -r hours minutes seconds <<<"$limit"',
        '  began=$(told "stime|start_time")',
        '  began=$(date -d "${began:-now}" +%s 2>/dev/null) || began=$(date +%s)',
        "  end=$((began + 3600 * 10#$hours + 60 * 10#$minutes + 10#$seconds))",
        "fi",
        f"export {contract.END_TIME}=$end",
    ]


def _threads() -> list[str]:
    return [
        comment("PBS sets this for one rank that has all CPUs of its node"),
        '[ "$OMP_NUM_THREADS" != "$NCPUS" ] || unset OMP_NUM_THREADS',
    ]
