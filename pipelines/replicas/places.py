"""What each of several engines needs of the machines."""

from dataclasses import dataclass, replace

from conf.errors import UserError
from conf.schema import DeviceConfig, DeviceType


@dataclass(frozen=True)
class Place:
    """The processors and GPUs that a replica needs."""

    num_cpus: int
    num_gpus: int

    def device(self, device: DeviceConfig) -> DeviceConfig:
        """Return the settings of a replica's device: on a CPU a thread for each of its processors."""
        return device if self.num_gpus else replace(device, threads=self.num_cpus)


def place_of(setting: str, number: int, device: DeviceConfig, cpus: list[int], gpus: list[int]) -> Place:
    """Return the place of each of `number` replicas on machines with so many processors and GPUs.

    A replica has a GPU where the run may use them and there are some, else `device.threads` processors, or an equal share of all.
    Raises UserError, which names the `setting`, where they are too few.
    """
    if device.type is DeviceType.cuda or (device.type is DeviceType.auto and any(gpus)):
        if sum(gpus) < number:
            raise UserError(f"{setting}={number} is more than the {sum(gpus)} GPUs that Ray has: give one for each")
        return Place(1, 1)
    for threads in [device.threads] if device.threads else range(max(cpus, default=0), 0, -1):
        if sum(each // threads for each in cpus) >= number:
            return Place(threads, 0)
    have = f"{device.threads or 1} of the {sum(cpus)} processors that Ray has each"
    raise UserError(f"{setting}={number} need {have}: give fewer replicas, or device.threads")
