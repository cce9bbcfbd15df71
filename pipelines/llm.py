"""vLLM's offline face over our engine: a script of `vllm.LLM` runs with `from pipelines import LLM, SamplingParams` for its import.

Names, defaults and results are vLLM's (docs.vllm.ai, LLM class). What cannot be done is refused by name: nothing is ignored.
"""

import itertools
import logging
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from conf.errors import UserError, shortened, there_are
from conf.schema import RunConfig
from pipelines import report
from pipelines.engine import Engine, Output, Request
from pipelines.engine.request import TokenLogprobs
from pipelines.loading import load_engine
from pipelines.memory import explained_out_of_memory
from pipelines.opening import open_source
from pipelines.pooled_pipeline import EmbeddingPipeline
from pipelines.prompt_encoder import EncodedPrompt, PromptEncoder
from pipelines.prompts import PromptRow, parse_row
from pipelines.sampling_params import SamplingParams
from pipelines.text_pipeline import compose_run

INPUTS = ("prompt", "prompt_token_ids", "messages")
log = logging.getLogger(__name__)

Prompt = str | list[int] | dict[str, Any]


@dataclass(frozen=True)
class Logprob:
    """A token's natural log probability, its rank (1: the most likely one) and its text."""

    logprob: float
    rank: int
    decoded_token: str | None


Logprobs = list[dict[int, Logprob]]


@dataclass(frozen=True)
class CompletionOutput:
    """One continuation of a prompt."""

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    """Sum over the chosen tokens; None without `logprobs`."""
    logprobs: Logprobs | None
    finish_reason: str
    stop_reason: str | int | None
    """The stop string or the id of the stop token; None for the model's own eos."""
    lora_request: str | None = None

    def finished(self) -> bool:
        return True


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and its continuations."""

    request_id: str
    prompt: str | None
    """The model's input as text; None where token ids were given."""
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None
    """The first token's are None: nothing predicts it."""
    outputs: list[CompletionOutput]
    num_cached_tokens: int
    finished: bool = True
    lora_request: str | None = None
    metrics: None = None
    encoder_prompt: None = None
    encoder_prompt_token_ids: None = None
    kv_transfer_params: None = None
    """None, as the three before it: this engine has no such things."""


@dataclass(frozen=True)
class EmbeddingOutput:
    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Return the number of the vector's values."""
        return len(self.embedding)


@dataclass(frozen=True)
class EmbeddingRequestOutput:
    """A prompt's vector."""

    request_id: str
    prompt_token_ids: list[int]
    outputs: EmbeddingOutput
    finished: bool = True


SETTINGS = {
    "max_model_len": "model.max_length",
    "load_format": "model.weights",
    "max_num_batched_tokens": "device.max_batched_tokens",
    "block_size": "device.block_size",
    "gpu_memory_utilization": "device.memory_fraction",
    "kv_cache_dtype": "quant.kv_cache",
}
"""vLLM's arguments that are settings of ours."""
VALUES = {
    "load_format": {"auto": "checkpoint", "safetensors": "checkpoint", "dummy": "random"},
    "kv_cache_dtype": {"auto": "none", "fp8": "fp8", "fp8_e4m3": "fp8", "int8": "int8"},
}
"""Their values, and ours, where they differ."""
ONLY = {
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "revision": None,
    "tokenizer_mode": "auto",
    "tokenizer_revision": None,
    "skip_tokenizer_init": False,
    "cpu_offload_gb": 0,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": True,
}
"""Arguments of which one value is what this engine does, by itself or by `overrides`."""
OWN_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Names of generation_config.json, and vLLM's."""
UNUSED = ("disable_log_stats", "swap_space")
"""Arguments that change nothing that a script sees, here or there."""
DEFAULT_SEQUENCES = 256  # at most; vLLM's own


class LLM:
    """An engine that generates by vLLM's calls.

    >>> LLM("tiny").generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    Calls from several threads take turns.
    """

    def __init__(
        self,
        model: str | Path,
        *,
        tokenizer: str | Path | None = None,
        dtype: str | torch.dtype = "auto",
        quantization: str | None = None,
        seed: int | None = 0,
        runner: str = "auto",
        max_num_seqs: int = DEFAULT_SEQUENCES,
        enforce_eager: bool = False,
        overrides: Iterable[str] = (),
        **arguments: Any,
    ) -> None:
        """`model`: a folder, GGUF file, hub id or option of conf/model. `runner`: "pooling" for `embed`, else for `generate` and `chat`.

        `quantization`: the checkpoint's own, such as awq. `overrides` are ours, as on the command line, such as quant=int8.

        Raises UserError for an argument or value that is not taken, and for whatever is wrong with the model.
        """
        if runner not in ("auto", "generate", "pooling"):
            raise UserError(f"runner={runner} is not allowed: give auto, generate or pooling")
        task = "embed" if runner == "pooling" else "predict"
        eager = ["device.cuda_graphs=false"] if enforce_eager and torch.cuda.is_available() else []
        settings = [*_settings(arguments), *eager, *overrides]
        dtype = str(dtype).removeprefix("torch.")
        run = compose_run(model, {"task": task}, None if dtype == "auto" else dtype, tokenizer, settings)
        if quantization is not None:
            _check_quantization(quantization, run)
        self._embedder = EmbeddingPipeline(run, batch_size=max_num_seqs) if runner == "pooling" else None
        self.engine: Engine = self._embedder.engine if self._embedder else load_engine(run, max_num_seqs)
        self._seed = seed
        self._turn = threading.Lock()
        self._ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return what `generate` takes where it is given none: the checkpoint's own settings, else vLLM's."""
        known = {each.name for each in fields(SamplingParams)}
        own = {OWN_NAMES.get(name, name): value for name, value in self.engine.requests.decode_defaults.items()}
        return SamplingParams(**{name: value for name, value in own.items() if name in known})

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        prompt_token_ids: list[int] | list[list[int]] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: str | None = None,
    ) -> list[RequestOutput]:
        """Continue prompts: texts, lists of token ids, or dictionaries with a "prompt" or "prompt_token_ids".

        `sampling_params`: one for all, one for each, or None for the checkpoint's own. `lora_request`: the name of one of model.adapters.
        `prompt_token_ids`: the prompts, as vLLM's first versions took them. Raises UserError for the first prompt that cannot be run,
        before any is.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise UserError("generate takes prompts or prompt_token_ids: give one of them")
        rows = _rows(cast(Any, prompt_token_ids if prompts is None else prompts))
        return self._generate(rows, sampling_params, use_tqdm, lora_request, self._encoder())

    def chat(
        self,
        messages: list[dict[str, Any]] | list[list[dict[str, Any]]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        use_tqdm: bool = True,
        lora_request: str | None = None,
        chat_template: str | Path | None = None,
        add_generation_prompt: bool = True,
    ) -> list[RequestOutput]:
        """Answer a conversation, or each of several. `chat_template`: the path of a Jinja file; None: the model's own."""
        many = messages if messages and isinstance(messages[0], list) else [messages]
        rows = [_row(index, {"messages": each}) for index, each in enumerate(many)]
        encoder = self._encoder("auto" if chat_template is None else str(chat_template), add_generation_prompt)
        return self._generate(rows, sampling_params, use_tqdm, lora_request, encoder)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt. Needs `runner="pooling"`."""
        if self._embedder is None:
            raise UserError('embed needs a model that was loaded for it: give runner="pooling" to LLM')
        rows = _rows(prompts)
        tokens = [self._encoder().encode(row) for row in rows]
        vectors = self._embedder([{"prompt_token_ids": each.token_ids} for each in tokens])
        return [
            EmbeddingRequestOutput(str(next(self._ids)), each.token_ids, EmbeddingOutput(vector.tolist()))
            for each, vector in zip(tokens, vectors, strict=True)
        ]

    def _encoder(self, template: str = "none", add_generation_prompt: bool = True) -> PromptEncoder:
        return PromptEncoder(self.engine.tokenizer, True, template, add_generation_prompt)

    def _generate(
        self,
        rows: list[PromptRow],
        given: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        adapter: str | None,
        encoder: PromptEncoder,
    ) -> list[RequestOutput]:
        if self._embedder is not None:
            raise UserError('generate and chat need a model that was loaded for them: leave runner="pooling" out')
        params = self._params_of(rows, given)
        with (
            self._turn,
            explained_out_of_memory(),
            report.progress_bar() if use_tqdm else nullcontext(report.NO_PROGRESS) as sink,
        ):
            asked = [self._ask(row, each, encoder, adapter) for row, each in zip(rows, params, strict=True)]
            outputs = self._run([request for _, request in asked], sink)
        return [self._output(*each, output, adapter) for each, output in zip(asked, outputs, strict=True)]

    def _params_of(
        self, rows: list[PromptRow], given: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        """Return the settings of each row."""
        if given is None or isinstance(given, SamplingParams):
            return [given or self.get_default_sampling_params()] * len(rows)
        if len(given) != len(rows):
            raise UserError(
                f"there are {len(given)} sampling_params for {len(rows)} prompts: give one, or one for each"
            )
        return list(given)

    def _ask(
        self, row: PromptRow, params: SamplingParams, encoder: PromptEncoder, adapter: str | None
    ) -> tuple[EncodedPrompt, Request]:
        decode = params.decode()
        number = next(self._ids)
        if decode.seed is None and self._seed is not None:
            decode = replace(decode, seed=self._seed + number)  # another one for each prompt of a script
        try:
            prompt = encoder.encode(row)
            if row.prompt_token_ids is not None:
                prompt = replace(prompt, text=None)
            return prompt, self.engine.request(number, prompt.token_ids, decode, adapter=adapter)
        except UserError as error:
            raise UserError(f"prompt {row.index}: {error}") from error

    def _run(self, requests: list[Request], progress: report.ProgressSink) -> list[Output]:
        """Return the outputs in the order of the requests."""
        outputs: dict[int, Output] = {}
        start, before = time.perf_counter(), self.engine.num_generated_tokens
        with closing(self.engine.generate(requests)) as running:
            for output in running:
                if output.error:
                    raise output.error
                outputs[output.request_id] = output
                speed = (self.engine.num_generated_tokens - before) / (time.perf_counter() - start)
                progress.generated(len(outputs), len(requests), speed)
        return [outputs[request.id] for request in requests]

    def _output(self, prompt: EncodedPrompt, request: Request, output: Output, adapter: str | None) -> RequestOutput:
        completions = []
        for index, each in enumerate(output.completions):
            steps = each.logprobs
            total = None if steps is None else sum(s.logprobs[id] for s, id in zip(steps, each.token_ids, strict=True))
            reason = None if each.stop_reason in self.engine.requests.eos_token_ids else each.stop_reason
            logprobs = None if steps is None else [self._named(step) for step in steps]
            rest = total, logprobs, each.finish_reason.value, reason, adapter
            completions.append(CompletionOutput(index, each.text or "", each.token_ids, *rest))
        of_prompt = output.prompt_logprobs
        named = None if of_prompt is None else [None, *map(self._named, of_prompt)]
        identity = str(request.id), prompt.text, request.prompt_token_ids
        return RequestOutput(*identity, named, completions, output.num_cached_tokens, lora_request=adapter)

    def _named(self, step: TokenLogprobs) -> dict[int, Logprob]:
        """Return a step's log probabilities by token id, each with its token's text."""
        tokenizer = self.engine.tokenizer
        return {
            id: Logprob(value, step.ranks[id], None if tokenizer is None else tokenizer.decode([id], False))
            for id, value in step.logprobs.items()
        }


def _rows(prompts: Prompt | Sequence[Prompt]) -> list[PromptRow]:
    """Return prompts as rows. Raises UserError for what is no prompt."""
    one = isinstance(prompts, str | dict) or (bool(prompts) and isinstance(prompts[0], int))
    many: list[Any] = [prompts] if one else list(prompts)
    return [_row(index, each) for index, each in enumerate(many)]


def _row(index: int, prompt: Any) -> PromptRow:
    if isinstance(prompt, str):
        return PromptRow(index, prompt=prompt)
    values = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
    if not isinstance(values, dict) or len(values) != 1 or next(iter(values)) not in INPUTS:
        what = 'a text, a list of token ids, or a dictionary with "prompt" or "prompt_token_ids"'
        raise UserError(f"prompt {index} is {shortened(repr(prompt))}: give {what}")
    row = parse_row(index, values)
    if row.error is not None:
        raise UserError(f"prompt {index}: {row.error}")
    return row


def _settings(arguments: dict[str, Any]) -> list[str]:
    """Return vLLM's arguments as overrides of ours. Raises UserError for an argument or a value that is not taken."""
    found = []
    for name, value in arguments.items():
        if name == "trust_remote_code":
            if value:
                log.warning("trust_remote_code=True changes nothing: no code of a checkpoint is ever run")
        elif name == "gpu_memory_utilization" and not torch.cuda.is_available():
            log.warning("gpu_memory_utilization=%s is not used without a GPU: device.kv_cache_memory is a CPU's", value)
        elif name in ONLY:
            if value != ONLY[name]:
                raise UserError(
                    f"{name}={value!r} is not taken: leave it out, and see overrides for what is there instead"
                )
        elif name in SETTINGS:
            if name in VALUES and value not in VALUES[name]:
                raise UserError(f"{name}={value!r} is not allowed: give one of {', '.join(VALUES[name])}")
            if value is not None:
                found.append(f"{SETTINGS[name]}={VALUES[name][value] if name in VALUES else value}")
        elif name not in UNUSED:
            known = [*SETTINGS, *ONLY, *UNUSED, "trust_remote_code"]
            raise UserError(f"argument {name} does not exist: {there_are(known, name)}")
    return found


def _check_quantization(name: str, run: RunConfig) -> None:
    """Raise UserError for a quantisation that is not the checkpoint's."""
    checkpoint = open_source(run.model).checkpoint
    config = checkpoint.config.raw("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    if checkpoint.path.suffix == ".gguf":
        method = "gguf"
    if name.lower().removesuffix("_marlin").replace("_", "-") != str(method).replace("_", "-"):
        has = f"has {method}" if method else "is not quantised: give overrides=['quant=int4'] to quantise it"
        raise UserError(f"quantization={name!r} contradicts the checkpoint {run.model.path}, which {has}")
