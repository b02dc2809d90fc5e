# shellcheck shell=bash disable=SC2154  # the settings and host are sent before this file
# What runs on a host. tools/cluster/cluster.sh sends it to a bash there on stdin, the settings before it and a call of
# one of these functions after it.
set -euo pipefail

for name in FOLDER VENV PYTHON; do
  [[ ${!name} != \~/* ]] || printf -v "$name" %s "$HOME/${!name:2}"
done
FOLDER=${FOLDER//%h/$host}
[[ $FOLDER == /* ]] || FOLDER=$HOME/$FOLDER
venv=$VENV
[[ $venv == /* ]] || venv=$FOLDER/$VENV
state=$HOME/.moe-pretraining/$SESSION/$host # by host too, since hosts may share a home
tmux=(tmux -L "moe-$SESSION-${host//[^a-zA-Z0-9]/-}")

die() {
  echo "error: $host: $*" >&2
  exit 1
}
is_there="a run of SESSION=$SESSION is there already; see --status, or give --stop or --restart."
open_session() { "${tmux[@]}" has-session -t =main 2>/dev/null; }

# alive [PID]: whether the run is there, or the one whose session began with the process PID. People may have opened
# more panes in its session.
alive() {
  local launch pid=${1:-}
  [[ -n $pid ]] || { read -r launch pid <"$state/launch"; } 2>/dev/null || return 1
  [[ $'\n'$("${tmux[@]}" list-panes -s -t =main -F '#{pane_dead} #{pane_pid}' 2>/dev/null)$'\n' == *$'\n'"0 $pid"$'\n'* ]]
}

# preflight METHOD RESTART DEVICE: print what the host has, or fail with what it lacks. METHOD is commit or files
# (--sync). DEVICE is tpu for a host of a TPU.
preflight() {
  local folder=$FOLDER free python
  printf 'clock %s\n' "$(date +%s.%N)" # compared where it arrives
  for program in git tmux; do
    type "$program" >/dev/null 2>&1 || die "$program is not installed there (sudo apt-get install $program)."
  done
  [[ -n $2 ]] || ! alive || die "$is_there"
  for python in ${PYTHON:-"$venv/bin/python" python3 python python3.13 python3.12 python3.11 uv} ''; do
    if [[ -n $python ]] && "$python" --version >/dev/null 2>&1; then break; fi
  done
  [[ -n $python ]] || die "no Python runs there${PYTHON:+ as PYTHON=$PYTHON}; install 3.11 or newer, or name one in PYTHON."
  while [[ ! -e $folder && ! -L $folder ]]; do folder=$(dirname "$folder"); done
  [[ -d $folder && -w $folder ]] || die "FOLDER=$FOLDER: $folder there is not a folder that this user may write to."
  free=$(df -Pk "$folder" | awk 'END { print int($4 / 2^20) }')
  ((free >= MIN_DISK_GB)) || die "its disk is full: $folder has $free GB free and MIN_DISK_GB is $MIN_DISK_GB."
  suits
  [[ ! -e $mark ]] || lock # for what is being sent there looks like a change
  unchanged "$1"
  alive || devices "$3"
  echo "$free GB free, $("$python" --version 2>&1)"
}

# devices DEVICE: fail where the host's devices cannot be used. DEVICE is tpu for a host of a TPU.
devices() {
  local file='' user find=(find) lock=/tmp/libtpu_lockfile
  # without sudo the processes of other users cannot be seen, such as those in containers
  if [[ $1 == tpu* ]] && sudo -n true 2>/dev/null; then find=(sudo -n find); fi
  user=$("${find[@]}" /proc/[0-9]*/fd \( -lname '/dev/accel[0-9]*' -o -lname '/dev/vfio/[0-9]*' \) 2>/dev/null |
    cut -d/ -f3 | head -n 1) || true
  if [[ -z $user ]] && type nvidia-smi >/dev/null 2>&1; then
    user=$(nvidia-smi --query-compute-apps=pid --format=csv,noheader 2>/dev/null | head -n 1) || true
  fi
  [[ -z $user ]] ||
    die "another run holds its devices (process $user$(ps -o user=,args= -p "$user" | sed 's/  */ /g; s/^/ of /' | cut -c1-80))."
  [[ $1 == tpu* ]] || return 0
  # libtpu locks this file. Of what another user left in /tmp, the kernel lets nobody open it, not even root.
  [[ ! -e $lock || -O $lock ]] ||
    die "libtpu cannot open $lock there, which $(find "$lock" -printf %u) left; sudo rm $lock removes it."
  for file in /dev/accel[0-9]* /dev/vfio/[0-9]*; do [[ ! -c $file ]] || break; done
  [[ -c $file ]] || die "it belongs to a TPU but has no device /dev/accel* or /dev/vfio/*; create the TPU with the software" \
    "version of its kind (see docs/several-hosts.md)."
  [[ -r $file && -w $file ]] || die "this user may not use $file there; sudo chmod a+rw $file allows it."
}

# flags WHERE ENVIRONMENT COUNT (NAME TEXT)... FLAG...: fail where main.py would refuse the flags. FOLDER does not change:
# the program that will run is sent as the text of COUNT files. WHERE is "here", or "elsewhere" for another machine's
# flags.
flags() {
  local where=$1 environment=$2 count=$3 python status said
  shift 3
  code=$(mktemp -d) # not local: the trap runs when this function is left
  trap 'rm -rf "$code"' EXIT
  for ((; count > 0; count--)); do
    [[ $1 != */* || -d $code/${1%/*} ]] || mkdir -p "$code/${1%/*}"
    printf '%s\n' "$2" >"$code/$1"
    shift 2
  done
  set -a
  eval "$environment"
  set +a
  [[ ! -d $FOLDER ]] || cd "$FOLDER" # paths in flags begin there
  for python in "$venv/bin/python" python3; do
    status=0
    said=$(PYTHONPATH=$code "$python" -P -B -m config.command_line "$where" "$@" 2>&1) || status=$?
    said=${said##*$'\n'}
    if ((status == 0)); then
      echo "${said:-this commit does not check its flags}"
      return
    elif [[ $status == 2 && $said == "error: "* ]]; then
      [[ $where == here ]] || { echo "$said" >&2 && exit 2; }
      die "${said#error: }"
    fi
  done
  echo "flags not checked: no environment there yet"
}

# --- The code: FOLDER is a git repository there. So git knows which files the launcher put into it, and changes and
# removes only these.

mark=$FOLDER/.git/moe-launcher                 # the launcher made FOLDER; "LAUNCH HOST" that filled it last
half=$FOLDER/.git/refs/moe-launcher/half       # the commit whose files are being put there

# in_folder WORD...: run git there, without the hooks, signatures and background work of the user's settings.
in_folder() {
  LC_ALL=C GIT_OPTIONAL_LOCKS=0 git -C "$FOLDER" -c core.hooksPath=/dev/null -c commit.gpgSign=false -c gc.auto=0 \
    -c core.fsmonitor=false -c core.autocrlf=false -c user.name=launcher -c user.email=launcher@localhost "$@"
}
changed() { [[ -e $FOLDER/.git/HEAD && -n $(in_folder status --porcelain --untracked-files=no) ]]; }

# others: whether FOLDER is there and the launcher did not make it. It looks for the mark last: the mark is written before
# the files.
others() {
  local inside
  inside=$(find "$FOLDER/" -mindepth 1 -maxdepth 1 ! -name .git -print -quit 2>/dev/null) || true
  [[ -n $inside || -e $FOLDER/.git/HEAD || -f $FOLDER/.git ]] && [[ ! -e $mark ]]
}

# suits: fail where the launcher must not fill FOLDER.
suits() {
  others || return 0
  [[ ! $FOLDER -ef / && ! $FOLDER -ef $HOME ]] ||
    die "FOLDER=$FOLDER: the home and / are never filled; name a folder for the code alone."
  [[ $TAKE_FOLDER == yes && ! -f $FOLDER/.git ]] ||
    die "FOLDER=$FOLDER: is there, and the launcher did not make it; name another, or set TAKE_FOLDER=yes (see" \
      "launcher.sh --help)."
}

# unchanged METHOD: fail where files of the commit were changed there, unless METHOD is files (--sync) and replaces them.
unchanged() {
  local advice="undo that, or send yours with --sync"
  [[ ! -e $half ]] || return 0 # what differs is of the launcher, which did not end
  if others; then
    advice="commit or undo that first"
  elif [[ $1 == files ]]; then
    return 0
  fi
  ! changed || die "it would not run the same commit: files in $FOLDER were changed there; $advice."
}

# filled_by LAUNCH: print the other host that shares FOLDER and filled it in this launch. The status is 1 if none did.
filled_by() {
  local launch='' other=''
  [[ ! -e $mark ]] || read -r launch other <"$mark" || true
  [[ $launch == "$1" && $other != "$host" ]] && echo "$other"
}

# lock: wait until no other host fills FOLDER, then lock it. The lock ends with this process, however that ends.
lock() {
  { command exec 9>>"$mark.lock"; } 2>/dev/null || die "FOLDER=$FOLDER: this user may not write to its .git."
  if type flock >/dev/null 2>&1; then
    flock -w 600 9 || (($? != 1)) || die "FOLDER=$FOLDER: somebody else has been filling it for 10 minutes."
  else
    python3 -c 'import fcntl; fcntl.flock(9, fcntl.LOCK_EX)' 2>/dev/null || true
  fi
}

# in_run PATH: whether it lies in a run directory of main.py.
in_run() {
  local folder=$1
  while [[ $folder == */* ]]; do
    folder=${folder%/*}
    [[ ! -e $FOLDER/$folder/metrics.jsonl ]] || return 0
    [[ ! -e $FOLDER/$folder/config.json || ! -e $FOLDER/$folder/checkpoints ]] || return 0
  done
  return 1
}

# keep COMMIT [OLD]: before COMMIT is checked out, save what others did there in a branch: changed files, and commits.
# OLD is a commit that was not checked out completely: then files that stand where COMMIT or OLD has some are saved too.
# Files in run directories are removed from git's index instead, so that git leaves them alone.
keep() {
  local commit=$1 path branch
  branch=kept-$(date +%Y%m%d-%H%M%S)-$$
  in_folder update-index -q --refresh >/dev/null || true
  in_folder diff-index -z --name-only "$commit" | while IFS= read -r -d '' path; do
    if in_run "$path"; then printf '%s\0' "$path"; fi
  done | in_folder update-index -z --force-remove --stdin
  if (($# > 1)); then
    for commit; do in_folder ls-tree -rz --name-only "$commit"; done | while IFS= read -r -d '' path; do
      if [[ (-f $FOLDER/$path || -L $FOLDER/$path) ]] && ! in_run "$path"; then printf '%s\0' "$path"; fi
    done | in_folder update-index -z --add --stdin
  fi
  in_folder add -u
  if changed; then
    in_folder checkout -q -b "$branch"
    in_folder commit -q -m "what stood here before $1"
  elif ! in_folder rev-parse -q --verify HEAD >/dev/null || [[ -n $(in_folder for-each-ref --contains HEAD) ]]; then
    return 0
  else
    in_folder branch "$branch"
  fi
  printf 'what differed there is kept in its git branch %s; ' "$branch"
}

# receive LAUNCH COMMIT METHOD: check COMMIT out in FOLDER. Its objects come on stdin, without its history.
receive() {
  local commit=$2 method=$3 other parent complaint old=() in_the_way
  suits
  mkdir -p "$FOLDER/.git" 2>/dev/null || die "FOLDER=$FOLDER: it could not be made there."
  lock
  if other=$(filled_by "$1"); then
    echo "the folder of $other, which has it"
    return
  fi
  unchanged "$method"
  if [[ -e $half ]]; then
    rm -f "$FOLDER"/.git/{index,HEAD}.lock # of who did not end
    old=("$(<"$half")")
    in_folder cat-file -e "${old[0]:-none}^{tree}" 2>/dev/null || { old=("$commit") && rm "$half"; }
  fi
  others || : >>"$mark"
  [[ -e $FOLDER/.git/HEAD ]] || git init -q "$FOLDER"
  in_folder unpack-objects -q || die "FOLDER=$FOLDER: the files did not arrive whole; nothing was changed."
  for parent in $(in_folder rev-parse "$commit^@"); do
    in_folder cat-file -e "$parent" 2>/dev/null || { echo "$commit" >>"$FOLDER/.git/shallow" && break; }
  done
  in_folder update-ref refs/moe-launcher/half "$commit"
  keep "$commit" "${old[@]}"
  if ! complaint=$(in_folder checkout -q --detach --no-overwrite-ignore "$commit" 2>&1); then
    mapfile -t in_the_way < <(sed -n 's/^\t//p' <<<"$complaint")
    ((${#in_the_way[@]})) || die "$FOLDER did not reach commit $commit (${complaint//$'\n'/ })."
    in_folder update-ref -d refs/moe-launcher/half # git looks before it writes
    die "FOLDER=$FOLDER: what stands there and was not sent would be overwritten (${#in_the_way[@]} files or folders," \
      "${in_the_way[0]} first); move it away, or name another folder."
  fi
  in_folder update-ref "refs/heads/launched-${SESSION//[^a-zA-Z0-9]/-}" "$commit"
  echo "$1 $host" >"$mark"
  in_folder update-ref -d refs/moe-launcher/half
  if [[ $method == files ]]; then echo "files as they stand here"; else echo "commit ${commit:0:10}"; fi
}

# setup LAUNCH: make the environment, once where hosts share the folder that it is in.
setup() {
  local other
  if [[ $VENV != /* ]] && other=$(filled_by "$1"); then
    echo "the folder of $other, which sets it up"
    return
  fi
  cd "$FOLDER"
  export VENV
  [[ -z $PYTHON ]] || export PYTHON
  # shellcheck disable=SC2086  # a word for each
  bash setup_tpu.sh $EXTRAS
}

# start LAUNCH ENVIRONMENT FLAG...: start main.py in a detached tmux session, return when its first step is compiled.
# ENVIRONMENT is assignments, some of them secret: they go through a file into the process, never through an argument.
# Of several starts at once tmux lets one make the session. Until then each has only a file of its own, and the session
# alone changes what is there of the run before.
start() {
  local launch=$1 environment=$2 mask complaint i now there begun=''
  script=$state/start.$launch # not local: the trap runs when this function is left
  shift 2
  mask=$(umask) # main.py's, whose files others may read
  umask 077
  mkdir -p "$state"
  ! alive || die "$is_there"
  find "$state" \( -name 'start.*' -o -name 'taken-back.*' \) -mmin +60 -exec rm -f {} +
  trap 'rm -f "$script"' EXIT
  {
    printf 'set -a\n%s\nset +a\n' "$environment"
    printf 'launch=%q\nmask=%q\nfolder=%q\nstate=%q\npython=%q\nrestarts=%q\nflags=(' "$launch" "$mask" "$FOLDER" "$state" \
      "$VENV/bin/python" "$MAX_RESTARTS"
    (($# == 0)) || printf '%q ' "$@"
    cat <<'SCRIPT'
)
rm -f "$0" # this process and all that it starts have the environment from here
umask 077
export LOG_PER_PROCESS=yes # main.py prints every line on every host, as what is here reads them
rm -f "$state/status" "$state/pid" "$state/stopping"
[[ ! -f $state/log ]] || mv -f "$state/log" "$state/log.before"
: >"$state/log"
echo "$launch $$" >"$state/launch.new"
mv -f "$state/launch.new" "$state/launch"
[[ ! -e $state/taken-back.$launch ]] || exit # while this was on its way
{
  umask "$mask"
  cd "$folder" && bash tools/cluster/supervise.sh "$restarts" "$state" "$python" main.py "${flags[@]}"
  echo "$?" >"$state/status"
} 2>&1 | tee -i -a "$state/log" # the session ends when the log is whole
SCRIPT
  } >"$script"
  # bash reads all of a file that is sourced before it begins, and does not keep it open
  if ! complaint=$("${tmux[@]}" new-session -d -s main "exec bash -c 'source \"\$0\"' $(printf %q "$script")" 2>&1); then
    ! open_session || die "$is_there"
    die "tmux could not start a session${complaint:+ (${complaint//$'\n'/ })}."
  fi
  for ((i = 0; i < START_TIMEOUT * 2; i++)); do
    there=
    ! open_session || there=1 # asked first: it is gone only after it wrote what is read next
    if [[ $(cat "$state/launch" 2>/dev/null) == "$launch "* ]]; then
      begun=1
      now=$(state)
      case $now in
        starting*) ;;
        "ended with status 0"* | running*) echo "$now" && return ;;
        *"; its log says why"*) # of the log of another host, which the launcher is to hear of first
          sleep 10
          die "main.py ${now%.}."
          ;;
        *) die "main.py ${now%.}." ;;
      esac
    elif [[ -n $begun || -z $there ]]; then
      die "its session was ended before main.py began, or another run took its place; see --status."
    fi
    sleep 0.5
  done
  die "main.py compiled no step within START_TIMEOUT=$START_TIMEOUT s."
}

# telling_line: print the last line of the log that tells something. An "error:" sentence wins unless main.py was
# started again after it. Of a traceback it is the exception. Messages of jax's libraries, progress bars and warnings
# are skipped.
telling_line() {
  tail -n 1000 "$state/log" 2>/dev/null | LC_ALL=C awk '
    { sub(/\r$/, ""); sub(/.*\r/, ""); gsub(/\033\[[0-9;]*[A-Za-z]/, "") }
    /^[ \t]*$/ || /^[ \t]/ { next } # what is indented goes with the line before: of a traceback, a warning
    /^Exception ignored / { ignored = 1; next } # by Python, at its end
    /^Traceback / { traceback = ignored ? 2 : 1; ignored = 0; next }
    traceback == 1 { traceback = 2; if (!error) last = $0; next } # the exception; what follows belongs to it
    /^[0-9][0-9]:[0-9][0-9]:[0-9][0-9] |^main\.py ended with status / { last = $0; error = traceback = 0; next }
    /^error: / { last = $0; error = 1; next }
    error || traceback { next }
    /^F[0-9][0-9][0-9][0-9] [0-9:.]+ / { sub(/^[^]]*\] */, ""); last = $0; next } # the reason of an abort
    /^\[Gloo\]|^[IWE][0-9][0-9][0-9][0-9] [0-9:.]+ |^[0-9-]+ [0-9:.]+: [IWEF] |^:UNKNOWN:|^Additional GRPC / { next }
    /^(WARNING|INFO|ERROR):|^wandb: |^[^ ]+:[0-9]+: [A-Za-z]*Warning: |^\*\*\* |^(Thread|Current thread) 0x/ { next }
    /^tools\/cluster\/supervise\.sh: line [0-9]+: +[0-9]+ |[0-9]%\|.*\||it\/s[],]|s\/it[],]/ { next }
    { last = $0 }
    END { print last }'
}

# state: print one line on what the session does.
state() {
  local last lives=
  # asked before the log is read: it is whole once the session has ended
  ! alive || lives=1
  last=$(telling_line | cut -c1-500) || true
  last=${last:+: $last}
  if [[ $lives ]]; then
    # main.py says this once what can go wrong at its start did not
    if grep -q ' compiled in ' "$state/log"; then echo "running$last"; else echo "starting$last"; fi
  elif [[ -s $state/status ]]; then
    echo "ended with status $(<"$state/status")$last"
  elif [[ -e $state/launch ]]; then
    echo "was killed, or its host restarted$last"
  else
    echo "nothing was started"
  fi
}

log() { tail -n "$1" "$state/log" 2>/dev/null || echo "$host has no log of SESSION=$SESSION"; }

# tree PID: print the processes that descend from it, and those of its process group.
tree() {
  ps -eo pid=,ppid=,pgid= | awk -v top="$1" '
    { parent[$1] = $2; group[$1] = $3 }
    END {
      for (pid in parent) {
        for (at = pid; at in parent && at != top && group[at] != top;) at = parent[at]
        if (at in parent) print pid
      }
    }'
}

# stop SECONDS [LAUNCH]: end the run by SIGTERM, so that it writes a checkpoint, and what has not ended in time by SIGKILL:
# then the exit status is 137. With LAUNCH, end only what that launch started, and say nothing.
stop() {
  local launch='' run='' pid sent='' i sentence
  if [[ -n ${2:-} ]]; then
    mkdir -p "$state"
    : >"$state/taken-back.$2"
  fi
  # shellcheck disable=SC2086  # all of them, or one launch's
  rm -f "$state"/start.${2:-*} # left where a start was cut off; one that is on its way ends with a sentence
  { read -r launch run <"$state/launch"; } 2>/dev/null || true
  [[ -z ${2:-} || $2 == "$launch" ]] || return 0
  for ((i = 0; i < $1 * 2; i++)); do
    { [[ -n $run ]] && alive "$run"; } || break
    : >"$state/stopping"
    pid=$(cat "$state/pid" 2>/dev/null) || true
    if [[ -n $pid && $pid != "$sent" && " $(tree "$run" | tr '\n' ' ')" == *" $pid "* ]]; then
      kill -TERM "$pid" 2>/dev/null || true
      sent=$pid
    fi
    sleep 0.5
  done
  if [[ -z $run ]] || ! alive "$run"; then
    state
    return
  fi
  sentence="it still ran STOP_TIMEOUT=$1 s after SIGTERM and was ended by SIGKILL; what it did since its last checkpoint is lost"
  # shellcheck disable=SC2046  # a word for each process
  kill -KILL -- "-$run" $(tree "$run") 2>/dev/null || true
  for ((i = 0; i < 20; i++)); do
    alive "$run" || break
    sleep 0.5
  done
  ! alive "$run" || die "it still runs, even after SIGKILL; restart that host."
  rm -f "$state/pid"
  echo 137 >"$state/status"
  echo "error: $sentence." >>"$state/log"
  [[ -z ${2:-} ]] || return 0
  state
  echo "error: $host: $sentence." >&2
  exit 137
}
