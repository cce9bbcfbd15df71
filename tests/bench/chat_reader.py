"""Cost of reading answers: `python tests/bench/chat_reader.py model.path=FOLDER device=cpu`.

Prints by chat format the microseconds per token that the reader of answers takes, for an answer of reasoning, content
and a call with long arguments, in the tokens of the model; and the time per token of a decode with 16 streams.
Overrides: as for run.py.
"""

import argparse
import json
import statistics
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from conf.compose import compose_run_config
from conf.decoding import DecodeConfig
from conf.serving import ServeConfig
from models.chat.entries import entries
from models.chat.writer import Call, write_calls
from models.tokenizers import Tokenizer
from pipelines.engine import Engine
from pipelines.jobs.report import environment
from pipelines.loading.load_engine import load_engine
from pipelines.server.api.conversation import Chat
from pipelines.server.api.parsing import check_request
from pipelines.server.api.requests import ChatRequest

STREAMS, NEW_TOKENS = 16, 128
TOOL = {"type": "function", "function": {"name": "note", "parameters": {"properties": {"text": {"type": "string"}}}}}


def reader_us(tokenizer: Tokenizer, name: str, rounds: int) -> float:
    """Return the microseconds per token that the reader takes, as a median."""
    form = entries()[name].form
    assert form.calls
    words = "The sky is wide & blue, 天空 too. " * 20
    reasoning = f"{form.reasoning.open}{words}{form.reasoning.close}" if form.reasoning else ""
    ids = tokenizer.encode(reasoning + words + write_calls(form.calls, [Call("note", {"text": words * 4})]), False)
    template = "{% if tools %}{% endif %}{{ messages[0].content }}"
    chat = Chat(tokenizer, ServeConfig(response_template=name))
    chat._template = template
    body = {"model": "m", "messages": [{"role": "user", "content": "Hi"}], "tools": [TOOL]}
    prompt = chat.prompt(check_request(ChatRequest, body))
    pieces = [(tokenizer.decode([id], skip_special_tokens=False), [id]) for id in ids]
    times = []
    for _ in range(rounds):
        reader, start = prompt.reader(), time.perf_counter()
        for text, token_ids in pieces:
            reader.read(text, token_ids)
        reader.end()
        times.append((time.perf_counter() - start) / len(pieces) * 1e6)
    chat.close()
    return round(statistics.median(times), 2)


def decode_us(engine: Engine) -> float:
    """Return the microseconds per token of a decode with STREAMS streams."""
    decode = DecodeConfig(max_new_tokens=NEW_TOKENS, ignore_eos=True)
    requests = [engine.request(i, [100 + i] * 16, decode) for i in range(STREAMS)]
    start = time.perf_counter()
    list(engine.generate(requests))
    return round((time.perf_counter() - start) / (STREAMS * NEW_TOKENS) * 1e6, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("overrides", nargs="*")
    args = parser.parse_args()
    engine = load_engine(compose_run_config(args.overrides), STREAMS)
    assert engine.tokenizer
    engine_us = statistics.median([decode_us(engine) for _ in range(4)][1:])
    rows: dict[str, Any] = {
        name: reader_us(engine.tokenizer, name, args.rounds)
        for name, entry in entries().items()
        if entry.form.calls and name != "chatglm3"
    }
    about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
    worst = max(rows.values())
    shares = {"decode_us_per_token": engine_us, "worst_share": round(worst / engine_us, 4)}
    print(json.dumps({**about, "overrides": args.overrides, "streams": STREAMS, **shares, "reader_us": rows}, indent=2))


if __name__ == "__main__":
    main()
