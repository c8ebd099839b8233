#!/usr/bin/env bash
# shellcheck disable=SC2154
# @title@; run once, on the first node, before all nodes start

# what the lines print is in setup.log; when one fails, the end of that is printed
export ALLRANKS_RUN_DIR=@run@
log="$ALLRANKS_RUN_DIR/setup.log"
(umask @umask@ && : >"$log") || exit 73
exec 3>&2 >"$log" 2>&1 </dev/null
trap 'code=$?; [ "$code" = 0 ] || tail -n 5 "$log" >&3; builtin exit "$code"' EXIT
set -e
#: traps
trap : USR1
trap 'builtin exit 143' TERM

cd -- @workdir@

# environment.setup
#: setup
