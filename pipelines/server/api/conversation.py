"""Converts messages and tools of requests to token ids, and texts of answers to messages. Without torch."""

import asyncio
import hashlib
import itertools
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import UserError
from conf.schema import ModelConfig
from conf.serving import ServeConfig
from models.formats import open_tokenizer
from models.formats.hub import find_checkpoint, find_tokenizer
from models.tokenizers.answers import FORMATS, AnswerFormat, AnswerReader, Content, Part, Reasoning, Region
from models.tokenizers.base import Message, Tokenizer, Tool, TooLong, UnreadArgument
from models.tokenizers.template_files import read_template
from pipelines.server.api.errors import bad_request, too_long
from pipelines.server.api.reasoning import with_effort
from pipelines.server.api.requests import ChatRequest, NamedTool, check_depth
from pipelines.server.api.settings import guide_of
from pipelines.server.api.system_turns import SystemTurns
from pipelines.server.api.tool_guides import CALL_TOKENS, Literals, after_reasoning, tool_guide

NUM_THREADS = max(2, os.cpu_count() or 2)
LONG_TEXT = 256 << 10  # characters; encoding takes 0.3 s
CALL_ID_LENGTH = 9  # Mistral's templates require it

T = TypeVar("T")


class ChatPrompt:
    """The prompt of a chat request, and the parser settings of its answers."""

    def __init__(
        self,
        text: str,
        token_ids: list[int],
        settings: dict[str, Any],
        form: AnswerFormat,
        tool_names: list[str],
        reasons: bool,
        dropped: list[str],
    ) -> None:
        """`reasons`: whether the prompt ends where reasoning begins. `dropped`: see AnswerReader."""
        self._dropped = dropped
        self.text = text
        self.token_ids = token_ids
        self.settings = settings
        """DecodeConfig settings that the tools and the reasoning require."""
        self.warnings: list[str] = []
        """Fields of the request that the chat template cannot honour."""
        self._form, self._tool_names, self._reasons = form, tool_names, reasons
        self._digest = hashlib.sha256(json.dumps(token_ids).encode()).hexdigest()
        self._samples = itertools.count()

    def reader(self) -> "MessageReader":
        """Return a parser for the answer of the next sample."""
        reader = AnswerReader(self._form, self._tool_names, self._reasons, self._dropped)
        return MessageReader(reader, f"{self._digest} {next(self._samples)}")


class MessageReader:
    """Splits the text of an answer into message deltas: content, reasoning_content and tool_calls."""

    def __init__(self, reader: AnswerReader, call_seed: str) -> None:
        """`call_seed`: source of the call ids. Repeated requests get the same ids."""
        self._reader = reader
        self._call_seed = call_seed
        self._num_calls = 0

    def read(self, text: str) -> list[dict[str, Any]]:
        """Return the deltas that the next piece of text completes."""
        return [self._delta(part) for part in self._reader.read(text)]

    def end(self) -> list[dict[str, Any]]:
        """Return the remaining deltas at the end of the answer."""
        return [self._delta(part) for part in self._reader.end()]

    def _delta(self, part: Part) -> dict[str, Any]:
        if isinstance(part, Content):
            return {"content": part.text}
        if isinstance(part, Reasoning):
            return {"reasoning_content": part.text}
        index, self._num_calls = self._num_calls, self._num_calls + 1
        digest = hashlib.sha256(f"{self._call_seed} {index}".encode()).hexdigest()[:CALL_ID_LENGTH]
        function = {"name": part.name, "arguments": part.arguments}
        return {"tool_calls": [{"index": index, "id": part.id or digest, "type": "function", "function": function}]}


class Chat:
    """Encodes conversations with a tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer | None, config: ServeConfig) -> None:
        """Raises UserError for a template that cannot be read, and for an unknown response_template."""
        self.tokenizer = tokenizer
        self._is_off = config.chat_template == "none"
        self._template = None if config.chat_template in ("auto", "none") else _read_template(config.chat_template)
        detected_format = tokenizer.answer_format(self._template) if tokenizer else "text"
        self._form = detected_format if config.response_template == "auto" else config.response_template
        self._system_turns = (
            SystemTurns(lambda messages: tokenizer.encode_messages(messages, self._template)[0]) if tokenizer else None
        )
        self._short, self._long = ThreadPoolExecutor(NUM_THREADS, "chat"), ThreadPoolExecutor(1, "long-chat")

    @classmethod
    def open(cls, model: ModelConfig, config: ServeConfig) -> "Chat":
        """Open the chat of a model. Raises UserError if its tokenizer cannot be read, and as __init__ does."""
        if model.tokenizer is None:
            return cls(None, config)
        if model.tokenizer:
            path = find_tokenizer(model.tokenizer, model.hub, model.revision)
        else:
            path = find_checkpoint(model.path, False, False, model.hub, model.revision)
        return cls(open_tokenizer(path), config)

    async def encode(self, request: ChatRequest, max_tokens: int | None = None) -> ChatPrompt:
        """Return a request's prompt, encoded in a thread. Raises ApiError (400) with the field to blame.

        `max_tokens`: a prompt that must have more tokens, because of its length, is rejected before encoding; None: no
        limit.
        """
        num_chars = len(request.model_dump_json(exclude_none=True))
        return await self.in_thread(num_chars, self.prompt, request, max_tokens)

    async def in_thread(self, num_chars: int, encode: Callable[..., T], *arguments: Any) -> T:
        """Run `encode` in a thread and return its result.

        Long texts share one thread, so that short texts never wait for them.
        """
        pool = self._long if num_chars > LONG_TEXT else self._short
        return await asyncio.get_running_loop().run_in_executor(pool, encode, *arguments)

    def close(self) -> None:
        for pool in (self._short, self._long):
            pool.shutdown(cancel_futures=True)

    def prompt(self, request: ChatRequest, max_tokens: int | None = None) -> ChatPrompt:
        """Return a request's prompt. `max_tokens`: as in `encode`. Raises ApiError (400) with the field to blame."""
        if self.tokenizer is None or self._is_off:
            setting = "model.tokenizer=null" if self.tokenizer is None else "serve.chat_template=none"
            raise bad_request(
                f"this server has {setting}, so it accepts no messages: send a prompt to /v1/completions", "messages"
            )
        if request.add_special_tokens:
            raise bad_request(
                "add_special_tokens=true is not allowed: the chat template writes these tokens", "add_special_tokens"
            )
        # The template gets the tools also with tool_choice=none. The choice only affects how the answer is parsed.
        tools = [tool.model_dump(exclude_none=True) for tool in request.tools or []]
        (text, token_ids), warnings = self._encoded(self.tokenizer, request, tools, max_tokens)
        form = FORMATS[self._form]
        reasons = any(not region.read_calls and _is_open(region, text, request) for region in form.regions)
        names = [tool["function"]["name"] for tool in tools] if request.tool_choice != "none" else []
        if names and not form.calls:
            message = "calls of tools in this model's format cannot be read: leave tools out, or give tool_choice=none"
            raise bad_request(message, "tools")
        settings = self._settings(request, tools if names else [], form if names else form.without_calls(), reasons)
        # Special tokens that mark calls stay in the text. All other special tokens, such as EOS, are dropped.
        special_texts = [] if settings.get("skip_special_tokens", True) else self.tokenizer.special_texts
        dropped = [
            text for text in special_texts if not any(text in literal for literal in form.literals + [*CALL_TOKENS])
        ]
        prompt = ChatPrompt(text, token_ids, settings, form, names, reasons, dropped)
        prompt.warnings = warnings
        return prompt

    def _encoded(
        self, tokenizer: Tokenizer, request: ChatRequest, tools: list[Tool], max_tokens: int | None
    ) -> tuple[tuple[str, list[int]], list[str]]:
        """Return text and token ids, and warnings."""
        arguments = dict(request.chat_template_kwargs or {})
        messages, moves = [self._message(message) for message in request.conversation()], list[str]()
        if self._system_turns is not None:
            messages, moves = self._system_turns.fitted(messages)

        def encode(effort: dict[str, Any]) -> tuple[str, list[int]]:
            return tokenizer.encode_messages(
                messages,
                self._template,
                tools=tools or None,
                template_arguments=arguments | effort,
                max_tokens=max_tokens,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
            )

        try:
            names = tokenizer.template_arguments(self._template, bool(tools)) if request.reasoning_effort else set()
            encoded, warnings = with_effort(encode, request.reasoning_effort, names - arguments.keys())
            return encoded, moves + warnings
        except TooLong as error:
            raise too_long(f"at least {error.num_tokens}", max_tokens, "messages") from error
        except UnreadArgument as error:
            field = error.name if error.name == "tools" else f"chat_template_kwargs.{error.name}"
            raise bad_request(str(error), field) from error
        except UserError as error:
            raise bad_request(str(error).replace("predict.chat_template", "serve.chat_template"), "messages") from error

    def _message(self, message: Message) -> Message:
        """Return a message for templates. Role developer becomes system, and call arguments become objects.

        DeepSeek's template takes call arguments as text.
        """
        if message["role"] == "developer":
            return message | {"role": "system"}
        if not message.get("tool_calls"):
            fields = {name: value for name, value in message.items() if name != "tool_calls"}
            return fields | ({"content": ""} if fields.get("content") is None else {})
        calls = []
        for call in message["tool_calls"]:
            text = call["function"]["arguments"] or "{}"
            arguments = text if self._form == "deepseek" else _arguments(text)
            calls.append(call | {"function": call["function"] | {"arguments": arguments}})
        return message | {"tool_calls": calls}

    def _settings(self, request: ChatRequest, tools: list[Tool], form: AnswerFormat, reasons: bool) -> dict[str, Any]:
        assert self.tokenizer
        settings: dict[str, Any] = {}
        special = {text: id for text in form.literals if (id := self.tokenizer.special_token_id(text)) is not None}
        if special and (tools or reasons):
            if request.skip_special_tokens:
                remedy = "the model's calls and reasoning are marked by such tokens: leave it out"
                raise bad_request(f"skip_special_tokens=true is not allowed here: {remedy}", "skip_special_tokens")
            settings["skip_special_tokens"] = False
        choice = request.tool_choice
        is_required = choice == "required" or isinstance(choice, NamedTool)
        is_strict = any(tool["function"].get("strict") for tool in tools)
        is_parallel = request.parallel_tool_calls is not False
        guide = guide_of(request)
        if tools and (is_required or is_strict or not is_parallel):
            if guide:
                raise bad_request(
                    "the answer's form is given twice: leave out response_format, or tool_choice and strict", "tools"
                )
            named = choice.function.name if isinstance(choice, NamedTool) else None
            allowed = {i: tool for i, tool in enumerate(tools) if named in (None, tool["function"]["name"])}
            literal = Literals(self.tokenizer)
            settings["guide"] = tool_guide(self._form, allowed, literal, is_required, is_parallel, reasons)
        elif guide and reasons:
            settings["guide"] = after_reasoning(guide)
        return settings


def _is_open(region: Region, text: str, request: ChatRequest) -> bool:
    """Return whether a prompt ends inside a region of the answer. A continued message may contain its opening."""
    if not request.continue_final_message:
        return text.rstrip().endswith(region.opening)
    begun = str(request.conversation()[-1].get("content"))
    closed = -1 if region.closing is None else begun.rfind(region.closing)
    return begun.rfind(region.opening) > closed


def _read_template(path: str) -> str:
    try:
        return read_template(Path(path).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"serve.chat_template={path} cannot be read ({error}): give auto, none or a Jinja file"
        ) from error


def _arguments(text: str) -> dict[str, Any] | str:
    """Return the JSON object in a text, or the text itself if a model wrote something else."""
    try:
        arguments = check_depth(json.loads(text))
    except (ValueError, RecursionError):
        return text
    return arguments if isinstance(arguments, dict) else text
