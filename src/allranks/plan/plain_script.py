"""The script of a node whose ranks torch's own launcher starts: bash alone, since the ranks' Python may be too old.

It does what an agent does for those who look on: it tells events, beats, notes when the logs grow, passes a request to
end on, and leaves no rank behind.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import TYPE_CHECKING

from allranks import contract
from allranks.plan import batch, plain_launcher
from allranks.plan.plain_launcher import Place
from allranks.plan.script import comment

if TYPE_CHECKING:
    from allranks.contract import NodeSpec
    from allranks.job.spec import Environment, Job
    from allranks.plan.entry import Entry

#: How often the script looks around, and how often it beats.
_LOOK_SECONDS, _BEAT_MS = 0.2, round(contract.scaled_wait(5.0) * 1000)
#: Two signals within this time are one request: a group and its leader may each have got it.
_ONE_REQUEST_MS = 300
#: A process that SIGKILL does not end within this time is the kernel's.
_KILL_MS = 20_000

_PLACE = Place(
    nodes=f'"${contract.NODE_COUNT}"',
    node=f'"${contract.NODE_RANK}"',
    ranks=f'"${contract.NODE_NPROC}"',
    master_addr=f'"${contract.RDZV_HOST}"',
    master_port=f'"${contract.RDZV_PORT}"',
)
_OUT, _ERR = (f'"$folder/{contract.rank_log(contract.ALL_OF_A_NODE, stream)}"' for stream in ("out", "err"))


def own_place(spec: NodeSpec, port: int) -> list[str]:
    """Return the block that tells a node its place where no other script does; its argument is the attempt."""
    return [
        comment("this node's place, and where all meet"),
        f"export {contract.RUN_DIR}={shlex.quote(spec.run_dir)} {contract.ATTEMPT}=${{1:-0}}",
        f"export {contract.NODE_RANK}={spec.node} {contract.NODE_COUNT}={spec.nnodes}",
        f"export {contract.NODE_NPROC}={spec.nproc_per_node}",
        f"export {contract.RDZV_HOST}={shlex.quote(spec.master_addr)} {contract.RDZV_PORT}={port}",
    ]


def plain_script(
    head: Sequence[str],
    job: Job,
    environment: Environment,
    python: Sequence[str],
    entry: Entry,
    *,
    mode: int,
    place: Sequence[str] = (),
    is_alone: bool = False,
    finds_port: bool = False,
) -> str:
    """Write the script that sets a node up, runs torch's own launcher there, and tells how it goes.

    Args:
        head: what :func:`allranks.plan.script.node_setup` returned.
        job: the job.
        environment: its environment, with paths as they are on the node.
        python: the ranks' interpreter, with its options.
        entry: what the ranks run.
        mode: permission bits of the files that are written.
        place: lines that tell the node its place, where nothing else does.
        is_alone: whether there is no other node, so that the settings hold all.
        finds_port: whether any free port will do, from that of the place on.
    """
    job, patience = job.model_copy(update={"environment": environment}), round(job.launch.stop_timeout * 1000)
    return batch.joined(
        [
            head,
            place,
            _folder(mode),
            _telling(),
            *(() if is_alone else (_network(),)),
            _port(finds_port),
            _looking_around(),
            _requests(),
            _rest(),
            _launching(job, python, entry),
            _waiting(patience),
            _leaving_none(patience),
            _end(plain_launcher.name_of(job)),
        ]
    )


def _folder(mode: int) -> list[str]:
    logs = [contract.rank_log(contract.ALL_OF_A_NODE, stream) for stream in ("out", "err")]
    files = " ".join([contract.AGENT_EVENTS, contract.HEARTBEAT, contract.LOG_INDEX, *logs])
    node = f'"${contract.RUN_DIR}" "${contract.ATTEMPT}" "${contract.NODE_RANK}"'
    umask = batch.umask(mode | 0o100 | (mode & 0o040) >> 2)
    return [
        comment("the node's folder; whatever goes wrong from here on is told there"),
        "set +eu",
        "IFS=$' \\t\\n'",
        "trap - ERR",
        f"printf -v folder '%s/{contract.ATTEMPTS_DIR}/%03d/node-%03d' {node}",
        f'({umask} && mkdir -p "$folder" && cd -- "$folder" && touch {files}) || exit 1',
    ]


def _telling() -> list[str]:
    event = '{"time": %s, "host": "%s", "kind": "%s"%s}\\n'
    return [
        comment("$now in seconds since 1970, with a point in every language, and $ms"),
        "look_at_clock() {",
        "  now=${EPOCHREALTIME:-$(date +%s.%N)}",
        "  now=${now/,/.}",
        "  ms=${now#*.}",
        "  ms=${now%.*}${ms:0:3}",
        "}",
        comment("an event: its kind, and its fields: name=text, or name:JSON"),
        "host=${HOSTNAME//[^A-Za-z0-9._-]/_}",
        "tell() {",
        "  local field name value fields=''",
        '  for field in "${@:2}"; do',
        "    name=${field%%[:=]*} value=${field#*[:=]}",
        '    if [ "${field:${#name}:1}" = "=" ]; then',
        "      value=${value//\\\\/\\\\\\\\}",
        '      value=\\"${value//\\"/\\\\\\"}\\"',
        "    fi",
        '    fields+=", \\"$name\\": $value"',
        "  done",
        "  look_at_clock",
        f'  printf \'{event}\' "$now" "$host" "$1" "$fields" >>"$folder/{contract.AGENT_EVENTS}"',
        "}",
        "look_at_clock",
        f'tell {contract.AGENT_STARTED} "pid:$$" "began:$now"',
    ]


def _network() -> list[str]:
    host, device = f"${contract.RDZV_HOST}", "sed -n 's/.* dev \\([^ ]*\\).*/\\1/p' | head -n 1"
    return [
        comment("which interface gloo and NCCL use, and how many threads: what is set already stays"),
        "decide() {",
        '  [ -z "${!1+set}" ] || return',
        f'  export "$1=$2" {contract.DECIDED}="${{{contract.DECIDED}:+${contract.DECIDED} }}$1"',
        '  echo "$1=$2: $3" >&2',
        "}",
        f"address=$(getent ahosts \"{host}\" | awk '{{print $1; exit}}')",
        f'if [ "${contract.NODE_COUNT}" -eq 1 ]; then',
        '  decide GLOO_SOCKET_IFNAME lo "all ranks are on this node"',
        "else",
        '  case "$address" in',
        "    127.0.0.1 | ::1) interface=lo ;;",
        f"    127.*) interface=$(ip -o route show default | {device}) ;;  # the first node, by its own name",
        "    *)",
        "      interface=$(ip -o addr show to \"$address\" | awk '{print $2; exit}')  # the first node itself",
        f'      [ -n "$interface" ] || interface=$(ip -o route get "$address" | {device})',
        "      ;;",
        "  esac",
        '  if [ -z "$interface" ]; then',
        f'    echo "GLOO_SOCKET_IFNAME: left alone: nothing tells the route to {host}" >&2',
        "  else",
        f'    decide GLOO_SOCKET_IFNAME "$interface" "it carries the route to {host}"',
        f'    [ "${contract.BACKEND}" = gloo ] || grep -qs ACTIVE /sys/class/infiniband/*/ports/*/state ||',
        '      decide NCCL_SOCKET_IFNAME "=$interface" "likewise; no InfiniBand or RoCE device is active"',
        "  fi",
        "fi",
        f"threads=$(($(nproc) / {contract.NODE_NPROC}))",
        f'decide OMP_NUM_THREADS "$((threads ? threads : 1))" "CPUs: $(nproc), ranks: ${contract.NODE_NPROC}"',
    ]


def _port(finds_one: bool) -> list[str]:
    port = f"${contract.RDZV_PORT}"
    listens = [
        "is_taken() {",
        "  local hex",
        '  printf -v hex :%04X "$1"',
        '  grep -qs "$hex [0-9A-F]*:0000 0A" /proc/net/tcp /proc/net/tcp6',
        "}",
    ]
    if finds_one:
        return [
            comment("a port that nobody listens on; the kernel gives none of these to outgoing connections"),
            *listens,
            f'while is_taken "{port}"; do export {contract.RDZV_PORT}=$(({contract.RDZV_PORT} + 1)); done',
        ]
    return [
        comment("all nodes know this port: it has to be free on the first one"),
        *listens,
        f'if [ "${contract.NODE_RANK}" -eq 0 ] && is_taken "{port}"; then',
        f'  tell {contract.ERROR} "what=cannot listen on port {port}" "why=another process on $host does" \\',
        '    "fix=another --master-port"',
        f"  {_ended('FAILED', '1', f'reason=cannot listen on port {port}')}",
        "  exit 1",
        "fi",
    ]


def _looking_around() -> list[str]:
    lines = [
        comment("beat, and note when the logs have grown: their lines are shown in that order"),
        "out=0 err=0 next_beat=0",
        "look_around() {",
        "  local sizes",
        "  look_at_clock",
        '  if [ "$ms" -ge "$next_beat" ]; then',
        f"    next_beat=$((ms + {_BEAT_MS}))",
        f'    echo "$now" 1<>"$folder/{contract.HEARTBEAT}"',
        "  fi",
        f"  mapfile -t sizes < <(stat -c %s {_OUT} {_ERR})",
    ]
    for number, name in enumerate(("out", "err")):
        lines += [
            f'  if [ "${{sizes[{number}]:-${name}}}" != "${name}" ]; then',
            f"    {name}=${{sizes[{number}]}}",
            f'    echo "$ms {contract.ALL_OF_A_NODE} {name[0]} ${name}" >>"$folder/{contract.LOG_INDEX}"',
            "  fi",
        ]
    return [*lines, "}"]


def _requests() -> list[str]:
    return [
        comment("a request to end: a signal or, where standard input is held open for that, its end"),
        "stop='' why='' since=0 hurry=''",
        "request() {",
        "  look_at_clock",
        '  if [ -z "$stop" ]; then',
        "    stop=$1 why=$2 since=$ms",
        f'  elif [ "$((ms - since))" -gt {_ONE_REQUEST_MS} ]; then',
        "    hurry=1",
        "  fi",
        "}",
        *(f"trap 'request {name} \"got SIG{name}\"' {name}" for name in ("TERM", "INT", "HUP")),
        "trap : USR1 USR2",
        "exec 9<> <(:)  # nothing ever comes from here",
        "source=9",
        f'[ -z "${{{contract.LIFELINE}-}}" ] || source=0',
        f"unset {contract.LIFELINE}",
        "rest_a_moment() {",
        f'  read -r -t {_LOOK_SECONDS} -u "$source" _',
        '  if [ "$?" -eq 1 ]; then',
        "    source=9",
        '    request TERM "the launcher is gone"',
        "  fi",
        "}",
    ]


def _rest() -> list[str]:
    return [
        comment("all that the launcher has started here: it has this node's mark, and is not of this script's group"),
        "group_of() {",
        "  local fields stat",
        '  read -r stat <"/proc/$1/stat"',
        '  read -ra fields <<<"${stat##*) }"',
        '  [ "${fields[0]}" = Z ] || echo "${fields[2]}"',
        "}",
        "group=$(group_of $$)",
        "left_here() {",
        "  local file process its",
        f'  for file in $(grep -lsxzF "{contract.RUN_DIR}=${contract.RUN_DIR}" /proc/[0-9]*/environ); do',
        "    process=${file//[!0-9]/}",
        '    its=$(group_of "$process" 2>/dev/null)',
        '    [ -n "$its" ] && [ "$its" != "$group" ] &&',
        f'      grep -qsxzF "{contract.NODE_RANK}=${contract.NODE_RANK}" "$file" && echo "$process"',
        "  done",
        "}",
    ]


def _launching(job: Job, python: Sequence[str], entry: Entry) -> list[str]:
    command = plain_launcher.command(job, python, entry, _PLACE)
    world = f"world_size:$(({contract.NODE_COUNT} * {contract.NODE_NPROC}))"
    return [
        comment("a session of its own: what this script is told does not reach it by another way"),
        " ".join(["(trap - INT QUIT && exec setsid", *command, "\\"]),
        f"  </dev/null >>{_OUT} 2>>{_ERR} 9<&-) &",
        "launcher=$!",
        f'tell {contract.RANKS_STARTED} restart:0 "{world}" "nodes:${contract.NODE_COUNT}"',
    ]


def _waiting(patience: int) -> list[str]:
    return [
        comment(f"the ranks have {patience / 1000:g} s to leave, once they are asked to"),
        "deadline=''",
        'while kill -0 "$launcher" 2>/dev/null; do',
        "  look_around",
        '  if [ -n "$stop" ] && [ -z "$deadline" ]; then',
        f'    tell {contract.STOP_REQUESTED} "signal=SIG$stop" "by=$why"',
        f"    deadline=$((ms + {patience}))",
        '    kill -s TERM "$launcher"',
        '  elif [ -n "$hurry" ] || { [ -n "$deadline" ] && [ "$ms" -gt "$deadline" ]; }; then',
        '    kill -s KILL "$launcher" $(left_here) 2>/dev/null',
        "  fi",
        "  rest_a_moment",
        "done",
        'wait "$launcher"',
        "code=$?",
    ]


def _leaving_none(patience: int) -> list[str]:
    return [
        comment("what it has left behind, unless all went well: a helper of the script may be meant to stay then"),
        'if [ "$code" -ne 0 ] || [ -n "$stop" ]; then',
        "  look_at_clock",
        f"  deadline=${{deadline:-$((ms + {patience}))}}",
        "  left=$(left_here)",
        '  [ -z "$left" ] || kill -s TERM $left 2>/dev/null',
        f'  while [ -n "$left" ] && [ "$ms" -le "$((deadline + {_KILL_MS}))" ]; do',
        "    look_around",
        '    if [ -n "$hurry" ] || [ "$ms" -gt "$deadline" ]; then kill -s KILL $left 2>/dev/null; fi',
        "    rest_a_moment",
        "    left=$(left_here)",
        "  done",
        "fi",
        "look_around",
    ]


def _end(launcher: str) -> list[str]:
    return [
        comment("how it ended; the launcher's own code is that of the run"),
        'if [ -n "$stop" ]; then',
        '  code=$((128 + $(kill -l "$stop")))',
        f"  {_ended('CANCELLED', '$code', 'reason=$why')}",
        'elif [ "$code" -eq 0 ]; then',
        f"  {_ended('SUCCEEDED', '0', 'reason:null')}",
        'elif [ "$code" -gt 128 ] && name=$(kill -l "$code" 2>/dev/null); then',
        f"  {_ended('FAILED', '$code', f'reason={launcher} was ended by SIG$name on $host')}",
        "else",
        f"  {_ended('FAILED', '$code', f'reason={launcher} ended with exit code $code on $host')}",
        "fi",
        'exit "$code"',
    ]


def _ended(state: str, code: str, reason: str) -> str:
    return f'tell {contract.ENDED} state={state} "exit_code:{code}" "{reason}" because_of_rank:null "lost:[]"'
