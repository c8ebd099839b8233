#!/usr/bin/env bash
# allranks VERSION: run RUN: end it on a machine

signal=$1 agent=$2 started=$3 run="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd -P)"
# all that was started with the run's folder in its environment, the ranks above all
marked() { grep -lsxzF "ALLRANKS_RUN_DIR=$run" /proc/[0-9]*/environ | cut -d/ -f3; }
is_there() {
  local fields stat
  if [ "$agent" = 0 ]; then [ -n "$(marked)" ]; return; fi  # nobody has noted which one it is
  stat=$(cat "/proc/$agent/stat" 2>/dev/null) || return 1
  read -ra fields <<<"${stat##*) }"
  [ "${fields[19]}" = "$started" ] && [ "${fields[0]}" != Z ]
}
tell() {
  if [ "$agent" != 0 ]; then kill -s "$1" -- "-$agent"; return; fi
  for process in $(marked); do kill -s "$1" "$process" 2>/dev/null; done
}

case $signal in
  END) ;;
  HELD) while is_there && read -r -t 30 _; do :; done ;;
  *) is_there && { [ "$signal" = 0 ] || tell "$signal"; }; exit ;;
esac
# an agent that nobody has noted may be about to start
told="" quiet=0 needed=1
if [ "$agent" = 0 ]; then needed=20; fi
for _ in $(seq 500); do
  if [ -z "$told" ] && is_there; then tell TERM && told=1; fi
  if is_there || [ -n "$(marked)" ]; then quiet=0; else quiet=$((quiet + 1)); fi
  if [ "$quiet" -ge "$needed" ]; then exit 0; fi
  sleep 0.1
done
for process in $(marked); do kill -s KILL "$process" 2>/dev/null; done
exit 0
