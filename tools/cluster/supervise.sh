#!/usr/bin/env bash
# tools/cluster/supervise.sh N STATE COMMAND...: run COMMAND, and up to N times again after a crash, a lost peer or a
# preemption. The pause before is RESTART_PAUSE seconds and doubles each time, up to 5 minutes. The folder STATE (empty:
# a new one) holds COMMAND's process id in the file `pid` while it runs. COMMAND is not started again if STATE holds a
# file `stopping`, nor after a signal to this script: SIGINT, or one of those below, which COMMAND gets too.
set -uo pipefail
restarts=$1 state=$2 first=${RESTART_PAUSE:-5}
shift 2
if [[ -z $state ]]; then
  state=$(mktemp -d)
  trap 'rm -rf "$state"' EXIT
fi
trap ': >"$state/stopping"' INT # a terminal sends it to COMMAND too
for name in TERM HUP USR1 USR2 XCPU; do # nohup's ignored HUP stays ignored: bash sets no trap for it
  # shellcheck disable=SC2064  # the name is that of now
  trap ': >"$state/stopping"; kill -'"$name"' "$(<"$state/pid")" 2>/dev/null' "$name"
done

for ((wait = first; ; wait = SECONDS - began > 600 ? first : wait < 160 ? 2 * wait : 300)); do
  began=$SECONDS
  ( # in the background, so that SIGTERM is passed on at once
    trap - INT
    echo "$BASHPID" >"$state/pid"
    exec "$@"
  ) &
  while
    wait $!
    status=$?
    kill -0 $! 2>/dev/null # a signal ended the waiting
  do :; done
  rm -f "$state/pid" # later another process may get that number, and must not be stopped
  # 0: done. 2: wrong flags, which a restart does not fix. 130: Ctrl-C. All else may be another host's fault.
  if [[ $status == @(0|2|130) || -e $state/stopping ]] || ((restarts-- == 0)); then exit "$status"; fi
  echo "main.py ended with status $status; starting it again in $wait s, $restarts times more after that"
  for ((i = 0; i < wait; i++)); do
    [[ -e $state/stopping ]] || sleep 1
  done
  [[ ! -e $state/stopping ]] || exit "$status"
done
