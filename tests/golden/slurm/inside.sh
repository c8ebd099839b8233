#!/usr/bin/env bash
# allranks VERSION: run RUN, 2 nodes x 4 ranks; to start it by hand: bash script.sh

set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]/#"$0"/script.sh}, line $LINENO)" >&2' ERR
trap '' USR1  # The warning is for ranks, and there are none yet.
export ALLRANKS_RUN_DIR=/project/runs/RUN
python=$(command -v PYTHON python3 | head -n 1)

# The supervisor starts node.sh on all nodes, records the exit code and decides about another attempt.
supervise() {
  exec "${python:?there is no python3 here}" "$ALLRANKS_RUN_DIR/code" --supervise "$1"
}
supervise start
