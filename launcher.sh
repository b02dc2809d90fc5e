#!/usr/bin/env bash
# One training run on all hosts of cluster.env: check, send, set up, start, watch, stop.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash launcher.sh [--sync] [--restart] [--max_restarts N] [any flag of main.py]
       bash launcher.sh --status | --logs [HOST] | --stop | --attach HOST

Starts main.py with the flags on all HOSTS of cluster.env (copy cluster.env.example) and returns when every host has
compiled its first step. Nothing is changed anywhere until all hosts have passed the check; if one fails to start, what
was started on the others is ended again.

  --sync         send the files as they stand here, not COMMIT; what git ignores and run directories stay here
  --restart      end the run that is there first, with a checkpoint
  --max_restarts N  each host starts main.py again, up to N times, after a crash, a lost peer or a preemption
  --status       what each host does, with the last line of its log
  --logs [HOST]  the last 100 lines of every host's log, or of one's
  --stop         SIGTERM: all write one checkpoint and end
  --attach HOST  look into the tmux session there (detach: Ctrl-b d)

Only files that the launcher put into FOLDER are ever changed or removed there; with --sync, what somebody changed of
them is kept in a git branch there. A FOLDER with files in it that the launcher did not make is refused; with
TAKE_FOLDER=yes the code is put beside what is there, or refused where it would overwrite something.

A status other than 0: a host failed; it is named, with its last lines.
HELP
}

CDPATH='' cd -- "$(dirname -- "$0")"
[[ ${1:-} != @(-h|--help) ]] || { usage && exit; }
source tools/cluster.sh
((${#hosts[@]})) || die "HOSTS: names no host; copy cluster.env.example to cluster.env and fill it in."

tmp=$(mktemp -d)
pids=() # of the hosts' jobs in progress
launched=
# Whatever ends the launch before it is whole takes back what it started.
finish() {
  trap '' INT TERM
  ((${#pids[@]} == 0)) || kill "${pids[@]}" 2>/dev/null || true
  if [[ -n $launched ]]; then
    echo "taking back what was started"
    pids=()
    for host in "${hosts[@]}"; do bash run.sh --stop "$host" 20 "$launched" >/dev/null 2>&1 & done
    wait
  fi
  rm -rf "$tmp"
}
trap finish EXIT

# on_all TITLE WORD...: `run.sh WORD HOST...` (HOST is put after the first word) on all hosts at once, and a table of
# how it went. The hosts that failed are left in `failed`; with FIRST=1 waiting ends with the first that fails.
on_all() {
  local title=$1 step=$2 i pid status
  shift 2
  pids=() failed=()
  declare -A index=()
  for i in "${!hosts[@]}"; do
    bash run.sh "$step" "${hosts[i]}" "$@" >"$tmp/$i" 2>"$tmp/$i.error" &
    pids[i]=$! index[$!]=$i
  done
  while ((${#pids[@]})); do
    status=0
    wait -n -p pid "${pids[@]}" || status=$?
    i=${index[$pid]}
    unset "pids[i]"
    ((status == 0)) || failed+=("$i")
    [[ -z ${FIRST:-} || ${#failed[@]} == 0 ]] || break
  done
  printf '%-8s %-24s %s\n' "$title" host ''
  for i in "${!hosts[@]}"; do
    status=ok
    [[ " ${failed[*]} " != *" $i "* ]] || status=FAILED
    [[ -z ${pids[i]:-} ]] || status=waiting
    printf '%-8s %-24s %s\n' "$status" "${hosts[i]}" "$(tail -n 1 "$tmp/$i")"
  done
  for i in "${failed[@]}"; do
    grep -qF "error: ${hosts[i]}: " "$tmp/$i.error" || echo "error: ${hosts[i]}: run.sh $step failed:" >&2
    tail -n 20 "$tmp/$i.error" >&2
  done
  ((${#failed[@]} == 0))
}

# snapshot: COMMIT becomes one of the files as they stand here. It lies in $tmp, and nothing here changes. Run
# directories that git does not know are left out: a host has its own.
snapshot() {
  local index prefix file folder tree nested left_out=()
  if ! git ls-files --error-unmatch launcher.sh >/dev/null 2>&1; then
    git init -q "$tmp/repository"
    export GIT_DIR=$tmp/repository/.git GIT_WORK_TREE=$PWD
  fi
  prefix=$(git rev-parse --show-prefix)
  index=$(git rev-parse --git-path index)
  mkdir -p "$tmp/objects/info"
  (cd "$(git rev-parse --git-path objects)" && pwd) >"$tmp/objects/info/alternates"
  [[ ! -f $index ]] || cp "$index" "$tmp/index" # it knows which files are as they were
  export GIT_OBJECT_DIRECTORY=$tmp/objects GIT_INDEX_FILE=$tmp/index
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

case ${1:-} in
  --status | --stop)
    on_all "${1#--}" "${1/status/state}"
    exit
    ;;
  --logs)
    [[ -n ${2:-} ]] || set -- --logs "${hosts[@]}"
    for host in "${@:2}"; do
      echo "--- $host"
      bash run.sh --log "$host" 100
    done
    exit
    ;;
  --attach)
    [[ " ${hosts[*]} " == *" ${2:-} "* && -n ${2:-} ]] || die "--attach ${2:-}: must be one of HOSTS ($HOSTS)."
    "${ssh[@]}" -t -- "$2" "tmux -L $(quoted "moe-$SESSION-${2//[^a-zA-Z0-9]/-}") attach"
    exit
    ;;
esac

while :; do
  case ${1:-} in
    --sync) export SYNC=1 ;;
    --restart) export RESTART=1 ;;
    --max_restarts) export MAX_RESTARTS=${2:-} && shift $(($# > 1)) ;;
    *) break ;;
  esac
  shift
done
[[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || die "--max_restarts $MAX_RESTARTS: must be a whole number."
export LAUNCH=$$-$EPOCHSECONDS
if [[ -n ${SYNC:-} ]]; then
  snapshot
else
  revision=$(git rev-parse --verify -q "$COMMIT^{commit}") ||
    die "COMMIT=$COMMIT: this repository has no such branch or commit."
  export COMMIT=$revision # from here on it is one commit, whatever is committed meanwhile
  [[ -z $(git status --porcelain --untracked-files=no) ]] ||
    echo "note: what is not committed here is not sent; --sync would send it"
  mapfile -t untracked < <(git ls-files --others --exclude-standard)
  ((${#untracked[@]} == 0)) ||
    echo "note: what git does not know here is not sent (${#untracked[@]} files, ${untracked[0]} first);" \
      "--sync would send it"
fi

on_all check --check || exit
[[ -z ${RESTART:-} ]] || on_all stop --stop || exit
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
launched= # it is whole, and stays
echo "started; bash launcher.sh --status, --logs, --stop"
