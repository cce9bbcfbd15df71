"""The Python face: the same composition and the same engine as `run.py`, without files."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

from conf.decoding import NEUTRAL, DecodeConfig
from conf.errors import UserError, there_are
from conf.schema import RunConfig
from pipelines.engine import Engine, Request
from pipelines.loading import load_engine
from pipelines.memory import explained_out_of_memory
from pipelines.prompts import EncodedPrompt, PromptEncoder, PromptRow, rows_from_python
from pipelines.streamers import Streamer

log = logging.getLogger(__name__)

SAMPLING_TEMPERATURE = 1.0  # for do_sample=True over a greedy config


def pipeline(
    task: str,
    model: str | Path = "tiny",
    quant: str = "none",
    decode: str = "greedy",
    device: str = "auto",
    parallel: str = "single",
    overrides: list[str] | None = None,
    **arguments: Any,
) -> "TextGenerationPipeline":
    """A pipeline by the names of the config's options.

    >>> pipe = pipeline("text_generation", model="tiny", decode="greedy", device="cpu")
    >>> pipe("Once upon a time", max_new_tokens=20)

    `model` is an option of conf/model or a folder; `overrides` are as on the command line; `arguments` are defaults for every
    call. Raises UserError, a ValueError, for an unknown task, option or argument, and for whatever is wrong with the model.
    """
    if task not in TASKS:
        raise UserError(f"task {task!r} does not exist: there are {', '.join(TASKS)}")
    from conf.compose import (  # here, so that an engine can be built where Hydra is not installed
        compose_run_config,
        options,
    )

    if isinstance(overrides, str):
        raise UserError(f"overrides={overrides!r} is one text: give a list of texts")
    choices = {"quant": quant, "decode": decode, "device": device, "parallel": parallel}
    for group, choice in choices.items():
        if choice not in options(group):
            raise UserError(f"{group}={choice} does not exist: {there_are(options(group), choice)}")
    path = None if str(model) in options("model") else str(model)
    if path is not None and "/" not in path and not Path(path).is_dir():
        raise UserError(f"model={path} is neither a folder nor an option: there are {', '.join(options('model'))}")
    names = [f"{group}={choice}" for group, choice in choices.items()] + ([] if path else [f"model={model}"])
    return TASKS[task](compose_run_config([*names, *(overrides or [])], model_path=path), **arguments)


class TextGenerationPipeline:
    """Prompts in, one dictionary per prompt out: `{'text_generation_text': [prompt and continuation]}`, with n or
    num_return_sequences several of them.

    `engine` runs token ids directly. Calls from several threads take turns.
    """

    def __init__(self, run: RunConfig, **arguments: Any) -> None:
        self.run = run
        self._defaults = _checked_arguments(arguments)
        _decode(run.decode, self._defaults, None)  # before the long wait
        with explained_out_of_memory():
            self.engine: Engine = load_engine(run, self._defaults.get("batch_size", run.predict.batch_size))
        self._suggested = self.engine.resolve(DecodeConfig()).temperature
        self._decode = _decode(run.decode, self._defaults, self._suggested)
        self.tokenizer = self.engine.tokenizer
        self._turn = threading.Lock()
        self._caller: int | None = None  # the thread whose turn it is

    def __call__(self, prompts: Any, **arguments: Any) -> list[dict[str, list[str]]]:
        """`prompts`: a text, a row as in a .jsonl (a dictionary), or a list of these.

        Arguments: every field of DecodeConfig; `do_sample`; `return_full_text` (False leaves the prompt out); `streamer`;
        `batch_size` (most sequences at once); `add_special_tokens`; `chat_template`. They beat those given to the constructor.
        Raises UserError for the first prompt that cannot be run, before any is.
        """
        streamer: Streamer | None = _checked_streamer({**self._defaults, **arguments}.get("streamer"))
        try:
            given = {**self._defaults, **_checked_arguments(arguments)}
            decode = _decode(self._decode, arguments, self._suggested)
            with self._own_turn(), explained_out_of_memory():
                results = self._generate(list(rows_from_python(prompts)), decode, given, streamer)
        except BaseException as error:
            if streamer:
                streamer.end(error)
            raise
        if streamer:
            streamer.end(None)
        return results

    @contextmanager
    def _own_turn(self) -> Iterator[None]:
        """Raises UserError where the turn is the thread's already, which would wait for itself for ever."""
        if self._caller == threading.get_ident():
            raise UserError("a streamer cannot call the pipeline that calls it: keep the text, and call afterwards")
        with self._turn:
            self._caller = threading.get_ident()
            try:
                yield
            finally:
                self._caller = None

    def _generate(
        self, rows: list[PromptRow], decode: DecodeConfig, given: dict[str, Any], streamer: Streamer | None
    ) -> list[dict[str, list[str]]]:
        settings = self.run.predict
        encoder = PromptEncoder(
            self.tokenizer,
            given.get("add_special_tokens", settings.add_special_tokens),
            str(given.get("chat_template", settings.chat_template)),
        )
        batch_size, most = given.get("batch_size"), self.engine.scheduler.max_num_requests
        if batch_size is not None and batch_size > most:
            raise UserError(f"batch_size={batch_size} is more than the {most} that this pipeline was made for")
        if self.tokenizer is None:
            raise UserError(
                "there is no tokenizer, so no text: use pipe.engine for token ids, or give model.tokenizer=PATH"
            )
        for name in ("logprobs", "prompt_logprobs"):
            if (value := getattr(decode, name)) is not None:
                raise UserError(f"{name}={value} has no place in this result: use pipe.engine, or task=predict")
        prepared = list(self._prepare(rows, encoder, decode, streamer))
        full_text = given.get("return_full_text", True)
        prefixes = {request.id: (prompt.text or "") if full_text else "" for prompt, request in prepared}
        if streamer:
            streamer.start(len(rows))
            for row, text in prefixes.items():
                if text and not streamer.skip_prompt:
                    streamer.put(row, text)
        texts: dict[int, list[str]] = {}
        for output in self.engine.generate((request for _, request in prepared), batch_size):
            row = output.request_id
            if output.error:
                raise output.error
            texts[row] = [prefixes[row] + (completion.text or "") for completion in output.completions]
            if streamer:
                streamer.end_row(row)
        return [{"text_generation_text": texts[row]} for row in range(len(rows))]

    def _prepare(
        self, rows: list[PromptRow], encoder: PromptEncoder, decode: DecodeConfig, streamer: Streamer | None
    ) -> Iterator[tuple[EncodedPrompt, Request]]:
        for row in rows:
            sink = (lambda text, index=row.index: streamer.put(index, text)) if streamer else None
            try:
                prompt = encoder.encode(row)
                yield prompt, self.engine.request(row.index, prompt.token_ids, decode.replaced(row.decode), sink)
            except UserError as error:
                raise UserError(f"prompt {row.index}: {error}") from error


TASKS = {"text_generation": TextGenerationPipeline}
DECODE_ARGUMENTS = tuple(field.name for field in fields(DecodeConfig))
OTHER_ARGUMENTS = ("do_sample", "return_full_text", "streamer", "batch_size", "add_special_tokens", "chat_template")


def _checked_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    if unknown := [name for name in arguments if name not in DECODE_ARGUMENTS + OTHER_ARGUMENTS]:
        names = DECODE_ARGUMENTS + OTHER_ARGUMENTS
        raise UserError(f"argument {unknown[0]} does not exist: {there_are(names, unknown[0])}")
    for name in ("do_sample", "return_full_text", "add_special_tokens"):
        if not isinstance(arguments.get(name, True), bool):
            raise UserError(f"{name}={arguments[name]!r} is neither True nor False")
    if not isinstance(arguments.get("chat_template", ""), str | Path):
        raise UserError(f"chat_template={arguments['chat_template']!r} is neither auto nor none nor a path")
    batch_size = arguments.get("batch_size", 1)
    if type(batch_size) is not int or batch_size < 1:
        raise UserError(f"batch_size={batch_size!r} is not a number above 0")
    return arguments


def _checked_streamer(streamer: Any) -> Any:
    if streamer is not None and (isinstance(streamer, type) or not hasattr(streamer, "end_row")):
        raise UserError(
            f"streamer={streamer!r} is no streamer: give TextStreamer(), TextIteratorStreamer() or one of your own"
        )
    return streamer


def _decode(base: DecodeConfig, given: dict[str, Any], suggested: float | None) -> DecodeConfig:
    """`suggested`: the temperature that the checkpoint samples with, if it says so."""
    values = {name: value for name, value in given.items() if name in DECODE_ARGUMENTS}
    do_sample = given.get("do_sample")
    if do_sample is False:
        if values.get("temperature"):  # no error, because such calls are written for transformers, which warns
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
