"""The interface of every tokenizer."""

import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import Any

from conf.errors import UserError
from models.tokenizers.control_tokens import ControlTokens
from models.tokenizers.prefill import cut_at_tag, tagged
from models.tokenizers.template_process import TemplateProcess

Message = dict[str, Any]
"""A message in the form of OpenAI's API: "role", "content" or "tool_calls", and other keys that templates read."""
Tool = dict[str, Any]
"""A tool: {"type": "function", "function": {"name", "description", "parameters"}}; the parameters are a JSON schema."""

GIVEN_BY_US = ("messages", "tools", "documents", "add_generation_prompt")
"""Template variables that a caller cannot set as arguments."""


class UnreadArgument(UserError):
    """Error for an argument that the template does not read. `name`: tools, or the argument's name."""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class TooLong(UserError):
    """Error for a conversation that exceeds the token limit, raised before it is encoded.

    `num_tokens`: a lower bound.
    """

    def __init__(self, num_tokens: int) -> None:
        super().__init__(f"the prompt has at least {num_tokens} tokens: shorten it")
        self.num_tokens = num_tokens


class Tokenizer(ABC):
    source: Path
    """Folder or file from which it was read."""
    size: int
    """Highest token id plus 1."""
    bos_token_id: int | None
    eos_token_id: int | None
    turn_end_ids: tuple[int, ...] = ()
    """Tokens besides EOS that end an answer in this family's conversations."""
    chat_template: str | None = None
    """Jinja source of the chat template; None if code writes conversations, or if there is no template."""
    tool_template: str | None = None
    """Jinja source for conversations with tools, if the checkpoint has a separate one."""
    template_names: tuple[str, ...] = ()
    """Names of the checkpoint's chat templates."""
    special_tokens: Mapping[str, str] = MappingProxyType({})
    """Texts of bos_token, eos_token and so on, for templates that use these names."""
    coded_chat_format: str | None = None
    """Name in `models.chat.entries` of the format that code, and no template, writes."""
    is_nfc: bool = False
    """Whether texts are normalised to NFC before tokenization."""

    def take_templates(self, templates: Mapping[str, str], default: str | None = None) -> None:
        """Set the chat templates from a checkpoint's templates by name.

        `default`: template to use if it has no "default".
        """
        self.chat_template, self.tool_template = templates.get("default", default), templates.get("tool_use")
        self.template_names = tuple(templates)

    @property
    def named_templates(self) -> dict[str, Any]:
        """The chat_template entry of tokenizer_config.json; empty if there is no template."""
        templates = {"default": self.chat_template, "tool_use": self.tool_template}
        named = [{"name": name, "template": template} for name, template in templates.items() if template]
        is_alone = [template["name"] for template in named] == ["default"]
        return {"chat_template": self.chat_template if is_alone else named} if named else {}

    @abstractmethod
    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    @abstractmethod
    def decode(self, token_ids: list[int], skip_special_tokens: bool) -> str:
        """Return the exact text of the tokens, without the clean-up of spaces that tokenizer settings may request."""

    @abstractmethod
    def token_bytes(self, id: int) -> bytes | None:
        """Return the bytes that a token adds after other tokens; they may be a part of a character.

        Returns None for special and unknown tokens, and for invalid ids. At the very beginning of a text, `decode` may
        omit a space. Raises UserError for a kind of tokenizer whose tokens have no fixed bytes.
        """

    @property
    def max_token_bytes(self) -> int | None:
        """Maximum bytes of a normalised text in one token; None if unbounded, for example if spaces are removed."""
        return None

    def least_tokens(self, text: str) -> int:
        """Return a lower bound of a text's token count without encoding it; 0 if there is no bound."""
        if (most := self.max_token_bytes) is None:
            return 0
        text = unicodedata.normalize("NFC", text) if self.is_nfc else text
        return -(-len(text.encode("utf-8", "replace")) // most)

    def runner_form(self) -> dict[str, Any]:
        """Return the tokenizer as data for another program: the content of `runner_form.RUNNER_TOKENIZER`.

        Raises UserError with the feature that the program does not support.
        """
        form, text = self._runner_form(), "a"  # the form first: it rejects dropout, which makes encoding random
        plain, complete = (self.encode(text, add_special_tokens=is_whole) for is_whole in (False, True))
        begin = next((i for i in range(len(complete)) if complete[i : i + len(plain)] == plain), None)
        if begin is None:
            raise UserError("its special tokens change the text between them")
        ends = {"begin": complete[:begin], "end": complete[begin + len(plain) :], "bos": self.bos_token_id}
        return form | ends

    def _runner_form(self) -> dict[str, Any]:
        """Return `runner_form` without the keys begin, end and bos."""
        raise UserError(f"it is of the kind {type(self).__name__.removesuffix('Tokenizer')}")

    def save(self, folder: Path) -> None:
        """Write files for `load_tokenizer` and transformers.

        Raises UserError for a tokenizer that was read from such files.
        """
        raise UserError(f"the tokenizer in {self.source} cannot be written in another form: copy its files")

    def encode_messages(
        self,
        messages: list[Message],
        template: str | None,
        add_generation_prompt: bool = True,
        tools: list[Tool] | None = None,
        template_arguments: Mapping[str, Any] | None = None,
        max_tokens: int | None = None,
        continue_final_message: bool = False,
    ) -> tuple[str, list[int]]:
        """Return a conversation as text and token ids.

        With `add_generation_prompt` it ends where the assistant's turn begins. With `continue_final_message` it ends
        with the text of the last message instead. Text in messages, tools and arguments never becomes a control token:
        "<|im_end|>" from a user stays text.

        `template`: Jinja source; None: the tokenizer's own. `template_arguments`: other template variables, such as
        enable_thinking. `max_tokens`: limit of the conversation; None: no limit.

        Raises UserError if there is no template or the template rejects the messages, UnreadArgument if the template
        does not read the tools or an argument, and TooLong if the users' texts or the whole text certainly exceed the
        limit.
        """
        if max_tokens is not None and template is None:
            self._check_length(_users_texts(messages), max_tokens)
        arguments = dict(template_arguments or {})
        template = self._template_for(template, bool(tools))
        if template is None:
            token_ids = self._in_own_format(
                messages, add_generation_prompt and not continue_final_message, tools, arguments
            )
            return self.decode(token_ids, skip_special_tokens=False), token_ids
        if tools or arguments:
            self._check_reads(template, tools, arguments)
        marks = ControlTokens.of(self._control_names, template).marks([messages, tools, arguments])
        if marks:
            messages = [marks.put(message, message.get("role") == "assistant") for message in messages]
            tools, arguments = marks.put(tools), marks.put(arguments)
        begins = add_generation_prompt and not continue_final_message
        rendered = tagged(messages) if continue_final_message else messages
        text = self._templates.render(template, rendered, self.special_tokens, begins, tools or None, arguments)
        if continue_final_message:
            text = cut_at_tag(text, messages)
        if max_tokens is not None:
            self._check_length(text, max_tokens)
        if not marks:
            return text, self.encode(text, add_special_tokens=False)  # the template has written BOS if necessary
        parts = marks.split(text)
        return "".join(parts), self._encode_parts(parts)

    def rendered(
        self,
        template: str,
        messages: list[Message],
        tools: list[Tool] | None,
        add_generation_prompt: bool,
        template_arguments: Mapping[str, Any],
    ) -> str:
        """Return a conversation as its template writes it. Raises UserError if the template rejects it."""
        return self._templates.render(
            template, messages, self.special_tokens, add_generation_prompt, tools, template_arguments
        )

    def template_variables(self, template: str) -> frozenset[str]:
        """Return the variables of a template that arguments can set. Raises UserError for invalid Jinja."""
        return self._templates.names(template) - {*GIVEN_BY_US, *self.special_tokens}

    def _template_for(self, template: str | None, has_tools: bool) -> str | None:
        return template or (self.tool_template if has_tools else None) or self.chat_template

    def _check_length(self, text: str, max_tokens: int) -> None:
        if (least := self.least_tokens(text)) > max_tokens:
            raise TooLong(least)

    @property
    def control_texts(self) -> list[str]:
        """Texts that `encode` recognises as tokens."""
        return list(self._control_names)

    @property
    def special_texts(self) -> list[str]:
        """Texts of the special tokens that `encode` recognises."""
        return [name for name, is_special in self._control_names.items() if is_special]

    def special_token_id(self, text: str) -> int | None:
        """Return the id of the special token with this text; None if `encode` does not recognise it."""
        if not self._control_names.get(text):
            return None
        (id,) = self.encode(text, add_special_tokens=False)
        return id

    @property
    def _control_names(self) -> Mapping[str, bool]:
        """Texts that `encode` recognises as tokens, and whether each is special."""
        return {}

    def _encode_parts(self, parts: list[str]) -> list[int]:
        """Return the token ids of a text in parts. Every second part spells a control token and becomes plain text."""
        raise NotImplementedError

    @cached_property
    def _templates(self) -> TemplateProcess:
        return TemplateProcess()

    def _check_reads(self, template: str, tools: list[Tool] | None, arguments: Mapping[str, Any]) -> None:
        if tools and "tools" not in self._templates.names(template):
            raise UnreadArgument("tools", "the chat template reads no tools: leave them out, or give another template")
        for name in arguments:
            if name not in (names := self.template_variables(template)):
                open_names = ", ".join(sorted(names)) or "none"
                raise UnreadArgument(name, f"{name!r} is not an argument of the chat template, which has {open_names}")

    def _in_own_format(
        self,
        messages: list[Message],
        add_generation_prompt: bool,
        tools: list[Tool] | None,
        arguments: Mapping[str, Any],
    ) -> list[int]:
        own_format = f"the built-in format of the tokenizer in {self.source}"
        if not add_generation_prompt:
            problem = "always begins an answer, but the prompt must be the conversation alone"
            raise UserError(f"{own_format} {problem}: give prompts instead of messages")
        for name in arguments:
            raise UnreadArgument(name, f"{own_format} has no arguments, but {name!r} is given: leave it out")
        if tools or any(message.get("tool_calls") for message in messages):
            messages = self._with_tools(messages, tools or [])
        return self._own_format(messages)

    def _with_tools(self, messages: list[Message], tools: list[Tool]) -> list[Message]:
        """Return the messages with tools in the family's own format.

        Raises UnreadArgument if the format has no tools.
        """
        own_format = f"the built-in format of the tokenizer in {self.source}"
        raise UnreadArgument("tools", f"{own_format} has no tools: leave them out, or give predict.chat_template=PATH")

    def _own_format(self, messages: list[Message]) -> list[int]:
        """Return a conversation as token ids, as the family's own code writes it.

        Raises UserError for an unknown role.
        """
        names = f", but {', '.join(self.template_names)} by name" if self.template_names else ""
        raise UserError(
            f"the tokenizer in {self.source} has no chat template{names}: give predict.chat_template=PATH, or prompts instead of messages"
        )


def _users_texts(messages: list[Message]) -> str:
    """Return the users' texts, which a checkpoint's template always writes, without outer white space.

    A template may omit reasoning and outer white space.
    """
    texts = (message.get("content") for message in messages if message.get("role") == "user")
    return "".join(text.strip() for text in texts if isinstance(text, str))


def refuse_role(message: Message, known: str) -> UserError:
    return UserError(f"the chat template does not take these messages: role {message['role']!r} is none of {known}")
