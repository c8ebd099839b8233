"""The scripts that are run on the machines of a run: one starts the node's agent, one ends it."""

from __future__ import annotations

import shlex
from typing import TYPE_CHECKING

from allranks import contract
from allranks.plan import batch
from allranks.plan.script import comment

if TYPE_CHECKING:
    from allranks.job.spec import Environment

#: Exit codes of :func:`starting`, of those that mean something else neither to ssh nor to a shell.
ENDED_AT_ONCE, NO_FOLDER, UNWRITABLE = 70, 72, 73
#: What runs on each node, in the run's folder.
NODE_SCRIPT = "node.sh"
#: These two: one starts the node's agent, one ends it.
START, END = "start.sh", "end.sh"
#: What ending is told that it shall do when the one who tells it is gone, and how long it bears silence.
HELD, _SECONDS_OF_SILENCE = "HELD", contract.whole_wait(30)
#: A word of shell for the folder that a script lies in.
BESIDE = '"$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"'
#: The job's own set-up of all machines, and what it has said.
SETUP, SETUP_LOG = "setup.sh", "setup.log"
#: What an agent takes at most, beyond the time that its ranks have to leave.
_SECONDS_TO_END = 20


def setting_up(title: str, run: str, mode: int, workdir: str, environment: Environment) -> str:
    """Write the script that runs the job's ``environment.setup`` once, on the first machine, before all nodes.

    What the lines say is in :data:`SETUP_LOG`; when one fails, the end of that goes to stderr.

    Args:
        title: one line on what this is.
        run: a word of shell for the absolute folder of the run.
        mode: permission bits of folders.
        workdir: absolute working directory of the ranks.
        environment: the job's.
    """
    return batch.joined(
        [
            ["#!/usr/bin/env bash", comment(title)],
            [
                comment("what the lines say, and what ends them"),
                f"export {contract.RUN_DIR}={run}",
                f'log="${contract.RUN_DIR}/{SETUP_LOG}"',
                f'({batch.umask(mode)} && : >"$log") || exit {UNWRITABLE}',
                'exec 3>&2 >"$log" 2>&1 </dev/null',
                """trap 'code=$?; [ "$code" = 0 ] || tail -n 5 "$log" >&3; exit "$code"' EXIT""",
            ],
            batch.strict(),
            batch.once(workdir, environment),
        ]
    )


def starting(title: str, run: str, mode: int, nodes: int, master_addr: str, master_port: int) -> str:
    """Write the script that starts a node's agent, in a session of its own, and returns when it is there.

    Its arguments are the node's number, the number of its ranks and the attempt. It prints one line: the agent's
    process id and its start time (man 5 proc), or the event of the error that the agent ended with.

    Args:
        title: one line on what this is.
        run: a word of shell for the absolute folder of the run.
        mode: permission bits of folders.
        nodes: how many nodes there are.
        master_addr: where they meet.
        master_port: likewise.
    """
    place = f'"${contract.RUN_DIR}" "${contract.ATTEMPT}" "${contract.NODE_RANK}"'
    return batch.joined(
        [
            ["#!/usr/bin/env bash", comment(title)],
            [
                comment("this node's place, and where all meet"),
                f"{contract.RUN_DIR}={run} || exit {NO_FOLDER}",
                f"export {contract.RUN_DIR} {contract.NODE_COUNT}={nodes}",
                f"export {contract.NODE_RANK}=$1 {contract.NODE_NPROC}=$2 {contract.ATTEMPT}=$3",
                f"export {contract.RDZV_HOST}={shlex.quote(master_addr)} {contract.RDZV_PORT}={master_port}",
                comment("secrets come by stdin, as lines of shell: they stand in no file and in no command line"),
                'eval "$(cat)"',
            ],
            [
                f"printf -v folder '%s/{contract.ATTEMPTS_DIR}/%03d/node-%03d' {place}",
                comment("its heartbeat takes the room that it needs now: a disk that is full is told at once"),
                f'({batch.umask(mode)} && mkdir -p "$folder" && : >>"$folder/{contract.AGENT_LOG}" && '
                f'date +%s.000000 >"$folder/{contract.HEARTBEAT}") || exit {UNWRITABLE}',
            ],
            [
                comment("a session of its own: it goes on when the connection ends"),
                f'cd -- "${contract.RUN_DIR}"',
                "(trap - INT QUIT  # a shell has what it starts in the background ignore them, for good",
                f'  exec setsid bash "${contract.RUN_DIR}/{NODE_SCRIPT}" </dev/null \\',
                f'    >>"$folder/{contract.AGENT_LOG}" 2>&1) &',
                "agent=$!",
                comment("who starts it hears at once if it cannot begin"),
                f'tells() {{ grep -s "\\"kind\\": \\"$1\\"" "$folder/{contract.AGENT_EVENTS}"; }}',
                f"until tells {contract.AGENT_STARTED} >/dev/null; do",
                '  if ! kill -0 "$agent" 2>/dev/null; then',
                f"    ! tells {contract.AGENT_STARTED} >/dev/null || break",
                f"    tells {contract.ERROR}",
                f'    tail -n 5 "$folder/{contract.AGENT_LOG}" >&2',
                f"    exit {ENDED_AT_ONCE}",
                "  fi",
                "  sleep 0.05",
                "done",
                'stat=$(cat "/proc/$agent/stat" 2>/dev/null)',
                'read -ra fields <<<"${stat##*) }"',
                'echo "$agent ${fields[19]:-0}"',
            ],
        ]
    )


def ending(title: str, run: str, patience: float) -> str:
    """Write the script that passes a signal on to a run's agent on a machine, or ends all that the run has there.

    Its arguments are the signal's name, and process id and start time that the other script printed, so that no later
    process is mistaken for the agent; both are 0 if nobody knows them. It returns 0, or 1 if there is no agent. ``0``
    only looks. With ``END`` in place of a name it waits until nothing of the run is left, as long as the ranks have to
    leave, and then kills the rest. With ``HELD`` it does so when stdin ends, or brings no line for 30 s.
    """
    return batch.joined(
        [
            ["#!/usr/bin/env bash", comment(title)],
            [
                f"signal=$1 agent=$2 started=$3 run={run}",
                comment("all that was started with the run's folder in its environment, the ranks above all"),
                f'marked() {{ grep -lsxzF "{contract.RUN_DIR}=$run" /proc/[0-9]*/environ | cut -d/ -f3; }}',
                "is_there() {",
                "  local fields stat",
                '  if [ "$agent" = 0 ]; then [ -n "$(marked)" ]; return; fi  # nobody has noted which one it is',
                '  stat=$(cat "/proc/$agent/stat" 2>/dev/null) || return 1',
                '  read -ra fields <<<"${stat##*) }"',
                '  [ "${fields[19]}" = "$started" ] && [ "${fields[0]}" != Z ]',
                "}",
                "tell() {",
                '  if [ "$agent" != 0 ]; then kill -s "$1" -- "-$agent"; return; fi',
                '  for process in $(marked); do kill -s "$1" "$process" 2>/dev/null; done',
                "}",
            ],
            [
                "case $signal in",
                "  END) ;;",
                f"  {HELD}) while is_there && read -r -t {_SECONDS_OF_SILENCE} _; do :; done ;;",
                '  *) is_there && { [ "$signal" = 0 ] || tell "$signal"; }; exit ;;',
                "esac",
                comment("an agent that nobody has noted may be about to start"),
                'told="" quiet=0 needed=1',
                'if [ "$agent" = 0 ]; then needed=20; fi',
                f"for _ in $(seq {round((patience + _SECONDS_TO_END) * 10)}); do",
                '  if [ -z "$told" ] && is_there; then tell TERM && told=1; fi',
                '  if is_there || [ -n "$(marked)" ]; then quiet=0; else quiet=$((quiet + 1)); fi',
                '  if [ "$quiet" -ge "$needed" ]; then exit 0; fi',
                "  sleep 0.1",
                "done",
                'for process in $(marked); do kill -s KILL "$process" 2>/dev/null; done',
                "exit 0",
            ],
        ]
    )
