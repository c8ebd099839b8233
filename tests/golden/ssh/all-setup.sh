#!/usr/bin/env bash
# allranks VERSION: run RUN; run once, on the first node, before all nodes start

# what the lines print is in setup.log; when one fails, the end of that is printed
export ALLRANKS_RUN_DIR=/project/runs/RUN
log="$ALLRANKS_RUN_DIR/setup.log"
(umask 027 && : >"$log") || exit 73
exec 3>&2 >"$log" 2>&1 </dev/null
trap 'code=$?; [ "$code" = 0 ] || tail -n 5 "$log" >&3; builtin exit "$code"' EXIT
set -e
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (${BASH_SOURCE[0]}, line $LINENO)" >&2' ERR
trap : USR1
trap 'builtin exit 143' TERM

cd -- /project

# environment.setup
make data
