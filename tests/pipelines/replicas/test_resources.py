"""The resources of replicas on machines, and errors if there are too few."""

from typing import Any

import pytest

from conf.errors import UserError
from conf.schema import DeviceConfig, DeviceType
from pipelines.replicas.resources import resources_of


def place(number: int, cpus: list[int], gpus: list[int], **device: Any) -> tuple[int, int]:
    resources = resources_of("serve.replicas", number, DeviceConfig(**device), cpus, gpus)
    return resources.num_cpus, resources.num_gpus


def test_each_replica_has_its_share_of_the_machines() -> None:
    cpu = DeviceType.cpu
    assert place(2, [8], [0]) == (4, 0)
    assert place(3, [8], [0]) == (2, 0)
    assert place(2, [8, 8, 2], [0, 0, 0]) == (8, 0)
    assert place(4, [8, 8, 2], [0, 0, 0]) == (4, 0)
    assert place(5, [8, 8, 2], [0, 0, 0]) == (2, 0)
    assert place(2, [8], [0], threads=3) == (3, 0)
    assert place(4, [2, 2], [2, 2]) == (1, 1)
    assert place(2, [8], [2], type=cpu) == (4, 0)
    ranks = DeviceConfig()
    assert resources_of("parallel.replicas", 2, ranks, [8, 5], [0, 0], num_ranks=2).num_cpus == 4
    assert resources_of("parallel.replicas", 2, ranks, [8], [0], num_ranks=3).device(ranks, 3).threads == 1
    on_gpus = resources_of("parallel.replicas", 2, ranks, [8, 5], [4, 3], num_ranks=3)
    assert (on_gpus.num_cpus, on_gpus.num_gpus, str(on_gpus)) == (3, 3, "3 GPU")
    with pytest.raises(
        UserError, match="replicas=2 is more than the 4 GPUs that Ray has: give 3 for each replica, all on one machine"
    ):
        resources_of("parallel.replicas", 2, ranks, [8, 8], [2, 2], num_ranks=3)
    with pytest.raises(UserError, match="parallel.replicas=2 needs 2 CPUs for each replica, and Ray has 3"):
        resources_of("parallel.replicas", 2, ranks, [3], [0], num_ranks=2)
    refused = [
        ((3, [2], [0], {}), "serve.replicas=3 needs 1 CPUs for each replica, and Ray has 2: give fewer"),
        ((2, [4], [0], {"threads": 3}), "serve.replicas=2 needs 3 CPUs for each replica, and Ray has 4: give fewer"),
        ((1, [], [], {}), "serve.replicas=1 needs 1 CPUs for each replica, and Ray has 0"),
        ((3, [8], [2], {}), "serve.replicas=3 is more than the 2 GPUs that Ray has: give one for each replica"),
        ((3, [2, 4], [4, 0], {}), "serve.replicas=3 is more than the 2 GPUs"),  # a replica needs a processor, too
        ((1, [8], [0], {"type": DeviceType.cuda}), "serve.replicas=1 is more than the 0 GPUs"),
    ]
    for (number, cpus, gpus, device), message in refused:
        with pytest.raises(UserError, match=message):
            place(number, cpus, gpus, **device)
