#!/usr/bin/env bash
# One training run on all hosts of cluster.env: check, send, set up, start, watch, stop.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash launcher.sh [--sync] [--restart] [--max_restarts N] [any flag of main.py]
       bash launcher.sh --status | --logs [-f] [HOST] | --stop | --attach HOST
       bash launcher.sh --keep [--sync] [--max_restarts N] [any flag of main.py]

Starts main.py with the flags on all HOSTS of cluster.env (copy cluster.env.example) and returns when every host has
compiled its first step. Nothing is stopped or changed anywhere until all hosts have passed the check and the program
that will run has parsed its flags. If one host fails to start, the others are stopped.

The flags are checked before anything is sent: here, if a Python (VENV, python3) has the packages, and on each host that
was set up before. That covers names, values, their combination, and an existing run of that name. What depends on
devices, data or weights is checked when main.py starts, and so is everything else if no Python has the packages.

  --sync         send the files as they are here, not COMMIT; ignored files and run directories are not sent
  --restart      first stop the current run, with a checkpoint
  --max_restarts N  each host restarts main.py, up to N times, after a crash, a lost peer or a preemption
  --status       the state of each host, with the last informative line of its log; FAILED, and an exit status of 1, if
                 a run ended with an error
  --logs [HOST]  the last 100 lines of the log of every host, or of one
  --logs -f [HOST]  the same, and new lines as they are written, prefixed with the host's name; Ctrl-C ends it
  --stop         SIGTERM: all hosts write one checkpoint and end; what still runs after STOP_TIMEOUT is ended by SIGKILL,
                 and the exit status is 137
  --attach HOST  attach to the tmux session there (detach: Ctrl-b d)

  --keep         for a TPU slice that does not exist yet: with TPU_TYPE in cluster.env, ask for it, start the run, and
                 do both again when the slice is lost, until the run has ended; then delete the slice. It works in a tmux
                 session on this machine, or right here without tmux or inside it; give the same command after it was
                 killed. --status tells about the slice too, --stop also deletes it, and --logs and --attach accept
                 keeper as a HOST. See docs/several-hosts.md

The launcher changes and removes only files that it put into FOLDER. With --sync, changes that somebody made to them are
kept in a git branch there. A FOLDER that the launcher did not make is refused if it has files in it; with
TAKE_FOLDER=yes the code is put beside them, unless it would overwrite something.

The exit status is not 0 if a host failed; the host is named, with the last lines of its log.
HELP
}

CDPATH='' cd -- "$(dirname -- "$0")"
[[ ${1:-} != @(-h|--help) ]] || { usage && exit; }
source tools/cluster/cluster.sh

tmp=$(mktemp -d)
temporary=${TMPDIR:-}
export TMPDIR=$tmp # what is started from here leaves no other temporary files
pids=()            # of the jobs in progress, one a host; each is a process group with all that it starts
launched=
start_job() {
  set -m
  "$@" </dev/null &
  set +m
}

# finish: at the end, stop all jobs. A launch that failed or was interrupted also ends what it started on the hosts.
finish() {
  local pid
  trap '' INT TERM HUP
  for pid in "${pids[@]}"; do kill -- "-$pid" 2>/dev/null || true; done
  [[ -z $launched ]] || take_back
  rm -rf "$tmp"
}
trap finish EXIT

take_back() {
  local i reason again=''
  ((MAX_RESTARTS == 0)) || again=", and start again up to $MAX_RESTARTS times"
  echo "taking back what was started"
  pids=()
  for i in "${!hosts[@]}"; do
    bash run.sh --stop "${hosts[i]}" 20 "$launched" >/dev/null 2>"$tmp/$i.error" &
    pids[i]=$!
  done
  for i in "${!hosts[@]}"; do
    wait "${pids[i]}" && continue
    reason=$(tail -n 1 "$tmp/$i.error")
    reason=${reason#"error: ${hosts[i]}: "}
    echo "error: ${hosts[i]}: was not taken back (${reason%.}); what was started there may still run$again;" \
      "once the host can be reached, end it by: bash run.sh --stop ${hosts[i]}" >&2
  done
}

# is_bad LINE: whether a line of `run.sh --state` tells of a run that neither ended well nor was stopped by a signal,
# whose statuses are 128 + HUP, INT, USR1, USR2, TERM or XCPU: then it has saved all.
is_bad() { [[ $1 == @("ended with status "*|"was killed"*) && $1 != "ended with status "@(0|129|130|138|140|143|152)* ]]; }

# on_all TITLE STEP WORD...: run `run.sh STEP HOST WORD...` for all hosts at once and print a table of the results. Sets
# `failed` to the hosts that failed. With FIRST=1 it returns as soon as one fails. Returns 137 where all that failed is
# that runs had to be ended by SIGKILL.
on_all() {
  local title=$1 step=$2 i pid status result=0
  shift 2
  pids=() failed=()
  declare -A index=() words=()
  for i in "${!hosts[@]}"; do
    start_job bash run.sh "$step" "${hosts[i]}" "$@" >"$tmp/$i" 2>"$tmp/$i.error"
    pids[i]=$! index[$!]=$i
  done
  while ((${#pids[@]})); do
    status=0
    wait -n -p pid "${pids[@]}" || status=$?
    i=${index[$pid]}
    unset "pids[i]"
    if ((status)); then
      failed+=("$i")
      words[$i]=FAILED
      if ((status == 137 && result != 1)); then result=137; else result=1; fi
      if ((status == 137)); then words[$i]=KILLED; fi
    elif [[ $step == --state ]] && is_bad "$(tail -n 1 "$tmp/$i")"; then
      words[$i]=FAILED result=1
    fi
    [[ -z ${FIRST:-} || ${#failed[@]} == 0 ]] || break
  done
  printf '%-8s %-24s %s\n' "$title" host ''
  for i in "${!hosts[@]}"; do
    [[ -z ${pids[i]:-} ]] || words[$i]=waiting
    printf '%-8s %-24s %s\n' "${words[$i]:-ok}" "${hosts[i]}" "$(tail -n 1 "$tmp/$i")"
  done
  for i in "${failed[@]}"; do
    grep -qF "error: ${hosts[i]}: " "$tmp/$i.error" || echo "error: ${hosts[i]}: run.sh $step failed:" >&2
    tail -n 20 "$tmp/$i.error" >&2
  done
  return "$result"
}

# stop: end what runs on all hosts, see usage.
stop() {
  echo "SIGTERM to all; what still runs after STOP_TIMEOUT=$STOP_TIMEOUT s is ended by SIGKILL"
  on_all stop --stop
}

# snapshot STORE: set COMMIT to a commit of the files as they are here. It is stored in the folder STORE, and the
# repository does not change. Run directories that git does not know are left out: a host has its own.
snapshot() {
  local store=$1 index prefix file folder tree nested left_out=()
  if ! git ls-files --error-unmatch launcher.sh >/dev/null 2>&1; then
    git init -q "$store/repository"
    export GIT_DIR=$store/repository/.git GIT_WORK_TREE=$PWD
  fi
  prefix=$(git rev-parse --show-prefix)
  index=$(git rev-parse --git-path index)
  mkdir -p "$store/objects/info"
  (cd "$(git rev-parse --git-path objects)" && pwd) >"$store/objects/info/alternates"
  [[ ! -f $index ]] || cp "$index" "$tmp/index" # it knows which files are as they were
  export GIT_OBJECT_DIRECTORY=$store/objects GIT_INDEX_FILE=$tmp/index
  while IFS= read -r -d '' file; do
    folder=$(dirname "$file")
    if [[ $folder != . && (${file##*/} == metrics.jsonl || -d $folder/checkpoints) ]]; then
      left_out+=(":(exclude,literal)$folder")
    fi
  done < <(git ls-files -z --others --exclude-standard -- metrics.jsonl '*/metrics.jsonl' '*/config.json')
  git -c core.autocrlf=false -c advice.addEmbeddedRepo=false add -A -- . "${left_out[@]}" 2>"$tmp/complaint" ||
    die "--sync: the files here cannot all be read ($(sed -n 's/^error: //p' "$tmp/complaint" | head -n 1))."
  tree=$(git write-tree ${prefix:+--prefix="$prefix"})
  nested=$(git ls-tree -r "$tree" | sed -n 's/^160000[^\t]*\t//p')
  [[ -z $nested ]] || echo "note: git repositories inside this one are not sent (${nested//$'\n'/, })"
  # without a date, so that the same files are the same commit
  COMMIT=$(GIT_AUTHOR_DATE=2000-01-01T00:00:00Z GIT_COMMITTER_DATE=2000-01-01T00:00:00Z git -c user.name=launcher \
    -c user.email=launcher@localhost commit-tree -m "files as they stood here" "$tree")
  export COMMIT
}

# need_hosts: fail where there is no host to work on.
need_hosts() {
  ((${#hosts[@]})) && return
  [[ -z $TPU_TYPE ]] || die "TPU_NAME=$TPU_NAME: the slice is not there now; --status tells more, and --keep asks for it."
  die "HOSTS: names no host; copy cluster.env.example to cluster.env and fill it in."
}

# keeper WORD...: tools/cluster/keep.py, which needs no packages. All but its status take the place of this script, so
# that signals reach them.
keeper() {
  local python
  for python in python3 "$VENV/bin/python"; do
    if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; then
      export TMPDIR=$temporary
      set -- "$python" -m tools.cluster.keep "$@"
      if [[ ${*: -1} != status ]]; then
        trap - EXIT
        rm -rf "$tmp"
        exec "$@"
      fi
      "$@"
      return
    fi
  done
  die "TPU_TYPE=$TPU_TYPE: what keeps slices needs Python 3.10 or newer on this machine; bash setup_tpu.sh gets one."
}

# alone OPTION WORD...: fail if a word follows the option.
alone() { (($# == 1)) || die "$1 $2: $1 takes nothing more; see --help."; }

# a_host WORD: fail unless it is one of HOSTS.
a_host() {
  need_hosts
  [[ " ${hosts[*]} " == *" $1 "* ]] || die "$1: must be one of HOSTS ($HOSTS)."
}

# none_ours WORD...: fail if an option of this script stands among the flags of main.py.
none_ours() {
  local word
  for word; do
    case ${word%%=*} in
      -h | --help) usage && exit ;;
      --sync | --restart | --max?restarts | --status | --logs | --stop | --attach | --keep)
        die "$word: stands alone, or before the flags of main.py; see --help." ;;
    esac
  done
}

# follow HOST: print its log as it grows, each line after the host's name. The terminal there (-tt) ends tail when the
# connection ends.
follow() {
  local line begun='' status=0 complaint there mark="--- the log of $1"
  there="cd; echo $(quoted "$mark"); exec tail -n 100 -F $(quoted ".moe-pretraining/$SESSION/$1/log")"
  complaint=$(mktemp)
  while IFS= read -r line; do
    line=${line%$'\r'}
    if [[ -n $begun ]]; then
      printf '%s: %s\n' "$1" "$line"
    elif [[ $line == *"$mark" ]]; then # the startup files of the shell there may print something before
      begun=1
    fi
  done < <("${ssh[@]}" -tt -- "$1" "exec bash -c $(quoted "$there")" 2>"$complaint" </dev/null)
  wait $! || status=$?
  if ((status == 255)); then
    echo "error: $(ssh_complaint "$1" "$(<"$complaint")")" >&2
  else
    echo "error: $1: its log is followed no longer; tail ended there with status $status." >&2
  fi
  return 1
}

# logs [-f] [HOST]: print the logs, see usage.
logs() {
  local word host pid status=0 step=show names=()
  if [[ -n $TPU_TYPE && ${!#} == keeper ]]; then
    [[ -f $KEEPER/log ]] || die "TPU_NAME=$TPU_NAME: nothing was kept so far; --keep begins."
    [[ $1 == -f ]] || step=
    exec tail -n 100 ${step:+-F} "$KEEPER/log"
  fi
  need_hosts
  for word; do
    if [[ $word == -f ]]; then step=follow; else a_host "$word" && names+=("$word"); fi
  done
  ((${#names[@]} < 2)) || die "--logs ${names[*]}: takes one of HOSTS, or none for all of them."
  ((${#names[@]})) || names=("${hosts[@]}")
  for host in "${names[@]}"; do
    if [[ $step == follow ]]; then
      start_job follow "$host"
      pids+=($!)
    else
      echo "--- $host"
      bash run.sh --log "$host" 100 || status=1
    fi
  done
  for pid in "${pids[@]}"; do wait "$pid" || status=1; done
  return "$status"
}

case ${1:-} in
  --status)
    alone "$@"
    if [[ -n $TPU_TYPE ]]; then
      keeper status || exit
      ((${#hosts[@]})) || exit 0
    fi
    need_hosts
    on_all status --state
    exit
    ;;
  --stop)
    alone "$@"
    if [[ -n $TPU_TYPE ]]; then
      keeper stop
    fi
    need_hosts
    stop
    exit
    ;;
  --logs)
    logs "${@:2}"
    exit
    ;;
  --attach)
    [[ -n ${2:-} ]] || die "--attach: one of HOSTS must follow it ($HOSTS)."
    if [[ $2 == keeper && -n $TPU_TYPE ]]; then
      tmux -L "$KEEPER_TMUX" has-session 2>/dev/null || die "no keeper is at work in tmux now; see --status."
      exec tmux -L "$KEEPER_TMUX" attach
    fi
    a_host "$2"
    alone "--attach $2" "${@:3}"
    "${ssh[@]}" -t -- "$2" "tmux -L $(quoted "moe-$SESSION-${2//[^a-zA-Z0-9]/-}") attach"
    exit
    ;;
esac

sync='' keeps=''
printf -v typed '%q ' "$@"
while :; do
  case ${1:-} in
    --sync) sync=1 ;;
    --restart) export RESTART=1 ;;
    --keep) keeps=1 ;;
    --max_restarts)
      [[ ${2:-} =~ ^[0-9]+$ ]] || die "--max_restarts ${2:-without a number}: a whole number must follow it."
      MAX_RESTARTS=$2
      whole MAX_RESTARTS 0
      shift
      ;;
    *) break ;;
  esac
  shift
done
none_ours "$@"
if [[ -n $keeps ]]; then
  [[ -n $TPU_TYPE ]] || die "--keep: TPU_TYPE, TPU_NAME and ZONE in cluster.env must say which slice to ask for."
  [[ -z ${RESTART:-} ]] || die "--restart: not beside --keep, which takes over what is there; give --stop first."
elif [[ -n $TPU_TYPE ]]; then
  die "TPU_TYPE=$TPU_TYPE: with it a run is started by --keep, which asks for the slice first."
fi
[[ -n $keeps ]] || need_hosts
export LAUNCH=$EPOCHSECONDS-$SRANDOM
if [[ -n $sync ]]; then
  export SYNC=1
  if [[ -n $keeps ]]; then snapshot "$KEEPER/sync"; else snapshot "$tmp"; fi
elif [[ -z ${SYNC:-} ]]; then # a keeper sets both SYNC and COMMIT
  revision=$(git rev-parse --verify -q "$COMMIT^{commit}" 2>/dev/null) ||
    die "COMMIT=$COMMIT: this repository has no such branch or commit."
  export COMMIT=$revision # from here on it is one commit, whatever is committed meanwhile
  [[ -z $(git status --porcelain --untracked-files=no) ]] ||
    echo "note: what is not committed here is not sent; --sync would send it"
  mapfile -t untracked < <(git ls-files --others --exclude-standard)
  ((${#untracked[@]} == 0)) ||
    echo "note: what git does not know here is not sent (${#untracked[@]} files, ${untracked[0]} first);" \
      "--sync would send it"
fi

# parse_here WHERE FLAG...: fail where main.py would refuse the flags, if a Python here has the packages that parsing
# needs. WHERE: elsewhere, or the type of a slice; what is printed then, see config/command_line.py.
parse_here() {
  local host="this machine"
  read_program
  FOLDER=$PWD call flags "$1" "" "${program[@]}" "${@:2}" | JAX_PLATFORMS=${JAX_PLATFORMS:-tpu} bash | past_noise
}

# admit: where a TPU refuses the key, have gcloud put one there, as it does whenever it opens a connection. gcloud keeps
# keys with the TPU, so one that was created again knows none.
admit() {
  local said user name="${SSH_USER:+$SSH_USER@}$TPU_NAME" by_gcloud
  said=$("${ssh[@]}" -- "${hosts[0]}" true 2>&1 </dev/null) && return
  [[ $said == *"Permission denied"* ]] && type gcloud >/dev/null 2>&1 || return 0
  echo "${hosts[0]} refuses this machine's key; asking gcloud to put it on the TPU"
  by_gcloud=(gcloud compute tpus tpu-vm ssh "$name" ${ZONE:+--zone "$ZONE"} ${PROJECT:+--project "$PROJECT"}
    ${SSH_KEY:+--ssh-key-file "$SSH_KEY"} --worker 0 --quiet)
  said=$("${by_gcloud[@]}" --command true 2>&1 </dev/null) ||
    echo "note: gcloud could not connect either ($(grep -m 1 ERROR <<<"$said" || tail -n 1 <<<"$said"))"
  # gcloud can print its own ssh command, which ends with user@address; with OS Login the user is a name of Google's
  user=$("${by_gcloud[@]}" --dry-run 2>/dev/null </dev/null | grep -oE '[^ ]+@[^ ]+ *$' | tail -n 1) || user=''
  user=${user%@*}
  [[ -z $user || $user == "${SSH_USER:-$(id -un)}" ]] ||
    die "TPU_NAME=$TPU_NAME: its hosts know you as $user, by OS Login; write SSH_USER=\"$user\" in cluster.env."
}

# keep FLAG...: check all that can be checked before a slice costs money, then have it asked for.
keep() {
  local places stored
  places=$(parse_here "$TPU_TYPE" '' "$@") || return
  if [[ $places == "flags not checked"* ]]; then
    echo "the flags are checked before a slice costs money; that needs the environment on this machine:"
    JAX_PLATFORMS=cpu VENV=${VENV/#\~\//$HOME/} bash setup_tpu.sh || return
    places=$(parse_here "$TPU_TYPE" '' "$@") || return
  fi
  [[ $places == *://* ]] || die "--keep: the flags could not be checked here ($places)."
  # a run of that name may have other flags
  if stored=$(gcloud storage cat "${places%%$'\t'*}/config.json" 2>/dev/null </dev/null); then
    parse_here "$TPU_TYPE" "$stored" "$@" >/dev/null || return
  fi
  keeper start "$places" "$COMMIT" "$sync" "bash launcher.sh ${typed% }" "$@"
}

with_config "$@"
set -- "${flags[@]}"
if [[ -n $keeps ]]; then
  keep "$@" || exit
fi
[[ -n ${KEEPER:-} ]] || parse_here elsewhere "$@" >/dev/null || exit
[[ -z $TPU_NAME ]] || admit
on_all check --check || exit
[[ -n ${KEEPER:-} ]] || on_all flags --flags "$@" || exit # a keeper has checked them before the slice was there
[[ -z ${RESTART:-} ]] || stop || (($? == 137)) || exit
on_all code --code || exit
on_all setup --setup || exit
launched=$LAUNCH
if ! FIRST=1 on_all start --start "$@"; then
  for i in "${failed[@]}"; do
    echo "--- the last 20 lines of ${hosts[i]}" >&2
    bash run.sh --log "${hosts[i]}" 20 >&2 || true
  done
  exit 1
fi
launched= # the launch succeeded: `finish` leaves it running
echo "started; bash launcher.sh --status, --logs, --stop"
