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
# And those that are only read here.
NUMBERS += "SLURM_STEP_NUM_TASKS SLURM_NODEID SLURM_GPUS_ON_NODE".split()
# The port of process 0 on a TPU slice. Left alone, jax takes 8482 since version 0.8.1. The firewall rule that Google
# makes for a slice does not open that one, so all hosts would wait for process 0 in vain (jax issue 35905).
TPU_PORT = "8476"
# Variables that win over what the metadata of a TPU VM says of its slice. Kubernetes sets them for its pods. On a VM
# they may be left from an earlier slice, and then the hosts wait for others that are gone.
OVER_METADATA = (
    "TPU_PROCESS_ADDRESSES TPU_WORKER_HOSTNAMES TPU_WORKER_ID TPU_SKIP_MDS_QUERY".split()
)
OVER_METADATA += "MEGASCALE_COORDINATOR_ADDRESS MEGASCALE_NUM_SLICES MEGASCALE_SLICE_ID".split()


def in_slurm_step():
    """Whether jax takes this process for a task of a Slurm step."""
    return all(name in os.environ for name in SLURM)


def tasks_of_slurm():
    """The number of processes that `srun` started, this one included; 1 if it started none. Raises UserError for a
    variable that jax would need and cannot read."""
    in_step = in_slurm_step()
    for name in NUMBERS:
        value = os.environ.get(name, "")
        needed = value or (in_step and name in SLURM)
        if needed and not re.fullmatch("[0-9]{1,18}", value):
            raise UserError(
                f"{name}={value}: must be a whole number, as the program that starts the processes sets it; leave it "
                f"unset where none does."
            )
    if not in_step:
        return 1
    # The shell of `salloc` may be a step too, of one task (use_interactive_step in slurm.conf). There SLURM_NTASKS is
    # the number of tasks that the job asked for. Where `srun` starts the processes, both numbers are the same.
    tasks = os.environ.get("SLURM_STEP_NUM_TASKS") or os.environ["SLURM_NTASKS"]
    return max(1, int(tasks))  # jax does not accept 0 processes


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


def number_of(run):
    """The number of this process among those that print into one log, as far as it is known before they meet. run: the
    `Run` flags, or None where they are not read yet."""
    if run and run.num_processes:
        return run.process_id
    variable = "OMPI_COMM_WORLD_RANK"
    if in_slurm_step() and os.environ.get("SLURM_STEP_NUM_TASKS") != "1":
        variable = "SLURM_PROCID"
    value = os.environ.get(variable, "")
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else 0


def tasks_without_srun():
    """The number of tasks of the Slurm job around this process, where `srun` did not start it as one of several; 0
    where there is no such job, or it has one task."""
    tasks = os.environ.get("SLURM_NTASKS", "")
    if "SLURM_JOB_ID" in os.environ and tasks_of_slurm() == 1 and tasks.isdecimal():
        return int(tasks) if int(tasks) > 1 else 0
    return 0


def gpus_of_task():
    """The GPUs, of those that it sees, on which this task of a Slurm step trains: "all", or their numbers as in "0,1";
    "" where Slurm says nothing of GPUs. By itself jax gives task n of a node GPU n, and leaves the others idle.

    - One task on a node, as in `--ntasks-per-node=1 --gpus-per-node=8`, takes all.
    - Where Slurm shows each task only its own, as with `--gpus-per-task=2`, the task takes all that it sees.
    - Where each task sees all GPUs of the node, they are divided: with 8 GPUs and 2 tasks, task 1 takes 4,5,6,7.
    """
    tasks = tasks_on_this_node()
    if tasks == 1:
        return "all"
    on_node = int(os.environ.get("SLURM_GPUS_ON_NODE") or 0)
    seen = len([name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name])
    if not (tasks and on_node and seen):
        return ""
    if seen < on_node:
        return "all"
    if on_node % tasks:
        raise UserError(
            f"SLURM_GPUS_ON_NODE={on_node}: must be a multiple of the {tasks} tasks that Slurm started on this node; "
            f"give --ntasks-per-node 1, or a number that divides it."
        )
    each = on_node // tasks
    first = each * int(os.environ["SLURM_LOCALID"])
    return ",".join(map(str, range(first, first + each)))


def tasks_on_this_node():
    """The number of tasks of this Slurm step on this node; 0 if it is not known."""
    counts = []
    for part in os.environ.get("SLURM_STEP_TASKS_PER_NODE", "").split(","):
        # 8(x2),4 means 8 on each of two nodes, and 4 on the third.
        described = re.fullmatch(r"(\d+)(?:\(x(\d+)\))?", part)
        if not described:
            return 0
        n, nodes = described.groups()
        counts += [int(n)] * int(nodes or 1)
    node = int(os.environ.get("SLURM_NODEID") or 0)
    return counts[node] if node < len(counts) else 0
