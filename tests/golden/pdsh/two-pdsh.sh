#!/usr/bin/env bash
# allranks VERSION: run RUN; by pdsh, on each machine: bash pdsh.sh HOST SCRIPT HOST=WORD,WORD… WORD…
# Runs a script of this folder with the words for this host, then those for all.

run=/project/runs/RUN host=$1 script=$2 words=
shift 2
while [[ ${1-} == *=* ]]; do
  [[ ${1%%=*} != "$host" ]] || words=${1#*=}
  shift
done

# secrets are in a file while nodes start: pdsh passes no stdin on
input=/dev/null
[ ! -e "$run/secrets.sh" ] || input=$run/secrets.sh
if [ -n "$words" ]; then
  IFS=, read -ra words <<<"$words"
  bash "$run/$script" "${words[@]}" "$@" <"$input"
  code=$?
else
  echo "pdsh says that this is $host, and no node is called so: it must put the name in for %h, as with PDSH_RCMD_TYPE=ssh" >&2
  code=71
fi
# pdsh's own words for the exit code depend on how it reaches machines
echo "allranks: exit code $code"
exit "$code"
