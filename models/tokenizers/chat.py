"""Jinja chat templates for families whose own format is code. Sources: their original tokenizers and model cards."""

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
