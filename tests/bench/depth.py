"""How the error of a number format grows with depth: `python tests/bench/depth.py --text FILE model.path=FOLDER
device=cpu`.

For each layer: the error of the hidden states of the first tokens of FILE relative to the model in float32. Both are
root mean squares over tokens and channels. The first token is left out, because its hidden states are a thousand times
larger. The last row is the mean of KL(float32 || format) of the logits, in nats. The results are written to
tests/bench/results/depth.json.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from conf.compose import compose_run_config  # noqa: E402
from conf.decoding import DecodeConfig  # noqa: E402
from models.layers.norm import ResidualStream  # noqa: E402
from pipelines.engine.batch import build_batch  # noqa: E402
from pipelines.jobs.report import environment, write_atomically  # noqa: E402
from pipelines.loading.load_engine import load_engine  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "depth.json"
FORMATS: dict[str, list[str]] = {
    "bfloat16": ["model.dtype=bfloat16"],
    "int8": ["quant=int8"],
    "a8w8, rtn": ["quant=a8w8", "quant.method=rtn"],
    "a8w8": ["quant=a8w8"],
    "int4 g32, rtn": ["quant=int4", "quant.group_size=32"],
}


def streams(overrides: list[str], text: str, num_tokens: int) -> list[torch.Tensor]:
    """Return the hidden states [T, E] after each layer, and the logits [T, V], in float64."""
    engine = load_engine(compose_run_config(overrides), 1)
    assert engine.tokenizer is not None
    prompt = engine.tokenizer.encode(text, add_special_tokens=True)[:num_tokens]
    streams: list[torch.Tensor] = []

    def keep(module: torch.nn.Module, inputs: Any, output: Any) -> None:
        stream = output.total() if isinstance(output, ResidualStream) else output
        streams.append(stream.double().clone())

    for layer in engine.executor.model.layers:
        layer.register_forward_hook(keep)
    engine.add(engine.request(0, prompt, DecodeConfig(max_new_tokens=1, prefix_cache=False)))
    plan = engine.scheduler.plan()
    all_rows = plan._replace(scheduled=[plan.scheduled[0]._replace(num_outputs=len(prompt))])
    logits = engine.executor.execute(build_batch(all_rows, engine.block_size)).logits
    return [*streams, logits.double().clone()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--formats", nargs="+", default=[*FORMATS])
    parser.add_argument("overrides", nargs="+")
    args = parser.parse_args()
    text = args.text.read_text(encoding="utf-8")
    rows: dict[str, Any] = {}
    exact = streams(["model.dtype=float32", *args.overrides], text, args.tokens)
    for name in args.formats:
        *hidden, logits = streams(["model.dtype=float32", *args.overrides, *FORMATS[name]], text, args.tokens)
        errors = [((a - b)[1:].norm() / b[1:].norm()).item() for a, b in zip(hidden, exact[:-1], strict=True)]
        wanted = exact[-1].log_softmax(-1)
        kl = (wanted.exp() * (wanted - logits.log_softmax(-1))).sum(-1).mean().item()
        rows[name] = {"error_after_layer": [round(error, 5) for error in errors], "kl_mean": round(kl, 5)}
        print(f"{name}: {rows[name]}", flush=True)
    about = {"what": (__doc__ or "").splitlines()[0], "date": str(date.today()), "environment": environment()}
    about |= {"model": args.overrides, "num_tokens": args.tokens, "text": args.text.name}
    write_atomically(RESULTS, [json.dumps(about | {"rows": rows}, indent=1) + "\n"])


if __name__ == "__main__":
    main()
