#!/usr/bin/env bash
# allranks VERSION: run RUN; on each machine: bash start.sh NODE RANKS ATTEMPT </dev/null

# this node's place, and where all meet
ALLRANKS_RUN_DIR=/project/runs/RUN || exit 72
export ALLRANKS_RUN_DIR ALLRANKS_NODE_COUNT=2
export ALLRANKS_NODE_RANK=$1 ALLRANKS_NODE_NPROC=$2 ALLRANKS_ATTEMPT=$3
export ALLRANKS_RDZV_HOST='gw; reboot' ALLRANKS_RDZV_PORT=29400
# secrets come by stdin, as lines of shell: they stand in no file and in no command line
eval "$(cat)"

printf -v folder '%s/attempts/%03d/node-%03d' "$ALLRANKS_RUN_DIR" "$ALLRANKS_ATTEMPT" "$ALLRANKS_NODE_RANK"
# its heartbeat takes the room that it needs now: a disk that is full is told at once
(umask 027 && mkdir -p "$folder" && : >>"$folder/agent.log" && date +%s.000000 >"$folder/heartbeat") || exit 73

# a session of its own: it goes on when the connection ends
cd -- "$ALLRANKS_RUN_DIR"
(trap - INT QUIT  # a shell has what it starts in the background ignore them, for good
  exec setsid bash "$ALLRANKS_RUN_DIR/node.sh" </dev/null \
    >>"$folder/agent.log" 2>&1) &
agent=$!
# who starts it hears at once if it cannot begin
tells() { grep -s "\"kind\": \"$1\"" "$folder/agent.jsonl"; }
until tells agent-started >/dev/null; do
  if ! kill -0 "$agent" 2>/dev/null; then
    ! tells agent-started >/dev/null || break
    tells error
    tail -n 5 "$folder/agent.log" >&2
    exit 70
  fi
  sleep 0.05
done
stat=$(cat "/proc/$agent/stat" 2>/dev/null)
read -ra fields <<<"${stat##*) }"
echo "$agent ${fields[19]:-0}"
