"""Files of prompts."""

import json
from pathlib import Path

from pipelines.jobs.prompts import Prompts, read_prompts

HELLO = [{"role": "user", "content": "hi"}]


def write(folder: Path, name: str, content: str | bytes) -> str:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    return str(file)


def read_jsonl(folder: Path, *rows: object) -> Prompts:
    lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
    return read_prompts(write(folder, "prompts.jsonl", "".join(f"{line}\n" for line in lines)))
