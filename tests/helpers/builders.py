"""Small models for tests, and shortcuts from a folder to an engine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from conf.decoding import DecodeConfig
from conf.quantization import BlockActivations, KVCacheFormat, QuantConfig
from conf.schema import DeviceConfig, DeviceType, DType, ModelConfig, RunConfig
from conf.tasks import PredictConfig
from models.causal_lm import CausalLM
from models.layers.dense import DenseMethod, PackedDenseMethod, StoredFloats
from models.layers.embedding import Embedding
from models.layers.linear import Linear
from models.linear_layers import matrix_layers
from pipelines.engine import Completion, Engine, Output
from pipelines.engine.batch import build_batch
from pipelines.engine.operations import CopyBlocks
from pipelines.loading.assembly import assemble
from pipelines.loading.device import prepare_device
from pipelines.loading.load_engine import load_engine
from pipelines.loading.model_source import resolve_model
from pipelines.loading.planning import plan_model
from pipelines.loading.request_settings import read_request_settings

REPOSITORY = Path(__file__).resolve().parents[2]
SHARED = REPOSITORY.parent / "shared"  # real small models and texts, next to the repository and not part of it
SMALL = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 88,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": None,
}
KEY_VALUE_BYTES = 2 * 2 * 2 * 16 * 4  # per token of this model: keys and values, layers, heads, channels, float32


def said(stderr: str) -> str:
    """Return the output of a command without the warning of a machine that has no compiler."""
    lines = stderr.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("WARNING: the CPU kernels are off"))


def write_llama(folder: Path, **config: Any) -> LlamaForCausalLM:
    """Write a random float32 Llama in Hugging Face layout, and return transformers' model of it."""
    model: LlamaForCausalLM = write_random(folder, LlamaForCausalLM, LlamaConfig(**{**SMALL, **config}))
    return model


def write_random(folder: Path, kind: type[PreTrainedModel], config: Any) -> Any:
    """Write a transformers model of this class and config in float32, and return it. Every parameter is random, biases
    included."""
    torch.manual_seed(0)
    model = kind(config).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.15)
    model.save_pretrained(folder)
    return model


def run_config(folder: Path, **model: Any) -> RunConfig:
    return RunConfig(
        model=ModelConfig(path=str(folder), dtype=DType.float32, tokenizer=None, **model),
        device=DeviceConfig(DeviceType.cpu),
        predict=PredictConfig(batch_size=3),
    )


def engine_of(
    folder: Path,
    batch_size: int = 3,
    tokenizer: str | None = None,
    allow_pickle: bool = False,
    kv_cache: str = "none",
    block_activations: str = "int8",
    **device: Any,
) -> Engine:
    """Return a float32 engine on the CPU. `tokenizer=""` uses the folder's own; `device`: fields of DeviceConfig."""
    quant = QuantConfig(kv_cache=KVCacheFormat[kv_cache], block_activations=BlockActivations[block_activations])
    run = run_config(folder)
    model = replace(run.model, tokenizer=tokenizer, allow_pickle=allow_pickle)
    config = DeviceConfig(DeviceType.cpu, **device)
    return load_engine(replace(run, model=model, device=config, quant=quant), batch_size)


def unpacked_engine(run: RunConfig, batch_size: int) -> Engine:
    """Return an engine whose layers hold their weights in the checkpoint's layout, as calibration requires."""
    source = resolve_model(run.model)
    plan = plan_model(run.model, run.quant, source, prepare_device(run.device), packed=False)
    return assemble(plan, run.device, run.decode, read_request_settings(run.model, source), batch_size)


def weights_of(model: CausalLM) -> dict[str, torch.Tensor]:
    """Return the weights by the checkpoint's names. Packed weights are unpacked."""
    weights = {name: parameter.data for name, parameter in model.named_parameters() if not name.endswith(".tiles")}
    for name, layer in matrix_layers(model).items():
        if isinstance(layer.method, PackedDenseMethod):
            weights[f"{name}.weight"] = layer.method.weight.unpack()
    return weights


def embedding_weight(engine: Engine) -> torch.Tensor:
    """Return the vectors of the token embedding. A tied head and recorded steps no longer share them, so a test may
    change them."""
    engine.executor.stop_recording()
    model = engine.executor.model
    assert isinstance(model.embedding, Embedding)
    if isinstance(model.head, Linear):
        model.head.untie(model.head.method)
    method = model.embedding.method
    weight = method.weight.unpack() if isinstance(method, PackedDenseMethod) else method.weight
    assert isinstance(weight, torch.Tensor)
    parameter = torch.nn.Parameter(weight.clone(), requires_grad=False)
    model.embedding.method = DenseMethod(StoredFloats(model.embedding.shape), parameter=parameter)
    return parameter.data


def generate(engine: Engine, prompts: list[list[int]], decode: DecodeConfig, prefix: str | None = None) -> list[Output]:
    """Return outputs in the order of the prompts. Checks the block accounting after every finished row, and that all
    blocks are freed."""
    outputs = []
    requests = (engine.request(i, prompt, decode, prefix=prefix) for i, prompt in enumerate(prompts))
    for output in engine.generate(requests):
        engine.scheduler.check_integrity()
        outputs.append(output)
    blocks = engine.scheduler.block_manager
    assert blocks.num_free_blocks == engine.requests.num_blocks
    return sorted(outputs, key=lambda output: output.request_id)


def complete(
    engine: Engine, prompts: list[list[int]], decode: DecodeConfig, prefix: str | None = None
) -> list[Completion]:
    """Return the first completion of each prompt."""
    return [output.completions[0] for output in generate(engine, prompts, decode, prefix)]


@torch.inference_mode()
def all_logits(engine: Engine, prompt: list[int], prefix: str | None = None) -> torch.Tensor:
    """Return logits [T, V] at every position of a prompt, from one prefill."""
    group = engine.add(engine.request(0, prompt, DecodeConfig(max_new_tokens=1, prefix_cache=False), prefix=prefix))
    plan = engine.scheduler.plan()
    if plan.copies:
        engine.executor.run(CopyBlocks(plan.copies, plan.window_copies))
    all_rows = plan._replace(scheduled=[plan.scheduled[0]._replace(num_outputs=len(prompt))])
    logits = engine.executor.execute(build_batch(all_rows, engine.block_size)).logits
    engine.scheduler.cancel(group)
    return logits.clone()  # a copy, because the next decode step may reuse the memory
