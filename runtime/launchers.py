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
