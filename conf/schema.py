"""Every option of a run, typed. `run.py` composes a `RunConfig` and passes it to the pipelines.

This module and its imports use only the standard library, so that every module can import it. A field's constraint is
its metadata (`constraints.py`); `__post_init__` checks it, and computes what metadata cannot express. Errors name the
dotted key. The classes are mutable because Hydra merges overrides into them. They must not change after composition.
"""

import math
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from conf.adapters import are_paths, check_adapters
from conf.cache_tiers import TIERS_FORM, are_tiers
from conf.constraints import Condition, check_fields, one_of, option, unused
from conf.decoding import DecodeConfig
from conf.errors import ErrorCode, UserError
from conf.pooling import EmbedConfig, ScoreConfig
from conf.quantization import CalibrateConfig, QuantConfig, QuantizeConfig, QuantizedFormat
from conf.serving import ChatConfig, ServeConfig
from conf.support.sizes import num_bytes
from conf.tasks import (
    BenchConfig,
    ConvertConfig,
    EvaluateConfig,
    ExportConfig,
    PredictConfig,
    PrefixConfig,
    SweepConfig,
    VerifyConfig,
)
from conf.tracker import TrackerConfig


class Task(Enum):
    predict = "predict"
    bench = "bench"
    evaluate = "evaluate"
    convert = "convert"
    quantize = "quantize"
    export = "export"
    prefix = "prefix"
    embed = "embed"
    score = "score"
    chat = "chat"
    serve = "serve"
    verify = "verify"

    @property
    def reads_rows(self) -> bool:
        """Whether the task reads the rows of `predict.data` with the settings of `predict`."""
        return self in READING_ROWS


class DType(Enum):
    auto = "auto"  # as in the checkpoint
    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


class Weights(Enum):
    checkpoint = "checkpoint"
    random = "random"  # initialised from config.json alone, for benchmarks


class Hub(Enum):
    huggingface = "huggingface"
    modelscope = "modelscope"


class ParallelMode(Enum):
    single = "single"
    tp = "tp"  # tensor parallel: every layer is sharded
    pp = "pp"  # pipeline parallel: each rank is a stage with some of the layers
    tp_pp = "tp_pp"  # pipeline parallel with tensor parallel stages
    ray = "ray"  # several engines on a Ray cluster, which share the rows of a job
    auto = "auto"  # the layout with the fastest estimate

    @property
    def divides(self) -> bool:
        """Whether several processes compute one model."""
        return self in (ParallelMode.tp, ParallelMode.pp, ParallelMode.tp_pp)


class Backend(Enum):
    auto = "auto"  # CPUs: shared memory on one machine, gloo for stages on several machines; GPUs: NCCL
    shared_memory = "shared_memory"  # ranks on CPUs of one machine
    gloo = "gloo"  # over TCP
    nccl = "nccl"  # between GPUs, one per rank


class Sum(Enum):
    gather = "gather"  # ranks gather the inputs of a layer, so that each sum has the same bits as in one process
    reduce = "reduce"  # ranks add partial sums: half as many exchanges, but bits depend on tp


class ExpertPlacement(Enum):
    split = "split"  # each rank has a shard of every expert
    whole = "whole"  # expert parallel: each expert is on one rank


class DeviceType(Enum):
    auto = "auto"  # cuda if available, else cpu
    cpu = "cpu"
    cuda = "cuda"


READING_ROWS = (Task.predict, Task.embed, Task.score)
PATHS = (are_paths, "paths by name: {NAME: PATH, ...}, or null")
_FILES = {"weights": one_of(Weights.checkpoint)}


@dataclass
class ModelConfig:
    """The checkpoint, and how to load it. Its config.json defines the architecture."""

    path: str = option("", form=(bool, "a folder or a hub id"))
    """Folder in any layout of models/README.md, GGUF file, or hub id such as `meta-llama/Llama-2-7b-hf`.

    A hub id may end in `@REVISION`, and before it in a tag of GGUF files: `org/name:Q4_K_M@v1`.
    """
    hub: Hub = Hub.huggingface
    """Hub for downloads.

    On the command line and in Python the default is modelscope if VLLM_USE_MODELSCOPE=True is set.
    """
    revision: str | None = option(None, form=(bool, "a branch, tag or commit, or null"))
    """Branch, tag or commit of the hub repository, for weights, tokenizer and config; null: the default branch.

    The run resolves it to a commit, which its config.yaml has as `org/name@COMMIT`.
    """
    dtype: DType = DType.auto
    weights: Weights = Weights.checkpoint
    tokenizer: str | None = ""
    """Folder of the tokenizer, GGUF file or hub id (`org/name@REVISION`); empty: the model's own; null: none, prompts are token ids."""
    max_length: int | None = option(None, minimum=1)
    """Most prompt + new tokens of a sequence; null: the checkpoint's context length."""
    allow_pickle: bool = False
    """Also read `.bin`, `.pt` and `.pth` files (with `weights_only=True`)."""
    verify: bool = option(False, only_with=_FILES)
    """Compare every file with the folder's manifest.json before loading."""
    prefixes: Any = option(  # untyped: Hydra cannot set a pair of a typed dict that may be null
        None, form=PATHS, only_with={"task": one_of(*READING_ROWS, Task.prefix, Task.serve)}, neutral={}
    )
    """Soft prefixes by the names that rows and requests use: {NAME: PATH, ...}.

    A path is a pre_caches.npy of PaddleNLP or a folder with one, or the folder of a PEFT adapter of prefix_tuning,
    prompt_tuning or p_tuning.
    """
    keep_packed: bool = option(False, only_with=_FILES)
    """Store the weights in outputs/packed as the CPU kernels read them, and map that file at the next start.

    The file is as large as the weights in memory.
    """
    adapters: Any = option(
        None,
        form=PATHS,
        only_with={
            "task": one_of(
                *READING_ROWS,
                Task.prefix,
                Task.serve,
                give="task=predict, or merge an adapter by task=convert convert.lora=FOLDER",
            )
        },
        neutral={},
    )
    """LoRA adapters in PEFT's layout that rows and requests may name: {NAME: FOLDER, ...}."""
    max_adapters: int = option(8, minimum=1, maximum=1024)
    """Most adapters in one step. The least recently used adapter is evicted."""

    def __post_init__(self) -> None:
        check_fields(self, "model")
        for name in sorted({*(self.prefixes or {})} & {*(self.adapters or {})}):
            key = f"model.prefixes.{name}"
            raise UserError(
                f"{key} is not allowed: an adapter has this name, give another one", ErrorCode.excludes, key
            )


_SHARED_LAYERS = {"mode": one_of(ParallelMode.tp, ParallelMode.tp_pp, ParallelMode.auto, ParallelMode.ray)}
_TO_THE_BIT = {"task": one_of(Task.quantize, reason="which chooses scales to the bits of one process")}


@dataclass
class ParallelConfig:
    mode: ParallelMode = option(ParallelMode.single, typed_as="parallel")
    replicas: int = option(1, minimum=1, maximum=4096, only_with={"mode": one_of(ParallelMode.ray)})
    """Engines that share the rows of a job, each with its own model, with mode=ray."""
    tp: int | None = option(
        None, minimum=2, maximum=512, only_with={"mode": one_of(ParallelMode.tp, ParallelMode.tp_pp, ParallelMode.ray)}
    )
    """Tensor parallel size, with mode=tp or tp_pp: ranks that compute each layer together, one process each.

    null: 2, or with tp the number of ranks that torchrun or srun started. With mode=ray it is per engine; null: one.
    """
    pp: int | None = option(
        None, minimum=2, maximum=512, only_with={"mode": one_of(ParallelMode.pp, ParallelMode.tp_pp, ParallelMode.ray)}
    )
    """Pipeline parallel size, with mode=pp or tp_pp: stages, each with some of the layers.

    null: 2, or with pp the number of ranks that torchrun or srun started. With mode=ray it is per engine; null: one.
    """
    backend: Backend = option(
        Backend.auto, only_with={"mode": one_of(ParallelMode.tp, ParallelMode.pp, ParallelMode.tp_pp)}
    )
    """How ranks communicate. Tensor parallel ranks on several machines need a named backend: gloo, or nccl on GPUs."""
    sum: Sum = option(Sum.gather, only_with=_SHARED_LAYERS, not_with=_TO_THE_BIT)
    """How tensor parallel ranks compute a layer's outputs.

    reduce applies to the output projections of attention and feed-forward whose inputs can be sharded. Other layers
    gather, and a warning counts them.
    """
    experts: ExpertPlacement = option(ExpertPlacement.split, only_with=_SHARED_LAYERS, not_with=_TO_THE_BIT)
    """How tensor parallel ranks share the experts of a mixture."""
    heartbeat_s: float = option(
        30.0,
        minimum=5,
        below=math.inf,
        only_with={"mode": one_of(ParallelMode.tp, ParallelMode.pp, ParallelMode.tp_pp, ParallelMode.ray)},
    )
    """Seconds without a heartbeat of a rank until the run fails, or, with mode=ray, until its engine is loaded again.
    """
    dry_run: bool = option(False, only_with={"mode": one_of(ParallelMode.auto)})
    """Print the estimates of parallel=auto for every layout, and run nothing."""
    topology: str | None = option(
        None,
        only_with={
            "mode": one_of(ParallelMode.auto),
            "dry_run": one_of(True, reason="because its machines may not be these"),
        },
    )
    """YAML file of the machines that parallel=auto plans for; null: this machine, measured.

    Examples are in pipelines/topologies.
    """

    def __post_init__(self) -> None:
        check_fields(self, "parallel")
        for name, unset in (("sum", Sum.gather), ("experts", ExpertPlacement.split)):
            value, key = getattr(self, name), f"parallel.{name}"
            if self.mode is ParallelMode.ray and self.tp is None and value is not unset:
                problem = f"{key}={value.name} is of ranks, which parallel=ray has with parallel.tp"
                raise UserError(f"{problem}: give parallel.tp too, or leave it out", ErrorCode.needs_other, key)


def _is_memory(size: str) -> bool:
    return size == "auto" or num_bytes(size, total=2**60) > 0


@dataclass
class DeviceConfig:
    type: DeviceType = DeviceType.auto
    threads: int | None = option(None, minimum=1)
    """Threads of the CPU operators; null: one per physical core that the process may use."""
    decode_threads: int | None = option(None, minimum=1)
    """Threads of decode steps.

    Memory limits these steps, and fewer cores may use its full bandwidth. null: all threads.
    """
    max_batched_tokens: int = option(2048, minimum=1)
    """Most tokens of a step. Longer prompts are computed in chunks, in steps with the rows that generate."""
    block_size: int | None = option(None, minimum=1)
    """Tokens in a block of the KV cache; null: 16 on a CPU, 64 on a GPU."""
    kept_prefixes: list[str] = option(
        factory=list,
        form=(all, "files that task=prefix has made"),
        only_with={"task": one_of(*READING_ROWS, Task.serve), "decode.prefix_cache": one_of(True)},
    )
    """Files of task=prefix.

    Their prompts are in the KV cache from the start, so that rows with these prefixes do not compute them.
    """
    kv_cache_memory: str = option(
        "auto", form=(_is_memory, "auto, a size such as 1GB, 512MiB or 4096, or a fraction between 0 and 1")
    )
    """Size of the KV cache, such as 1GB, 512MiB or 4096 (bytes), or a fraction below 1 of the available memory.

    Available is the memory that the weights leave free; on a GPU `memory_fraction` limits it. auto: half of it, or less
    if all rows need less. Layers with sliding windows keep the blocks of their windows alone, where this saves memory.
    """
    kv_cache_tiers: list[str] = option(
        factory=list,
        form=(are_tiers, TIERS_FORM),
        only_with={
            "task": one_of(*READING_ROWS, Task.serve),
            "decode.prefix_cache": one_of(True),
            "parallel.mode": one_of(ParallelMode.single),
            "serve.replicas": one_of(1),
        },
    )
    """Tiers for blocks that leave the full KV cache: memory:SIZE, file:FOLDER:SIZE or both. Prompts load them again.

    A file tier also serves later runs of the same model. SIZE is in bytes, such as 4GB, and is never exceeded.
    """
    memory_fraction: float = option(0.9, above=0, maximum=1)
    """Share of a GPU's memory that the process may use: weights, KV cache, CUDA graphs and the tensors of a step."""
    cuda_graphs: bool = True
    """On a GPU, capture decode steps of up to `batch_size` rows when the model is loaded, and replay them."""

    def __post_init__(self) -> None:
        check_fields(self, "device")


def _of(*tasks: Task) -> dict[str, Condition]:
    return {"task": one_of(*tasks)}


@dataclass
class RunConfig:
    task: Task = Task.predict
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="?"))
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    predict: PredictConfig = option(factory=PredictConfig, only_with=_of(*READING_ROWS))
    bench: BenchConfig = option(factory=BenchConfig, only_with=_of(Task.bench))
    evaluate: EvaluateConfig = option(factory=EvaluateConfig, only_with=_of(Task.evaluate))
    convert: ConvertConfig = option(factory=ConvertConfig, only_with=_of(Task.convert))
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    export: ExportConfig = option(factory=ExportConfig, only_with=_of(Task.export))
    prefix: PrefixConfig = option(factory=PrefixConfig, only_with=_of(Task.prefix))
    embed: EmbedConfig = option(factory=EmbedConfig, only_with=_of(Task.embed, Task.score, Task.serve))
    score: ScoreConfig = option(factory=ScoreConfig, only_with=_of(Task.score))
    chat: ChatConfig = option(factory=ChatConfig, only_with=_of(Task.chat))
    serve: ServeConfig = option(factory=ServeConfig, only_with=_of(Task.serve))
    verify: VerifyConfig = option(factory=VerifyConfig, only_with=_of(Task.verify))
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)
    tracker: TrackerConfig = field(default_factory=TrackerConfig)

    def __post_init__(self) -> None:
        """Raises UserError for settings that this task does not read: sections of other tasks, and calibration."""
        check_fields(self)
        by = f"task={self.task.name}"
        calibrates = self.task is Task.quantize or self.quant.needs_calibration
        if not calibrates and self.calibrate != CalibrateConfig():
            scheme = f"quant={self.quant.scheme.name} with {by}"
            problem = f"calibrate is not used by {scheme}: leave it out, or give task=quantize"
            raise UserError(problem, ErrorCode.needs_other, "calibrate")
        if self.quant.sparsity.prunes and self.task is not Task.quantize:
            problem = f"quant.sparsity.method={self.quant.sparsity.method.name} is not used by {by}"
            remedy = "make the pruned model by task=quantize, and give its folder as model.path"
            raise UserError(f"{problem}: {remedy}", ErrorCode.needs_other, "quant.sparsity.method")
        unread = replace(self.quantize, format=QuantizedFormat.compressed_tensors) if calibrates else self.quantize
        if self.task is not Task.quantize and unread != QuantizeConfig():
            raise unused("quantize", unread, QuantizeConfig(), by, "task=quantize")
        loaded = self.quant, self.device, self.parallel, self.model.adapters
        if self.chat.url and loaded != (QuantConfig(), DeviceConfig(), ParallelConfig(), None):
            problem = "quant, device, parallel and adapters are not used with chat.url, whose server has its own"
            raise UserError(f"{problem}: leave them out", ErrorCode.excludes, "chat.url")
        if self.task is Task.verify:
            if loaded != (QuantConfig(), DeviceConfig(), ParallelConfig(), None):
                problem = "verify.folder has a job with its own quant, device, parallel and adapters"
                raise UserError(f"{problem}: leave them out", ErrorCode.excludes, "verify.folder")
            self.decode.check_unset("by task=verify", "leave it out, because the job in verify.folder has its own")
        self._check_parallel()
        self._check_predict()

    def _check_parallel(self) -> None:
        if self.parallel.mode is ParallelMode.ray and not self.task.reads_rows:
            remedy = "serve.replicas" if self.task is Task.serve else "task=predict, embed or score"
            problem = f"parallel=ray is not used by task={self.task.name}: leave it out, or give {remedy}"
            raise UserError(problem, ErrorCode.needs_other, "parallel.mode")
        if self.parallel.mode is ParallelMode.auto and (
            self.predict.export or self.task not in (Task.predict, Task.bench)
        ):
            user = "predict.export=true" if self.predict.export else f"task={self.task.name}"
            remedy = "leave it out" + ("" if self.predict.export else ", or give task=predict or task=bench")
            raise UserError(f"parallel=auto is not used by {user}: {remedy}", ErrorCode.needs_other, "parallel.mode")
        mode, tp, pp = self.parallel.mode, self.parallel.tp, self.parallel.pp
        if (mode.divides or tp or pp) and self.task in (Task.convert, Task.prefix):
            ranks = f"parallel={mode.name}" if mode.divides else f"parallel.pp={pp}" if pp else f"parallel.tp={tp}"
            problem = f"task={self.task.name} does not work with {ranks}: leave one of them out"
            raise UserError(problem, ErrorCode.excludes, "parallel.mode")

    def _check_predict(self) -> None:
        check_adapters(self.model.adapters or {}, self.predict.adapter)
        if self.task in (Task.embed, Task.score):
            for name in ("truncate", "output_file", "export"):
                value, unset = getattr(self.predict, name), getattr(PredictConfig(), name)
                if value != unset:
                    raise unused(f"predict.{name}", value, unset, f"task={self.task.name}", "task=predict")
