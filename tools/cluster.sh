# shellcheck shell=bash
# Sourced by launcher.sh, run.sh and debug_tpu.sh in the repository's root: what cluster.env says, and how to reach a
# host. tools/on_host.sh is what then runs there.

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
if [[ -z $COORDINATOR && ${#hosts[@]} -gt 1 ]]; then
  COORDINATOR=${hosts[0]#*@}:8476
fi
export HOSTS COORDINATOR # the scripts started from here need not ask again

# Host keys are written down at first contact and compared ever after.
ssh=(ssh -o BatchMode=yes -o StrictHostKeyChecking=accept-new -o ConnectTimeout=10 -o ServerAliveInterval=15
  -o LogLevel=ERROR ${SSH_CONFIG:+-F "$SSH_CONFIG"} ${SSH_USER:+-l "$SSH_USER"} ${SSH_PORT:+-p "$SSH_PORT"}
  ${SSH_KEY:+-i "$SSH_KEY" -o IdentitiesOnly=yes})

# quoted WORD...: the words for any POSIX shell; printf %q would write $'...', which only some know.
quoted() {
  local word
  for word; do printf "'%s' " "${word//\'/\'\\\'\'}"; done
}

# ssh_complaint HOST STDERR: why ssh itself failed, as a sentence.
ssh_complaint() {
  case $2 in
    *"IDENTIFICATION HAS CHANGED"* | *"Host key verification failed"*)
      echo "$1: its host key is not the one of the first contact; if that is as it should be, run ssh-keygen -R $1." ;;
    *"Permission denied"* | *"Too many authentication failures"*)
      echo "$1: refuses the key${SSH_KEY:+ SSH_KEY=$SSH_KEY}; add its public half to authorized_keys there, or name another in SSH_KEY." ;;
    *) echo "$1: cannot be reached by ssh ($(tail -n 1 <<<"$2" | tr -d '\r'))." ;;
  esac
}

began="--- moe-launcher begins ---"
# past_noise: pass on what follows that line; the startup files of the shell there may print something before.
past_noise() {
  local line
  while IFS= read -r line; do
    [[ $line != *"$began" ]] || exec cat
  done
}

# on_host HOST FUNCTION ARGUMENT...: run a function of tools/on_host.sh there. Everything travels on stdin: arguments of
# ssh stand in the process lists of two machines and pass through whatever shell the user has there. What the command in
# `payload`, if there is one, prints is the function's stdin.
payload=()
on_host() {
  local host=$1 status=0 name complaint
  shift
  complaint=$(mktemp)
  {
    printf 'echo %q\n' "$began"
    for name in "${settings[@]}" host; do printf '%s=%q\n' "$name" "${!name}"; done
    cat tools/on_host.sh
    printf '{ ' # so that a call that is cut off on its way does not run
    printf '%q ' "$@"
    ((${#payload[@]})) || printf '</dev/null'
    printf '; exit; }\n'
    "${payload[@]}"
  } | "${ssh[@]}" -- "$host" exec bash 2>"$complaint" | past_noise || status=${PIPESTATUS[1]}
  if ((status == 255)); then
    echo "error: $(ssh_complaint "$host" "$(<"$complaint")")" >&2
  else
    cat "$complaint" >&2
  fi
  rm -f "$complaint"
  return "$status"
}
