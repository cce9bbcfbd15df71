"""The CPUs and GPUs that each replica needs from the machines."""

from dataclasses import dataclass, replace

from conf.errors import UserError
from conf.schema import DeviceConfig, DeviceType


@dataclass(frozen=True)
class ResourceSpec:
    """The CPUs and GPUs of a replica."""

    num_cpus: int
    num_gpus: int

    def __str__(self) -> str:
        return f"{self.num_gpus} GPU" if self.num_gpus else f"{self.num_cpus} CPU"

    @property
    def num_own_cpus(self) -> int:
        """Number of CPUs that only this replica should use; 0 if it computes on GPUs."""
        return 0 if self.num_gpus else self.num_cpus

    def device(self, device: DeviceConfig, num_ranks: int = 1) -> DeviceConfig:
        """Return a replica's device settings: on CPUs, one thread for each CPU, divided among its ranks."""
        return device if self.num_gpus else replace(device, threads=self.num_cpus // num_ranks)


def resources_of(
    setting: str, number: int, device: DeviceConfig, cpus: list[int], gpus: list[int], num_ranks: int = 1
) -> ResourceSpec:
    """Return the resources of each of `number` replicas of `num_ranks` ranks, on machines with these CPUs and GPUs.

    Each rank gets a GPU if the run may use GPUs and there are any, else `device.threads` CPUs, or an equal share of all
    CPUs. Raises UserError, which names the `setting`, if there are too few.
    """
    if device.type is DeviceType.cuda or (device.type is DeviceType.auto and any(gpus)):
        usable = [min(pair) for pair in zip(cpus, gpus, strict=True)]  # a GPU also needs a CPU
        if sum(num_gpus // num_ranks for num_gpus in usable) < number:
            remedy = "one for each replica" if num_ranks == 1 else f"{num_ranks} for each replica, all on one machine"
            raise UserError(f"{setting}={number} is more than the {sum(usable)} GPUs that Ray has: give {remedy}")
        return ResourceSpec(num_ranks, num_ranks)
    for threads in [device.threads] if device.threads else range(max(cpus, default=0), 0, -1):
        if sum(num_cpus // (threads * num_ranks) for num_cpus in cpus) >= number:
            return ResourceSpec(threads * num_ranks, 0)
    num_cpus = (device.threads or 1) * num_ranks
    message = f"{setting}={number} needs {num_cpus} CPUs for each replica, and Ray has {sum(cpus)}"
    raise UserError(f"{message}: give fewer replicas, or fewer device.threads")
