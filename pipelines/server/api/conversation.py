"""Converts messages and tools of requests to token ids. Without torch."""

import asyncio
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from conf.errors import UserError
from conf.schema import ModelConfig
from conf.serving import ServeConfig
from models.chat.calls import Tools
from models.chat.description import ChatFormat
from models.formats import open_tokenizer
from models.formats.hub import find_checkpoint, find_tokenizer
from models.tokenizers.base import Tokenizer, Tool, TooLong, UnreadArgument
from models.tokenizers.template_files import read_template
from pipelines.server.api.answer_settings import answer_settings
from pipelines.server.api.chat_format import ServedFormat, configured_format, served_format
from pipelines.server.api.chat_prompt import ChatPrompt
from pipelines.server.api.errors import bad_request, too_long
from pipelines.server.api.requests import ChatRequest
from pipelines.server.api.system_turns import SystemTurns

NUM_THREADS = max(2, os.cpu_count() or 2)
LONG_TEXT = 256 << 10  # characters; encoding takes 0.3 s

T = TypeVar("T")


class Chat:
    """Encodes conversations with a tokenizer and its chat template."""

    def __init__(self, tokenizer: Tokenizer | None, config: ServeConfig) -> None:
        """Raises UserError for a template that cannot be read, and for an unknown response_template."""
        self.tokenizer = tokenizer
        self._is_off = config.chat_template == "none"
        self._template = None if config.chat_template in ("auto", "none") else _read_template(config.chat_template)
        self._setting = config.response_template
        if self._setting != "auto":
            configured_format(self._setting)  # a wrong value ends the start
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

    @cached_property
    def format(self) -> ServedFormat:
        """The model's chat format. The first use probes the template."""
        return served_format(self.tokenizer, self._template, self._setting)

    def prepare(self) -> None:
        """Find the chat format in a thread, so that the first request does not wait for it."""
        self._short.submit(lambda: self.format)

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
        text, token_ids, warnings = self._encoded(self.tokenizer, request, tools, max_tokens)
        offered = tools if request.tool_choice != "none" else []
        if offered and not self.format.form.calls:
            message = f"this model's calls of tools cannot be read ({self.format.reason})"
            raise bad_request(f"{message}: leave tools out, or give tool_choice=none", "tools")
        form = self.format.form if offered else self.format.form.without_calls()
        begun = _begun(form, text, request)
        num_calls = sum(len(getattr(message, "tool_calls", None) or []) for message in request.messages)
        settings = answer_settings(request, self.tokenizer, self.format, form, offered, begun, num_calls)
        # Special tokens of the format stay in the text. All others, such as EOS, are dropped.
        special_texts = [] if request.skip_special_tokens is False else self.tokenizer.special_texts
        dropped = [text for text in special_texts if not any(text in literal for literal in form.literals)]
        max_calls = 1 if request.parallel_tool_calls is False else None
        parameters = {tool["function"]["name"]: tool["function"].get("parameters") for tool in offered}
        callable_tools = Tools(parameters, max_calls) if offered else None
        prompt = ChatPrompt(
            text, token_ids, settings, form, callable_tools, begun, dropped, self.format.vocabulary, num_calls
        )
        prompt.warnings = warnings
        if request.thinking_token_budget is not None and self.format.form.reasoning is None:
            reason = f"this model's format ({self.format.name}) has no reasoning"
            prompt.warnings.append(f"thinking_token_budget is not used: {reason}")
        return prompt

    def _encoded(
        self, tokenizer: Tokenizer, request: ChatRequest, tools: list[Tool], max_tokens: int | None
    ) -> tuple[str, list[int], list[str]]:
        """Return text, token ids and warnings."""
        arguments = dict(request.chat_template_kwargs or {})
        messages, warnings = self.format.messages(request.conversation()), list[str]()
        if self._system_turns is not None:
            messages, warnings = self._system_turns.fitted(messages)
        if request.reasoning_effort:
            effort, more = self.format.effort_arguments(request.reasoning_effort)
            arguments, warnings = {**effort, **arguments}, warnings + more
        try:
            text, token_ids = tokenizer.encode_messages(
                messages,
                self._template,
                tools=tools or None,
                template_arguments=arguments,
                max_tokens=max_tokens,
                add_generation_prompt=request.add_generation_prompt is not False,
                continue_final_message=bool(request.continue_final_message),
            )
            return text, token_ids, warnings
        except TooLong as error:
            raise too_long(f"at least {error.num_tokens}", max_tokens, "messages") from error
        except UnreadArgument as error:
            field = error.name if error.name == "tools" else f"chat_template_kwargs.{error.name}"
            raise bad_request(str(error), field) from error
        except UserError as error:
            raise bad_request(str(error).replace("predict.chat_template", "serve.chat_template"), "messages") from error


def _begun(form: ChatFormat, text: str, request: ChatRequest) -> str:
    """Return the literal with which a prompt begins the answer. A continued message may leave reasoning open."""
    if request.continue_final_message and form.reasoning:
        content = str(request.conversation()[-1].get("content"))
        open, close = (literal.strip() for literal in form.reasoning)
        return form.reasoning.open if open and content.rfind(open) > content.rfind(close) else ""
    return form.begun(text)


def _read_template(path: str) -> str:
    try:
        return read_template(Path(path).expanduser())
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"serve.chat_template={path} cannot be read ({error}): give auto, none or a Jinja file"
        ) from error
