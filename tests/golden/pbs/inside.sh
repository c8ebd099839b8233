#!/usr/bin/env bash
# allranks VERSION: run RUN, 2 nodes x 1 rank; to start it by hand: bash script.sh

set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (line $LINENO)" >&2' ERR
# until there are ranks that could save, a warning is for nobody, and the end is one
trap : USR1
trap 'exit 143' TERM

job="$PBS_JOBID"
export ALLRANKS_RUN_DIR=/project/runs/RUN ALLRANKS_ATTEMPT=0
# the attempt is the first one that no job has taken: its folder has no file with a job's id yet
until
  printf -v attempt '%s/attempts/%03d' "$ALLRANKS_RUN_DIR" "$ALLRANKS_ATTEMPT"
  (umask 077 && mkdir -p "$attempt" && set -o noclobber && echo "$job" >"$attempt/job") 2>/dev/null
do
  [ -s "$attempt/job" ] || { echo "allranks: cannot write into $attempt" >&2; exit 1; }
  ALLRANKS_ATTEMPT=$((ALLRANKS_ATTEMPT + 1))
done

# whatever ends this script, its exit code is told
trap 'echo "$?" >"$attempt/exit"' EXIT

# the nodes are the different hosts of the job, in PBS's order; some may stand there several times
nodes=() lines=() line=0
while read -r host; do
  [[ " ${nodes[*]} " == *" $host "* ]] || nodes+=("$host") lines+=("$line")
  line=$((line + 1))
done <"$PBS_NODEFILE"
[ "${#nodes[@]}" -eq 2 ] || {
  echo "allranks: PBS gave the hosts ${nodes[*]}, and the job needs 2 different ones: ask for -l place=scatter" >&2
  exit 1
}

# where the nodes meet: on the first one, at a port which follows from the job's id and is free
export ALLRANKS_RDZV_HOST=${nodes[0]}
export ALLRANKS_RDZV_PORT=$((16384 + (${PBS_JOBID%%[!0-9]*} + ${PBS_ARRAY_INDEX:-${PBS_ARRAYID:-0}}) % 16000)) ALLRANKS_NODE_COUNT=${#nodes[@]}
while (: <"/dev/tcp/$ALLRANKS_RDZV_HOST/$ALLRANKS_RDZV_PORT") 2>/dev/null; do
  ALLRANKS_RDZV_PORT=$((16384 + (ALLRANKS_RDZV_PORT + 613) % 16000))
done

# when the job will be ended, in seconds since 1970: ranks save and leave before
told() { qstat -f "$PBS_JOBID" 2>/dev/null | sed -nE "s/^ *($1) = //p"; }
limit=$(told Resource_List.walltime)
end=
if [ -n "$limit" ]; then
  IFS=: read -r hours minutes seconds <<<"$limit"
  began=$(told "stime|start_time")
  began=$(date -d "${began:-now}" +%s 2>/dev/null) || began=$(date +%s)
  end=$((began + 3600 * 10#$hours + 60 * 10#$minutes + 10#$seconds))
fi
export ALLRANKS_END_TIME=$end

# PBS sets this for one rank that has all CPUs of its node
[ "$OMP_NUM_THREADS" != "$NCPUS" ] || unset OMP_NUM_THREADS

# what runs on each node
allranks_node() {
  export -fn allranks_node
  set -e
  trap 'echo "allranks: $HOSTNAME: $BASH_COMMAND failed with exit code $?" >&2' ERR
  # the warning is for those who listen to it: nobody else is to die of it
  trap '' USR1
  # the ranks' working directory
  cd -- /project

  # the backend that allranks.init() takes
  export ALLRANKS_BACKEND=gloo
  # `import allranks` in the ranks finds the run's own copy
  export PYTHONPATH="$ALLRANKS_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}"
  # the node's folder in the attempt
  printf -v folder '%s/attempts/%03d/node-%03d' "$ALLRANKS_RUN_DIR" "$ALLRANKS_ATTEMPT" "$ALLRANKS_NODE_RANK"
  (umask 077 && mkdir -p "$folder")
  # the number of ranks on this node
  export ALLRANKS_NODE_NPROC=1
  # the agent takes the place of this shell: it starts the ranks and watches them
  exec PYTHON "$ALLRANKS_RUN_DIR/code" "$ALLRANKS_RUN_DIR/node.json"
}
export -f allranks_node

# how a node runs that: allranks_task ATTEMPT NODE
allranks_task() {
  # PBS sets threads for one rank that has all CPUs of its node; its ranks share them
  local cpus=$NCPUS
  unset OMP_NUM_THREADS
  # the environment of the script: PBS gives a task almost none; it may hold secrets
  . "$1/environment-$2${3:+-$3}" || exit 1
  rm -f "$1/environment-$2${3:+-$3}"
  cpus=${cpus:-${NCPUS:-$PBS_NUM_PPN}}
  [ -z "$cpus" ] || export OMP_NUM_THREADS="${OMP_NUM_THREADS:-$((cpus > 1 ? cpus / 1 : 1))}"
  unset "${!OMPI_COMM_WORLD_@}" "${!PMI_@}" "${!PMIX_@}"  # of an mpiexec that starts one task
  export ALLRANKS_NODE_RANK=$2
  printf -v folder '%s/node-%03d' "$1" "$2"
  name=agent
  (umask 077 && mkdir -p "$folder" && : >>"$folder/agent.log")
  exec >>"$folder/agent.log" 2>&1 </dev/null
  # signals are handed on, and the exit code is told: what starts tasks may lose it
  for signal in USR1 INT TERM HUP; do
    trap "kill -s $signal \"\$task\" 2>/dev/null || true" "$signal"
  done
  allranks_node & task=$!
  echo "$task" >"$folder/$name.pid"
  local code
  while true; do
    wait "$task"
    code=$?
    kill -0 "$task" 2>/dev/null || break
  done
  rm -f "$folder/$name.pid"
  echo "$code $HOSTNAME" >"$folder/$name.exit"
  exit "$code"
}
{ declare -f allranks_node allranks_task; echo 'allranks_task "$@"'; } >"$attempt/node.sh"

# run a command on a node: on NODE COMMAND..., with the first of these that is here
for starter in pbs_tmrsh pbsdsh mpiexec ssh; do
  ! command -v "$starter" >/dev/null || break
done
on() {
  local host=${nodes[$1]} line=${lines[$1]}
  shift
  case $starter in
    pbs_tmrsh) exec setsid pbs_tmrsh "$host" "$@" ;;
    pbsdsh) exec setsid pbsdsh -n "$line" -- "$@" ;;
    mpiexec) exec setsid mpiexec -n 1 -host "$host" "$@" ;;
    ssh) exec setsid ssh -o BatchMode=yes -o ConnectTimeout=30 "$host" "$(printf '%q ' "$@")" ;;
  esac
}
# start a task on a node, with the environment of this script, in a file that the task removes
start() {
  (umask 077
    unset PBS_NODENUM PBS_TASKNUM PBS_VNODENUM PBS_MOMPORT PBS_JOBCOOKIE
    unset HOSTNAME PWD OLDPWD SHLVL
    unset CUDA_VISIBLE_DEVICES ROCR_VISIBLE_DEVICES
    export -p >"$attempt/environment-$1${2:+-$2}")
  on "$1" "$BASH" "$attempt/node.sh" "$attempt" "$@"
}
# send a signal to the tasks of nodes: signal_to SIGNAL NODE...
signal_to() {
  local name=$1 node
  shift
  for node; do
    on "$node" "$BASH" -c 'exec 2>/dev/null; kill -s "$0" $(cat "$1"/*.pid)' "$name" "$(printf '%s/node-%03d' "$attempt" "$node")" >/dev/null 2>&1 &
  done
}

# whether a task has told its end; a folder that is listed shows what another node has written there
is_over() { : "${told%/*}"/*; [ -s "$told" ] || ! kill -0 "$$" 2>/dev/null; }
# start a task, and tell how it ended, in a line: by its own word; what starts it may fail or wait on
follow() {
  local code= process= told
  printf -v told '%s/node-%03d/%s' "$attempt" "$1" "agent.exit"
  exec 3< <(start "$@" >&2 & echo "$!"; wait "$!" && echo 0 || echo "$?")
  read -r -u 3 process || true
  until read -r -t 1 -u 3 code || [ "$?" -le 128 ] || is_over; do :; done
  if [ -z "$code" ] && ! read -r -t 2 -u 3 code; then
    # PBS does not see the end of this task: its daemon there is gone, or was restarted
    [ ! -s "$told" ] || echo "PBS on ${nodes[$1]}" >"${told%/*}/cut-off"
    kill -s KILL "$process" 2>/dev/null || true
  fi
  for ((second = 0; second < 5; second++)); do ! is_over || break; sleep 1; done
  if [ ! -s "$told" ]; then
    echo "allranks: ${nodes[$1]}: a task was not started, or is lost" >&2
    if [ "$1" -gt 0 ] && [ -e "${told%/*}/agent.jsonl" ]; then until is_over; do sleep 1; done; fi
  fi
  [ ! -s "$told" ] || read -r code _ <"$told"
  [ -s "$told" ] || [ "${code:-0}" -ne 0 ] || code=1
  echo "$code $1"
}
# start all nodes
all() {
  trap '' USR1 INT TERM HUP
  for node in "${!nodes[@]}"; do follow "$node" & done
  wait
}
# signals for this script are for the ranks; the first node's agent tells the others of the end
trap 'signal_to USR1 "${!nodes[@]}"' USR1
trap 'signal_to INT 0' INT
trap 'signal_to TERM 0' TERM
trap 'signal_to HUP 0' HUP
# when one has failed, all are ended; PBS gives no warning of the time limit, so it comes from here
code=0 todo=warn at=${end:+$((end - 120))}
while true; do
  now=$(date +%s)
  if read -r ${at:+-t "$((at > now ? at - now : 1))"} ended node; then
    if [ "$code" -eq 0 ] && [ "$ended" -ne 0 ]; then
      code=$ended todo=end at=$(date +%s)
      [ ! -e "$(printf '%s/node-%03d/agent.jsonl' "$attempt" "$node")" ] || at=$((at + 45))
    fi
    # the first node's agent leaves last: what is not over then is lost
    [ "$node" -ne 0 ] || ! grep -qs '"kind": "ended"' "$attempt/node-000/agent.jsonl" || todo=leave at=$(($(date +%s) + 15))
  elif [ "$?" -le 128 ]; then
    break
  elif [ "$(date +%s)" -ge "$at" ]; then
    case $todo in
      warn) signal_to USR1 "${!nodes[@]}"; at= ;;
      end) signal_to TERM "${!nodes[@]}"; todo=leave at=$(($(date +%s) + 15)) ;;
      leave) signal_to KILL "${!nodes[@]}"; break ;;
    esac
  fi
done < <(all)
rm -f "$attempt/environment-"*
exit "$code"
