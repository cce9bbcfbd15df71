"""Perplexity over bytes of every 4- to 8-bit scheme: `python tests/bench/quality.py FILE.gguf TEXT FOLDER [--json
FILE]`.

FILE.gguf is a Llama model in Q4_1. FOLDER keeps two bfloat16 twins of it for later calls. The first twin has the values
of the file. They are on a grid of 16 values per block of 32, which flatters formats with such blocks. In the second
twin each value of a Q4_1 matrix is moved at random within its cell of the grid, uniformly by up to half a step (seed
0).

A cell is a run of task=evaluate in bfloat16 on the CPU, with the first 60,000 bytes of TEXT in windows of 1,024 tokens,
compared with the float twin. `gguf` cells evaluate a file that task=convert writes with the bytes of llama-quantize.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer

REPOSITORY = Path(__file__).resolve().parents[2]
NUM_BYTES, WINDOW = 60_000, 1024
BLOCK, BLOCK_BYTES = 32, 20  # of a Q4_1 block, which begins with its float16 step
PROJECTIONS = {
    **{f"attn_{name}": f"self_attn.{name}_proj" for name in "qkv"},
    **{f"ffn_{name}": f"mlp.{name}_proj" for name in ("gate", "up", "down")},
    "attn_output": "self_attn.o_proj",
}
CELLS = {
    "none": [],
    "int8": ["quant=int8"],
    "int8 g64": ["quant=int8", "quant.group_size=64"],
    "a8w8": ["quant=a8w8"],
    "a8w8, down_proj int8": ["quant=a8w8", "quant.overrides={*.down_proj: int8}"],
    "fp8": ["quant=fp8"],
    "int4": ["quant=int4"],
    "int4 g32": ["quant=int4", "quant.group_size=32"],
    "int4 g32, zero points": ["quant=int4", "quant.group_size=32", "quant.symmetric=false"],
    **{f"auto, {size} MB": ["quant=auto", f"quant.max_bytes={size}000000"] for size in (95, 106, 130)},
    "q5_0, head q5_0": ["quant=q5_0", "quant.overrides={lm_head: q5_0}"],
    **{name: [f"quant={name}"] for name in ("q4_1", "q5_0", "q5_1", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k")},
    **{f"{name} imatrix": [f"quant={name}", "quant.method=imatrix"] for name in ("q4_1", "q5_0", "q3_k_m", "q4_k_m")},
    **{
        f"auto, {size} MB, imatrix": ["quant=auto", f"quant.max_bytes={size}000000", "quant.method=imatrix"]
        for size in (95, 106, 130)
    },
}
FILES = ("q4_0", "q4_1", "q3_k_m", "q4_k_m", "q5_k_m", "q6_k", "q8_0")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cells", nargs="*", default=[*CELLS], choices=[*CELLS])
    parser.add_argument("--files", nargs="*", default=[*FILES], choices=FILES)
    args = parser.parse_args()
    if not (args.folder / "second").is_dir():
        write_twins(args.file, args.folder)
    text = args.folder / "text.txt"
    text.write_bytes(args.text.read_bytes()[:NUM_BYTES])
    rows = []
    for twin in ("first", "second"):
        cells = {name: [f"model.path={args.folder / twin}", *CELLS[name]] for name in args.cells}
        cells |= {f"gguf {dtype}": [f"model.path={converted(args.folder, twin, dtype)}"] for dtype in args.files}
        for name, options in cells.items():
            metrics = evaluate([f"evaluate.reference={args.folder / twin}", f"evaluate.data={text}", *options])
            names = ("perplexity", "kl_mean", "kl_p99", "top1_agreement", "weight_bytes")
            rows.append({"twin": twin, "scheme": name} | {key: round(metrics[key], 5) for key in names})
            print(
                f"| {twin} | {name} | {metrics['weight_bytes'] / 1e6:.1f} | {metrics['perplexity']:.2f} |", flush=True
            )
    if args.json:
        result = {"date": str(date.today()), "model": args.file.stem, "text": args.text.name, "rows": rows}
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def write_twins(file: Path, folder: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    del model.config.quantization_config
    # otherwise transformers refuses to save the dequantised weights
    model.is_quantized, model.hf_quantizer = False, None
    save(model, tokenizer, folder / "first")
    model.float()
    generator = torch.Generator().manual_seed(0)
    state = model.state_dict()
    for tensor in GGUFReader(file).tensors:
        match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", tensor.name)
        if match and match[2] in PROJECTIONS:
            weight = state[f"model.layers.{match[1]}.{PROJECTIONS[match[2]]}.weight"]
            steps = steps_of(tensor.data, weight, match[2], model.config)
            weight += (torch.rand(weight.shape, generator=generator) - 0.5) * steps.repeat_interleave(BLOCK, 1)
    save(model, tokenizer, folder / "second")


def steps_of(data: Any, weight: torch.Tensor, name: str, config: Any) -> torch.Tensor:
    """Return the step of each block [O, I / 32], with rows in Hugging Face's order."""
    halves = data.reshape(-1, BLOCK_BYTES)[:, :2].copy().view(np.float16)
    steps = torch.from_numpy(halves.astype(np.float32)).view(len(weight), -1)
    if name not in ("attn_q", "attn_k"):
        return steps
    heads = config.num_attention_heads if name == "attn_q" else config.num_key_value_heads
    return steps.unflatten(0, (heads, -1, 2)).transpose(1, 2).flatten(0, 2)  # llama.cpp interleaves the rotary halves


def save(model: Any, tokenizer: Any, folder: Path) -> None:
    model.to(torch.bfloat16).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def converted(folder: Path, twin: str, dtype: str) -> Path:
    output = folder / f"{twin}-{dtype}"
    if not output.exists():
        run(
            "task=convert",
            f"model.path={folder / twin}",
            "convert.format=gguf",
            f"convert.dtype={dtype}",
            f"convert.output={output}",
        )
    return next(output.glob("*.gguf"))


def evaluate(options: list[str]) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        run("task=evaluate", "device=cpu", f"evaluate.window={WINDOW}", f"hydra.run.dir={folder}/run", *options)
        metrics: dict[str, float] = json.loads((Path(folder) / "run" / "metrics.json").read_text(encoding="utf-8"))
        return metrics


def run(*arguments: str) -> None:
    subprocess.run([sys.executable, str(REPOSITORY / "run.py"), *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
