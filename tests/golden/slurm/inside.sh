#!/usr/bin/env bash
# allranks VERSION: run RUN, 2 nodes x 4 ranks; to start it by hand: bash script.sh

set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (line $LINENO)" >&2' ERR
# until there are ranks that could save, a warning is for nobody, and the end is one
trap : USR1
trap 'exit 143' TERM

job="$SLURM_JOB_ID"
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

# where the nodes meet: on the first one, at a port which follows from the job's id and is free
host=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export ALLRANKS_RDZV_HOST=${host:-${SLURMD_NODENAME:?is not set, and there is no scontrol}}
export ALLRANKS_RDZV_PORT=$((16384 + SLURM_JOB_ID % 16000)) ALLRANKS_NODE_COUNT=2
while (: <"/dev/tcp/$ALLRANKS_RDZV_HOST/$ALLRANKS_RDZV_PORT") 2>/dev/null; do
  ALLRANKS_RDZV_PORT=$((16384 + (ALLRANKS_RDZV_PORT + 613) % 16000))
done

# when the job will be ended, in seconds since 1970: ranks save and leave before
end=${SLURM_JOB_END_TIME:-$(date -d "$(squeue --noheader --jobs="$job" --format=%e)" +%s 2>/dev/null)} || end=
export ALLRANKS_END_TIME=$end

# what runs on each node
allranks_node() {
  export -fn allranks_node
  set -e
  trap 'echo "allranks: $SLURMD_NODENAME: $BASH_COMMAND failed with exit code $?" >&2' ERR
  # the warning is for those who listen to it: nobody else is to die of it
  trap '' USR1
  # the ranks' working directory
  cd -- /project

  # the backend that allranks.init() takes
  export ALLRANKS_BACKEND=nccl
  # `import allranks` in the ranks finds the run's own copy
  export PYTHONPATH="$ALLRANKS_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}"
  # the node's number, and its folder in the attempt
  export ALLRANKS_NODE_RANK=$SLURM_NODEID
  printf -v folder '%s/attempts/%03d/node-%03d' "$ALLRANKS_RUN_DIR" "$ALLRANKS_ATTEMPT" "$ALLRANKS_NODE_RANK"
  (umask 077 && mkdir -p "$folder")
  # which step of the allocation this is, to be told to end
  [ "$SLURM_NODEID" -gt 0 ] || echo "$SLURM_JOB_ID.$SLURM_STEP_ID" >"$folder/step"
  # a rank for each GPU of this node
  export ALLRANKS_NODE_NPROC=${SLURM_GPUS_ON_NODE:-4}
  # the agent takes the place of this shell: it starts the ranks and watches them
  exec PYTHON "$ALLRANKS_RUN_DIR/code" "$ALLRANKS_RUN_DIR/node.json"
}
export -f allranks_node

# start all nodes; when one fails, all end
setsid srun --nodes="$ALLRANKS_NODE_COUNT" --ntasks="$ALLRANKS_NODE_COUNT" --ntasks-per-node=1 \
  --overlap --kill-on-bad-exit=1 --wait=0 --export=ALL bash -c allranks_node &
step=$!

# signals for this script are for the ranks; srun would kill them for most
pass_on() {
  scancel --signal="$1" "$(cat "$attempt/node-000/step")" || [ "$1" = USR1 ] || kill "$step" || true
}
trap 'pass_on USR1' USR1
trap 'pass_on INT' INT
trap 'pass_on TERM' TERM
trap 'pass_on HUP' HUP
while kill -0 "$step" 2>/dev/null; do wait "$step" || true; done
wait "$step" || exit
