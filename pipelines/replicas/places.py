"""What each of several engines needs of the machines."""

from dataclasses import dataclass

from conf.errors import UserError
from conf.schema import DeviceType, RunConfig


@dataclass(frozen=True)
class Place:
    """The processors and GPUs that a replica needs."""

    num_cpus: int
    num_gpus: int


def place_of(run: RunConfig, cpus: list[int], gpus: list[int]) -> Place:
    """Return the place of each replica on machines with so many processors and GPUs. Raises UserError where they are too few.

    A replica has a GPU where the run may use them and there are some, else `device.threads` processors, or an equal share of all.
    """
    number, device = run.serve.replicas, run.device
    if device.type is DeviceType.cuda or (device.type is DeviceType.auto and any(gpus)):
        if sum(gpus) < number:
            raise UserError(
                f"serve.replicas={number} is more than the {sum(gpus)} GPUs that Ray has: give one for each"
            )
        return Place(1, 1)
    for threads in [device.threads] if device.threads else range(max(cpus, default=0), 0, -1):
        if sum(each // threads for each in cpus) >= number:
            return Place(threads, 0)
    have = f"{device.threads or 1} of the {sum(cpus)} processors that Ray has each"
    raise UserError(f"serve.replicas={number} need {have}: give fewer replicas, or device.threads")
