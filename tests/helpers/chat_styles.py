"""Chat templates of six styles, with answers that contain calls."""

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from conf.serving import ServeConfig
from models.tokenizers import Tokenizer, load_tokenizer
from pipelines.server.api.conversation import Chat
from tests.helpers.small_tokenizers import byte_level, save

CHATML = """\
{%- if tools %}{{- '<|im_start|>system\\n# Tools\\n' }}
{%- for tool in tools %}{{- tool | tojson + '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for m in messages %}
{%- if m.role == 'tool' %}{{- '<|im_start|>user\\n<tool_response>\\n' + m.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}{{- '<|im_start|>' + m.role + '\\n' }}
{%- set text = m.content or '' %}
{%- if m.role == 'assistant' and '</think>' in text %}{%- set text = text.split('</think>')[-1].lstrip('\\n') %}{%- endif %}
{%- if m.reasoning_content %}{{- '<think>' + m.reasoning_content + '</think>' }}{%- endif %}{{- text }}
{%- for call in m.tool_calls or [] %}{{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}{%- endif %}"""
LLAMA3 = """\
{{- bos_token }}{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if tools is not none %}{{- '<|start_header_id|>system<|end_header_id|>\\n\\n' }}
{%- for t in tools %}{{- t | tojson(indent=4) + '\\n\\n' }}{%- endfor %}{{- '<|eot_id|>' }}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- set call = m.tool_calls[0].function %}
{{- '{"name": "' + call.name + '", "parameters": ' }}{{- call.arguments | tojson + '}<|eot_id|>' }}
{%- elif m.role == 'tool' %}{{- '<|start_header_id|>ipython<|end_header_id|>\\n\\n' + m.content | tojson + '<|eot_id|>' }}
{%- else %}{{- '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}"""
MISTRAL = """\
{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.last %}
{{- '[AVAILABLE_TOOLS] ' + tools | tojson + '[/AVAILABLE_TOOLS]' }}{%- endif %}
{{- '[INST] ' + m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{- '[TOOL_CALLS] [' }}{%- for c in m.tool_calls %}{{- c.function | tojson }}{%- endfor %}{{- ']' + eos_token }}
{%- elif m.role == 'tool' %}{{- '[TOOL_RESULTS] {"content": ' + m.content | tojson }}
{{- ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{- ' ' + m.content + eos_token }}{%- endif %}{%- endfor %}"""
DEEPSEEK = """\
{{- bos_token }}{%- for m in messages %}
{%- if m.role == 'user' %}{{- '<｜User｜>' + m.content }}
{%- elif m.role == 'tool' %}{{- '<｜tool▁outputs▁begin｜>' + m.content + '<｜tool▁outputs▁end｜>' }}
{%- elif m.tool_calls %}{{- '<｜Assistant｜><｜tool▁calls▁begin｜>' }}
{%- for c in m.tool_calls %}{{- '<｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.function.name + '\\n```json\\n' }}
{{- c.function.arguments | tojson + '\\n```<｜tool▁call▁end｜>' }}{%- endfor %}{{- '<｜tool▁calls▁end｜>' + eos_token }}
{%- elif m.role == 'assistant' %}{{- '<｜Assistant｜>' + m.content.split('</think>')[-1] + eos_token }}
{%- else %}{{- m.content }}{%- endif %}{%- endfor %}
{%- if tools %}{{- tools | tojson }}{%- endif %}
{%- if add_generation_prompt %}{{- '<｜Assistant｜>' }}{%- endif %}"""
KIMI = """\
{%- if tools %}{{- '<|im_system|>tool_declare<|im_middle|>' + tools | tojson(separators=(',', ':')) + '<|im_end|>' }}{%- endif %}
{%- for m in messages %}{%- set name = m.name or m.role %}
{%- if m.role in ('user', 'assistant') %}{{- '<|im_' + m.role + '|>' + name + '<|im_middle|>' }}
{%- else %}{{- '<|im_system|>' + name + '<|im_middle|>' }}{%- endif %}
{%- if m.role == 'tool' %}{{- '## Return of ' + m.tool_call_id + '\\n' }}{%- endif %}{{- m.content or '' }}
{%- if m.tool_calls %}{{- '<|tool_calls_section_begin|>' }}{%- for c in m.tool_calls %}
{{- '<|tool_call_begin|>' + c.id + '<|tool_call_argument_begin|>' }}
{%- if c.function.arguments is string %}{{- c.function.arguments }}{%- else %}{{- c.function.arguments | tojson }}{%- endif %}
{{- '<|tool_call_end|>' }}{%- endfor %}{{- '<|tool_calls_section_end|>' }}{%- endif %}{{- '<|im_end|>' }}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_assistant|>assistant<|im_middle|>' }}{%- endif %}"""
GLM4 = """\
{{- '[gMASK]<sop>' }}{%- if tools %}{{- '<|system|>\\n' }}
{%- for t in tools %}{{- t.function.name + '\\n' + t.function | tojson(indent=4) }}
{%- endfor %}{%- endif %}
{%- for m in messages %}
{%- if m.tool_calls %}{%- for c in m.tool_calls %}
{{- '<|assistant|>' + c.function.name + '\\n' + c.function.arguments | tojson }}{%- endfor %}
{%- elif m.role == 'tool' %}{{- '<|observation|>\\n' + m.content }}
{%- else %}{{- '<|' + m.role + '|>\\n' + m.content }}{%- endif %}{%- endfor %}
{%- if add_generation_prompt %}{{- '<|assistant|>' }}{%- endif %}"""
STYLES = {  # template, special tokens, other added tokens
    "chatml": (
        CHATML,
        ["<|im_start|>", "<|im_end|>"],
        ["<tool_call>", "</tool_call>", "<tool_response>", "<think>", "</think>"],
    ),
    "llama3": (LLAMA3, ["<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|python_tag|>"], []),
    "mistral": (
        MISTRAL,
        ["[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"],
        [],
    ),
    "deepseek": (
        DEEPSEEK,
        ["<｜User｜>", "<｜Assistant｜>"],
        ["<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>", "</think>", "\n\n"],
    ),
    "kimi": (
        KIMI,
        ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"],
        [
            "<|tool_calls_section_begin|>",
            "<|tool_calls_section_end|>",
            "<|tool_call_begin|>",
            "<|tool_call_argument_begin|>",
            "<|tool_call_end|>",
        ],
    ),
    "glm4": (GLM4, ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"], []),
}


def written(folder: Path, style: str, backend: Backend) -> tuple[Tokenizer, Any]:
    template, special, added = STYLES[style]
    backend.add_tokens([AddedToken(token, normalized=False) for token in added])
    backend.add_special_tokens(special)
    save(backend, folder)
    file = folder / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    ours = load_tokenizer(folder)
    assert ours is not None
    return ours, AutoTokenizer.from_pretrained(folder, local_files_only=True)


WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
ARGUMENTS = '{"city": "北京"}'
CALLS = {  # answers with two calls, or with one if the family allows only one
    "chatml": f'<tool_call>\n{{"name": "weather", "arguments": {ARGUMENTS}}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>',
    "llama3": f'{{"name": "weather", "parameters": {ARGUMENTS}}}',
    "mistral": f'[TOOL_CALLS] [{{"name": "weather", "arguments": {ARGUMENTS}}}, {{"name": "clock", "arguments": {{}}}}]',
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>weather\n```json\n"
    f"{ARGUMENTS}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>clock\n```json\n{{}}\n```"
    "<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    "kimi": "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>"
    f"{ARGUMENTS}<|tool_call_end|><|tool_call_begin|>functions.clock:12<|tool_call_argument_begin|>{{}}<|tool_call_end|>"
    "<|tool_calls_section_end|>",
    "glm4": f"weather\n{ARGUMENTS}",
}


def chat_of(folder: Path, style: str, **serve: Any) -> tuple[Chat, Tokenizer]:
    tokenizer, _ = written(folder, style, byte_level())
    return Chat(tokenizer, ServeConfig(**serve)), tokenizer
