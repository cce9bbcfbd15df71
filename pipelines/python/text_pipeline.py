"""The Python API for text generation: the same composition and engine as `run.py`, without files."""

import logging
import threading
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, overload

from conf.decoding import NEUTRAL, DecodeConfig
from conf.errors import UserError, list_known_names
from conf.schema import RunConfig
from pipelines.engine import Engine, Request
from pipelines.engine.request import Sink, TokenLogprobs
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import PromptRow, rows_from_python
from pipelines.jobs.rows import Row, RowRequest
from pipelines.jobs.text_generator import TextGenerator, whole_texts
from pipelines.loading.load_engine import load_engine
from pipelines.loading.memory import explained_out_of_memory
from pipelines.loading.model_source import OpenModel
from pipelines.python.streamers import Streamer

log = logging.getLogger(__name__)

Result = dict[str, Any]


class Prepared(NamedTuple):
    row_request: RowRequest
    texts: range
    """Indices of the texts of this prompt, counted over all prompts."""


SAMPLING_TEMPERATURE = 1.0  # for do_sample=True with a greedy config


class TextGenerationPipeline:
    """Continues prompts.

    Each result is `{'text_generation_text': [prompt and continuation]}`, with several texts if n or
    num_return_sequences is above 1.

    Sampled results have a `seed`. `logprobs` adds `token_ids` and `logprobs` of each text. `prompt_logprobs` adds
    `prompt_token_ids` and `prompt_logprobs`. `logprobs` and `prompt_logprobs` have an element for each token, except a
    prompt's first token. An element has, by token id, the logprob and the rank of the token and of the most likely
    tokens. `engine` runs token ids directly. Concurrent calls from several threads run one after another.
    """

    task = "predict"

    def __init__(self, run: RunConfig, open_model: OpenModel | None = None, **arguments: Any) -> None:
        """`open_model`: as for `load_engine`. `arguments`: defaults for every call."""
        self.run = run
        self._defaults = _checked_arguments(arguments)
        _decode(run.decode, self._defaults, None)  # fails before the model is loaded
        with explained_out_of_memory():
            self.engine: Engine = load_engine(
                run, self._defaults.get("batch_size", run.predict.batch_size), open_model=open_model
            )
        self._suggested = self.engine.requests.resolve(DecodeConfig()).temperature
        self._decode = _decode(run.decode, self._defaults, self._suggested)
        self.tokenizer = self.engine.tokenizer
        self._turn = threading.Lock()
        self._caller: int | None = None  # the thread that holds the lock

    def __repr__(self) -> str:
        engine, quant = self.engine, self.run.quant
        parts = {
            "model": self.run.model.path,
            "dtype": str(engine.dtype).removeprefix("torch."),
            "device": engine.device.type,
            "quant": quant.scheme.name,
            "kv_cache": quant.kv_cache.name,
            "weights": f"{engine.executor.weight_bytes / 1e6:,.1f} MB",
            "context": engine.config.context.num_tokens,
            "batch_size": engine.config.max_num_requests,
        }
        unset = vars(DecodeConfig())
        parts |= {name: v for name, v in vars(self._decode).items() if v not in (unset[name], NEUTRAL.get(name))}
        if "speculate" in parts:
            parts["speculate"] = self._decode.speculate.name
        if "speculation" in parts:
            parts["speculation"] = self._decode.speculation.changed()
        return f"TextGenerationPipeline({', '.join(f'{name}={value}' for name, value in parts.items())})"

    def __reduce__(self) -> NoReturn:
        remedy = "make one in each process, by pipeline(...) with the same arguments"
        raise UserError(
            f"a pipeline holds threads, memory and captured steps, which cannot be pickled or copied: {remedy}"
        )

    @overload
    def __call__(self, prompts: Iterator[Any], **arguments: Any) -> Iterator[Result]: ...

    @overload
    def __call__(self, prompts: Any, **arguments: Any) -> list[Result]: ...

    def __call__(self, prompts: Any, **arguments: Any) -> list[Result] | Iterator[Result]:
        """Continue the prompts, and return their results in order.

        `prompts`: a text; a conversation, `[{"role": "user", "content": "Hi"}, ...]`; a row as in a .jsonl (a
        dictionary); or a list of these. If `prompts` is a generator, the call returns an iterator of
        the results, in order. The generator is read when the engine has room, so memory stays constant.

        Arguments: every field of DecodeConfig; `do_sample`; `return_full_text` (False omits the prompt); `streamer`;
        `batch_size` (maximum concurrent sequences); `add_special_tokens`; `chat_template`; `prefix` and `adapter`
        (names, for prompts that set none). They override the constructor's arguments.

        Raises UserError for the first invalid prompt; for a list, before any prompt runs.
        """
        streamer: Streamer | None = _checked_streamer({**self._defaults, **arguments}.get("streamer"))
        try:
            call_arguments = {**self._defaults, **_checked_arguments(arguments)}
            decode = _decode(self._decode, arguments, self._suggested)
            results = self._results(prompts, decode, call_arguments, self._generator(call_arguments), streamer)
            if isinstance(prompts, Iterator):
                if streamer:
                    raise UserError("a streamer needs to know how many prompts there are: give a list, not a generator")
                return self._turn_by_turn(results)
            with self._own_turn(), explained_out_of_memory():
                all_results = list(results)
        except BaseException as error:
            if streamer:
                streamer.end(error)
            raise
        if streamer:
            streamer.end(None)
        return all_results

    def _turn_by_turn(self, results: Generator[Result, None, None]) -> Iterator[Result]:
        """Yield the results. Other calls may run between two results."""
        try:
            while True:
                with self._own_turn(), explained_out_of_memory():
                    result = next(results, None)
                if result is None:
                    return
                yield result
        finally:
            with self._own_turn():
                results.close()

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Hold the pipeline's lock. Raises UserError if this thread holds it already, which would be a deadlock."""
        if self._caller == threading.get_ident():
            other_calls = "nor can a generator of prompts"
            raise UserError(
                f"a streamer cannot call the pipeline that calls it: keep the text, and call afterwards; {other_calls}"
            )
        with self._turn:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None

    def _generator(self, call_arguments: dict[str, Any]) -> TextGenerator:
        batch_size, most = call_arguments.get("batch_size"), self.engine.config.max_num_requests
        if batch_size is not None and batch_size > most:
            limit = f"the {most} that this pipeline was made for"
            raise UserError(f"batch_size={batch_size} is more than {limit}: give fewer, or make it for more")
        if self.tokenizer is None:
            raise UserError(
                "there is no tokenizer, so no text: use pipe.engine for token ids, or give model.tokenizer=PATH"
            )
        settings = self.run.predict
        encoder = PromptEncoder(
            self.tokenizer,
            call_arguments.get("add_special_tokens", settings.add_special_tokens),
            str(call_arguments.get("chat_template", settings.chat_template)),
            truncate=settings.truncate,
            max_tokens=settings.max_prompt_tokens,
        )
        prefix, adapter = call_arguments.get("prefix", settings.prefix), call_arguments.get("adapter", settings.adapter)
        return TextGenerator(self.engine, encoder, prefix, adapter)

    def _results(
        self,
        prompts: Any,
        decode: DecodeConfig,
        call_arguments: dict[str, Any],
        generator: TextGenerator,
        streamer: Streamer | None,
    ) -> Generator[Result, None, None]:
        """Yield results in order.

        A generator's prompts are taken when the engine has room. A list is checked whole before it runs.
        """
        prepared: Iterable[Prepared] = _prepare(rows_from_python(prompts), generator, decode, streamer)
        if not isinstance(prompts, Iterator):
            prepared = list(prepared)
            if streamer:
                streamer.start(sum(len(prepared_row.texts) for prepared_row in prepared))
        full_text = call_arguments.get("return_full_text", True)
        running: dict[int, Prepared] = {}  # by row index

        def requests() -> Iterator[Request]:
            for prepared_row in prepared:
                running[prepared_row.row_request.request.id] = prepared_row
                yield prepared_row.row_request.request

        if streamer and full_text and not streamer.skip_prompt:
            for prepared_row in prepared:
                if text := prepared_row.row_request.prompt.text:
                    for number in prepared_row.texts:
                        streamer.put(number, text)
        finished: dict[int, Result] = {}  # results that wait for an earlier row
        next_row = 0
        with closing(self.engine.generate(requests(), call_arguments.get("batch_size"))) as outputs:
            for output in outputs:
                row = output.request_id
                if output.error:
                    raise output.error
                row_request, texts = running.pop(row)
                finished[row] = _result(generator.result(row_request, output), row_request.request, full_text)
                if streamer:
                    for number in texts:
                        streamer.end_row(number)
                while next_row in finished:
                    yield finished.pop(next_row)
                    next_row += 1


def _prepare(
    rows: Iterable[PromptRow], generator: TextGenerator, decode: DecodeConfig, streamer: Streamer | None
) -> Iterator[Prepared]:
    num_texts = 0
    for row in rows:
        sink = _sink(streamer, num_texts) if streamer else None
        try:
            row_request = generator.request(row, decode, sink=sink)
        except UserError as error:
            raise UserError(f"prompt {row.index}: {error}") from error
        first_text, num_texts = num_texts, num_texts + row_request.request.params.n
        yield Prepared(row_request, range(first_text, num_texts))


def _sink(streamer: Streamer, first_text: int) -> Sink:
    def put(sample: int, token_ids: list[int], text: str, logprobs: list[TokenLogprobs]) -> None:
        if text:
            streamer.put(first_text + sample, text)

    return put


def _result(row: Row, request: Request, full_text: bool) -> Result:
    completions = row.get("completions", [row])
    result: Result = {**whole_texts(row if full_text else {**row, "prompt": None})}
    if "seed" in row:
        result["seed"] = row["seed"]
    if "logprobs" in completions[0]:
        result |= {name: [completion[name] for completion in completions] for name in ("token_ids", "logprobs")}
    if "num_truncated_tokens" in row:
        result["num_truncated_tokens"] = row["num_truncated_tokens"]
    if "prompt_logprobs" in row:
        result |= {"prompt_token_ids": request.prompt_token_ids, "prompt_logprobs": row["prompt_logprobs"]}
    return result


DECODE_ARGUMENTS = tuple(field.name for field in fields(DecodeConfig))
OTHER_ARGUMENTS = (
    "do_sample",
    "return_full_text",
    "streamer",
    "batch_size",
    "add_special_tokens",
    "chat_template",
    "prefix",
    "adapter",
)


def _checked_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    if unknown := [name for name in arguments if name not in DECODE_ARGUMENTS + OTHER_ARGUMENTS]:
        names = DECODE_ARGUMENTS + OTHER_ARGUMENTS
        raise UserError(f"argument {unknown[0]} does not exist: {list_known_names(names, unknown[0])}")
    for name in ("do_sample", "return_full_text", "add_special_tokens"):
        if not isinstance(arguments.get(name, True), bool):
            raise UserError(f"{name}={arguments[name]!r} is not allowed: give True or False")
    if not isinstance(arguments.get("chat_template", ""), str | Path):
        raise UserError(f"chat_template={arguments['chat_template']!r} is not allowed: give auto, none or a path")
    if not isinstance(arguments.get("prefix"), str | None):
        raise UserError(f"prefix={arguments['prefix']!r} is not allowed: give a name of model.prefixes")
    if not isinstance(arguments.get("adapter", ""), str | None):
        raise UserError(f"adapter={arguments['adapter']!r} is not allowed: give a name of model.adapters")
    batch_size = arguments.get("batch_size", 1)
    if type(batch_size) is not int or batch_size < 1:
        raise UserError(f"batch_size={batch_size!r} is not allowed: give a number above 0")
    return arguments


def _checked_streamer(streamer: Any) -> Any:
    if streamer is not None and (isinstance(streamer, type) or not hasattr(streamer, "end_row")):
        raise UserError(
            f"streamer={streamer!r} is no streamer: give TextStreamer(), TextIteratorStreamer() or one of your own"
        )
    return streamer


def _decode(base: DecodeConfig, arguments: dict[str, Any], suggested: float | None) -> DecodeConfig:
    """Return the decode settings of a call. `suggested`: the checkpoint's sampling temperature, if it has one."""
    values = {name: value for name, value in arguments.items() if name in DECODE_ARGUMENTS}
    do_sample = arguments.get("do_sample")
    if do_sample is False:
        if values.get("temperature"):  # a warning, as in transformers, and not an error
            log.warning("do_sample=False makes no use of temperature=%s", values["temperature"])
        values["temperature"] = 0.0
    elif do_sample:
        if values.get("temperature") == 0:
            raise UserError("do_sample=True contradicts temperature=0, which is greedy: leave one of them out")
        for name in ("num_beams", "penalty_alpha"):
            if (value := values.get(name, getattr(base, name))) not in (None, NEUTRAL[name]):
                raise UserError(
                    f"do_sample=True contradicts {name}={value}, which does not sample: leave one of them out"
                )
        values.setdefault("temperature", base.temperature or suggested or SAMPLING_TEMPERATURE)
    return base.replaced(values)
