#!/usr/bin/env bash
# Started by the supervisor of run RUN: sets a node up and becomes a rank.
set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO, on $SLURMD_NODENAME)" >&2' ERR
trap '' USR1; trap '(($? == 0)) || sleep 0.5' EXIT  # The warning is for ranks. Let a last line be read.
cd -- /project

export ALLRANKS_BACKEND=nccl PYTHONPATH="$ALLRANKS_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}"  # for `import allranks`
trap - EXIT; exec PYTHON "$ALLRANKS_RUN_DIR/code" --rank PYTHON /project/train.py --epochs 3 'a b'
