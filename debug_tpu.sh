#!/usr/bin/env bash
# A tmux session with a pane per host that runs a command, and a second window with a pane per host on its devices.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash debug_tpu.sh [COMMAND]

Opens a tmux session on this machine, with a pane for each of HOSTS in cluster.env (see launcher.sh --help). In the
first window each pane runs COMMAND on its host, in FOLDER; without COMMAND it follows the log of the run. In the second
window each shows the host's devices by tpu-info or nvidia-smi, every 5 seconds. Ctrl-b n changes the window, Ctrl-b &
closes one.
HELP
}

CDPATH='' cd -- "$(dirname -- "$0")"
[[ ${1:-} != @(-h|--help) ]] || { usage && exit; }
source tools/cluster/cluster.sh
((${#hosts[@]})) || die "HOSTS: names no host; copy cluster.env.example to cluster.env and fill it in."
type tmux >/dev/null 2>&1 || die "tmux is not installed on this machine."
for name in $SECRETS; do unset "$name"; done # tmux would show them to all who ask for its environment

session=debug-${SESSION//./_} # tmux allows no dots
! tmux has-session -t "=$session" 2>/dev/null ||
  die "tmux session $session is there already: tmux attach -t $session, or tmux kill-session -t $session."

# there PATH: print it quoted but for ~/ at its beginning, which the shell on the host replaces.
there() { if [[ $1 == \~/* ]]; then echo \~/"$(quoted "${1:2}")"; else quoted "$1"; fi; }

# panes WINDOW COMMAND: a pane per host. %h in the command is the host; a shell stays when it ends.
panes() {
  local window=$1 host remote pane
  for host in "${hosts[@]}"; do
    remote="cd $(there "${FOLDER//%h/$host}") 2>/dev/null; ${2//%h/$host}; exec \$SHELL"
    # a pane whose connection fails or ends stays, and shows why
    pane="$(quoted "${ssh[@]}" -t -- "$host" "exec bash -c $(quoted "$remote")"); read -r _"
    if ! tmux has-session -t "=$session" 2>/dev/null; then
      # large enough to be cut for hundreds of hosts; who attaches gives it their own size
      tmux new-session -d -x 600 -y 400 -s "$session" -n "$window" "$pane"
    elif ! tmux list-windows -t "=$session" -F '#W' | grep -qx "$window"; then
      tmux new-window -d -t "=$session:" -n "$window" "$pane"
    else
      tmux split-window -d -t "=$session:$window.{bottom-right}" "$pane" # the last, so that they are in order
      tmux select-layout -t "=$session:$window" tiled >/dev/null
    fi
  done
}

panes run "${1:-tail -n 100 -F ~/.moe-pretraining/$SESSION/%h/log}"
tpu_info=$(there "$VENV/bin/tpu-info")
panes devices "while :; do clear; hostname; $tpu_info 2>/dev/null || tpu-info 2>/dev/null || nvidia-smi 2>/dev/null || echo no tpu-info, no nvidia-smi; sleep 5; done"
[[ ! -t 1 ]] || exec tmux attach -t "=$session"
echo "tmux attach -t $session"
