"""Chat formats for families that define them in code. Sources: their original tokenizers and model cards."""

import json
from typing import Any

LLAMA2 = """\
{%- set ns = namespace(system='') -%}
{%- for message in messages -%}
{%- if message.role == 'system' and loop.first -%}
{%- set ns.system = '<<SYS>>\n' + message.content | trim + '\n<</SYS>>\n\n' -%}
{%- elif message.role == 'user' -%}
{{- '<s>[INST] ' + ns.system + message.content | trim + ' [/INST]' -}}
{%- set ns.system = '' -%}
{%- elif message.role == 'assistant' -%}
{{- ' ' + message.content | trim + ' </s>' -}}
{%- else -%}
{{- raise_exception('the roles are system (first), user and assistant') -}}
{%- endif -%}
{%- endfor -%}
"""

TELECHAT = """\
{%- for message in messages -%}
{%- if message.role == 'user' -%}
{{- '<_user>' + message.content + '<_bot>' -}}
{%- elif message.role == 'assistant' -%}
{{- message.content + '<_end>' -}}
{%- else -%}
{{- raise_exception('the roles are user and assistant') -}}
{%- endif -%}
{%- endfor -%}
"""
"""The format of modeling_telechat.py, which has no system message. Most TeleChat2 checkpoints have a template."""

CHATGLM3_TOOLS = "Answer the following questions as best as you can. You have access to the following tools:"
"""Beginning of a conversation with tools and without a system message."""


def chatglm3_messages(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return messages with tools as in ChatGLM3's repository.

    The system message lists the tools. Calls become Python code, and results become observations.
    """
    turns = [turn for message in messages for turn in _chatglm3_turns(message)]
    if tools:
        system = turns.pop(0)["content"] if turns and turns[0]["role"] == "system" else CHATGLM3_TOOLS
        listed = json.dumps([tool["function"] for tool in tools], indent=4, ensure_ascii=False)
        turns.insert(0, {"role": "system", "content": f"{system}\n{listed}"})
    return turns


def _chatglm3_turns(message: dict[str, Any]) -> list[dict[str, Any]]:
    if message["role"] == "tool":
        return [message | {"role": "observation"}]
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    text_turns = (
        [{"role": message["role"], "content": message["content"]}] if message.get("content") or not calls else []
    )
    return text_turns + [
        {
            "role": "assistant",
            "metadata": call["name"],
            "content": f"```python\ntool_call({', '.join(f'{name}={value!r}' for name, value in call['arguments'].items())})\n```",
        }
        for call in calls
    ]
