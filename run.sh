#!/usr/bin/env bash
# From nothing to a training run: the environment, a corpus that needs no download, the training itself.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash run.sh [--max_restarts N] local [any flag of main.py]
       bash run.sh [--max_restarts N] HOST [any flag of main.py]

HOST, one of HOSTS in cluster.env (see launcher.sh --help): checks the host, sends this repository's commit there, sets
it up and starts main.py with the flags, as one process of as many as there are HOSTS, in a tmux session that outlives
the connection. launcher.sh does this to all hosts at once, one of the steps --check, --flags, --code, --setup, --start
before HOST at a time; --state, --log and --stop before HOST say what runs there, show the end of its log, end it with
a checkpoint.

local: trains on this machine. Sets up .venv, makes the corpus if it is missing (Python's standard library, with a
tokenizer trained on it) and starts main.py with these flags where they are not given:

  --preset tiny
  --bucket_name data/shards/stdlib        or stdlib-X, tokenized with X, beside --tokenizer X; nothing is tokenized
                                          if --bucket_name is given
  --n_devices 8 --n_device_axis 2 2 2     without an accelerator: simulated devices; as many as a given
                                          --n_device_axis needs

--max_restarts: main.py is started again, up to N times, after a crash, a lost peer or a preemption, not after an error
in the flags.

Paths in flags are relative to the repository. PYTHON, VENV and JAX_PLATFORMS: see setup_tpu.sh --help.
bash run.sh local --help lists the flags of main.py.
HELP
}

# clock: pass lines on, but compare the line with the host's clock with this machine's in the moment that it arrives.
clock() {
  local line skew
  while read -r line; do
    if [[ $line == clock\ * ]]; then
      skew=$(awk -v there="${line#clock }" -v here="$EPOCHREALTIME" 'BEGIN { printf "%.1f", there - here }')
      awk -v skew="$skew" -v most="$MAX_CLOCK_SKEW" 'BEGIN { exit !(skew * skew > most * most) }' || continue
      die "$host: its clock is $skew s off this machine's and MAX_CLOCK_SKEW is $MAX_CLOCK_SKEW; set it by NTP."
    fi
    echo "$line"
  done
}

# objects COMMIT: a git pack of the commit and its files, without its history.
objects() { git rev-list --objects --no-walk "$1" | git pack-objects -q --stdout; }

# send: this repository at COMMIT; with --sync the launcher made that of the files as they stand here.
send() {
  local revision
  revision=$(git rev-parse --verify -q "$COMMIT^{commit}") ||
    die "COMMIT=$COMMIT: this repository has no such branch or commit."
  payload=(objects "$revision")
  on_host "$host" receive "$LAUNCH" "$revision" "$method"
  payload=()
}

# passed NAME...: assignments of those variables that are set.
passed() {
  local name
  for name; do
    [[ -z ${!name:-} ]] || printf '%s=%q\n' "$name" "${!name}"
  done
}

# find_others: the flags by which main.py on $host finds the other processes, into the array `others`.
find_others() {
  local i
  others=()
  [[ -n $COORDINATOR && $COORDINATOR != none ]] || return 0
  for i in "${!hosts[@]}"; do [[ ${hosts[i]} != "$host" ]] || break; done
  others=(--coordinator "$COORDINATOR" --num_processes "${#hosts[@]}" --process_id "$i")
}

# parse FLAG...: whether main.py, as it is to be sent, takes the flags on that host.
parse() {
  read_program
  find_others
  # shellcheck disable=SC2086  # a word for each name
  on_host "$host" flags here "$(passed $PASS_ENV)" "${program[@]}" "${others[@]}" "$@"
}

# begin FLAG...: main.py as one process of as many as there are hosts.
begin() {
  find_others
  # shellcheck disable=SC2086
  on_host "$host" start "$LAUNCH" "$(passed $PASS_ENV $SECRETS)" "${others[@]}" "$@"
}

on_a_host() {
  local method=commit
  [[ -z ${SYNC:-} ]] || method=files
  LAUNCH=${LAUNCH:-$$-$EPOCHSECONDS}
  if [[ $step == @(all|--check) ]]; then on_host "$host" preflight "$method" "${RESTART:-}" | clock; fi
  if [[ $step == @(all|--flags) ]]; then parse "$@"; fi
  if [[ $step == @(all|--code) ]]; then send; fi
  if [[ $step == @(all|--setup) ]]; then on_host "$host" setup "$LAUNCH"; fi
  if [[ $step == @(all|--start) ]]; then begin "$@"; fi
  case $step in
    --state) on_host "$host" state ;;
    --log) on_host "$host" log "${1:-20}" ;;
    --stop) on_host "$host" stop "${@:-$STOP_TIMEOUT}" ;;
  esac
}

CDPATH='' cd -- "$(dirname -- "$0")"
if [[ ${1:-} == --max_restarts ]]; then
  export MAX_RESTARTS=${2:-nothing}
  shift $(($# > 1 ? 2 : 1))
fi
if [[ ! ${MAX_RESTARTS:-0} =~ ^[0-9]+$ ]]; then
  echo "error: --max_restarts $MAX_RESTARTS: must be a whole number." >&2
  exit 1
fi
case ${1:-} in
  local) shift ;;
  -h | --help) usage && exit ;;
  *)
    source tools/cluster/cluster.sh
    [[ $MAX_RESTARTS =~ ^[0-9]+$ ]] || die "MAX_RESTARTS=$MAX_RESTARTS: must be a whole number."
    step=${1:-}
    case $step in
      --check | --flags | --code | --setup | --start | --state | --log | --stop) shift ;;
      *) step=all ;;
    esac
    host=${1:-}
    if [[ -z $host || " ${hosts[*]} " != *" $host "* ]]; then
      echo "error: run.sh ${host:-without a word}: the first word must be local, as in: bash run.sh local," \
        "or one of HOSTS in cluster.env (now ${HOSTS:-none})" >&2
      exit 2
    fi
    shift
    on_a_host "$@"
    exit
    ;;
esac

# Which flags were given, as main.py reads them: --flag value or --flag=value, hyphens for underscores.
given=' ' tokenizer='' n_devices=''
for ((i = 1; i <= $#; i++)); do
  [[ ${!i} =~ ^(--?[A-Za-z][A-Za-z0-9_-]*)(=(.*))?$ ]] || continue
  flag=${BASH_REMATCH[1]//-/_}
  given+="$flag "
  case $flag in
    __tokenizer) if [[ ${!i} == *=* ]]; then tokenizer=${BASH_REMATCH[3]}; else tokenizer=${*:i+1:1}; fi ;;
    __n_device_axis)
      if [[ ${*:i+1:3} =~ ^([1-9][0-9]*)\ ([1-9][0-9]*)\ ([1-9][0-9]*)$ ]]; then
        n_devices=$((BASH_REMATCH[1] * BASH_REMATCH[2] * BASH_REMATCH[3]))
      fi
      ;;
  esac
done
gave() { [[ $given == *" $1 "* ]]; }

export VENV=${VENV:-.venv}
bash setup_tpu.sh
python=$VENV/bin/python

train=(main.py)
gave __preset || train+=(--preset tiny)

if ! gave __bucket_name; then
  bucket=data/shards/stdlib
  if [[ -n $tokenizer ]]; then
    name=${tokenizer##*/}
    bucket+=-${name%.tiktoken}
  fi
  train+=(--bucket_name "$bucket")
  if ! gave __help && ! gave _h; then
    if [[ -z $tokenizer ]]; then
      tokenizer=data/shards/bpe8192.tiktoken
      [[ -f $tokenizer ]] ||
        "$python" data/train_tokenizer.py --source stdlib --vocab_size 8192 --output "$tokenizer"
    fi
    # a manifest is written last, so one that stands there means whole shards
    [[ -f $bucket/train/manifest.json && -f $bucket/val/manifest.json ]] ||
      "$python" data/tokenize_shards.py --source stdlib --output "$bucket" --tokenizer "$tokenizer"
  fi
fi

if [[ $(bash setup_tpu.sh --accelerator) == cpu ]] && ! gave __n_devices; then
  if gave __n_device_axis; then
    [[ -z $n_devices ]] || train+=(--n_devices "$n_devices")
  elif [[ ${XLA_FLAGS:-} != *xla_force_host_platform_device_count* ]]; then
    train+=(--n_devices 8 --n_device_axis 2 2 2) # a part of every axis, so that a laptop runs what a pod runs
  fi
fi

# exec: Ctrl-C and SIGTERM reach main.py itself, which then writes a checkpoint
((${MAX_RESTARTS:-0} == 0)) || exec bash tools/cluster/supervise.sh "$MAX_RESTARTS" "" "$python" "${train[@]}" "$@"
exec "$python" "${train[@]}" "$@"
