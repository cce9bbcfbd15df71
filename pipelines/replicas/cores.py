"""Assigns cores to the replicas of a machine. Ray counts CPUs but does not bind processes to them."""

import os
import socket

from pipelines.ranks.launch import cores_in_order

NAME = f"quintet-{os.getuid()}-processor"  # abstract socket namespace: freed when the process ends for any reason


class Cores:
    """CPUs that no other replica of this user has while this object exists.

    Each CPU is claimed by binding a socket name.
    """

    def __init__(self, number: int) -> None:
        """`number`: number of CPUs, adjacent if possible.

        If too few are free, or if it is 0, all allowed CPUs are shared.
        """
        allowed = os.sched_getaffinity(0)
        self.cpus: set[int] = set()
        self._names: list[socket.socket] = []
        for cpu in (cpu for core in cores_in_order(allowed) for cpu in sorted(core)):
            if len(self.cpus) < number and self._bind(cpu):
                self.cpus.add(cpu)
        if not number or len(self.cpus) < number:
            self.cpus = allowed
            for name in self._names:
                name.close()

    def _bind(self, cpu: int) -> bool:
        name = socket.socket(socket.AF_UNIX)
        try:
            name.bind(f"\0{NAME}-{cpu}")
        except OSError:
            name.close()
            return False
        self._names.append(name)
        return True
