"""Quantisation with ranks.

Rank 0 sends each step. The first rank of a part's stage chooses the part's codes, and all ranks of the stage apply
them.
"""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from torch import Tensor

from conf.compose import from_json
from conf.quantization import QuantConfig
from conf.schema import RunConfig
from models.batch import Batch, KVCache
from models.parallel import stage_layers
from pipelines.loading.fingerprint import plain
from pipelines.loading.planning import ModelPlan, plan_model
from pipelines.loading.quantize.share import Share
from pipelines.ranks.control import Workers
from pipelines.ranks.messages import Channel, Header
from pipelines.ranks.rank_context import RankContext
from pipelines.ranks.tensors import described, numbers_of, read
from quantization.file_layout import FileLayout, file_layout
from quantization.kept_parts import KeptPart
from quantization.quantizer import LinearReport, QuantizedLayer


class DriverShare(Share):
    """Rank 0's share of a quantisation.

    It runs each step together with the workers and returns the results of the part's stage.
    """

    def __init__(
        self,
        run: RunConfig,
        layout: FileLayout,
        plan: ModelPlan,
        whole: ModelPlan,
        batches: list[Batch],
        cache: KVCache,
        workers: Workers,
    ) -> None:
        """`plan`: rank 0's shard.

        `whole`: the whole model, on the meta device. All methods raise RankLost if a rank fails.
        """
        header = {"op": "quantize", "step": "begin", "run": plain(asdict(run)), "shapes": [b.shape for b in batches]}
        workers.tell(header, numbers_of(batch.numbers for batch in batches))
        group, parallel_layout = workers.context.group, workers.context.parallel_layout
        self._workers, self._tp = workers, parallel_layout.tp
        self._stages = stage_layers(whole.model, parallel_layout.pp, whole.dtype)
        self._reached = 0  # the stage that holds the streams
        super().__init__(run.quant, layout, plan.model, batches, cache, whole.model, plan.shards, group)

    def rest(self) -> dict[str, Tensor]:
        last = len(self._stages) - 1
        for stage in {0, last}:
            self._tell(stage, {"step": "rest"})
        found = self._workers.meanwhile(super().rest)
        if last:
            found |= self._answer(last).tensors
        return {name: found[name] for name, _ in self._whole.named_parameters() if name in found}

    def choose(self, part: QuantizedLayer) -> KeptPart | None:
        stage = self._begin("choose", part)
        return self._answer(stage) if stage else self._workers.meanwhile(lambda: super(DriverShare, self).choose(part))

    def pass_over(self, part: QuantizedLayer) -> None:
        if not self._begin("pass_over", part):
            self._workers.meanwhile(lambda: super(DriverShare, self).pass_over(part))

    def place(self, part: QuantizedLayer, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        stage = self._begin("place", part, KeptPart(dict(tensors), []))
        if stage:
            return self._answer(stage).tensors
        return self._workers.meanwhile(lambda: super(DriverShare, self).place(part, tensors))

    def static_cache(self, cache: KVCache) -> KVCache:
        self._workers.tell({"op": "quantize", "step": "static_cache"})
        return super().static_cache(cache)

    def _begin(self, step: str, part: QuantizedLayer, given: KeptPart | None = None) -> int:
        """Start a step on the part's stage, and return the stage's index.

        Its first step receives the previous stage's streams.
        """
        last = self._stages[-1].stop - 1
        stage = next(i for i, layers in enumerate(self._stages) if min(part.index, last) in layers)
        self._tell(stage, {"step": step, "part": part.index}, given)
        if stage > self._reached:
            self._tell(self._reached, {"step": "leave"})
            if self._reached == 0:
                self._workers.meanwhile(super().leave)
            self._reached = stage
        return stage

    def _tell(self, stage: int, header: Header, given: KeptPart | None = None) -> None:
        more, content = ({}, b"") if given is None else message_of(given)
        ranks = range(stage * self._tp, (stage + 1) * self._tp)
        self._workers.tell({"op": "quantize", **header, **more}, content, ranks)

    def _answer(self, stage: int) -> KeptPart:
        return kept_of(*self._workers.answer_of(stage * self._tp))


class WorkerShare:
    """A worker's share. It runs the steps that rank 0 sends."""

    def __init__(
        self,
        channel: Channel,
        context: RankContext,
        plan: ModelPlan,
        batches: list[Batch],
        cache: KVCache,
        header: Header,
    ) -> None:
        """`plan`: the rank's shard. `header`: rank 0's first message. Raises UserError as `plan_model` does."""
        self._channel, self._context = channel, context
        run = from_json(header["run"])
        whole = plan_model(run.model, QuantConfig(), plan.source, plan.device, packed=False).model
        layout = file_layout(whole, run.quant, run.quantize.format)
        self._share = Share(run.quant, layout, plan.model, batches, cache, whole, plan.shards, context.group)

    def follow(self, header: Header, content: bytearray) -> None:
        """Run a step. The first rank of a stage sends the result to rank 0."""
        result = self._step(header, content)
        self._context.check()
        if result is not None and self._context.parallel_layout.tp_rank == 0:
            self._channel.send(*message_of(result))

    def static_cache(self, cache: KVCache) -> KVCache:
        return self._share.static_cache(cache)

    def _step(self, header: Header, content: bytearray) -> KeptPart | None:
        share = self._share
        match header["step"]:
            case "rest":
                return KeptPart(share.rest(), [])
            case "choose":
                return share.choose(share.parts[header["part"]])
            case "pass_over":
                share.pass_over(share.parts[header["part"]])
            case "place":
                return KeptPart(share.place(share.parts[header["part"]], kept_of(header, content).tensors), [])
            case "leave":
                share.leave()
        return None


def message_of(kept: KeptPart) -> tuple[Header, bytes]:
    """Return a message that holds a part, or some tensors of a part."""
    folds = kept.folds or {}
    tensors = [*kept.tensors.values(), *folds.values()]
    header: dict[str, Any] = {
        "names": [*kept.tensors],
        "folds": None if kept.folds is None else [*folds],
        "reports": [asdict(report) for report in kept.reports],
        "tensors": described(tensors),
    }
    return header, numbers_of(tensors)


def kept_of(header: Header, content: bytearray) -> KeptPart:
    """Return the part of a message from `message_of`."""
    tensors = iter(read(header["tensors"], content))
    own = {name: next(tensors).clone() for name in header["names"]}  # clone: aligned memory
    folds = None if header["folds"] is None else {name: next(tensors).clone() for name in header["folds"]}
    return KeptPart(own, [LinearReport(**report) for report in header["reports"]], folds)
