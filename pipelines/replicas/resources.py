"""What each of several engines needs of the machines."""

from dataclasses import dataclass, replace

from conf.errors import UserError
from conf.schema import DeviceConfig, DeviceType


@dataclass(frozen=True)
class ResourceSpec:
    """The processors and GPUs that a replica needs."""

    num_cpus: int
    num_gpus: int

    def __str__(self) -> str:
        return f"{self.num_gpus} GPU" if self.num_gpus else f"{self.num_cpus} CPU"

    @property
    def num_own_cpus(self) -> int:
        """The processors that nobody else should compute on; none where a GPU computes."""
        return 0 if self.num_gpus else self.num_cpus

    def device(self, device: DeviceConfig, num_ranks: int = 1) -> DeviceConfig:
        """Return the settings of a replica's device: on a CPU a thread for each of its processors, which its ranks share."""
        return device if self.num_gpus else replace(device, threads=self.num_cpus // num_ranks)


def resources_of(
    setting: str, number: int, device: DeviceConfig, cpus: list[int], gpus: list[int], num_ranks: int = 1
) -> ResourceSpec:
    """Return the place of each of `number` replicas, of so many ranks each, on machines with so many processors and GPUs.

    Each rank has a GPU where the run may use them and there are some, else `device.threads` processors, or an equal share of all.
    Raises UserError, which names the `setting`, where they are too few.
    """
    if device.type is DeviceType.cuda or (device.type is DeviceType.auto and any(gpus)):
        usable = [min(pair) for pair in zip(cpus, gpus, strict=True)]  # each with a processor
        if sum(each // num_ranks for each in usable) < number:
            each = "one for each" if num_ranks == 1 else f"{num_ranks} for each, all on one machine"
            raise UserError(f"{setting}={number} is more than the {sum(usable)} GPUs that Ray has: give {each}")
        return ResourceSpec(num_ranks, num_ranks)
    for threads in [device.threads] if device.threads else range(max(cpus, default=0), 0, -1):
        if sum(each // (threads * num_ranks) for each in cpus) >= number:
            return ResourceSpec(threads * num_ranks, 0)
    have = f"{(device.threads or 1) * num_ranks} of the {sum(cpus)} processors that Ray has each"
    raise UserError(f"{setting}={number} need {have}: give fewer replicas, or device.threads")
