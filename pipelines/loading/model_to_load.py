"""The model that rank 0 tells each worker to load, as a message, and the plan that a worker makes of it."""

from dataclasses import asdict, dataclass

import torch

from conf.compose import from_json
from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import DeviceConfig, ModelConfig, ParallelConfig
from models.heads import HeadKind
from pipelines.jobs.journal import Fingerprint
from pipelines.loading.fingerprint import common_fingerprint, plain
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from pipelines.ranks.messages import Header


@dataclass(frozen=True)
class ModelToLoad:
    """The options with which every rank plans the whole model."""

    model: ModelConfig
    quant: QuantConfig
    parallel: ParallelConfig
    device: DeviceConfig
    head: HeadKind
    predicts_ahead: bool
    """Whether the model includes its MTP layer."""
    packed: bool
    common: Fingerprint | None
    """Rank 0's `common_fingerprint`, which the worker's must equal; None if the ranks share a machine."""

    def message(self) -> Header:
        """Return the part of a worker's first message that `of_message` reads."""
        return plain(asdict(self))

    @classmethod
    def of_message(cls, message: Header) -> "ModelToLoad":
        return cls(
            model=from_json(ModelConfig, message["model"]),
            quant=from_json(QuantConfig, message["quant"]),
            parallel=from_json(ParallelConfig, message["parallel"]),
            device=from_json(DeviceConfig, message["device"]),
            head=HeadKind[message["head"]],
            predicts_ahead=message["predicts_ahead"],
            packed=message["packed"],
            common=message["common"],
        )

    def plan(self, device: torch.device, rank: str) -> ModelPlan:
        """Return the plan of the whole model on a worker, whose name is `rank`.

        Raises UserError as `resolve_model` and `plan_model` do, and if the worker's files or code differ from rank 0's.
        """
        source = resolve_model(self.model, self.head)
        if self.common is not None:
            _compare(rank, self.common, common_fingerprint(source.checkpoint.path))
        if self.predicts_ahead:
            source = source.with_mtp_layer()
        return plan_model(self.model, self.quant, source, device, packed=self.packed)


def _compare(rank: str, expected: Fingerprint, actual: Fingerprint) -> None:
    names = sorted(name for name in expected | actual if expected.get(name) != actual.get(name))
    if names:
        raise UserError(
            f"{rank} has not what rank 0 has, but another {', '.join(names[:3])}{' ...' if len(names) > 3 else ''}: "
            "give all machines the same files and versions"
        )
