# shellcheck shell=bash
# Sourced by launcher.sh, run.sh and debug_tpu.sh in the repository's root: what cluster.env says, and how to reach a
# host. tools/cluster/on_host.sh is what then runs there.

die() {
  local sentence=$*
  echo "error: ${sentence//$'\n'/ }" >&2
  exit 1
}

# The environment wins over cluster.env, and that over the example, which therefore names every setting.
mapfile -t settings < <(sed -n 's/^\([A-Z_]*\)=.*/\1/p' cluster.env.example)
given=$(for name in "${settings[@]}"; do [[ ! -v $name ]] || printf '%s=%q\n' "$name" "${!name}"; done)
text='' assigned=() exported=()
if [[ -e cluster.env || -L cluster.env ]]; then
  # what editors of other systems add goes; ~ and $HOME stay, to be the home there instead of the home here
  # shellcheck disable=SC2016
  text=$(LC_ALL=C sed -E -e $'s/\r$//' -e $'1s/^\xef\xbb\xbf//' -e 's/^((export +)?(FOLDER|VENV|PYTHON)=)~/\1\\~/' \
    -e 's/^((export +)?(FOLDER|VENV|PYTHON)="?)(\$HOME|\$\{HOME\})\//\1\\$HOME\//' cluster.env 2>/dev/null | tr -d '\0') ||
    die "cluster.env: is no file that can be read."
fi
once=''
while IFS=: read -r line row; do
  [[ $row =~ ^[[:space:]]*(export[[:space:]]+)?([A-Za-z_][A-Za-z0-9_]*)\+?= ]] || continue
  assigned+=("$line ${BASH_REMATCH[2]}")
  [[ -z ${BASH_REMATCH[1]} ]] || exported+=("${BASH_REMATCH[2]}")
  if [[ $row =~ ^(export\ +)?HOSTS=[^$]*$ ]]; then # the shell would forget the first
    [[ -z $once ]] || die "cluster.env, line $line: HOSTS is set a second time; name all hosts in one, or write HOSTS+=."
    once=1
  fi
done < <(grep -an = <<<"$text" || true)

# A process of its own reads cluster.env, so that an error there is reported, with its line. An array becomes a list.
mark="--- settings ---"
said=$(
  trap 'exit 0' EXIT # without the mark it failed
  trap 'echo "cluster.env: line $LINENO: ${BASH_COMMAND%%$'\''\n'\''*} failed"' ERR
  exec 2>&1 </dev/null
  set -aeE
  source ./cluster.env.example
  # shellcheck source=/dev/null
  source <(printf '%s\n:\n' "$text")
  exec 2>/dev/null # set -x would write between the settings
  echo "$mark"
  # shellcheck disable=SC2068  # a word for each name
  for name in "${settings[@]}" "${exported[@]}" ${PASS_ENV[@]//[,;]/ } ${SECRETS[@]//[,;]/ }; do
    [[ $name =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || continue
    declare -n value=$name
    [[ -z ${value[*]+set} ]] || printf '%s=%q\n' "$name" "${value[*]}"
  done
)
if [[ $said != *"$mark"* ]]; then
  said=$(sed -nE 's/^[^:]*: [^:0-9]* ([0-9]+): (.*)/, line \1: \2/p' <<<"$said" | head -n 1)
  die "cluster.env${said:-: ends before its last line}; a setting is NAME=\"value\", without spaces around the =."
fi
set -a
source ./cluster.env.example
eval "${said#*"$mark"}"
eval "$given"
set +a

for name in PASS_ENV SECRETS; do
  read -d '' -ra names <<<"${!name//[,;]/ }" || true
  printf -v "$name" %s "${names[*]}"
  for row in "${names[@]}"; do
    [[ $row =~ ^[A-Za-z_][A-Za-z0-9_]*$ ]] || die "$name: must hold names of variables, separated by spaces, not their values."
  done
done

# What is no setting may be a variable of the user's own: exported, or in small letters beside the setting of that name.
for row in "${assigned[@]}"; do
  name=${row#* }
  [[ " ${settings[*]} ${exported[*]} $PASS_ENV $SECRETS " != *" $name "* ]] || continue
  if [[ $name == *[a-z]* ]]; then
    [[ " ${settings[*]} " == *" ${name^^} "* && " ${assigned[*]} " != *" ${name^^} "* ]] || continue
  fi
  die "cluster.env, line ${row% *}: $name is no setting; cluster.env.example names all."
done

# whole NAME LEAST [MOST]: fail unless the setting is a whole number in that range.
whole() {
  local most=${3:-999999999} value=-1
  [[ ! ${!1} =~ ^0*[0-9]{1,9}$ ]] || value=$((10#${!1}))
  ((value >= $2 && value <= most)) || die "$1=${!1}: must be a whole number from $2 to $most."
  printf -v "$1" %s "$value"
}
whole MIN_DISK_GB 0
whole START_TIMEOUT 1
whole STOP_TIMEOUT 1
whole MAX_RESTARTS 0
[[ -z $SSH_PORT ]] || whole SSH_PORT 1 65535
[[ $MAX_CLOCK_SKEW =~ ^[0-9]+(\.[0-9]+)?$ ]] || die "MAX_CLOCK_SKEW=$MAX_CLOCK_SKEW: must be a number of seconds, such as 1 or 0.5."
[[ $SESSION =~ ^[A-Za-z0-9_][A-Za-z0-9_.-]*$ ]] || die "SESSION=$SESSION: must be a word of letters, digits, _, . and -."
[[ $COORDINATOR =~ ^((\[[0-9a-fA-F:.]+\]|[^[:space:]:]+):[0-9]{1,5}|none|)$ ]] ||
  die "COORDINATOR=$COORDINATOR: must be HOST:PORT, none or empty."
[[ -n $FOLDER && -n $VENV ]] || die "FOLDER=$FOLDER, VENV=$VENV: must name folders; neither may be empty."
for name in FOLDER VENV PYTHON; do
  # shellcheck disable=SC2016  # as it stands there in single quotes
  row=${!name/#'$HOME/'/'~/'}
  [[ $row != *[\$\`$'\n']* && ($row != \~* || $row == \~/[!/]*) ]] ||
    die "$name=${!name}: the host replaces only ~/ at its beginning, by the home there."
  printf -v "$name" %s "$row"
done
SSH_CONFIG=${SSH_CONFIG/#\~\//$HOME/}

# A slice that comes and goes: --keep asks for it. KEEPER is its folder, which outlives each slice.
if [[ -n $TPU_TYPE ]]; then
  for name in SPOT KEEP_SLICE; do
    [[ ${!name} == @(yes|no|) ]] || die "$name=${!name}: must be yes, no or empty."
    [[ ${!name} == yes ]] || printf -v "$name" ''
  done
  [[ $TPU_TYPE =~ ^v[0-9][0-9a-z]*-[0-9]+$ ]] || die "TPU_TYPE=$TPU_TYPE: must be a slice as Google names it, such as v4-32."
  [[ $TPU_NAME =~ ^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$ ]] ||
    die "TPU_NAME=$TPU_NAME: must be a name for the slice, of small letters, digits and -, such as week."
  [[ $ZONE =~ ^[a-z]+-[a-z]+[0-9]+-[a-z]$ ]] || die "ZONE=$ZONE: must be the zone of the slice, such as us-central2-b."
  if [[ -z ${KEEPER:-} ]]; then # else these are the hosts that the script found which started this one
    [[ -z $HOSTS ]] || die "HOSTS, TPU_TYPE: name hosts that are there or the type of a slice to ask for, not both."
    KEEPER=$HOME/.moe-pretraining/keep/${PROJECT:-default}.$ZONE.$TPU_NAME
    KEEPER_TMUX=moe-keep-${KEEPER##*/}
    KEEPER_TMUX=${KEEPER_TMUX//[^a-zA-Z0-9]/-}
    if [[ -f $KEEPER/hosts ]]; then { read -r HOSTS && read -r COORDINATOR; } <"$KEEPER/hosts"; fi
  fi
  export KEEPER KEEPER_TMUX
fi

# read_hosts: split HOSTS, which may span several lines, into the array `hosts`.
read_hosts() {
  read -d '' -ra hosts <<<"${HOSTS//[,;$'\r']/ }" || true
  HOSTS="${hosts[*]}"
}
read_hosts
# describe_tpu FIELD: print a field of the TPU. Without a terminal gcloud asks no question.
describe_tpu() {
  gcloud compute tpus tpu-vm describe "$TPU_NAME" ${ZONE:+--zone "$ZONE"} ${PROJECT:+--project "$PROJECT"} \
    --format="value($1)" </dev/null
}

# find_tpu: set HOSTS to the addresses of the TPU, or fail with the reason why there are none.
find_tpu() {
  local said state advice address where="${ZONE:+ in ZONE=$ZONE}${PROJECT:+ of PROJECT=$PROJECT}"
  type gcloud >/dev/null 2>&1 || die "TPU_NAME=$TPU_NAME: its hosts are found by gcloud, which is not installed; name them in HOSTS."
  if ! said=$(describe_tpu state 2>&1); then
    [[ $said != *NOT_FOUND* ]] || die "TPU_NAME=$TPU_NAME: there is no such TPU$where; name another, create it, or set TPU_TYPE and have --keep ask for it."
    said=$(grep -m 1 '^ERROR' <<<"$said" || tail -n 1 <<<"$said")
    die "TPU_NAME=$TPU_NAME: gcloud cannot describe it$where ($said)."
  fi
  state=$(grep -xE '[A-Z_]+' <<<"$said" | tail -n 1) || state='' # beside what gcloud may say on stderr
  case $state in
    READY | '') ;;
    *)
      case $state in
        STOPPED | STOPPING) advice="start it by gcloud compute tpus tpu-vm start" ;;
        PREEMPTED | TERMINATED | DELETING) advice="delete it and create another" ;;
        *) advice="wait until it is READY" ;;
      esac
      die "TPU_NAME=$TPU_NAME: its state$where is $state, so its hosts cannot be used; $advice."
      ;;
  esac
  for address in accessConfig.externalIp ipAddress; do
    HOSTS=$(describe_tpu "networkEndpoints[].$address") || die "TPU_NAME=$TPU_NAME: gcloud failed (see above)."
    read_hosts
    [[ -z $HOSTS ]] || return 0
  done
  die "TPU_NAME=$TPU_NAME: gcloud names no address of its hosts$where${state:+, though its state is $state}; name them in HOSTS."
}
if [[ -z $HOSTS && -n $TPU_NAME && -z $TPU_TYPE ]]; then
  find_tpu
  COORDINATOR=${COORDINATOR:-none}
fi
for host in "${hosts[@]}"; do
  [[ ! $host =~ ^[^:]*:[0-9]*$ ]] || die "HOSTS: $host: a port belongs in SSH_PORT, or with an alias in ~/.ssh/config."
  [[ $host =~ ^([A-Za-z0-9_][A-Za-z0-9_.+-]*@)?[A-Za-z0-9_:][A-Za-z0-9_.:%-]*$ ]] ||
    die "HOSTS: $host: must be user@address, or an ssh alias; separate them by spaces and leave out all else."
done
# a host may not be named twice, not even with two users: one process takes all its devices
twice=$(printf '%s\n' "${hosts[@]#*@}" | sort -f | uniq -di | head -n 1)
[[ -z $twice ]] || die "HOSTS: names $twice twice; each host is one process, so name it once."
if [[ -z $COORDINATOR && ${#hosts[@]} -gt 1 ]]; then
  COORDINATOR=${hosts[0]#*@}
  [[ $COORDINATOR != *:* ]] || COORDINATOR="[$COORDINATOR]"
  COORDINATOR+=:8476
fi
export HOSTS COORDINATOR # the scripts started from here need not ask again

# gcloud makes this key, and puts its public half on TPUs.
if [[ -z $SSH_KEY && -n $TPU_NAME && -f $HOME/.ssh/google_compute_engine ]]; then SSH_KEY=$HOME/.ssh/google_compute_engine; fi
key=${SSH_KEY/#\~\//$HOME/}
if [[ -n $key && $key != *[%$]* && $key != \~* ]]; then # ssh itself replaces %, $ and ~
  [[ -e $key ]] || die "SSH_KEY=$SSH_KEY: there is no such file; name the private key that the hosts know."
  [[ -f $key && -r $key ]] || die "SSH_KEY=$SSH_KEY: cannot be read; name a private key file of your own."
fi

# Host keys are written down at first contact and compared ever after. Another slice has other keys, perhaps at the same
# addresses, so the keeper of slices has a file of its own.
ssh=(ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=10 -o ServerAliveInterval=15
  -o LogLevel=ERROR ${KEEPER:+-o UserKnownHostsFile="$KEEPER/known_hosts"} ${SSH_CONFIG:+-F "$SSH_CONFIG"} ${SSH_USER:+-l "$SSH_USER"} ${SSH_PORT:+-p "$SSH_PORT"}
  ${SSH_KEY:+-i "$SSH_KEY" -o IdentitiesOnly=yes})

# quoted WORD...: print the words quoted for any POSIX shell. printf %q would write $'...', which only some know.
quoted() {
  local word
  for word; do printf "'%s' " "${word//\'/\'\\\'\'}"; done
}

# ssh_complaint HOST STDERR: print why ssh itself failed, as a sentence.
ssh_complaint() {
  local said=${2//$'\r'/} name file
  case $said in
    *"IDENTIFICATION HAS CHANGED"* | *"Host key verification failed"*)
      name=$(sed -n 's/^Host key for \(.*\) has changed.*/\1/p' <<<"$said")
      file=$(sed -n 's/^Offending .* key in \(.*\):[0-9]*$/\1/p' <<<"$said")
      echo "$1: its host key is not the one of the first contact; if that is as it should be, run ssh-keygen" \
        "${file:+-f $(quoted "$file")}-R $(quoted "${name:-$1}")and start again." ;;
    *"Load key "*)
      echo "$1: a key cannot be used ($(grep -m 1 '^Load key ' <<<"$said")); name one in SSH_KEY that ssh reads without a" \
        "passphrase and of which no one else may read the file (chmod 600)." ;;
    *"Permission denied"* | *"Too many authentication failures"*)
      echo "$1: refuses the key${SSH_KEY:+ SSH_KEY=$SSH_KEY}; add its public half to authorized_keys there, name another" \
        "in SSH_KEY, or give ssh-agent its passphrase." ;;
    *) echo "$1: cannot be reached by ssh ($(tail -n 1 <<<"$said"))." ;;
  esac
}

began="--- moe-launcher begins ---"
# past_noise: print the lines of stdin after that line. The startup files of the shell there may print some before.
past_noise() {
  local line
  while IFS= read -r line; do
    [[ $line != *"$began" ]] || exec cat
  done
}

# call FUNCTION ARGUMENT...: print a script for bash that calls a function of tools/cluster/on_host.sh, for $host. The
# function's stdin is the output of the command in `payload`, if there is one.
payload=()
call() {
  local name
  printf 'echo %q\n' "$began"
  for name in "${settings[@]}" host; do printf '%s=%q\n' "$name" "${!name}"; done
  cat tools/cluster/on_host.sh
  printf '{ ' # so that a call that is cut off on its way does not run
  printf '%q ' "$@"
  ((${#payload[@]})) || printf '</dev/null'
  printf '; exit; }\n'
  "${payload[@]}"
}

# on_host HOST FUNCTION ARGUMENT...: run a function of tools/cluster/on_host.sh there. Everything is sent on stdin:
# arguments of ssh would show in the process lists of two machines, and the user's own shell there would read them.
on_host() {
  local host=$1 status=0 complaint
  shift
  {
    complaint=$(
      {
        call "$@" | "${ssh[@]}" -- "$host" exec bash 2>&3 | past_noise >&4
        exit "${PIPESTATUS[1]}"
      } 3>&1
    ) || status=$?
  } 4>&1
  if ((status == 255)); then
    echo "error: $(ssh_complaint "$host" "$complaint")" >&2
  elif [[ -n $complaint ]]; then
    printf '%s\n' "$complaint" >&2
  fi
  return "$status"
}

# with_config WORD...: set the array `flags` to these words, but the name of a file here that --config names is replaced
# by its text: the hosts do not have the file.
with_config() {
  local word file before=
  flags=()
  for word; do
    file=
    [[ $before != --config ]] || file=$word
    [[ $word != --config=* ]] || file=${word#*=}
    if [[ -n $file && -f $file ]]; then word=${word%"$file"}$(<"$file"); fi
    flags+=("$word")
    before=$word
  done
}

# read_program: set the array `program` to what `flags` of tools/cluster/on_host.sh needs of COMMIT: the number of
# files, then the name and the text of each. Of files that may hold a tokenizer the name is enough.
read_program() {
  local name all i texts python=() others=()
  while read -r name; do
    case $name in
      tests/* | tools/* | docs/*) continue ;; # main.py's flags are parsed without them
      *.py | config/*.txt) python+=("$name") ;;
      *.json | *.tiktoken) others+=("$name" '') ;;
    esac
  done < <(git ls-tree -r --full-tree --name-only "$COMMIT" 2>/dev/null)
  # one git for all, which writes a byte before each text that no text has: a process for each would take seconds
  all=$(printf '%s\n' "${python[@]/#/$COMMIT:}" | git cat-file --batch=$'\x01')
  mapfile -t -d $'\x01' texts <<<"$all"
  program=("$((${#python[@]} + ${#others[@]} / 2))" "${others[@]}")
  for i in "${!python[@]}"; do
    texts[i + 1]=${texts[i + 1]%$'\n'} # git's own
    program+=("${python[i]}" "${texts[i + 1]:1}")
  done
}
