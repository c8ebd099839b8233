#!/usr/bin/env bash
# @title@; on each node: bash end.sh SIGNAL|0|END|HELD AGENT STARTED
# Sends a signal to the agent with this process id and start time (both 0: unknown); 0 only checks that it is there.
# END ends the agent and waits until nothing of the run is left; HELD does so once stdin ends or is silent.

signal=$1 agent=$2 started=$3 run=@run@
# all processes that were started with the run's folder in their environment, the ranks above all
marked() { grep -lsxzF "ALLRANKS_RUN_DIR=$run" /proc/[0-9]*/environ | cut -d/ -f3; }
is_there() {
  local fields stat
  if [ "$agent" = 0 ]; then [ -n "$(marked)" ]; return; fi
  stat=$(cat "/proc/$agent/stat" 2>/dev/null) || return 1
  read -ra fields <<<"${stat##*) }"
  [ "${fields[19]}" = "$started" ] && [ "${fields[0]}" != Z ]
}
send() {
  if [ "$agent" != 0 ]; then kill -s "$1" -- "-$agent"; return; fi
  for process in $(marked); do kill -s "$1" "$process" 2>/dev/null; done
}

case $signal in
  END) ;;
  HELD) while is_there && read -r -t @silence@ _; do :; done ;;
  *) is_there && { [ "$signal" = 0 ] || send "$signal"; }; exit ;;
esac
# an agent that nothing is known of may be about to start: wait longer until all is quiet
sent="" quiet=0 needed=1
if [ "$agent" = 0 ]; then needed=20; fi
for _ in $(seq @tenths@); do
  if [ -z "$sent" ] && is_there; then send TERM && sent=1; fi
  if is_there || [ -n "$(marked)" ]; then quiet=0; else quiet=$((quiet + 1)); fi
  if [ "$quiet" -ge "$needed" ]; then exit 0; fi
  sleep 0.1
done
for process in $(marked); do kill -s KILL "$process" 2>/dev/null; done
exit 0
