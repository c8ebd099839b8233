"""The batch script for Slurm: short, and every line that is not obvious explained."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence

from allranks import contract
from allranks.clusters.slurm_directives import own_tasks
from allranks.plan import batch
from allranks.plan.directives import written
from allranks.plan.parts import Parts, agent, rank, rendezvous
from allranks.plan.script import comment, required

_WIDTH = 100
_STEP = "step"
#: Functions of the script. They travel in the environment, where a program called "node" might look for itself.
_NODE, _RANK = "allranks_node", "allranks_rank"


def batch_script(parts: Parts) -> str:
    """Write the script."""
    job, run_dir = parts.job, parts.spec.run_dir
    mode = 0o750 if job.runs.group_readable else 0o700
    is_array = bool(job.scheduler.array) and not parts.inside
    job_id = '"${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID"' if is_array else '"$SLURM_JOB_ID"'
    requeues = job.retry.requeue and not parts.inside
    return batch.joined(
        [
            ["#!/usr/bin/env bash", comment(parts.title), *written(parts.directives, "#SBATCH")],
            batch.strict(),
            required(parts.secrets) if parts.secrets else [],
            batch.own_folder(run_dir, parts.spec.to_json(), mode, contract.SBATCH_SCRIPT) if parts.standalone else [],
            batch.attempt(run_dir, job_id, mode, contract.SBATCH_SCRIPT, "$SLURM_ARRAY_TASK_ID" if is_array else None),
            batch.ending(parts.own_python, job.retry.max_attempts if requeues else None),
            batch.once(parts.workdir, parts.environment),
            _rendezvous(parts),
            _end_time(),
            _on_nodes(parts, mode),
            _start(parts),
            _wait(parts),
        ]
    )


def _rendezvous(parts: Parts) -> list[str]:
    return rendezvous(
        parts,
        find_host=[
            'host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)',
            f"export {contract.RDZV_HOST}=${{host:-${{SLURMD_NODENAME:?is not set, and there is no scontrol}}}}",
        ],
        number="SLURM_JOB_ID",
        count=str(parts.spec.nnodes) if parts.inside else "$SLURM_JOB_NUM_NODES",
    )


def _end_time() -> list[str]:
    asked = 'date -d "$(squeue --noheader --jobs="$job" --format=%e)" +%s'
    return [
        comment("when the job will be ended, in seconds since 1970: ranks save and leave before"),
        f"end=${{SLURM_JOB_END_TIME:-$({asked} 2>/dev/null)}} || end=",
        f"export {contract.END_TIME}=$end",
    ]


def _on_nodes(parts: Parts, mode: int) -> list[str]:
    gpus = f"${{SLURM_GPUS_ON_NODE:-{parts.spec.nproc_per_node}}}" if parts.per_gpu else None
    names = (_RANK, "what each rank runs") if parts.is_direct else (_NODE, "what runs on each node")
    return batch.on_nodes(
        *names,
        host="$SLURMD_NODENAME",
        workdir=parts.workdir,
        environment=parts.environment,
        settings=parts.settings,
        backend=parts.backend,
        mode=mode,
        node="$SLURM_NODEID",
        last=[*(_leave_step() if parts.inside else ()), *(_rank(parts) if parts.is_direct else agent(parts, gpus))],
    )


def _leave_step() -> list[str]:
    return [
        comment("which step of the allocation this is, to be told to end"),
        f'[ "$SLURM_NODEID" -gt 0 ] || echo "$SLURM_JOB_ID.$SLURM_STEP_ID" >"$folder/{_STEP}"',
    ]


def _rank(parts: Parts) -> list[str]:
    place = {
        "RANK": "$SLURM_PROCID",
        "LOCAL_RANK": "$SLURM_LOCALID",
        "GROUP_RANK": "$SLURM_NODEID",
        "WORLD_SIZE": "$SLURM_STEP_NUM_TASKS",
        "LOCAL_WORLD_SIZE": "${#ranks[@]}",
    }
    return rank(parts, place, ['IFS=, read -ra ranks <<<"$SLURM_GTIDS"  # of this node'])


def _start(parts: Parts) -> list[str]:
    """Return the block that starts the nodes."""
    why = "a node that dies takes no other with it" if parts.is_elastic else "when one fails, all end"
    function, what = (_RANK, "the ranks") if parts.is_direct else (_NODE, "all nodes")
    options = [*_options(parts), *map(shlex.quote, parts.job.launch.launcher_args)]
    # A signal for the group of this script must not reach srun, see _wait.
    srun = "setsid srun" if parts.inside else "srun"
    return [comment(f"start {what}; {why}"), *_wrapped([srun, *options, f"bash -c {function} &"]), "step=$!"]


def _options(parts: Parts) -> Iterator[str]:
    yield f'--nodes="${contract.NODE_COUNT}"'
    if parts.is_direct:
        nproc = parts.spec.nproc_per_node
        each = f"--ntasks=$(({contract.NODE_COUNT} * {nproc})) --ntasks-per-node={nproc}"
        yield '--ntasks="$SLURM_NTASKS"' if own_tasks(parts.job) else each
        yield "--distribution=block"
    else:
        yield f'--ntasks="${contract.NODE_COUNT}" --ntasks-per-node=1'
    if parts.job.resources.cpus_per_node and not parts.inside:
        yield '--cpus-per-task="$SLURM_CPUS_PER_TASK"'
    if parts.inside:
        yield "--overlap"
    if parts.is_elastic:
        yield "--no-kill"
    yield f"--kill-on-bad-exit={0 if parts.is_elastic else 1}"
    yield "--wait=0"
    yield "--export=ALL"


def _wrapped(words: Sequence[str]) -> list[str]:
    """Break a command into lines."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > _WIDTH:
            lines[-1] += " \\"
            lines.append(" ")
        lines[-1] += f" {word}" if lines[-1] else word
    return lines


def _wait(parts: Parts) -> list[str]:
    why = "USR1 comes to this script alone; TERM comes to the ranks too, and srun would kill them for it"
    lines = ["trap 'kill -USR1 \"$step\" || true' USR1", "trap : TERM"]
    if parts.inside:
        why = "signals for this script are for the ranks; srun would kill them for most"
        step = f"{contract.node_dir(0, 0).removeprefix(contract.attempt_dir(0))}/{_STEP}"
        lines = [
            "pass_on() {",
            f'  scancel --signal="$1" "$(cat "$attempt{step}")" || [ "$1" = USR1 ] || kill "$step" || true',
            "}",
            *(f"trap 'pass_on {name}' {name}" for name in ("USR1", "INT", "TERM", "HUP")),
        ]
    return [
        comment(why),
        *lines,
        'while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done',
        'wait "$step" || exit',
    ]
