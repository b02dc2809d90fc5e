#!/usr/bin/env bash
# Make the virtual environment with the jax that fits this machine. Running it again is cheap: once everything is
# installed it only checks a stamp.
set -euo pipefail

usage() {
  cat <<'HELP'
usage: bash setup_tpu.sh [extra ...]      make or complete the virtual environment
       bash setup_tpu.sh --accelerator    print what this machine computes on: tpu, gpu or cpu

Installs the dependencies in pyproject.toml, jax for the accelerator that it finds, and the extras named (test;
gs and s3 for storage).

  PYTHON=...           Python to build on; without it 3.13 or 3.12, which have the newest jax, else the first usable
                       one that is found, or one fetched by uv
  VENV=...             folder of the environment, relative to the repository (.venv)
  JAX_PLATFORMS=cpu    ignore an accelerator; tpu or cuda: assume that it is present
HELP
}
say() { echo "setup: $*"; }
die() {
  echo "error: $*" >&2
  exit 1
}

# What the machine computes on: runtime/platforms.py tells, in any Python; fails where there is none so far.
accelerator() {
  local asked
  for asked in "$python" ${PYTHON:+"$PYTHON"} python3 python; do
    "$asked" -I runtime/platforms.py 2>/dev/null && return
  done
  return 1
}

# version PYTHON MODULES: print 3.11, say; fail unless it runs, is 3.11 or newer and has the modules.
version() {
  "$1" -I -c "import sys, $2; sys.version_info < (3, 11) and sys.exit(1); print('%d.%d' % sys.version_info[:2])" \
    2>/dev/null
}
BUILDS="venv, ensurepip" # Debian's python3 has ensurepip only with the package python3-venv

clean_up() {
  [[ -z $progress ]] || kill "$progress" 2>/dev/null || true
  rm -rf "$tmp"
}

# quietly SENTENCE COMMAND...: run the command with its output in a file, and show every few seconds how far it is; if it
# fails show the end of that file and die.
quietly() {
  local sentence=$1 status=0
  shift
  # A process that is ended right after its fork would run the trap, since it has not yet forgotten it.
  trap - EXIT
  tell_progress & # in the background, so that Ctrl-C ends the command itself
  progress=$!
  trap clean_up EXIT
  "$@" >"$log" 2>&1 || status=$?
  kill "$progress" 2>/dev/null || true
  wait "$progress" 2>/dev/null || true
  ((status == 0)) || {
    tail -n 8 "$log" >&2
    die "$sentence"
  }
}

# What pip does: which package it looks at or fetches, then how many are installed.
tell_progress() {
  local before last packages
  before=$(n_installed)
  while sleep 5; do
    packages=$(sed -n 's/^Installing collected packages: //p' "$log" | wc -w)
    last="installed $(($(n_installed) - before)) of $packages packages"
    if ((packages == 0)); then
      last=$(grep -oE '^ *(Collecting|Downloading|Building) [[:alnum:]_.]+' "$log" | tail -n 1) || true
    fi
    say "$((SECONDS - started)) s: ${last:-at work}"
  done
}
n_installed() { find "$venv" -maxdepth 4 -name '*.dist-info' 2>/dev/null | wc -l; }

# The first Python that can build the environment: one that the newest jax supports, else the machine's own.
find_python() {
  local python pyenv=${PYENV_ROOT:-${HOME:-}/.pyenv}/versions
  for python in python3.13 "$pyenv"/3.13.*/bin/python python3.12 "$pyenv"/3.12.*/bin/python \
    python3 python python3.11 "$pyenv"/3.11.*/bin/python; do
    if version "$python" "$BUILDS" >/dev/null; then
      echo "$python"
      return
    fi
  done
  return 1
}

# Without such a Python: uv takes one that lacks only ensurepip, or downloads one.
make_with_uv() {
  local uv python advice="install Python 3.11 or newer with its venv module, or name one in PYTHON."
  if ! uv=$(command -v uv); then
    for python in python3 python ""; do
      [[ -n $python ]] || die "no Python 3.11 or newer was found, nor uv, nor a Python with pip to get uv with; $advice"
      "$python" -m pip --version >/dev/null 2>&1 && break
    done
    quietly "uv could not be installed with $python -m pip (see above); $advice" \
      "$python" -m pip install -qq --target "$tmp/uv" uv
    uv=$tmp/uv/bin/uv
  fi
  say "making $venv by uv, since no Python 3.11 or newer with venv and ensurepip was found"
  quietly "uv could not find or download a Python (see above); $advice" \
    "$uv" venv --quiet --seed --python ">=3.11,<3.14" "$venv"
}

# The requirements of pyproject.toml with the extras in its arguments, one a line. Not `pip install .`: that would
# fetch a build backend and leave build/ and *.egg-info in the tree for a package with nothing in it.
requirements() {
  "$python" -I - "$@" <<'PYTHON'
import sys, tomllib

with open("pyproject.toml", "rb") as f:
    project = tomllib.load(f)["project"]
extras = project["optional-dependencies"]
for name in sys.argv[1:]:
    if name not in extras:
        sys.exit(f"error: setup_tpu.sh {name}: no such extra; there are {', '.join(extras)}.")
print(*project["dependencies"], *(line for name in sys.argv[1:] for line in extras[name]), sep="\n")
PYTHON
}

CDPATH='' cd -- "$(dirname -- "$0")"
venv=${VENV:-.venv}
python=$venv/bin/python
case ${1:-} in
  -h | --help) usage && exit ;;
  --accelerator)
    accelerator || die "no Python was found that could look; name one in PYTHON."
    exit
    ;;
  -*) die "setup_tpu.sh $1: no such option; see --help." ;;
esac

extra_for() { # MACHINE: the extra that it needs
  case $1 in tpu) echo tpu ;; gpu) echo cuda ;; esac
}
machine=$(accelerator) || machine= # no Python yet: asked again once there is one
extra=$(extra_for "$machine")
set -- "$@" ${extra:+"$extra"}
stamp=$venv/.stamp # written last: line 1 what was installed, line 2 with which extras

# One setup of an environment at a time; one that waited finds it made. Where the lock cannot be written, there is none.
if type flock >/dev/null 2>&1 && { command exec 9>>"$venv.lock"; } 2>/dev/null; then
  flock -n 9 || { say "waiting for another setup of $venv" && flock 9; } || true
fi

wish=
if [[ -n ${PYTHON:-} ]]; then
  wish=$(version "$PYTHON" "$BUILDS") || die "PYTHON=$PYTHON: must be a Python 3.11 or newer with the modules" \
    "$BUILDS; this $("$PYTHON" -c 'import sys; print("is", sys.version.split()[0])' 2>/dev/null || echo cannot run)."
fi
has=$(version "$python" pip) || has=
sum=$(cksum <pyproject.toml)

had='' old=''
if [[ -f $stamp ]]; then
  { read -r old && read -r had; } <"$stamp" || true
fi
missing=
for extra; do
  [[ " $had " == *" $extra "* ]] || missing=$extra
done
if [[ -n $has && ${wish:-$has} == "$has" && $old == "python $has, pyproject.toml $sum" && -z $missing ]]; then
  exit 0
fi

tmp=$(mktemp -d)
progress=
trap clean_up EXIT
log=$tmp/log
started=$SECONDS

if [[ -e $venv && (-z $has || ${wish:-$has} != "$has") ]]; then
  [[ -f $venv/pyvenv.cfg || -z $(ls -A "$venv") ]] ||
    die "VENV=$venv: is there already and is no virtual environment; name another folder."
  if [[ -n $has ]]; then
    say "rebuilding $venv: it has Python $has, PYTHON is $wish"
  elif [[ -f $venv/pyvenv.cfg ]]; then
    say "rebuilding $venv: its Python does not run, is older than 3.11 or lacks pip"
  fi
  rm -rf "$venv"
  has=
fi
if [[ -z $has ]]; then
  if base=${PYTHON:-$(find_python)}; then
    say "making $venv with Python $(version "$base" "$BUILDS") ($base)"
    quietly "$base could not make $venv (see above); name another Python in PYTHON." "$base" -m venv "$venv"
  else
    make_with_uv
  fi
  has=$(version "$python" pip) || die "$venv: its Python was made but does not run or lacks pip."
fi

if [[ -z $machine ]]; then
  machine=$(accelerator) || die "$python does not run runtime/platforms.py."
  extra=$(extra_for "$machine")
  set -- "$@" ${extra:+"$extra"}
fi
# Extras that were there stay, so that asking for fewer later is no change
for extra in $had; do
  [[ " $* " == *" $extra "* ]] || set -- "$@" "$extra"
done
requirements "$@" >"$tmp/requirements.txt"
say "installing for $machine${*:+, extras $*}; a minute or two"
rm -f "$stamp" # from here until the end an interruption leaves no stamp
# -I: what PYTHONPATH or the user's own site-packages hold does not count as installed
quietly "pip could not install the requirements (see above); run this again once that is fixed." \
  "$python" -I -m pip install --progress-bar off --disable-pip-version-check -r "$tmp/requirements.txt"
printf '%s\n' "python $has, pyproject.toml $sum" "$*" >"$stamp.part"
mv "$stamp.part" "$stamp"
say "done in $((SECONDS - started)) s"
