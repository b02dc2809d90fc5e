#!/usr/bin/env bash
# From nothing to a training run: the environment, a corpus that needs no download, the training itself.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash run.sh [--max_restarts N] local [any flag of main.py]
       bash run.sh [--max_restarts N] track [--hours 1] [--target_loss 3.28] [any flag of main.py]
       bash run.sh [--max_restarts N] HOST [any flag of main.py]

HOST, one of HOSTS in cluster.env (see launcher.sh --help): checks the host, sends this repository's commit there, sets
it up and starts main.py with the flags in a tmux session, which continues when the connection ends. Each of the HOSTS
runs one process. A word before HOST does one step alone: --check, --flags, --code, --setup or --start. launcher.sh
takes these steps one after another, each on all hosts at once. Three more words look after a run: --state says what
runs on the host, --log shows the end of its log, and --stop ends it with a checkpoint.

local: trains on this machine. Sets up .venv, makes the corpus if it is missing (Python's standard library, with a
tokenizer trained on it) and starts main.py with these flags where they are not given:

  --preset tiny
  --data data/shards/stdlib      or stdlib-X, tokenized with X, beside --tokenizer X or --vocab_size X

--data may also name text, a file or a folder of it (.txt, .md, .jsonl, .parquet and others), as in: bash run.sh
local --data input.txt. It is tokenized into data/shards/NAME, here data/shards/input, with a tokenizer that is trained
on it where --tokenizer is not given, and the run has that NAME. Without an accelerator, --n_device_axis 2 2 2 simulates
that many devices.

track: a number to compare with others'. Sets up .venv, fetches modded-nanogpt's shards of fineweb10B if they are
missing, or takes those that --data names, designs a run of 15 minutes, or --hours, for this machine, trains it, and
writes a page: tokens and seconds to a validation loss of 3.28. bash run.sh track --help says more.

--max_restarts: main.py is started again, up to N times, after a crash, a lost peer or a preemption, not after an error
in the flags.

Paths in flags are relative to the repository. PYTHON, VENV and JAX_PLATFORMS: see setup_tpu.sh --help.
bash run.sh local --help lists the flags of main.py.
HELP
}

# clock: print the lines of stdin. A line "clock SECONDS", the time on the host, is compared with this machine's clock
# when it arrives, and not printed.
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

# send: send this repository at COMMIT to the host. With --sync the launcher made COMMIT of the files as they are here.
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

# parse FLAG...: check on the host that main.py, as it will be sent, takes the flags.
parse() {
  read_program
  find_others
  # shellcheck disable=SC2086  # a word for each name
  on_host "$host" flags here "$(passed $PASS_ENV)" "${program[@]}" "${others[@]}" "$@"
}

# begin FLAG...: start main.py on the host, as one process of as many as there are hosts.
begin() {
  find_others
  # shellcheck disable=SC2086
  on_host "$host" start "$LAUNCH" "$(passed $PASS_ENV $SECRETS)" "${others[@]}" "$@"
}

on_a_host() {
  local method=commit device=''
  [[ -z $TPU_NAME ]] || device=${JAX_PLATFORMS:-tpu}
  [[ -z ${SYNC:-} ]] || method=files
  LAUNCH=${LAUNCH:-$EPOCHSECONDS-$SRANDOM}
  if [[ $step == @(all|--check) ]]; then on_host "$host" preflight "$method" "${RESTART:-}" "$device" | clock; fi
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

# on_this_machine PROGRAM FLAG...: set up, then make the corpus and train, as tools/local.py and tools/track.py do.
on_this_machine() {
  export VENV=${VENV:-.venv}
  bash setup_tpu.sh
  set -- "$VENV/bin/python" "$@"
  # exec: signals reach Python itself
  ((${MAX_RESTARTS:-0} == 0)) || exec bash tools/cluster/supervise.sh "$MAX_RESTARTS" "" "$@"
  exec "$@"
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
  -h | --help) usage && exit ;;
  local | track) on_this_machine "tools/$1.py" "${@:2}" ;;
esac

source tools/cluster/cluster.sh
step=all
case ${1:-} in
  --check | --flags | --code | --setup | --start | --state | --log | --stop)
    step=$1
    shift
    ;;
esac
host=${1:-}
if [[ -z $host || " ${hosts[*]} " != *" $host "* ]]; then
  echo "error: run.sh ${host:-without a word}: the first word must be local, as in: bash run.sh local, or track," \
    "or one of HOSTS in cluster.env (now ${HOSTS:-none})" >&2
  exit 2
fi
shift
with_config "$@"
on_a_host "${flags[@]}"
