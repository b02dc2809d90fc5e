"""Stand-ins for the programs that the shell scripts call, and what the scripts say."""

import os

# without what the scripts react to, which the shell that runs the tests may have set
REACTED = {"PYTHON", "VENV", "JAX_PLATFORMS", "XLA_FLAGS"}
CLEAN = {name: value for name, value in os.environ.items() if name not in REACTED}


def program(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


def assert_one_sentence(result, code, *words):
    """It failed with `code` and one line on stderr that holds the words."""
    assert result.returncode == code, result.stderr
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1, result.stderr
    assert all(word in result.stderr for word in words), result.stderr


# Knows one TPU, whose state and addresses are in variables
GCLOUD = r"""#!/bin/bash
echo "$*" >>"$0.calls"
[[ -z $COMPLAINT ]] || { echo "ERROR: (gcloud.compute.tpus.tpu-vm.describe) $COMPLAINT" >&2; exit 1; }
case $* in
  *"(state)") echo "$STATE" ;;
  *externalIp*) echo "$OUTSIDE" ;;
  *ipAddress*) echo "$INSIDE" ;;
esac
"""
TPU = {"HOSTS": "", "COORDINATOR": "", "TPU_NAME": "pod", "ZONE": "z", "PROJECT": "p"}
