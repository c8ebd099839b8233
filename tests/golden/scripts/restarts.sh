#!/usr/bin/env bash
# allranks VERSION: node 0 of run RUN; to start it by hand: bash node-000.sh
set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO)" >&2' ERR

# the ranks' working directory
cd -- /project

# 8 CPUs for 1 rank
export OMP_NUM_THREADS=8
# all ranks are on this machine
export GLOO_SOCKET_IFNAME=lo
# a run that a rank starts inherits none of these
export ALLRANKS_DECIDED='OMP_NUM_THREADS GLOO_SOCKET_IFNAME'
# the backend that allranks.init() takes
export ALLRANKS_BACKEND=gloo
# `import allranks` in the ranks finds the run's own copy
export PYTHONPATH=/project/runs/RUN/code"${PYTHONPATH:+:$PYTHONPATH}"

# the agent takes the place of this shell: it starts the ranks and watches them
exec PYTHON /project/runs/RUN/code /project/runs/RUN/node-000.json
