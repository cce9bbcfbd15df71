"""The schemas of answers in /openapi.json. A field with a default may be absent."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from pipelines.server.api.requests import ToolCall

Count = Annotated[int, Field(ge=0)]
Finish = Literal["stop", "length"]


class AnswerShape(BaseModel):
    """A JSON object without additional fields."""

    model_config = ConfigDict(extra="forbid")


class Status(AnswerShape):
    status: Literal["ok", "ready"]


class Version(AnswerShape):
    version: str


class ModelChatFormat(AnswerShape):
    """How the model's answers are read."""

    name: str
    origin: Literal["config", "entry", "probe", "refused"]
    reason: str | None
    """Why tools are refused."""


class Model(AnswerShape):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    """The folder of an adapter as it was given; else the model itself, or the base model of a soft prefix."""
    parent: str | None
    """The base model of an adapter or soft prefix."""
    max_model_len: Count
    context_length: Count
    """Equal to `max_model_len`. Clients read one of the two."""
    chat_format: ModelChatFormat


class Models(AnswerShape):
    object: Literal["list"]
    data: list[Model]


class AnthropicModel(AnswerShape):
    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    max_input_tokens: Count
    max_tokens: Count


class AnthropicModels(AnswerShape):
    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CachedTokens(AnswerShape):
    cached_tokens: Count


class ReasoningTokens(AnswerShape):
    reasoning_tokens: Count


class Usage(AnswerShape):
    prompt_tokens: Count
    completion_tokens: Count
    total_tokens: Count
    prompt_tokens_details: CachedTokens
    completion_tokens_details: ReasoningTokens = ReasoningTokens(reasoning_tokens=0)


class PromptLogprob(AnswerShape):
    logprob: float
    rank: Annotated[int, Field(ge=1)]
    decoded_token: str


PromptLogprobs = list[dict[str, PromptLogprob] | None]
"""By token id; None for the first token."""


class Generated(AnswerShape):
    """Fields shared by answers of chats and completions."""

    id: str
    created: int
    model: str
    seed: int
    system_fingerprint: str | None
    usage: Usage


class ChatMessage(AnswerShape):
    role: Literal["assistant"]
    content: str | None
    refusal: None
    reasoning_content: str = ""
    tool_calls: list[ToolCall] = []


class TokenLogprob(AnswerShape):
    token: str
    logprob: float
    bytes: list[Annotated[int, Field(ge=0, le=255)]]


class StepLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class ChatLogprobs(AnswerShape):
    content: list[StepLogprob]
    refusal: None


class ChatChoice(AnswerShape):
    index: Count
    message: ChatMessage
    logprobs: ChatLogprobs | None
    finish_reason: Finish | Literal["tool_calls"]
    stop_reason: str | int | None
    token_ids: list[Count] = []


class ChatAnswer(Generated):
    object: Literal["chat.completion"]
    choices: list[ChatChoice]
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: list[Count] = []


class TextLogprobs(AnswerShape):
    tokens: list[str]
    token_logprobs: list[float | None]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[Count]


class CompletionChoice(AnswerShape):
    index: Count
    text: str
    logprobs: TextLogprobs | None
    finish_reason: Finish
    stop_reason: str | int | None
    prompt_logprobs: PromptLogprobs = []
    prompt_token_ids: list[Count] = []
    token_ids: list[Count] = []


class CompletionAnswer(Generated):
    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class OutputText(AnswerShape):
    type: Literal["output_text"]
    text: str
    annotations: Annotated[list[Any], Field(max_length=0)]
    logprobs: Annotated[list[Any], Field(max_length=0)]


class OutputReasoningText(AnswerShape):
    type: Literal["reasoning_text"]
    text: str


class OutputMessage(AnswerShape):
    type: Literal["message"]
    id: str
    role: Literal["assistant"]
    status: Literal["completed", "incomplete"]
    content: list[OutputText]


class OutputReasoning(AnswerShape):
    type: Literal["reasoning"]
    id: str
    summary: Annotated[list[Any], Field(max_length=0)]
    status: Literal["completed", "incomplete"]
    content: list[OutputReasoningText]


class OutputCall(AnswerShape):
    type: Literal["function_call"]
    id: str
    call_id: str
    name: str
    arguments: str
    status: Literal["completed", "incomplete"]


class CacheTokens(CachedTokens):
    cache_write_tokens: Count


class ResponseUsage(AnswerShape):
    input_tokens: Count
    input_tokens_details: CacheTokens
    output_tokens: Count
    output_tokens_details: ReasoningTokens
    total_tokens: Count


class Incomplete(AnswerShape):
    reason: Literal["max_output_tokens"]


class ResponseError(AnswerShape):
    code: Literal["invalid_prompt", "rate_limit_exceeded", "server_error"]
    message: str


class ResponseAnswer(AnswerShape):
    """A response. Fields copied from the request have the request's schema."""

    id: str
    object: Literal["response"]
    created_at: int
    model: str
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    error: ResponseError | None
    incomplete_details: Incomplete | None
    output: list[OutputMessage | OutputReasoning | OutputCall]
    background: bool
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    truncation: Literal["disabled"]
    usage: ResponseUsage | None
    """None until the response is complete."""
    seed: int
    system_fingerprint: str | None
    instructions: str | None
    max_output_tokens: int | None
    temperature: float | None
    top_p: float | None
    metadata: dict[str, str] | None
    user: str | None


class ResponseDeleted(AnswerShape):
    id: str
    object: Literal["response"]
    deleted: Literal[True]


class TextContent(AnswerShape):
    type: Literal["text"]
    text: str


class Thinking(AnswerShape):
    type: Literal["thinking"]
    thinking: str
    signature: Literal[""]


class ToolUse(AnswerShape):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]


class MessageUsage(AnswerShape):
    input_tokens: Count
    cache_creation_input_tokens: Count
    cache_read_input_tokens: Count
    output_tokens: Count


class MessageAnswer(AnswerShape):
    """An Anthropic message, with the seed and the fingerprint of the answer."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[TextContent | Thinking | ToolUse]
    stop_reason: Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]
    stop_sequence: str | None
    seed: int
    system_fingerprint: str | None
    usage: MessageUsage


class Embedding(AnswerShape):
    object: Literal["embedding"]
    index: Count
    embedding: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class PromptUsage(AnswerShape):
    prompt_tokens: Count
    total_tokens: Count


class Embeddings(AnswerShape):
    object: Literal["list"]
    data: list[Embedding]
    model: str
    system_fingerprint: str | None
    usage: PromptUsage


class RankedText(AnswerShape):
    text: str


class Ranked(AnswerShape):
    index: Count
    """Position in the request's documents."""
    relevance_score: float
    document: RankedText = RankedText(text="")


class Ranking(AnswerShape):
    id: str
    model: str
    results: list[Ranked]
    """The highest score comes first."""
    usage: PromptUsage


class PairScore(AnswerShape):
    object: Literal["score"]
    index: Count
    score: float


class Scores(AnswerShape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PairScore]
    usage: PromptUsage


class Classified(AnswerShape):
    index: Count
    label: str
    """The label with the highest number."""
    probs: list[float]
    num_classes: Count


class Classes(AnswerShape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[Classified]
    usage: PromptUsage


class PooledOutput(AnswerShape):
    object: Literal["pooling"]
    index: Count
    data: list[float] | str
    """Numbers, or base64 of little-endian float32."""


class PooledOutputs(AnswerShape):
    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[PooledOutput]
    usage: PromptUsage


class Tokens(AnswerShape):
    count: Count
    max_model_len: Count
    tokens: list[Count]
    token_strs: list[str] | None


class InputTokens(AnswerShape):
    input_tokens: Count


class ResponseInputTokens(InputTokens):
    object: Literal["response.input_tokens"]


class Text(AnswerShape):
    prompt: str


class File(AnswerShape):
    id: str
    object: Literal["file"]
    filename: str
    purpose: Literal["batch", "batch_output"]
    bytes: Count
    created_at: int
    expires_at: int
    status: Literal["processed"]
    status_details: None


class Deleted(AnswerShape):
    id: str
    object: Literal["file"]
    deleted: Literal[True]


class Page(AnswerShape):
    object: Literal["list"]
    first_id: str | None
    last_id: str | None
    has_more: bool


class Files(Page):
    data: list[File]


class InputItems(Page):
    data: list[dict[str, Any]]
    """The items have the schema of the request's `input`, and each has an id."""


class LineCounts(AnswerShape):
    total: Count
    completed: Count
    failed: Count


class LineErrors(AnswerShape):
    object: Literal["list"]
    data: list[dict[str, Any]]


class BatchAnswer(AnswerShape):
    """A batch. Times are in seconds since 1970; None if the event has not happened."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: LineErrors | None
    input_file_id: str
    completion_window: Literal["24h"]
    status: Literal[
        "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
    ]
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    request_counts: LineCounts
    metadata: dict[str, str] | None


class Batches(Page):
    data: list[BatchAnswer]
