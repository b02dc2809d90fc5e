# shellcheck shell=bash
# Sourced by launcher.sh, run.sh and debug_tpu.sh in the repository's root: what cluster.env says, and how to reach a
# host. tools/cluster/on_host.sh is what then runs there.

die() {
  echo "error: $*" >&2
  exit 1
}

# The environment wins over cluster.env, and that over the example, which therefore names every setting.
mapfile -t settings < <(sed -n 's/^\([A-Z_]*\)=.*/\1/p' cluster.env.example)
given=$(for name in "${settings[@]}" ; do [[ ! -v $name ]] || declare -p "$name"; done)
set -a
# shellcheck source=/dev/null
source ./cluster.env.example
# shellcheck source=/dev/null
[[ ! -f cluster.env ]] || source ./cluster.env
eval "$given"
set +a

if [[ -z $HOSTS && -n $TPU_NAME ]]; then
  type gcloud >/dev/null 2>&1 || die "TPU_NAME=$TPU_NAME: its hosts are found by gcloud, which is not installed; name them in HOSTS."
  for address in accessConfig.externalIp ipAddress; do
    HOSTS=$(gcloud compute tpus tpu-vm describe "$TPU_NAME" ${ZONE:+--zone "$ZONE"} ${PROJECT:+--project "$PROJECT"} \
      --format="value(networkEndpoints[].$address)") ||
      die "TPU_NAME=$TPU_NAME: gcloud knows no such TPU in ZONE=$ZONE, PROJECT=$PROJECT."
    HOSTS=${HOSTS//[;,$'\n']/ }
    [[ -z ${HOSTS// /} ]] || break
  done
  COORDINATOR=${COORDINATOR:-none}
fi
read -ra hosts <<<"$HOSTS"
# a host may not be named twice, not even with two users: one process takes all its devices
twice=$(printf '%s\n' "${hosts[@]#*@}" | sort -f | uniq -di | head -n 1)
[[ -z $twice ]] || die "HOSTS: names $twice twice; each host is one process, so name it once."
if [[ -z $COORDINATOR && ${#hosts[@]} -gt 1 ]]; then
  COORDINATOR=${hosts[0]#*@}:8476
fi
export HOSTS COORDINATOR # the scripts started from here need not ask again

key=${SSH_KEY/#\~\//$HOME/}
if [[ -n $key && $key != *[%$]* && $key != \~* ]]; then # ssh itself replaces %, $ and ~
  [[ -e $key ]] || die "SSH_KEY=$SSH_KEY: there is no such file; name the private key that the hosts know."
  [[ -f $key && -r $key ]] || die "SSH_KEY=$SSH_KEY: cannot be read; name a private key file of your own."
fi

# Host keys are written down at first contact and compared ever after.
ssh=(ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=10 -o ServerAliveInterval=15
  -o LogLevel=ERROR ${SSH_CONFIG:+-F "$SSH_CONFIG"} ${SSH_USER:+-l "$SSH_USER"} ${SSH_PORT:+-p "$SSH_PORT"}
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

# read_program: set the array `program` to what `flags` of tools/cluster/on_host.sh needs of COMMIT: the number of
# files, then the name and the text of each. Of files that may hold a tokenizer the name is enough.
read_program() {
  local name text
  program=()
  while read -r name; do
    case $name in
      tests/* | tools/* | docs/*) continue ;; # main.py's flags are parsed without them
      *.py) text=$(git show "$COMMIT:$name") ;;
      *.json | *.tiktoken) text= ;;
      *) continue ;;
    esac
    program+=("$name" "$text")
  done < <(git ls-tree -r --full-tree --name-only "$COMMIT" 2>/dev/null)
  program=("$((${#program[@]} / 2))" "${program[@]}")
}
