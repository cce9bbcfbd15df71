"""The settings of the decoder that the chat format of an answer needs."""

from typing import Any

from models.chat.description import ChatFormat
from models.tokenizers.base import Tokenizer, Tool
from pipelines.server.api.call_rules import Literals
from pipelines.server.api.chat_format import ServedFormat
from pipelines.server.api.requests import ChatRequest, NamedTool
from pipelines.server.api.settings import guide_of, thinking_setting
from pipelines.server.api.tool_guides import after_reasoning, tool_guide


def answer_settings(
    request: ChatRequest,
    tokenizer: Tokenizer,
    served: ServedFormat,
    form: ChatFormat,
    tools: list[Tool],
    begun: str,
    num_calls: int,
) -> dict[str, Any]:
    """Return settings of DecodeConfig: kept tokens, stops, the grammar and the limit of reasoning.

    `form`: the answer's format, without calls if no tools may be called. `begun`: see AnswerReader. `num_calls`: number
    of calls in the conversation. Raises ApiError (400) with the field to blame.
    """
    settings: dict[str, Any] = {}
    if any(special in literal for special in tokenizer.special_texts for literal in form.literals):
        settings["skip_special_tokens"] = False
    stops = [id for text in form.stops if (id := tokenizer.special_token_id(text)) is not None]
    if stops:
        settings["stop_token_ids"] = sorted({*stops, *(request.stop_token_ids or [])})
    choice, guide = request.tool_choice, guide_of(request)
    is_required = choice == "required" or isinstance(choice, NamedTool)
    literal = Literals(tokenizer, form.literals)
    if tools and (guide or is_required or any(tool["function"].get("strict") for tool in tools)):
        named = choice.function.name if isinstance(choice, NamedTool) else None
        allowed = {i: tool for i, tool in enumerate(tools) if named in (None, tool["function"]["name"])}
        is_parallel = request.parallel_tool_calls is not False
        settings["guide"] = tool_guide(form, allowed, literal, is_required, is_parallel, begun, guide, num_calls)
    elif guide and (begun or form.answer or form.has_messages or _may_reason(form, tokenizer)):
        settings["guide"] = after_reasoning(guide, form, literal, begun)
    if request.thinking_token_budget is not None:
        settings["thinking"] = _thinking(request.thinking_token_budget, served, begun)
    return settings


def _may_reason(form: ChatFormat, tokenizer: Tokenizer) -> bool:
    """Return whether the model may begin reasoning by itself: it has a token for that."""
    return form.reasoning is not None and form.reasoning.open.strip() in tokenizer.control_texts


def _thinking(budget: int, served: ServedFormat, begun: str) -> dict[str, Any] | None:
    """Return the setting `thinking` of a request with a budget; None, no limit, for a format without reasoning."""
    span = served.form.reasoning
    if span is None:
        return None
    is_open = begun == span.open
    return thinking_setting(budget, span.open.strip(), span.close.strip(), is_open, served.form.limit_text or None)
