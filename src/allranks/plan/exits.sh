# shellcheck shell=bash disable=SC2329
exit() {  # of a line of the set-up: it is named
  local code=${1-$?}
  ((BASH_SUBSHELL)) && builtin exit "$code"
  ((code)) || code=1
  echo "allranks: exit $* failed with exit code $code (@caller@, line ${BASH_LINENO[0]}@on@)" >&2
  builtin exit "$code"
}
