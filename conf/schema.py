"""Every option of a run, typed. `run.py` composes a `RunConfig` and passes it to the pipelines.

This module and its imports use only the standard library, so that every module can import it. Checks are in
`__post_init__`; errors name the dotted key. The classes are mutable because Hydra merges overrides into them. They must
not change after composition.
"""

from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from conf.adapters import check_adapters, check_paths
from conf.decoding import DecodeConfig
from conf.errors import UserError, check
from conf.pooling import EmbedConfig, ScoreConfig
from conf.quantization import Activations, CalibrateConfig, QuantConfig, QuantizeConfig
from conf.serving import ChatConfig, ServeConfig
from conf.speculation import BESIDE_AUTO, Speculate
from conf.support.sizes import num_bytes
from conf.tasks import (
    BenchConfig,
    ConvertConfig,
    EvaluateConfig,
    ExportConfig,
    PredictConfig,
    PrefixConfig,
    SweepConfig,
)


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

    @property
    def reads_rows(self) -> bool:
        """Whether the task reads the rows of `predict.data` with the settings of `predict`."""
        return self in (Task.predict, Task.embed, Task.score)


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


@dataclass
class ModelConfig:
    """The checkpoint, and how to load it. Its config.json defines the architecture."""

    path: str = ""
    """Folder in any layout of models/README.md, GGUF file, or hub id such as `meta-llama/Llama-2-7b-hf`."""
    hub: Hub = Hub.huggingface
    """Hub for downloads.

    On the command line and in Python the default is modelscope if VLLM_USE_MODELSCOPE=True is set.
    """
    revision: str | None = None
    """Branch, tag or commit of the hub repository, for weights, tokenizer and config; null: the default branch."""
    dtype: DType = DType.auto
    weights: Weights = Weights.checkpoint
    tokenizer: str | None = ""
    """Folder of the tokenizer, GGUF file or hub id; empty: the model's own; null: none, prompts are token ids."""
    max_length: int | None = None
    """Most prompt + new tokens of a sequence; null: the checkpoint's context length."""
    allow_pickle: bool = False
    """Also read `.bin`, `.pt` and `.pth` files (with `weights_only=True`)."""
    verify: bool = False
    """Compare every file with the folder's manifest.json before loading."""
    prefixes: Any = None  # untyped: Hydra cannot set a pair of a typed dict that may be null
    """Soft prefixes by the names that rows and requests use: {NAME: PATH, ...}.

    A path is a pre_caches.npy of PaddleNLP or a folder with one, or the folder of a PEFT adapter of prefix_tuning,
    prompt_tuning or p_tuning.
    """
    keep_packed: bool = False
    """Store the weights in outputs/packed as the CPU kernels read them, and map that file at the next start.

    The file is as large as the weights in memory.
    """
    adapters: Any = None
    """LoRA adapters in PEFT's layout that rows and requests may name: {NAME: FOLDER, ...}."""
    max_adapters: int = 8
    """Most adapters in one step. The least recently used adapter is evicted."""

    def __post_init__(self) -> None:
        check(bool(self.path), "model.path", repr(self.path), "a folder or a hub id")
        check(self.revision != "", "model.revision", repr(self.revision), "a branch, tag or commit, or null")
        check_paths("model.prefixes", self.prefixes)
        check_paths("model.adapters", self.adapters)
        for name in sorted({*(self.prefixes or {})} & {*(self.adapters or {})}):
            raise UserError(f"model.prefixes.{name} is not allowed: an adapter has this name, give another one")
        check(0 < self.max_adapters <= 1024, "model.max_adapters", self.max_adapters, "a number from 1 to 1024")
        random = self.weights is Weights.random
        check(not (self.verify and random), "model.verify", "true", "false, or model.weights=checkpoint")
        check(not (self.keep_packed and random), "model.keep_packed", "true", "false, or model.weights=checkpoint")
        check(
            self.max_length is None or self.max_length > 0,
            "model.max_length",
            self.max_length,
            "a number above 0, or null",
        )


@dataclass
class ParallelConfig:
    mode: ParallelMode = ParallelMode.single
    replicas: int = 1
    """Engines that share the rows of a job, each with its own model, with mode=ray."""
    tp: int | None = None
    """Tensor parallel size, with mode=tp or tp_pp: ranks that compute each layer together, one process each.

    null: 2, or with tp the number of ranks that torchrun or srun started. With mode=ray it is per engine; null: one.
    """
    pp: int | None = None
    """Pipeline parallel size, with mode=pp or tp_pp: stages, each with some of the layers.

    null: 2, or with pp the number of ranks that torchrun or srun started. With mode=ray it is per engine; null: one.
    """
    backend: Backend = Backend.auto
    """How ranks communicate. Tensor parallel ranks on several machines need a named backend: gloo, or nccl on GPUs."""
    sum: Sum = Sum.gather
    """How tensor parallel ranks compute a layer's outputs.

    reduce applies to the output projections of attention and feed-forward whose inputs can be sharded. Other layers
    gather, and a warning counts them.
    """
    experts: ExpertPlacement = ExpertPlacement.split
    """How tensor parallel ranks share the experts of a mixture."""
    heartbeat_s: float = 30.0
    """Seconds without a heartbeat of a rank until the run fails, or, with mode=ray, until its engine is loaded again.
    """
    dry_run: bool = False
    """Print the estimates of parallel=auto for every layout, and run nothing."""
    topology: str | None = None
    """YAML file of the machines that parallel=auto plans for; null: this machine, measured.

    Examples are in pipelines/topologies.
    """

    def __post_init__(self) -> None:
        for name in ("tp", "pp"):
            number = getattr(self, name)
            check(number is None or 1 < number <= 512, f"parallel.{name}", number, "a number from 2 to 512, or null")
        check(5.0 <= self.heartbeat_s < float("inf"), "parallel.heartbeat_s", self.heartbeat_s, "a number from 5 on")
        check(0 < self.replicas <= 4096, "parallel.replicas", self.replicas, "a number from 1 to 4096")
        tp, pp, tp_pp, auto = ParallelMode.tp, ParallelMode.pp, ParallelMode.tp_pp, ParallelMode.auto
        ray = ParallelMode.ray
        users: dict[str, tuple[ParallelMode, ...]] = {
            "tp": (tp, tp_pp, ray),
            "pp": (pp, tp_pp, ray),
            "backend": (tp, pp, tp_pp),
            "sum": (tp, tp_pp, auto, ray),
            "experts": (tp, tp_pp, auto, ray),
            "heartbeat_s": (tp, pp, tp_pp, ray),
            "replicas": (ray,),
            "dry_run": (auto,),
            "topology": (auto,),
        }
        for name, modes in users.items():
            value, default = getattr(self, name), getattr(type(self), name)
            if value != default and self.mode not in modes:
                what = f"parallel.{name}={typed(value)} is not used by parallel={self.mode.name}"
                raise UserError(f"{what}: leave it at {typed(default)}, or give parallel={modes[0].name}")
        for name in ("sum", "experts"):
            value = getattr(self, name)
            if self.mode is ray and self.tp is None and value != getattr(type(self), name):
                what = f"parallel.{name}={typed(value)} is of ranks, which parallel=ray has with parallel.tp"
                raise UserError(f"{what}: give parallel.tp too, or leave it out")
        if self.topology is not None and not self.dry_run:
            remedy = "give parallel.dry_run=true, or leave it out"
            raise UserError(f"parallel.topology is of machines that may not be these: {remedy}")


@dataclass
class DeviceConfig:
    type: DeviceType = DeviceType.auto
    threads: int | None = None
    """Threads of the CPU operators; null: one per physical core that the process may use."""
    decode_threads: int | None = None
    """Threads of decode steps.

    Memory limits these steps, and fewer cores may use its full bandwidth. null: all threads.
    """
    max_batched_tokens: int = 2048
    """Most tokens of a step. Longer prompts are computed in chunks, in steps with the rows that generate."""
    block_size: int | None = None
    """Tokens in a block of the KV cache; null: 16 on a CPU, 64 on a GPU."""
    kept_prefixes: list[str] = field(default_factory=list)
    """Files of task=prefix.

    Their prompts are in the KV cache from the start, so that rows with these prefixes do not compute them.
    """
    kv_cache_memory: str = "auto"
    """Size of the KV cache, such as 1GB, 512MiB or 4096 (bytes), or a fraction below 1 of the available memory.

    Available is the memory that the weights leave free; on a GPU `memory_fraction` limits it. auto: half of it, or less
    if all rows need less.
    """
    memory_fraction: float = 0.9
    """Share of a GPU's memory that the process may use: weights, KV cache, CUDA graphs and the tensors of a step."""
    cuda_graphs: bool = True
    """On a GPU, capture decode steps of up to `batch_size` rows when the model is loaded, and replay them."""

    def __post_init__(self) -> None:
        check(self.max_batched_tokens > 0, "device.max_batched_tokens", self.max_batched_tokens, "a number above 0")
        check(
            self.block_size is None or self.block_size > 0,
            "device.block_size",
            self.block_size,
            "a number above 0, or null",
        )
        for path in self.kept_prefixes:
            check(bool(path), "device.kept_prefixes", self.kept_prefixes, "files that task=prefix has made")
        memory = self.kv_cache_memory
        allowed = "auto, a size such as 1GB, 512MiB or 4096, or a fraction between 0 and 1"
        check(memory == "auto" or num_bytes(memory, whole=2**60) > 0, "device.kv_cache_memory", memory, allowed)
        fraction = self.memory_fraction
        check(0 < fraction <= 1, "device.memory_fraction", fraction, "a number above 0 and up to 1")
        for name in ("threads", "decode_threads"):
            number = getattr(self, name)
            check(number is None or number > 0, f"device.{name}", number, "a number above 0, or null")


def typed(value: object) -> str:
    """Return a value as it is typed on the command line."""
    if isinstance(value, Enum):
        return value.name
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


@dataclass
class RunConfig:
    task: Task = Task.predict
    model: ModelConfig = field(default_factory=lambda: ModelConfig(path="?"))
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    quant: QuantConfig = field(default_factory=QuantConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    device: DeviceConfig = field(default_factory=DeviceConfig)
    predict: PredictConfig = field(default_factory=PredictConfig)
    bench: BenchConfig = field(default_factory=BenchConfig)
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig)
    convert: ConvertConfig = field(default_factory=ConvertConfig)
    quantize: QuantizeConfig = field(default_factory=QuantizeConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    prefix: PrefixConfig = field(default_factory=PrefixConfig)
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    score: ScoreConfig = field(default_factory=ScoreConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    calibrate: CalibrateConfig = field(default_factory=CalibrateConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    def __post_init__(self) -> None:
        """Raises UserError for settings that this task does not read: sections of other tasks, and calibration."""
        calibrates = self.task is Task.quantize or self.quant.needs_calibration
        if not calibrates and self.calibrate != CalibrateConfig():
            scheme = f"quant={self.quant.scheme.name} with task={self.task.name}"
            raise UserError(f"calibrate is not used by {scheme}: leave it out, or give task=quantize")
        if self.quant.sparsity.prunes and self.task is not Task.quantize:
            method = f"quant.sparsity.method={self.quant.sparsity.method.name} is not used by task={self.task.name}"
            raise UserError(f"{method}: make the pruned model by task=quantize, and give its folder as model.path")
        if not (self.task.reads_rows or self.task in (Task.prefix, Task.serve)):
            merge = "or merge an adapter by task=convert convert.lora=FOLDER"
            for name, remedy in (("prefixes", "or give task=predict"), ("adapters", merge)):
                if getattr(self.model, name):
                    raise UserError(f"model.{name} is not used by task={self.task.name}: leave it out, {remedy}")
        if self.parallel.mode is ParallelMode.ray and not self.task.reads_rows:
            remedy = "serve.replicas" if self.task is Task.serve else "task=predict, embed or score"
            raise UserError(f"parallel=ray is not used by task={self.task.name}: leave it out, or give {remedy}")
        takes_kept = self.task.reads_rows or self.task is Task.serve
        if self.device.kept_prefixes and not (takes_kept and self.decode.prefix_cache):
            user = "decode.prefix_cache=false" if takes_kept else f"task={self.task.name}"
            raise UserError(f"device.kept_prefixes is not used by {user}: leave one of them out")
        if self.decode.speculate is not Speculate.none and self.quant.activations is Activations.auto:
            raise UserError(f"decode.speculate={self.decode.speculate.name} {BESIDE_AUTO}")
        loaded = self.quant, self.device, self.parallel, self.model.adapters
        if self.chat.url and loaded != (QuantConfig(), DeviceConfig(), ParallelConfig(), None):
            what = "quant, device, parallel and adapters are not used with chat.url, whose server has its own"
            raise UserError(f"{what}: leave them out")
        if self.parallel.mode is ParallelMode.auto and self.task not in (Task.predict, Task.bench):
            raise UserError(
                f"parallel=auto is not used by task={self.task.name}: leave it out, or give task=predict or task=bench"
            )
        if self.parallel.mode.divides or self.parallel.tp or self.parallel.pp:
            self._check_ranks()
        self._check_predict()
        for other in [task for task in Task if task is not self.task]:
            section = getattr(self, other.name)
            unchanged = type(section)()
            for name, value in vars(section).items():
                default = getattr(unchanged, name)
                is_read = calibrates and (other, name) == (Task.quantize, "format")
                is_read |= other is Task.predict and self.task.reads_rows
                if value != default and not is_read:
                    raise UserError(
                        f"{other.name}.{name}={typed(value)} is not used by task={self.task.name}: "
                        f"leave it at {typed(default)}, or give task={other.name}"
                    )

    def _check_predict(self) -> None:
        if self.predict.export and self.parallel.mode is ParallelMode.auto:
            raise UserError("parallel=auto is not used by predict.export=true: leave it out")
        check_adapters(self.model.adapters or {}, self.predict.adapter)
        if self.task in (Task.embed, Task.score):
            for name in ("truncate", "output_file", "export"):
                if (value := getattr(self.predict, name)) != getattr(PredictConfig(), name):
                    raise UserError(f"predict.{name}={typed(value)} is not used by task={self.task.name}: leave it out")

    def _check_ranks(self) -> None:
        if self.task in (Task.convert, Task.prefix):
            mode, name = self.parallel.mode, "pp" if self.parallel.pp else "tp"
            ranks = f"parallel={mode.name}" if mode.divides else f"parallel.{name}={getattr(self.parallel, name)}"
            raise UserError(f"task={self.task.name} does not work with {ranks}: leave one of them out")
        if self.task is Task.quantize:
            for name, default in (("sum", Sum.gather), ("experts", ExpertPlacement.split)):
                value = getattr(self.parallel, name)
                if value is not default:
                    what = f"parallel.{name}={value.name} is not used by task=quantize"
                    raise UserError(
                        f"{what}, which chooses scales to the bits of one process: leave it at {default.name}"
                    )
