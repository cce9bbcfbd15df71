"""Seconds from a command to its first token, or to a finished quantised model: `python tests/bench/first_token.py
--folder FOLDER`.

Makes checkpoints of random bfloat16 weights in Llama's shapes under FOLDER, with the tokenizer of models/tiny, and
starts `run.py` for each row without any preparation: a calibrated model that a run kept is removed again. A row that
the result file already has is not measured again, so that an interrupted bench continues. `promised_s` is the estimate
that a calibrating run prints at its start. `--files` measures existing files instead, such as GGUF files: packed in this
run, and mapped from the packed file that an earlier run kept.
"""

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from models.formats.safetensors_writer import save_tensors  # noqa: E402
from pipelines.jobs.report import environment, write_atomically  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "first_token.json"
SHAPES = {  # hidden and feed-forward channels, layers, heads, key/value heads, vocabulary
    "small": (256, 768, 4, 4, 2, 4096),
    "1.1B": (2048, 5632, 22, 32, 4, 32000),
    "7B": (4096, 11008, 32, 32, 32, 32000),
}
FIRST_TOKEN = ["predict.data=Once upon a time", "predict.batch_size=1", "decode.max_new_tokens=1"]
SAMPLES = [
    "calibrate.num_samples=16",
    "calibrate.sequence_length=256",
]  # the defaults, 128 samples of 512 tokens, are 16 times as many tokens
ROWS: dict[str, list[str]] = {
    **{
        f"{scheme}, first token": [f"quant={scheme}", *FIRST_TOKEN]
        for scheme in ("none", "int8", "int4", "a8w8", "fp8")
    },
    "a8w8 static, artefact": ["task=quantize", "quant=a8w8", "quant.activations=static", *SAMPLES],
    "int4 gptq, artefact": ["task=quantize", "quant=int4", "quant.method=gptq", *SAMPLES],
}
PROMISED = re.compile(r"about ([\d,]+) s")
KEPT = re.compile(r"calibrated model in (\S+)")


def write_checkpoint(folder: Path, size: str) -> None:
    """Write a checkpoint. config.json is written last; a folder with it is complete."""
    if (folder / "config.json").is_file():
        return
    folder.mkdir(parents=True, exist_ok=True)
    hidden, inner, layers, heads, kv_heads, vocabulary = SHAPES[size]
    generator = torch.Generator().manual_seed(0)

    def weight(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02, generator=generator)

    keys = hidden // heads * kv_heads
    of_layer = {
        **{
            f"self_attn.{name}_proj": (rows, hidden)
            for name, rows in (("q", hidden), ("k", keys), ("v", keys), ("o", hidden))
        },
        **{"mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner)},
    }
    weight_map = {}
    for i in range(layers + 1):
        prefix = f"model.layers.{i}."
        tensors = {f"{prefix}{name}.weight": weight(*shape) for name, shape in of_layer.items()}
        norms = [f"{prefix}{name}_layernorm.weight" for name in ("input", "post_attention")]
        if i == layers:
            tensors = {name: weight(vocabulary, hidden) for name in ("model.embed_tokens.weight", "lm_head.weight")}
            norms = ["model.norm.weight"]
        tensors |= {name: torch.ones(hidden, dtype=torch.bfloat16) for name in norms}
        file = f"model-{i + 1:05}-of-{layers + 1:05}.safetensors"
        save_tensors(folder / file, tensors, {})
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(REPOSITORY / "models" / "tiny" / file, folder)
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": vocabulary,
        "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
    }  # fmt: skip
    write_atomically(folder / "config.json", [json.dumps(config, indent=2)])


def measure(model: Path, overrides: list[str], scratch: Path) -> dict[str, Any]:
    shutil.rmtree(scratch, ignore_errors=True)
    if "task=quantize" in overrides:
        overrides = [*overrides, f"quantize.output={scratch / 'quantized'}"]
    command = [
        sys.executable,
        "run.py",
        f"model.path={model}",
        *overrides,
        f"hydra.run.dir={scratch / 'run'}",
        "device=cpu",
    ]
    start = time.perf_counter()
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        sys.exit(f"{' '.join(command)}\n{done.stderr}")
    metrics = json.loads((scratch / "run" / "metrics.json").read_text())
    row = {"seconds": round(seconds, 1), "peak_memory_bytes": metrics["peak_memory_bytes"]}
    row |= {name: round(metrics[name], 2) for name in ("load_s", "weight_bytes") if name in metrics}
    if promised := PROMISED.search(done.stderr):
        row["promised_s"] = int(promised[1].replace(",", ""))
    if kept := KEPT.search(done.stderr):
        shutil.rmtree(kept[1])
    shutil.rmtree(scratch)
    return row


def measure_file(file: Path, is_kept: bool, scratch: Path) -> dict[str, Any]:
    """Return the medians of three runs with a file in the page cache."""
    overrides = [*FIRST_TOKEN, f"model.keep_packed={is_kept}"]
    measure(file, overrides, scratch)  # reads the file, and makes the packed file
    runs = [measure(file, overrides, scratch) for _ in range(3)]
    return {"file_bytes": file.stat().st_size} | {name: median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--folder", type=Path, required=True, help="for checkpoints and quantised models; 1.1 B take 4 GB, 7 B 21 GB"
    )
    parser.add_argument("--sizes", nargs="+", choices=SHAPES, default=["1.1B", "7B"])
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--files", nargs="+", type=Path, default=[], help="existing models, instead of sizes and rows")
    parser.add_argument("--results", type=Path, default=RESULTS)
    args = parser.parse_args()
    report: dict[str, Any] = json.loads(args.results.read_text()) if args.results.is_file() else {"rows": {}}
    scratch = args.folder.resolve() / "scratch"

    def add(row: str, measured: Callable[[], dict[str, Any]]) -> None:
        if row not in report["rows"]:
            report["rows"][row] = measured()
            about = {
                "what": " ".join((__doc__ or "").partition("\n\n")[0].split()),
                "date": str(date.today()),
                "environment": environment(),
            }
            write_atomically(args.results, [json.dumps(about | {"rows": report["rows"]}, indent=2) + "\n"])
        print(f"{row}: {report['rows'][row]}", flush=True)

    for file in args.files:
        add(f"{file.name}, packed now", partial(measure_file, file.resolve(), False, scratch))
        add(f"{file.name}, kept packed", partial(measure_file, file.resolve(), True, scratch))
    for size in [] if args.files else args.sizes:
        model = args.folder.resolve() / size
        write_checkpoint(model, size)
        for name in args.rows:
            add(f"{size}, {name}", partial(measure, model, ROWS[name], scratch))


if __name__ == "__main__":
    main()
