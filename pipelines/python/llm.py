"""vLLM's offline API: a script of `vllm.LLM` runs with the import `from pipelines import LLM, SamplingParams`.

Names, defaults and results are vLLM's (docs.vllm.ai, LLM class). An unsupported argument raises an error that names it.
Nothing is ignored silently.
"""

import itertools
import threading
import time
from collections.abc import Iterable, Sequence
from contextlib import closing, nullcontext
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, cast

import torch

from conf.errors import UserError, shortened
from pipelines.engine import Engine, Output, Request
from pipelines.jobs import report
from pipelines.jobs.prompt_encoder import EncodedPrompt, PromptEncoder
from pipelines.jobs.prompts import PromptRow, parse_row
from pipelines.jobs.rows import RowRequest
from pipelines.jobs.text_generator import TextGenerator
from pipelines.loading.load_engine import load_engine
from pipelines.loading.memory import explained_out_of_memory
from pipelines.python.composing import compose_run
from pipelines.python.pooled_pipeline import EmbeddingPipeline
from pipelines.python.sampling_params import SamplingParams
from pipelines.python.vllm_arguments import check_quantization, run_settings
from pipelines.python.vllm_outputs import EmbeddingOutput, EmbeddingRequestOutput, RequestOutput, request_output

INPUTS = ("prompt", "prompt_token_ids", "messages")

Prompt = str | list[int] | dict[str, Any]


OWN_NAMES = {"max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens"}
"""Names in generation_config.json, and in vLLM."""
TASKS = {"auto": "auto", "generate": "generate", "embed": "pooling", "embedding": "pooling"}
"""Values of `task`, the argument that `runner` replaces in later versions of vLLM."""
DTYPES = {"half": "float16", "float": "float32"}
"""vLLM's own dtype names, and torch's."""
DEFAULT_SEQUENCES = 256  # vLLM's default maximum


class LLM:
    """An engine with the methods of vLLM's LLM.

    >>> LLM("tiny").generate("Once upon a time", SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text

    Concurrent calls from several threads run one after another.
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
        task: str = "auto",
        max_num_seqs: int | None = None,
        chat_template: str | Path | None = None,
        overrides: Iterable[str] = (),
        **arguments: Any,
    ) -> None:
        """Load the model.

        `model`: a folder, GGUF file, hub id or option of conf/model. `runner`: "pooling" for `embed`, else for
        `generate` and `chat`. `quantization`: the checkpoint's own method, such as awq. `chat_template`: the default of
        `chat`. `overrides`: our settings, as on the command line, such as quant=int8. The other arguments of vLLM are
        in pipelines/python/vllm_arguments.py.

        Raises UserError for an argument or value that is not supported, and if the model cannot be loaded.
        """
        runner = _executor(runner, task)
        settings, texts = run_settings(arguments)
        name = str(dtype).removeprefix("torch.")
        name = DTYPES.get(name, name)
        choices = {"task": "embed" if runner == "pooling" else "predict"}
        all_overrides = [*settings, *overrides]
        run = compose_run(model, choices, None if name == "auto" else name, tokenizer, all_overrides, texts)
        if run.predict.max_prompt_tokens is not None:
            raise UserError("predict.truncate is not used by LLM: give SamplingParams(truncate_prompt_tokens=N)")
        if quantization is not None:
            check_quantization(quantization, run.model)
        num_sequences = DEFAULT_SEQUENCES if max_num_seqs is None else max_num_seqs
        self._embedder = EmbeddingPipeline(run, batch_size=num_sequences) if runner == "pooling" else None
        self.engine: Engine = self._embedder.engine if self._embedder else load_engine(run, num_sequences)
        self._of_engine = {name: getattr(run.decode, name) for name in ("speculate", "speculation")}
        self._prefix_cache = run.decode.prefix_cache
        self._template = "auto" if chat_template is None else str(chat_template)
        self._seed = seed
        self._turn = threading.Lock()
        self._ids = itertools.count()

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the default settings of `generate`: the checkpoint's, else vLLM's."""
        known = {field.name for field in fields(SamplingParams)}
        defaults = {OWN_NAMES.get(name, name): value for name, value in self.engine.config.decode_defaults.items()}
        return SamplingParams(**{name: value for name, value in defaults.items() if name in known})

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

        `sampling_params`: one for all prompts, one for each, or None for the checkpoint's own. `lora_request`: a name
        in model.adapters. `prompt_token_ids`: the prompts, as in the first versions of vLLM. Raises UserError for the
        first invalid prompt, before any prompt runs.
        """
        if (prompts is None) == (prompt_token_ids is None):
            raise UserError("generate takes prompts or prompt_token_ids: give one of them")
        rows = _rows(cast(Any, prompt_token_ids if prompts is None else prompts))
        return self._generate(rows, sampling_params, use_tqdm, self._generator(lora_request))

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
        """Answer one conversation, or a list of conversations.

        `chat_template`: the path of a Jinja file; None: the default of this LLM.
        """
        conversations = messages if messages and isinstance(messages[0], list) else [messages]
        rows = [_row(index, {"messages": conversation}) for index, conversation in enumerate(conversations)]
        template = self._template if chat_template is None else str(chat_template)
        generator = self._generator(lora_request, template, add_generation_prompt)
        return self._generate(rows, sampling_params, use_tqdm, generator)

    def embed(self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = True) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt. Needs `runner="pooling"`."""
        if self._embedder is None:
            raise UserError('embed needs a model that was loaded for it: give runner="pooling" to LLM')
        rows = _rows(prompts)
        tokens = [self._generator().encoder.encode(row) for row in rows]
        vectors = self._embedder([{"prompt_token_ids": prompt.token_ids} for prompt in tokens])
        return [
            EmbeddingRequestOutput(str(next(self._ids)), prompt.token_ids, EmbeddingOutput(vector.tolist()))
            for prompt, vector in zip(tokens, vectors, strict=True)
        ]

    def _generator(
        self, adapter: str | None = None, template: str = "none", add_generation_prompt: bool = True
    ) -> TextGenerator:
        encoder = PromptEncoder(self.engine.tokenizer, True, template, add_generation_prompt)
        return TextGenerator(self.engine, encoder, adapter=adapter)

    def _generate(
        self,
        rows: list[PromptRow],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        use_tqdm: bool,
        generator: TextGenerator,
    ) -> list[RequestOutput]:
        if self._embedder is not None:
            raise UserError('generate and chat need a model that was loaded for them: leave runner="pooling" out')
        params = self._params_of(rows, sampling_params)
        with (
            self._turn,
            explained_out_of_memory(),
            report.progress_bar() if use_tqdm else nullcontext(report.NO_PROGRESS) as sink,
        ):
            row_requests = [self._ask(row, row_params, generator) for row, row_params in zip(rows, params, strict=True)]
            outputs = self._run([row_request.request for row_request in row_requests], sink)
        eos_token_ids, adapter = self.engine.config.eos_token_ids, generator.adapter
        return [
            request_output(
                row_request, output, self.engine.tokenizer if row_params.detokenize else None, eos_token_ids, adapter
            )
            for row_request, output, row_params in zip(row_requests, outputs, params, strict=True)
        ]

    def _params_of(
        self, rows: list[PromptRow], sampling_params: SamplingParams | Sequence[SamplingParams] | None
    ) -> list[SamplingParams]:
        if sampling_params is None or isinstance(sampling_params, SamplingParams):
            return [sampling_params or self.get_default_sampling_params()] * len(rows)
        if len(sampling_params) != len(rows):
            raise UserError(
                f"there are {len(sampling_params)} sampling_params for {len(rows)} prompts: give one, or one for each"
            )
        return list(sampling_params)

    def _ask(self, row: PromptRow, params: SamplingParams, generator: TextGenerator) -> RowRequest:
        decode = replace(params.decode(), **self._of_engine)
        decode = replace(decode, prefix_cache=decode.prefix_cache and self._prefix_cache)
        number = next(self._ids)
        seed = None if self._seed is None else self._seed + number  # every prompt of a script gets its own seed
        try:
            prompt = generator.encoder.encode(row)
            text = prompt.text if row.prompt_token_ids is None else None
            prompt = EncodedPrompt(text, params.truncated(prompt.token_ids, self.engine.config.context.num_tokens))
            return generator.request(replace(row, index=number), decode, seed, prompt=prompt)
        except UserError as error:
            raise UserError(f"prompt {row.index}: {error}") from error

    def _run(self, requests: list[Request], progress: report.ProgressSink) -> list[Output]:
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


def _rows(prompts: Prompt | Sequence[Prompt]) -> list[PromptRow]:
    is_single = isinstance(prompts, str | dict) or (bool(prompts) and isinstance(prompts[0], int))
    prompt_list: list[Any] = [prompts] if is_single else list(prompts)
    return [_row(index, prompt) for index, prompt in enumerate(prompt_list)]


def _row(index: int, prompt: Any) -> PromptRow:
    if isinstance(prompt, str):
        return PromptRow(index, prompt=prompt)
    values = {"prompt_token_ids": prompt} if isinstance(prompt, list) else prompt
    if not isinstance(values, dict) or len(values) != 1 or next(iter(values)) not in INPUTS:
        forms = 'a text, a list of token ids, or a dictionary with "prompt" or "prompt_token_ids"'
        raise UserError(f"prompt {index} is {shortened(repr(prompt))}: give {forms}")
    row = parse_row(index, values)
    if row.error is not None:
        raise UserError(f"prompt {index}: {row.error}")
    return row


def _executor(runner: str, task: str) -> str:
    if runner not in ("auto", "generate", "pooling"):
        raise UserError(f"runner={runner} is not allowed: give auto, generate or pooling")
    if task not in TASKS:
        raise UserError(f"task={task} is not taken: give generate or embed; pipeline('score') scores")
    named = {runner, TASKS[task]} - {"auto"}
    if len(named) > 1:
        raise UserError(f"task={task} contradicts runner={runner}: leave one of them out")
    return named.pop() if named else "auto"
