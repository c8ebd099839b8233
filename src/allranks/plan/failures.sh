# shellcheck shell=bash
trap 'echo "allranks: $BASH_COMMAND failed with exit code $? (@file@, line $LINENO@on@)" >&2' ERR
