#!/usr/bin/env bash
# allranks VERSION: run RUN; on each node: bash start.sh NODE RANKS ATTEMPT </dev/null
# Prints the agent's process id and its start time (man 5 proc), or the event of the error that the agent ended with.

# this node's place, and where all nodes meet
ALLRANKS_RUN_DIR=/project/runs/RUN || exit 72
export ALLRANKS_RUN_DIR ALLRANKS_NODE_COUNT=2
export ALLRANKS_NODE_RANK=$1 ALLRANKS_NODE_NPROC=$2 ALLRANKS_ATTEMPT=$3
export ALLRANKS_RDZV_HOST=gpu1 ALLRANKS_RDZV_PORT=29400
# secrets come by stdin, as lines of shell: they stand in no file and in no command line
eval "$(cat)"

printf -v folder '%s/attempts/%03d/node-%03d' "$ALLRANKS_RUN_DIR" "$ALLRANKS_ATTEMPT" "$ALLRANKS_NODE_RANK"
# the heartbeat takes the room that it needs now, so that a full disk is reported at once
(umask 077 && mkdir -p "$folder" && : >>"$folder/agent.log" && date +%s.000000 >"$folder/heartbeat") || exit 73

# a session of its own: the agent survives this connection
cd -- "$ALLRANKS_RUN_DIR" || exit 72
(trap - INT QUIT  # a shell has its background processes ignore them, for good
  exec setsid bash "$ALLRANKS_RUN_DIR/node.sh" </dev/null >>"$folder/agent.log" 2>&1) &
agent=$!
# wait until it has started, or report why it could not
reports() { grep -s "\"kind\": \"$1\"" "$folder/agent.jsonl"; }
until reports agent-started >/dev/null; do
  if ! kill -0 "$agent" 2>/dev/null; then
    ! reports agent-started >/dev/null || break
    reports error
    tail -n 5 "$folder/agent.log" >&2
    exit 70
  fi
  sleep 0.05
done
stat=$(cat "/proc/$agent/stat" 2>/dev/null)
read -ra fields <<<"${stat##*) }"
echo "$agent ${fields[19]:-0}"
