"""What the launcher of this process, such as Slurm, says about the other processes, in variables that jax reads."""

import os
import re

from runtime.messages import UserError

# If all of these variables are set, jax takes the process for a task of a Slurm step.
SLURM = "SLURM_JOB_ID SLURM_NTASKS SLURM_PROCID SLURM_LOCALID SLURM_STEP_NODELIST".split()
# Variables in which jax expects whole numbers when it finds the other processes by itself.
NUMBERS = [
    *SLURM[:4],
    *"OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK".split(),
]
NUMBERS += "TPU_WORKER_ID MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID JOB_COMPLETION_INDEX".split()
NUMBERS += "JAX_COORDINATOR_PORT JAX_PARTITION_INDEX JAX_SLICE_INDEX".split()
# The port of process 0 on a TPU slice. Left alone, jax takes 8482 since version 0.8.1. The firewall rule that Google
# makes for a slice does not open that one, so all hosts would wait for process 0 in vain (jax issue 35905).
TPU_PORT = "8476"
# Variables that win over what the metadata of a TPU VM says of its slice. Kubernetes sets them for its pods. On a VM
# they may be left from an earlier slice, and then the hosts wait for others that are gone.
OVER_METADATA = (
    "TPU_PROCESS_ADDRESSES TPU_WORKER_HOSTNAMES TPU_WORKER_ID TPU_SKIP_MDS_QUERY".split()
)
OVER_METADATA += "MEGASCALE_COORDINATOR_ADDRESS MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID".split()


def tasks_of_slurm():
    """The number of processes that Slurm started, this one included; 1 if it is not a task of a Slurm step. Raises
    UserError for a variable that jax would need and cannot read."""
    in_step = all(name in os.environ for name in SLURM)
    for name in NUMBERS:
        value = os.environ.get(name, "")
        needed = value or (in_step and name in SLURM)
        if needed and not re.fullmatch("[0-9]{1,18}", value):
            raise UserError(
                f"{name}={value}: must be a whole number, as the program that starts the processes sets it; leave it "
                f"unset where none does."
            )
    # jax does not accept 0 processes.
    return max(1, int(os.environ["SLURM_NTASKS"])) if in_step else 1


def is_one_tpu_host():
    """Whether the environment names one host as the whole TPU, as Kaggle does with TPU_PROCESS_ADDRESSES=local. jax
    would search for a machine of that name."""
    hosts = os.environ.get("TPU_PROCESS_ADDRESSES", os.environ.get("TPU_WORKER_HOSTNAMES", ""))
    slices = os.environ.get("MEGASCALE_NUM_SLICES", "")
    return hosts != "" and "," not in hosts and slices in ("", "1")


def prepare_tpu_slice():
    """Set what jax needs before it asks a TPU VM for the other hosts of its slice. Returns a note for the user, or
    ""."""
    os.environ.setdefault("JAX_COORDINATOR_PORT", TPU_PORT)
    found = [f"{name}={os.environ[name]}" for name in OVER_METADATA if name in os.environ]
    if not found or "KUBERNETES_SERVICE_HOST" in os.environ:
        return ""
    return (
        f"{' '.join(found)} in the environment: taken instead of what the TPU itself says of its hosts; unset them if "
        f"they are left from an earlier slice"
    )
