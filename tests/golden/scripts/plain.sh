#!/usr/bin/env bash
# allranks VERSION: node 0 of run RUN; to start it by hand: bash node-000.sh
set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO)" >&2' ERR
cd -- /project

export OMP_NUM_THREADS=8  # 8 CPUs for 1 rank
export GLOO_SOCKET_IFNAME=lo  # all ranks are on this machine
export ALLRANKS_DECIDED='OMP_NUM_THREADS GLOO_SOCKET_IFNAME'  # a run that a rank starts inherits none of these
export ALLRANKS_RUN_DIR=/project/runs/RUN
export ALLRANKS_BACKEND=gloo PYTHONPATH="$ALLRANKS_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}"  # for `import allranks`
exec PYTHON "$ALLRANKS_RUN_DIR/code" /project/runs/RUN/node-000.json
