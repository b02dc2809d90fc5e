# shellcheck shell=bash disable=SC2154  # the settings and host are sent before this file
# What runs on a host: tools/cluster.sh sends it there on the stdin of a bash, with the settings before it and one call
# of these functions after it.
set -euo pipefail

FOLDER=${FOLDER//%h/$host}
[[ $FOLDER == /* ]] || FOLDER=$HOME/$FOLDER
state=$HOME/.moe-pretraining/$SESSION/$host # by host too, since hosts may share a home
tmux=(tmux -L "moe-$SESSION-${host//[^a-zA-Z0-9]/-}")

die() {
  echo "error: $host: $*" >&2
  exit 1
}
alive() { "${tmux[@]}" has-session 2>/dev/null; }

# preflight METHOD RESTART: print what the host has, or fail with what it lacks; METHOD is git or rsync.
preflight() {
  local folder=$FOLDER free python users=
  printf 'clock %s\n' "$(date +%s.%N)" # compared where it arrives
  for program in git tmux; do
    type "$program" >/dev/null 2>&1 || die "$program is not installed there."
  done
  [[ -n $2 ]] || ! alive || die "a run of SESSION=$SESSION is there already; see --status, or give --stop or --restart."
  for python in ${PYTHON:-"$FOLDER/$VENV/bin/python" python3 python python3.13 python3.12 python3.11 uv} ''; do
    if [[ -n $python ]] && "$python" --version >/dev/null 2>&1; then break; fi
  done
  [[ -n $python ]] || die "no Python runs there${PYTHON:+ as PYTHON=$PYTHON}; install 3.11 or newer, or name one in PYTHON."
  while [[ ! -d $folder ]]; do folder=$(dirname "$folder"); done
  free=$(df -Pk "$folder" | awk 'END { print int($4 / 2^20) }')
  ((free >= MIN_DISK_GB)) || die "its disk is full: $folder has $free GB free and MIN_DISK_GB is $MIN_DISK_GB."
  if [[ $1 == git && -d $FOLDER/.git && -n $(git -C "$FOLDER" status --porcelain --untracked-files=no) ]]; then
    die "it would not run the same commit: files in $FOLDER were changed there; undo that, or send yours with --sync."
  fi
  alive || users=$(find /proc/[0-9]*/fd \( -lname '/dev/accel[0-9]*' -o -lname '/dev/vfio/[0-9]*' \) 2>/dev/null | cut -d/ -f3) || true
  if ! alive && type nvidia-smi >/dev/null 2>&1; then
    users+=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null) || true
  fi
  [[ -z $users ]] || die "another run holds its devices (process $(head -n 1 <<<"$users"))."
  echo "$free GB free, $("$python" --version 2>&1)"
}

# receive: make the folder that git push or rsync fills.
receive() {
  mkdir -p "$FOLDER"
  if [[ ! -e $FOLDER/.git ]]; then
    git init -q "$FOLDER"
    git -C "$FOLDER" config receive.shallowUpdate true
  fi
  echo "$FOLDER"
}

# checkout COMMIT: what was pushed.
checkout() {
  git -C "$FOLDER" checkout -q --detach "$1"
  [[ $(git -C "$FOLDER" rev-parse HEAD) == "$1" ]] || die "$FOLDER did not reach commit $1."
}

# setup: as main.py will find it.
setup() {
  cd "$FOLDER"
  export VENV
  [[ -z $PYTHON ]] || export PYTHON
  bash setup_tpu.sh
}

# start LAUNCH ENVIRONMENT FLAG...: main.py in a detached tmux; returns when its first step is compiled. ENVIRONMENT is
# assignments, secrets among them: they reach a file and from there the process, never an argument.
start() {
  local launch=$1 environment=$2 mask
  shift 2
  mask=$(umask) # main.py's, whose files others may read
  umask 077
  mkdir -p "$state"
  ! alive || die "a run of SESSION=$SESSION is there already; see --status, or give --stop or --restart."
  rm -f "$state/status" "$state/pid" "$state/stopping"
  [[ ! -f $state/log ]] || mv "$state/log" "$state/log.before"
  : >"$state/log"
  echo "$launch" >"$state/launch"
  printf '%s\n' "$environment" >"$state/environment"
  {
    printf 'umask %s\ncd %q\nstate=%q\npython=%q\nrestarts=%q\nflags=(' "$mask" "$FOLDER" "$state" \
      "$VENV/bin/python" "$MAX_RESTARTS"
    (($# == 0)) || printf '%q ' "$@"
    cat <<'SCRIPT'
)
{
  set -a
  source "$state/environment"
  set +a
  bash tools/supervise.sh "$restarts" "$state" "$python" main.py "${flags[@]}"
  echo "$?" >"$state/status"
} 2>&1 | tee -i -a "$state/log" # the session ends when the log is whole
SCRIPT
  } >"$state/start.sh"
  "${tmux[@]}" new-session -d -s main "exec bash $(printf %q "$state/start.sh")" || die "tmux could not start a session."
  if [[ $launch == $(cat "$state/taken-back" 2>/dev/null) ]]; then stop 0 "$launch"; fi # while this was on its way
  for ((i = 0; i < START_TIMEOUT * 2; i++)); do
    case $(state) in
      starting*) sleep 0.5 ;;
      "ended with status 0"* | running*) state && return ;;
      *) die "main.py $(state)." ;;
    esac
  done
  die "main.py compiled no step within START_TIMEOUT=$START_TIMEOUT s."
}

# state: one line on what the session does.
state() {
  local last
  last=$(tail -n 1 "$state/log" 2>/dev/null | cut -c1-150) || true
  if alive; then
    # main.py says this once what can go wrong at its start did not
    if grep -q ' compiled in ' "$state/log"; then echo "running: $last"; else echo "starting: $last"; fi
  elif [[ -s $state/status ]]; then
    echo "ended with status $(<"$state/status"): $last"
  elif [[ -e $state/launch ]]; then
    echo "was killed, or its host restarted: $last"
  else
    echo "nothing was started"
  fi
}

log() { tail -n "$1" "$state/log" 2>/dev/null || echo "$host has no log of SESSION=$SESSION"; }

# stop SECONDS [LAUNCH]: SIGTERM, so that a checkpoint is written. With LAUNCH only what that launch started, and for
# good: what does not end in time is killed.
stop() {
  if [[ -n ${2:-} ]]; then
    mkdir -p "$state"
    echo "$2" >"$state/taken-back"
  fi
  [[ -z ${2:-} || $2 == $(cat "$state/launch" 2>/dev/null) ]] || return 0
  alive || { state && return; }
  local pid
  : >"$state/stopping"
  pid=$(cat "$state/pid" 2>/dev/null) || true
  [[ -z $pid ]] || kill -TERM "$pid" 2>/dev/null || true
  for ((i = 0; i < $1 * 2; i++)); do
    alive || { state && return; }
    sleep 0.5
  done
  [[ -n ${2:-} ]] || die "it still runs, $1 s after SIGTERM; see --logs $host."
  [[ -z $pid ]] || kill -KILL "$pid" 2>/dev/null || true
  "${tmux[@]}" kill-session 2>/dev/null || true
}
