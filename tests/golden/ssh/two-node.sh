#!/usr/bin/env bash
# allranks VERSION: run RUN: what runs on each of 2 nodes
set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO)" >&2' ERR
cd -- /project

export ALLRANKS_BACKEND=nccl PYTHONPATH="$ALLRANKS_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}"  # for `import allranks`
exec PYTHON "$ALLRANKS_RUN_DIR/code" "$ALLRANKS_RUN_DIR/node.json"
