"""Plan draft models, which have weights of their own or an MTP layer, and give an engine its proposers."""

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import Activations, QuantConfig
from conf.schema import DType, ModelConfig, ParallelMode
from conf.speculation import BESIDE_AUTO, Speculate
from models.batch import KVCache
from models.tokenizers import Tokenizer
from pipelines.engine import Engine
from pipelines.engine.proposers.model import ModelProposer
from pipelines.engine.proposers.mtp import MtpProposer
from pipelines.loading.exported_plan import check_mode
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_source import ModelSource, resolve_model
from pipelines.loading.planning import plan_model
from pipelines.loading.request_settings import RequestSettings

REMEDY = "give a smaller model of the same family"


def plan_draft(
    decode: DecodeConfig, mode: ParallelMode, target: ModelPlan, settings: RequestSettings
) -> ModelPlan | None:
    """Plan the draft model for `target`, in its dtype and KV cache format; None if `decode` does not use a draft model.

    `mode`: the run's, for an exported draft model. Raises UserError if its tokens differ from the model's, and if it
    cannot take the run's prompts.
    """
    if decode.speculate is not Speculate.model:
        return None
    path = decode.speculation.model_path
    if path is None:
        raise UserError("decode.speculate=model needs the model that drafts: give decode.speculation.model_path=FOLDER")
    model = ModelConfig(
        path=path,
        hub=target.options.hub,
        dtype=DType[str(target.dtype).removeprefix("torch.")],
        weights=target.options.weights,
        allow_pickle=target.options.allow_pickle,
        verify=target.options.verify,
        keep_packed=target.options.keep_packed,
    )
    try:
        source = resolve_model(model)
        _compare(source, target.source, settings)
        check_mode(source, mode)
        quant = QuantConfig(kv_cache=target.static_cache or target.quant.kv_cache)
        return plan_model(model, quant, source, target.device, packed=True)
    except UserError as error:
        raise UserError(f"decode.speculation.model_path={path}: {error}") from error


def _compare(source: ModelSource, target: ModelSource, settings: RequestSettings) -> None:
    shape, context = source.shape, settings.context
    # If both have the same tokenizer, ids beyond the tokenizer are padding: Qwen2.5 0.5B has 128 fewer of them than 7B.
    num_needed = target.shape.vocab_size
    if settings.tokenizer:
        num_needed = min(num_needed, settings.tokenizer.size)
    if shape.vocab_size != target.shape.vocab_size and (shape.vocab_size < num_needed or not settings.tokenizer):
        sizes = f"{shape.vocab_size} tokens, but the model's {target.shape.vocab_size}"
        raise UserError(f"its vocabulary has {sizes}: {REMEDY}")
    if shape.context_length < context.num_tokens:
        remedy = f"give model.max_length={shape.context_length}, or another model"
        raise UserError(f"it takes {shape.context_length} tokens, but the run {context}: {remedy}")
    if shape.capabilities.needs_whole_prompt or target.shape.capabilities.needs_whole_prompt:
        raise UserError("a prompt that sees itself whole cannot be drafted for: give decode.speculate=ngram")
    draft_tokenizer = source.checkpoint.load_tokenizer() if settings.tokenizer else None
    if draft_tokenizer and settings.tokenizer:
        _compare_tokenizers(draft_tokenizer, settings.tokenizer)


def _compare_tokenizers(draft_tokenizer: Tokenizer, expected: Tokenizer) -> None:
    for token in range(max(draft_tokenizer.size, expected.size)):
        texts = [_text(tokenizer, token) for tokenizer in (draft_tokenizer, expected)]
        if texts[0] != texts[1]:
            raise UserError(f"its token {token} is {texts[0]!r}, but the model's {texts[1]!r}: {REMEDY}")


def _text(tokenizer: Tokenizer, token: int) -> str | None:
    return tokenizer.decode([token], skip_special_tokens=False) if token < tokenizer.size else None


def place_proposers(
    engine: Engine, plan: ModelPlan, draft: ModelPlan | None, caches: list[KVCache], num_graph_sequences: int
) -> None:
    limits = engine.block_size, engine.config.max_batched_tokens
    if draft:
        executor = engine.executor.draft_executor(draft.model, caches[1], num_graph_sequences)
        engine.speculator.proposers[Speculate.model] = ModelProposer(executor, *limits, engine.vocab_size)
    if plan.model.config.capabilities.predicts_ahead:
        engine.speculator.proposers[Speculate.mtp] = MtpProposer(engine.executor, *limits)


def unavailable_proposers(plan: ModelPlan, draft: ModelPlan | None) -> dict[Speculate, str]:
    reasons = {}
    if draft is None:
        reasons[Speculate.model] = "has no model that drafts: give decode.speculate=model and its path to the run"
    if not plan.model.config.capabilities.predicts_ahead:
        reasons[Speculate.mtp] = "has no layer that drafts: give decode.speculate=mtp to the run"
    if plan.quant.activations is Activations.auto:
        reason = f"contradicts quant.activations=auto, {BESIDE_AUTO}: leave one of them out"
        reasons |= {mode: reason for mode in Speculate if mode is not Speculate.none}
    return reasons
