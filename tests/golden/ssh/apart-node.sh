#!/usr/bin/env bash
# allranks VERSION: run RUN: what runs on each of 2 nodes
set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO)" >&2' ERR

# the ranks' working directory
cd -- ../../project

# environment.venv
. .venv/bin/activate

# the backend that allranks.init() takes
export ALLRANKS_BACKEND=nccl
# `import allranks` in the ranks finds the run's own copy
export PYTHONPATH="$ALLRANKS_RUN_DIR/code""${PYTHONPATH:+:$PYTHONPATH}"

# the agent takes the place of this shell: it starts the ranks and watches them
exec python "$ALLRANKS_RUN_DIR/code" "$ALLRANKS_RUN_DIR/node.json"
