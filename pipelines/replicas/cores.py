"""Which cores each of several replicas of a machine computes on. Ray counts processors, and gives none to anybody."""

import os
import socket

from pipelines.ranks.launch import cores_in_order

NAME = f"quintet-{os.getuid()}-processor"  # in no folder, and gone with the process however it ends


class Cores:
    """Processors that no other replica of this user has, while this object lives: a name of each is bound."""

    def __init__(self, number: int) -> None:
        """`number`: of processors, which are neighbours where they are free. Where too few are, or for none, all are shared."""
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
