"""Requests of OpenAI's API with vLLM's extensions. Each field is honoured, or rejected by name. null means absent."""

from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from conf.decoding import MAX_BREAKER, MAX_BREAKERS, MAX_LIST
from pipelines.server.api.errors import bad_request, not_allowed
from pipelines.server.api.skipping import NotUsed, Skippable

MAX_SAMPLES = 8
MAX_PROMPTS = 64
MAX_TOKENS = 2**31 - 1
# Replaces top_p=0. The most likely token always has a higher probability, so only this token is kept.
LEAST_SHARE = 1e-9
MAX_FIELDS = 100  # of an object with known fields; without this limit each unknown field would cause a separate error
MAX_PARTS = 1024  # of a message content
MAX_DEPTH = 64  # of JSON whose schema is not known here
TEXTS_ONLY = "this server reads and writes only text: leave it out"
UNSUPPORTED = {
    "audio": TEXTS_ONLY,
    "dimensions": "vectors have all dimensions of the model: leave it out",
    "function_call": "give tool_choice",
    "functions": "give tools",
    "previous_response_id": "only /v1/responses continues a response: send the whole conversation",
    "conversation": "there are no conversation objects: send all items, or previous_response_id to /v1/responses",
    "prediction": "leave it out, or give the server decode.speculate",
    "suffix": "models here continue a text and fill no gaps: leave it out",
    "verbosity": "ask for it in a message",
    "web_search_options": "nothing is looked up: leave it out",
    "guided_json": "give structured_outputs",
    "guided_regex": "give structured_outputs",
    "guided_choice": "give structured_outputs",
    "guided_grammar": "give structured_outputs",
    "min_new_tokens": "give min_tokens",
    "max_new_tokens": "give max_tokens",
}
"""Fields of OpenAI or of other servers that are rejected, and the remedy."""

T = TypeVar("T")
Name: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
TokenId: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
TokenIds: TypeAlias = Annotated[list[TokenId], Field(max_length=MAX_LIST, fail_fast=True)]
NumTokens: TypeAlias = Annotated[int, Field(ge=0, le=MAX_TOKENS)]
Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]
TopP: TypeAlias = Annotated[float, Field(ge=0, le=1), AfterValidator(lambda share: share or LEAST_SHARE)]
Breaker: TypeAlias = Annotated[str, Field(min_length=1, max_length=MAX_BREAKER)]
StopText: TypeAlias = Annotated[str, Field(min_length=1, max_length=256)]
PromptIds: TypeAlias = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
Prompt: TypeAlias = str | list[int]
Prompts: TypeAlias = (
    str
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
    | PromptIds
    | Annotated[list[PromptIds], Field(min_length=1, max_length=MAX_PROMPTS, fail_fast=True)]
)


class Shape(BaseModel):
    """A JSON object with exact types and only known fields."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, values: Any) -> Any:
        """Drop unknown fields that are null. Clients send back whole messages with all fields of their classes."""
        if not isinstance(values, dict) or len(values) > MAX_FIELDS:
            return values
        return {name: value for name, value in values.items() if value is not None or name in cls.model_fields}

    @model_validator(mode="before")
    @classmethod
    def _check_size(cls, value: object) -> object:
        if isinstance(value, dict) and len(value) > MAX_FIELDS:
            raise PydanticCustomError("too_many_fields", f"Input should be an object of at most {MAX_FIELDS} fields")
        return value


class Body(Shape):
    """Base of the bodies of all routes."""

    path: ClassVar[str]
    """Path of the route, which is a POST route."""
    aliases: ClassVar[tuple[str, ...]] = ()
    """Further paths of the route."""
    names_model: ClassVar[bool] = False
    """Whether `model` must be given if the server has several models."""
    model: Name | None = None
    """None: the server's model."""


def check_depth(value: T) -> T:
    """Return JSON whose nesting recursive readers can handle. Raises ValueError for deeper nesting."""
    level: list[object] = [value]
    for _ in range(MAX_DEPTH + 1):
        inner = [container for container in level if isinstance(container, dict | list)]
        if not inner:
            return value
        level = [
            item for container in inner for item in (container.values() if isinstance(container, dict) else container)
        ]
    raise PydanticCustomError("too_deep", f"Input should be JSON of at most {MAX_DEPTH} levels")


Parts: TypeAlias = Annotated[list[T], Field(max_length=MAX_PARTS, fail_fast=True)]
Json: TypeAlias = Annotated[dict[str, Any], AfterValidator(check_depth)]
"""An object whose schema is not known here."""
Effort: TypeAlias = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]


class SkippedObject(Skippable, Shape):
    """An object that is left out of the request. Only its type is checked: a subclass lists the allowed types."""

    model_config = ConfigDict(extra="allow")

    @model_validator(mode="after")
    def _check_depth(self) -> "SkippedObject":
        check_depth(self.model_extra)
        return self


class StreamOptions(Shape):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: Literal[False] | None = None


class JsonSchema(Shape):
    name: Annotated[str, Field(min_length=1, max_length=64)]
    description: str | None = None
    json_schema: Json | None = Field(default=None, alias="schema")
    strict: bool | None = None


class TextFormat(Shape):
    type: Literal["text"]


class JsonObjectFormat(Shape):
    type: Literal["json_object"]


class JsonSchemaFormat(Shape):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormat: TypeAlias = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat,
    Field(discriminator="type"),
]


class StructuredOutputs(Shape):
    """Constraint on the answer's form. Exactly one field is set."""

    json_schema: Json | None = Field(default=None, alias="json")
    json_object: Literal[True] | None = None
    regex: str | None = None
    choice: Annotated[list[str], Field(min_length=1, max_length=MAX_LIST, fail_fast=True)] | None = None
    grammar: str | None = None

    @model_validator(mode="after")
    def _check_one_field(self) -> "StructuredOutputs":
        if len(constraints := self.model_dump(exclude_none=True)) != 1:
            names = ", ".join("json" if name == "json_schema" else name for name in constraints) or "none"
            message = f"structured_outputs has {names}: give one of json, json_object, regex, choice, grammar"
            raise bad_request(message, "structured_outputs")
        return self


class Sampling(Body):
    """Fields shared by all generation requests: OpenAI's settings, then vLLM's and llama.cpp's."""

    names_model = True

    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: TopP | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_LIST, fail_fast=True),
        ]
        | None
    ) = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16, fail_fast=True)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = None
    service_tier: Literal["auto", "default"] | None = None

    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_n_sigma: Annotated[float, Field(ge=-1, le=1000)] | None = None
    xtc_probability: Annotated[float, Field(ge=0, le=1)] | None = None
    xtc_threshold: Annotated[float, Field(ge=0, le=1)] | None = None
    dynatemp_range: Annotated[float, Field(ge=0, le=100)] | None = None
    dynatemp_exponent: Annotated[float, Field(gt=0, le=100)] | None = None
    dry_multiplier: Annotated[float, Field(ge=0, le=1000)] | None = None
    dry_base: Annotated[float, Field(ge=1, le=1000)] | None = None
    dry_allowed_length: NumTokens | None = None
    dry_penalty_last_n: Annotated[int, Field(ge=-1, le=MAX_TOKENS)] | None = None
    dry_sequence_breakers: Annotated[list[Breaker], Field(max_length=MAX_BREAKERS, fail_fast=True)] | None = None
    min_tokens: NumTokens | None = None
    stop_token_ids: TokenIds | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: Annotated[list[StopText], Field(max_length=MAX_LIST, fail_fast=True)] | None = None
    allowed_token_ids: TokenIds | None = None
    prompt_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    add_special_tokens: bool | None = None
    use_beam_search: bool | None = None
    length_penalty: Annotated[float, Field(ge=-10, le=10)] | None = None
    return_token_ids: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    response_format: ResponseFormat | None = None
    priority: Literal[0] | None = None

    @model_validator(mode="after")
    def _check_together(self) -> "Sampling":
        if self.temperature == 0 and (self.n or 1) > 1 and not self.use_beam_search:
            raise not_allowed("n", self.n, "with temperature=0, which gives the same text every time, give n=1")
        if self.stream_options is not None and not self.stream:
            raise bad_request("stream_options are for streams: give stream=true, or leave them out", "stream_options")
        if self.stream and self.prompt_logprobs is not None:
            message = "streams do not return prompt log probabilities: leave out stream, or prompt_logprobs"
            raise not_allowed("prompt_logprobs", self.prompt_logprobs, message)
        if self.length_penalty is not None and not self.use_beam_search:
            raise bad_request("length_penalty is for use_beam_search=true: give it, or leave it out", "length_penalty")
        if self.use_beam_search:
            self._check_beams()
        if self.structured_outputs is not None and self.response_format is not None:
            message = "structured_outputs and response_format both set the answer's format: give only one"
            raise bad_request(message, "structured_outputs")
        return self

    def _check_beams(self) -> None:
        if self.stream:
            raise not_allowed("stream", True, "beams have no single text that grows: leave out use_beam_search")
        if self.temperature:
            raise not_allowed("temperature", self.temperature, "with use_beam_search=true give 0, or leave it out")


class CacheControl(Shape):
    """A cache hint. It has no effect: the prefix cache works without it."""

    type: Literal["ephemeral"]
    ttl: Annotated[Literal["5m", "1h"] | None, NotUsed()] = None


class TextPart(Shape):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = None


Content: TypeAlias = str | Parts[TextPart]


class SystemMessage(Shape):
    role: Literal["system", "developer"]
    content: Content
    name: Name | None = None


class UserMessage(Shape):
    role: Literal["user"]
    content: Content
    name: Name | None = None


class FunctionCall(Shape):
    name: Name
    arguments: str
    """A JSON object as text, or other text that a model wrote instead."""


class ToolCall(Shape):
    id: Name
    type: Literal["function"]
    function: FunctionCall


class AssistantMessage(Shape):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """vLLM's name of `reasoning_content`."""
    refusal: str | None = None
    annotations: Annotated[Parts[Json] | None, NotUsed(unless=([],))] = None
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=128, fail_fast=True)] | None = None


class ToolMessage(Shape):
    role: Literal["tool"]
    content: Content
    tool_call_id: Name
    name: Name | None = None


Message: TypeAlias = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage,
    Field(discriminator="role"),
]


class Function(Shape):
    name: Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
    description: str | None = None
    parameters: Json | None = None
    strict: bool | None = None


class Tool(Shape):
    type: Literal["function"]
    function: Function


class NamedFunction(Shape):
    name: Name


class NamedTool(Shape):
    type: Literal["function"]
    function: NamedFunction


class ChatRequest(Sampling):
    """A conversation to continue."""

    path = "/v1/chat/completions"

    messages: Annotated[list[Message], Field(min_length=1, max_length=4096, fail_fast=True)]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_TOKENS)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    tools: Annotated[list[Tool], Field(max_length=128, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: Effort | None = None
    thinking_token_budget: NumTokens | None = None
    """Most tokens of reasoning. At this number the engine closes the reasoning."""
    chat_template_kwargs: Annotated[Json, Field(max_length=32)] | None = None
    add_generation_prompt: bool | None = None
    """Whether the prompt ends where an answer begins. The default is true without continue_final_message."""
    continue_final_message: bool | None = None
    """Whether the answer continues the text of the last message."""
    modalities: Annotated[list[Literal["text"]], Field(max_length=1)] | None = None
    store: Literal[False] | None = None
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=16, fail_fast=True),
        ]
        | None
    ) = None
    safety_identifier: Annotated[str, Field(max_length=512)] | None = None
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = None

    @model_validator(mode="after")
    def _check_chat(self) -> "ChatRequest":
        if self.max_completion_tokens and self.max_tokens and self.max_completion_tokens != self.max_tokens:
            message = (
                f"max_tokens={self.max_tokens} and max_completion_tokens={self.max_completion_tokens} differ: give one"
            )
            raise bad_request(message, "max_tokens")
        if self.continue_final_message and self.add_generation_prompt:
            message = "continue_final_message and add_generation_prompt are both true: give only one"
            raise bad_request(message, "continue_final_message")
        last = self.messages[-1]
        if self.continue_final_message and (last.content is None or getattr(last, "tool_calls", None)):
            message = (
                "the last message has calls or no text, so no answer can continue it: leave out continue_final_message"
            )
            raise bad_request(message, "messages")
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs is for logprobs=true: give it, or leave it out", "top_logprobs")
        if self.tool_choice not in (None, "none") and not self.tools and (self.tool_choice, self.tools) != ("auto", []):
            raise bad_request("tool_choice needs tools: give tools, or leave it out", "tool_choice")
        if isinstance(self.tool_choice, NamedTool):
            tool_names = [tool.function.name for tool in self.tools or []]
            if (name := self.tool_choice.function.name) not in tool_names:
                raise not_allowed("tool_choice", name, f"there are {', '.join(tool_names)}")
        return self

    def conversation(self) -> list[dict[str, Any]]:
        """Return the messages for chat templates. Content parts are joined by line breaks; null fields are dropped."""
        messages = [message.model_dump(exclude_none=True, exclude={"annotations"}) for message in self.messages]
        for message in messages:
            if (reasoning := message.pop("reasoning", None)) is not None:
                message.setdefault("reasoning_content", reasoning)
            if isinstance(message.get("content"), list):
                message["content"] = "\n".join(part["text"] for part in message["content"])
        return messages


class CompletionRequest(Sampling):
    """Prompts to continue."""

    path = "/v1/completions"

    prompt: Prompts
    max_tokens: NumTokens | None = None
    """0 is allowed only with echo: the prompt is scored and nothing is generated."""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    echo: bool | None = None
    best_of: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = None

    @model_validator(mode="after")
    def _check_completion(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            raise not_allowed("max_tokens", 0, "give a number above 0, or echo=true")
        if self.stream and self.echo and self.logprobs is not None:
            message = "streams do not return prompt log probabilities: leave out stream, echo or logprobs"
            raise not_allowed("echo", True, message)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise not_allowed(
                "best_of", self.best_of, f"all samples are answered: give n={self.n or 1}, or leave it out"
            )
        return self

    @property
    def prompts(self) -> list[Prompt]:
        """Return the prompts. Each is a text or token ids."""
        return listed_prompts(self.prompt)


def listed_prompts(prompts: Prompts) -> list[Prompt]:
    return [prompts] if isinstance(prompts, str) or isinstance(prompts[0], int) else list(prompts)
