#!/usr/bin/env bash
# @title@
#: directives

set -e
#: traps
trap '' USR1  # The warning is for ranks, and there are none yet.
export ALLRANKS_RUN_DIR=@run_dir@
#: secrets
#: log
python=$(command -v @pythons@ python3 | head -n 1)

# The supervisor starts node.sh on all nodes, records the exit code and decides about another attempt.
supervise() {
  exec "${python:?there is no python3 here}" @supervisor@
#: alone
}
#: setup
supervise start
