"""Shared by the tests of several clients: a template with tools for the bundled model, a tool, and the expected
texts."""

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from conf.decoding import DecodeConfig
from pipelines.engine import Engine
from pipelines.loading.load_engine import load_engine
from tests.helpers.serving import tiny_run

PROMPT = "Once upon a time"
QUESTION = "What is 3 + 4?"
TOOL_TEMPLATE = (
    "{{ bos_token }}{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content or '' }}{{ message.tool_calls | tojson if message.tool_calls else '' }}"
    "{{ message.tool_call_id or '' }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The bundled model's own template, extended by tools, calls and results."""


class Weather(BaseModel):
    """Tell the weather of a city."""

    model_config = ConfigDict(extra="forbid")
    city: Literal["Bern", "Rome"]


class Expected:
    """Texts of the bundled model, as task=predict generates them."""

    def __init__(self) -> None:
        self._engine: Engine = load_engine(tiny_run(), 4)

    def text(self, prompt: str | list[int], **decode: Any) -> str:
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        ids = tokenizer.encode(prompt, True) if isinstance(prompt, str) else prompt
        (output,) = self._engine.generate([self._engine.request(0, ids, DecodeConfig(**decode))])
        return output.completions[0].text or ""

    def answer(self, question: str, **decode: Any) -> str:
        """Return the answer to a question with the model's own template."""
        tokenizer = self._engine.tokenizer
        assert tokenizer is not None
        return self.text(tokenizer.encode_messages([{"role": "user", "content": question}], None)[1], **decode)
