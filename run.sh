#!/usr/bin/env bash
# From nothing to a training run: the environment, a corpus that needs no download, the training itself.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash run.sh local [any flag of main.py]

Trains on this machine. Sets up .venv, makes the corpus if it is missing (Python's standard library, with a tokeniser
trained on it) and starts main.py with these flags where they are not given:

  --preset tiny
  --bucket_name data/shards/stdlib        or stdlib-X, tokenised with X, beside --tokenizer X; nothing is tokenised
                                          if --bucket_name is given
  --n_devices 8 --n_device_axis 2 2 2     without an accelerator: simulated devices; as many as a given
                                          --n_device_axis needs

Paths in flags are relative to the repository. PYTHON, VENV and JAX_PLATFORMS: see setup_tpu.sh --help.
bash run.sh local --help lists the flags of main.py.
HELP
}

CDPATH='' cd -- "$(dirname -- "$0")"
case ${1:-} in
  local) shift ;;
  -h | --help) usage && exit ;;
  *)
    echo "error: run.sh ${1:-without a word}: the first word must be local, as in: bash run.sh local" >&2
    exit 2
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
exec "$python" "${train[@]}" "$@"
