#!/usr/bin/env bash
# @title@
set -e
#: traps
#: set_up
#: place
export ALLRANKS_BACKEND=@backend@ PYTHONPATH="$ALLRANKS_RUN_DIR/code${PYTHONPATH:+:$PYTHONPATH}"  # for `import allranks`
#: secrets
#: becomes
