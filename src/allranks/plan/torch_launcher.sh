# shellcheck shell=bash disable=SC1102,SC2013,SC2046,SC2086,SC2153,SC2329
export ALLRANKS_RUN_ID=${ALLRANKS_RUN_DIR##*/}

# the node's directory; whatever goes wrong from here on is recorded there
set +eu
IFS=$' \t\n'
trap - ERR
printf -v folder '%s/attempts/%03d/node-%03d' "$ALLRANKS_RUN_DIR" "$ALLRANKS_ATTEMPT" "$ALLRANKS_NODE_RANK"
(umask @umask@ && mkdir -p "$folder" && cd -- "$folder" && touch agent.jsonl heartbeat lines.idx node.out node.err) || exit 1

# $now in seconds since 1970, with a point in every language, and $ms
look_at_clock() {
  now=${EPOCHREALTIME:-$(date +%s.%N)}
  now=${now/,/.}
  ms=${now#*.}
  ms=${now%.*}${ms:0:3}
}
# an event: its kind, and its fields: name=text, or name:JSON
host=${HOSTNAME//[^A-Za-z0-9._-]/_}
tell() {
  local field name value fields=''
  for field in "${@:2}"; do
    name=${field%%[:=]*} value=${field#*[:=]}
    if [ "${field:${#name}:1}" = "=" ]; then
      value=${value//\\/\\\\}
      value=\"${value//\"/\\\"}\"
    fi
    fields+=", \"$name\": $value"
  done
  look_at_clock
  printf '{"time": %s, "host": "%s", "kind": "%s"%s}\n' "$now" "$host" "$1" "$fields" >>"$folder/agent.jsonl"
}
look_at_clock
tell agent-started "pid:$$" "began:$now"

# which interface gloo and NCCL use, and how many threads: what is set already stays
decide() {
  [ -z "${!1+set}" ] || return
  export "$1=$2" ALLRANKS_DECIDED="${ALLRANKS_DECIDED:+$ALLRANKS_DECIDED }$1"
  echo "$1=$2: $3" >&2
}
decide_all() {
  local address interface threads
  address=$(getent ahosts "$ALLRANKS_RDZV_HOST" | awk '{print $1; exit}')
  if [ "$ALLRANKS_NODE_COUNT" -eq 1 ]; then
    decide GLOO_SOCKET_IFNAME lo "all ranks are on this node"
  else
    case "$address" in
      127.0.0.1 | ::1) interface=lo ;;
      127.*) interface=$(ip -o route show default | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -n 1) ;;  # the first node, by its own name
      *)
        interface=$(ip -o addr show to "$address" | awk '{print $2; exit}')  # the first node itself
        [ -n "$interface" ] || interface=$(ip -o route get "$address" | sed -n 's/.* dev \([^ ]*\).*/\1/p' | head -n 1)
        ;;
    esac
    if [ -z "$interface" ]; then
      echo "GLOO_SOCKET_IFNAME: left alone: nothing tells the route to $ALLRANKS_RDZV_HOST" >&2
    else
      decide GLOO_SOCKET_IFNAME "$interface" "it carries the route to $ALLRANKS_RDZV_HOST"
      [ "$ALLRANKS_BACKEND" = gloo ] || grep -qs ACTIVE /sys/class/infiniband/*/ports/*/state ||
        decide NCCL_SOCKET_IFNAME "=$interface" "likewise; no InfiniBand or RoCE device is active"
    fi
  fi
  threads=$(($(nproc) / ALLRANKS_NODE_NPROC))
  decide OMP_NUM_THREADS "$((threads ? threads : 1))" "CPUs: $(nproc), ranks: $ALLRANKS_NODE_NPROC"
}
@decide_all@

# where any port will do, the next free one: the kernel gives none of these to outgoing connections
is_taken() {
  local hex
  printf -v hex :%04X "$1"
  grep -qs "$hex [0-9A-F]*:0000 0A" /proc/net/tcp /proc/net/tcp6
}
finds_port=@finds_port@
while [ -n "$finds_port" ] && is_taken "$ALLRANKS_RDZV_PORT"; do
  export ALLRANKS_RDZV_PORT=$((ALLRANKS_RDZV_PORT + 1))
done
if [ "$ALLRANKS_NODE_RANK" -eq 0 ] && is_taken "$ALLRANKS_RDZV_PORT"; then
  tell error "what=cannot listen on port $ALLRANKS_RDZV_PORT" "why=another process on $host does" \
    "fix=another --master-port"
  tell ended state=FAILED "exit_code:1" "reason=cannot listen on port $ALLRANKS_RDZV_PORT" because_of_rank:null "lost:[]"
  exit 1
fi

# beat, and note when the logs have grown: their lines are shown in that order
out=0 err=0 next_beat=0
look_around() {
  local sizes
  look_at_clock
  if [ "$ms" -ge "$next_beat" ]; then
    next_beat=$((ms + @beat_ms@))
    echo "$now" 1<>"$folder/heartbeat"
  fi
  mapfile -t sizes < <(stat -c %s "$folder/node.out" "$folder/node.err")
  if [ "${sizes[0]:-$out}" != "$out" ]; then
    out=${sizes[0]}
    echo "$ms -1 o $out" >>"$folder/lines.idx"
  fi
  if [ "${sizes[1]:-$err}" != "$err" ]; then
    err=${sizes[1]}
    echo "$ms -1 e $err" >>"$folder/lines.idx"
  fi
}

# a request to end: a signal or, where standard input is held open for that, its end
stop='' why='' since=0 hurry=''
request() {
  look_at_clock
  if [ -z "$stop" ]; then
    stop=$1 why=$2 since=$ms
  elif [ "$((ms - since))" -gt 300 ]; then
    hurry=1
  fi
}
trap 'request TERM "got SIGTERM"' TERM
trap 'request INT "got SIGINT"' INT
trap 'request HUP "got SIGHUP"' HUP
trap : USR1 USR2
exec 9<> <(:)  # nothing ever comes from here
source=9
[ -z "${ALLRANKS_LIFELINE-}" ] || source=0
unset ALLRANKS_LIFELINE
rest_a_moment() {
  read -r -t 0.2 -u "$source" _
  if [ "$?" -eq 1 ]; then
    source=9
    request TERM "the launcher is gone"
  fi
}

# all that the launcher has started here: it has this node's mark, and is not of this script's group
group_of() {
  local fields stat
  read -r stat <"/proc/$1/stat"
  read -ra fields <<<"${stat##*) }"
  [ "${fields[0]}" = Z ] || echo "${fields[2]}"
}
group=$(group_of $$)
left_here() {
  local file process its
  for file in $(grep -lsxzF "ALLRANKS_RUN_DIR=$ALLRANKS_RUN_DIR" /proc/[0-9]*/environ); do
    process=${file//[!0-9]/}
    its=$(group_of "$process" 2>/dev/null)
    [ -n "$its" ] && [ "$its" != "$group" ] &&
      grep -qsxzF "ALLRANKS_NODE_RANK=$ALLRANKS_NODE_RANK" "$file" && echo "$process"
  done
}

# a session of its own: what this script is told does not reach it by another way
(trap - INT QUIT && exec setsid @command@ \
  </dev/null >>"$folder/node.out" 2>>"$folder/node.err" 9<&-) &
launcher=$!
tell ranks-started restart:0 "world_size:$((ALLRANKS_NODE_COUNT * ALLRANKS_NODE_NPROC))" "nodes:$ALLRANKS_NODE_COUNT"

# the ranks have @patience@ s to leave, once they are asked to
deadline=''
while kill -0 "$launcher" 2>/dev/null; do
  look_around
  if [ -n "$stop" ] && [ -z "$deadline" ]; then
    tell stop-requested "signal=SIG$stop" "by=$why"
    deadline=$((ms + @patience_ms@))
    kill -s TERM "$launcher"
  elif [ -n "$hurry" ] || { [ -n "$deadline" ] && [ "$ms" -gt "$deadline" ]; }; then
    kill -s KILL "$launcher" $(left_here) 2>/dev/null
  fi
  rest_a_moment
done
wait "$launcher"
code=$?

# what it has left behind, unless all went well: a helper of the script may be meant to stay then
if [ "$code" -ne 0 ] || [ -n "$stop" ]; then
  look_at_clock
  deadline=${deadline:-$((ms + @patience_ms@))}
  left=$(left_here)
  [ -z "$left" ] || kill -s TERM $left 2>/dev/null
  while [ -n "$left" ] && [ "$ms" -le "$((deadline + 20000))" ]; do
    look_around
    if [ -n "$hurry" ] || [ "$ms" -gt "$deadline" ]; then kill -s KILL $left 2>/dev/null; fi
    rest_a_moment
    left=$(left_here)
  done
fi
look_around

# how it ended; the launcher's own code is that of the run
if [ -n "$stop" ]; then
  code=$((128 + $(kill -l "$stop")))
  tell ended state=CANCELLED "exit_code:$code" "reason=$why" because_of_rank:null "lost:[]"
elif [ "$code" -eq 0 ]; then
  tell ended state=SUCCEEDED "exit_code:0" "reason:null" because_of_rank:null "lost:[]"
elif [ "$code" -gt 128 ] && name=$(kill -l "$code" 2>/dev/null); then
  tell ended state=FAILED "exit_code:$code" "reason=@launcher@ was ended by SIG$name on $host" because_of_rank:null "lost:[]"
else
  tell ended state=FAILED "exit_code:$code" "reason=@launcher@ exited with code $code on $host" because_of_rank:null "lost:[]"
fi
exit "$code"
