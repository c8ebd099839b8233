"""The tasks of a PBS job, in its batch script: what a node runs, how that is started there, and waiting for all of it.

PBS starts the script on the first node alone, and hands almost nothing of its environment to what is started on the
others. So the script leaves its functions and, for each task, its environment in files of the attempt.
"""

from __future__ import annotations

import shlex

from allranks import contract
from allranks.plan import batch
from allranks.plan.directives import warning_seconds
from allranks.plan.parts import Parts, agent, rank
from allranks.plan.script import comment, indented

#: What can start tasks on the nodes of a job, in the order of preference: each by the line for one task, where
#: ``$host`` is the node's name and ``$line`` its first line in PBS_NODEFILE, from 0.
STARTERS = {
    "pbs_tmrsh": 'pbs_tmrsh "$host" "$@"',
    "pbsdsh": 'pbsdsh -n "$line" -- "$@"',
    "mpiexec": 'mpiexec -n 1 -host "$host" "$@"',
    "ssh": 'ssh -o BatchMode=yes -o ConnectTimeout=30 "$host" "$(printf \'%q \' "$@")"',
}
#: Functions of the script, what runs on each node among them.
_NODE, _RANK, _TASK = "allranks_node", "allranks_rank", "allranks_task"
#: In the folder of a node, the process of a task.
_PID = ".pid"
#: What a task has of its own, whatever the first node has: its place, and the GPUs that PBS lets it see.
_OF_A_TASK = (
    ("PBS_NODENUM", "PBS_TASKNUM", "PBS_VNODENUM", "PBS_MOMPORT", "PBS_JOBCOOKIE"),
    ("HOSTNAME", "PWD", "OLDPWD", "SHLVL"),
    ("CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
#: The file that the functions are left in, in the attempt's folder.
_FUNCTIONS = "node.sh"
#: Seconds beyond those that ranks have to leave, after which nodes are no longer waited for; 5 at least: so
#: long agents may take to end on a slow machine.
_PATIENCE = max(5, contract.whole_wait(15))
#: Seconds in which a file that another node has written is seen here.
_HEARD = contract.whole_wait(5)
#: Seconds in which a starter ends after its task: of the 10 that PBS leaves a job it ends, most are for saving.
_STARTER_ENDS = 2


def on_nodes(parts: Parts, mode: int) -> list[str]:
    """Return the block that defines what runs on each node, or for each rank where there are no agents."""
    names = (_RANK, "what each rank runs") if parts.is_direct else (_NODE, "what runs on each node")
    return batch.on_nodes(
        *names,
        host="$HOSTNAME",
        workdir=parts.workdir,
        environment=parts.environment,
        settings=parts.settings,
        backend=parts.backend,
        mode=mode,
        node=None,
        last=_rank(parts) if parts.is_direct else agent(parts, None),
    )


def _rank(parts: Parts) -> list[str]:
    nproc = parts.spec.nproc_per_node
    node = f"${contract.NODE_RANK}"
    place = {
        "RANK": f"$(({contract.NODE_RANK} * {nproc} + LOCAL_RANK))",
        "LOCAL_RANK": "$LOCAL_RANK",
        "GROUP_RANK": node,
        "WORLD_SIZE": f"$(({contract.NODE_COUNT} * {nproc}))",
        "LOCAL_WORLD_SIZE": str(nproc),
    }
    first = f"{contract.NODE_RANK} * {nproc}"
    return rank(parts, place, [f'ranks=($(seq "$(({first}))" "$(({first} + {nproc - 1}))"))  # of this node'])


def task(parts: Parts, mode: int) -> list[str]:
    """Return the block that defines what a node does around that: a function, which is left in a file."""
    function = _RANK if parts.is_direct else _NODE
    nproc = parts.spec.nproc_per_node
    shared = f"(cpus > {nproc} ? cpus / {nproc} : 1)"
    name = f'"rank-$(($2 * {parts.spec.nproc_per_node} + $3))"' if parts.is_direct else "agent"
    looking = _looking() if parts.is_direct and not parts.inside else []
    body = [
        comment("PBS sets threads for one rank that has all CPUs of its node; its ranks share them"),
        "local cpus=$NCPUS",
        "unset OMP_NUM_THREADS",
        comment("the environment of the script: PBS gives a task almost none; it may hold secrets"),
        f'. "$1/{contract.TASK_ENVIRONMENT}$2${{3:+-$3}}" || exit 1',
        f'rm -f "$1/{contract.TASK_ENVIRONMENT}$2${{3:+-$3}}"',
        "cpus=${cpus:-${NCPUS:-$PBS_NUM_PPN}}",
        f'[ -z "$cpus" ] || export OMP_NUM_THREADS="${{OMP_NUM_THREADS:-$({shared})}}"',
        'unset "${!OMPI_COMM_WORLD_@}" "${!PMI_@}" "${!PMIX_@}"  # of an mpiexec that starts one task',
        f"export {contract.NODE_RANK}=$2{' LOCAL_RANK=$3' if parts.is_direct else ''}",
        'printf -v folder \'%s/node-%03d\' "$1" "$2"',
        f"name={name}",
        f'({batch.umask(mode)} && mkdir -p "$folder" && : >>"$folder/{contract.AGENT_LOG}")',
        f'exec >>"$folder/{contract.AGENT_LOG}" 2>&1 </dev/null',
        comment("signals are handed on, and the exit code is told: what starts tasks may lose it"),
        "for signal in USR1 INT TERM HUP; do",
        r'  trap "kill -s $signal \"\$task\" 2>/dev/null || true" "$signal"',
        "done",
        f"{function} & task=$!",
        f'echo "$task" >"$folder/$name{_PID}"',
        *looking,
        "local code",
        "while true; do",
        '  wait "$task"',
        "  code=$?",
        '  kill -0 "$task" 2>/dev/null || break',
        "done",
        *(['[ -z "$look" ] || kill "$look"'] if looking else []),
        f'rm -f "$folder/$name{_PID}"',
        f'echo "$code $HOSTNAME" >"$folder/$name{contract.TASK_EXIT}"',
        'exit "$code"',
    ]
    usage = "ATTEMPT NODE LOCAL_RANK" if parts.is_direct else "ATTEMPT NODE"
    return [
        comment(f"how a node runs that: {_TASK} {usage}"),
        f"{_TASK}() {{",
        *indented(body),
        "}",
        f'{{ declare -f {function} {_TASK}; echo \'{_TASK} "$@"\'; }} >"$attempt/{_FUNCTIONS}"',
    ]


def _looking() -> list[str]:
    """Return the lines by which a rank hears that PBS ends the job.

    It tells the first node alone, and starts nothing on the others any more. There are no agents that would tell them.
    """
    word = f'case $(ls "$1") in *{contract.TERMINATED}*) kill -s TERM "$task"; break ;; esac'
    return [
        comment("PBS tells the first node alone that it ends the job: the others look for what that one leaves"),
        "look=",
        'if [ "$2" -gt 0 ]; then',
        f"  (while sleep 1; do {word}; done) & look=$!",
        "fi",
    ]


def start(parts: Parts) -> list[str]:
    """Return the block that says how a task is started, and how a node is sent a signal."""
    own = " ".join(map(shlex.quote, parts.job.launch.launcher_args))
    kill = '\'exec 2>/dev/null; kill -s "$0" $(cat "$1"/*' + _PID + ")'"
    folder = '"$(printf \'%s/node-%03d\' "$attempt" "$node")"'
    return [
        *_starter(parts.job.scheduler.start_with, own),
        comment("start a task on a node, with the environment of this script, in a file that the task removes"),
        "start() {",
        f"  ({batch.umask(0o700)}",
        *(f"    unset {' '.join(names)}" for names in _OF_A_TASK),
        f'    export -p >"$attempt/{contract.TASK_ENVIRONMENT}$1${{2:+-$2}}")',
        f'  on "$1" "$BASH" "$attempt/{_FUNCTIONS}" "$attempt" "$@"',
        "}",
        comment("send a signal to the tasks of nodes: signal_to SIGNAL NODE..."),
        "signal_to() {",
        "  local name=$1 node",
        "  shift",
        "  for node; do",
        f'    on "$node" "$BASH" -c {kill} "$name" {folder} >/dev/null 2>&1 &',
        "  done",
        "}",
    ]


def _starter(asked: str | None, own: str) -> list[str]:
    """Return the lines that define ``on``, which runs a command on a node."""
    head = ["on() {", "  local host=${nodes[$1]} line=${lines[$1]}", "  shift"]
    if asked:
        why = f"run a command on a node: on NODE COMMAND..., with {asked}"
        return [comment(why), *head, f"  {_with(asked, own)}", "}"]
    cases = [f"    {name}) {_with(name, own)} ;;" for name in STARTERS]
    return [
        comment("run a command on a node: on NODE COMMAND..., with the first of these that is here"),
        f"for starter in {' '.join(STARTERS)}; do",
        '  ! command -v "$starter" >/dev/null || break',
        "done",
        *head,
        "  case $starter in",
        *cases,
        "  esac",
        "}",
    ]


def _with(starter: str, own: str) -> str:
    """Return the command of a starter, in place of a subshell, with a user's own options behind its name."""
    return STARTERS[starter].replace(starter, f"exec setsid {starter} {own}".rstrip(), 1)


def wait(parts: Parts) -> list[str]:
    """Return the block that starts all tasks and waits for them."""
    what = "all ranks" if parts.is_direct else "all nodes"
    patience = int(parts.spec.stop_timeout) + _PATIENCE
    left = patience if parts.is_direct else _PATIENCE
    warning = warning_seconds(parts.job)
    at = f"${{end:+$((end - {warning}))}}" if warning else ""
    return [
        *_follow(parts),
        comment(f"start {what}"),
        "all() {",
        "  trap '' USR1 INT TERM HUP",
        *indented(_all(parts)),
        "  wait",
        "}",
        *_traps(parts),
        comment("when one has failed, all are ended; PBS gives no warning of the time limit, so it comes from here"),
        f"code=0 todo=warn at={at}",
        "while true; do",
        "  now=$(date +%s)",
        '  if read -r ${at:+-t "$((at > now ? at - now : 1))"} ended node; then',
        '    if [ "$code" -eq 0 ] && [ "$ended" -ne 0 ]; then',
        "      code=$ended todo=end at=$(date +%s)",
        *indented(indented(indented(_hearing(parts)))),
        "    fi",
        *indented(indented(_last_agent(parts))),
        '  elif [ "$?" -le 128 ]; then',
        "    break",
        '  elif [ "$(date +%s)" -ge "$at" ]; then',
        "    case $todo in",
        '      warn) signal_to USR1 "${!nodes[@]}"; at= ;;',
        f'      end) signal_to TERM "${{!nodes[@]}}"; todo=leave at=$(($(date +%s) + {left})) ;;',
        '      leave) signal_to KILL "${!nodes[@]}"; break ;;',
        "    esac",
        "  fi",
        "done < <(all)",
        f'rm -f "$attempt/{contract.TASK_ENVIRONMENT}"*',
        'exit "$code"',
    ]


def _hearing(parts: Parts) -> list[str]:
    """Return the lines that give agents the time to end their ranks: they hear from each other of one that failed."""
    if parts.is_direct:
        return []
    agent = f'$(printf \'%s/node-%03d/{contract.AGENT_EVENTS}\' "$attempt" "$node")'
    return [f'[ ! -e "{agent}" ] || at=$((at + {int(parts.spec.stop_timeout) + _PATIENCE}))']


def _last_agent(parts: Parts) -> list[str]:
    """Return the lines that end the wait soon after node 0's agent has left: no node that can answer is left then."""
    if parts.is_direct:
        return []
    ended = f'grep -qs \'"kind": "{contract.ENDED}"\' "$attempt/node-000/{contract.AGENT_EVENTS}"'
    return [
        comment("the first node's agent leaves last: what is not over then is lost"),
        f'[ "$node" -ne 0 ] || ! {ended} || todo=leave at=$(($(date +%s) + {_PATIENCE}))',
    ]


def _follow(parts: Parts) -> list[str]:
    """Return the lines that define how a task is started and followed to its end."""
    rank = f"rank-$(($1 * {parts.spec.nproc_per_node} + $2))"
    name = rank if parts.is_direct else "agent"
    events = f'"${{told%/*}}/{contract.AGENT_EVENTS}"'
    # The agents decide: they hear from each other of one that is lost, and node 0's tells.
    agent_decides = [f'    if [ "$1" -gt 0 ] && [ -e {events} ]; then until is_over; do sleep 1; done; fi']
    return [
        comment("whether a task has told its end; a folder that is listed shows what another node has written there"),
        'is_over() { : "${told%/*}"/*; [ -s "$told" ] || ! kill -0 "$$" 2>/dev/null; }',
        comment("start a task, and tell how it ended, in a line: by its own word; what starts it may fail or wait on"),
        "follow() {",
        "  local code= process= told",
        f'  printf -v told \'%s/node-%03d/%s\' "$attempt" "$1" "{name}{contract.TASK_EXIT}"',
        '  exec 3< <(start "$@" >&2 & echo "$!"; wait "$!" && echo 0 || echo "$?")',
        "  read -r -u 3 process || true",
        '  until read -r -t 1 -u 3 code || [ "$?" -le 128 ] || is_over; do :; done',
        f'  if [ -z "$code" ] && ! read -r -t {_STARTER_ENDS} -u 3 code; then',
        "    " + comment("PBS does not see the end of this task: its daemon there is gone, or was restarted"),
        f'    [ ! -s "$told" ] || echo "PBS on ${{nodes[$1]}}" >"${{told%/*}}/{contract.CUT_OFF}"',
        '    kill -s KILL "$process" 2>/dev/null || true',
        "  fi",
        f"  for ((second = 0; second < {_HEARD}; second++)); do ! is_over || break; sleep 1; done",
        '  if [ ! -s "$told" ]; then',
        '    echo "allranks: ${nodes[$1]}: a task was not started, or is lost" >&2',
        *([] if parts.is_direct else agent_decides),
        "  fi",
        '  [ ! -s "$told" ] || read -r code _ <"$told"',
        '  [ -s "$told" ] || [ "${code:-0}" -ne 0 ] || code=1',
        '  echo "$code $1"',
        "}",
    ]


def _all(parts: Parts) -> list[str]:
    if not parts.is_direct:
        return ['for node in "${!nodes[@]}"; do follow "$node" & done']
    return [
        'for node in "${!nodes[@]}"; do',
        f'  for ((local = 0; local < {parts.spec.nproc_per_node}; local++)); do follow "$node" "$local" & done',
        "done",
    ]


def _traps(parts: Parts) -> list[str]:
    """Return the lines for signals that come to the script.

    PBS sends SIGTERM to everything on the first node, and nothing to the others: agents tell each other.
    """
    if parts.inside:
        first = '"${!nodes[@]}"' if parts.is_direct else "0"
        return [
            comment("signals for this script are for the ranks; the first node's agent tells the others of the end"),
            "trap 'signal_to USR1 \"${!nodes[@]}\"' USR1",
            *(f"trap 'signal_to {name} {first}' {name}" for name in ("INT", "TERM", "HUP")),
        ]
    others = "the others look for this file" if parts.is_direct else "its agent tells the others"
    return [
        comment(f"PBS ends what runs on the first node; {others}"),
        f'trap \'echo "$end" >"$attempt/{contract.TERMINATED}"\' TERM',
    ]
