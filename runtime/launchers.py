"""What the program that started this process says of the others: Slurm, and variables that jax reads."""

import os
import re

from runtime.messages import UserError

# By these variables jax knows that the process is a task of a step of Slurm's.
SLURM = "SLURM_JOB_ID SLURM_NTASKS SLURM_PROCID SLURM_LOCALID SLURM_STEP_NODELIST".split()
# Variables in which jax expects whole numbers where it finds the other processes by itself.
NUMBERS = [
    *SLURM[:4],
    *"OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_LOCAL_RANK".split(),
]
NUMBERS += "TPU_WORKER_ID MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID JOB_COMPLETION_INDEX".split()
NUMBERS += "JAX_COORDINATOR_PORT JAX_PARTITION_INDEX JAX_SLICE_INDEX".split()


def tasks_of_slurm():
    """The number of processes that Slurm started with this one; 1 where it is no task of a step of Slurm's. Raises
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
    return max(1, int(os.environ["SLURM_NTASKS"])) if in_step else 1  # jax refuses 0
