"""Decode speed after 2k, 8k and 32k tokens of context, with llama.cpp and vLLM in the same rounds.

`python tests/bench/long_context.py --llama-cpp PYTHON --vllm PYTHON --tokenizer FOLDER`. The model is a Llama of random
weights with SmolLM2's widths (hidden 576, 9 heads over 3, head_dim 64) and few layers, so that keys and values are a
large part of the bytes that a step reads. Weights are bfloat16; the cache is bfloat16, int8 or int4 (llama.cpp:
float16, its default, q8_0 and q4_0; vLLM: bfloat16). Each engine runs in its own process, which has computed the prompt; the engines take
turns in every round. Medians of tokens per second and of the ratios of the rounds are written to
tests/bench/results/long_context.json.
"""

import argparse
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import date
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

import torch  # noqa: E402

from conf.compose import compose_run_config  # noqa: E402
from conf.decoding import DecodeConfig  # noqa: E402
from kernels.kv_format import FORMATS  # noqa: E402
from pipelines.jobs.report import environment, write_atomically  # noqa: E402
from pipelines.loading.bandwidth import memory_bandwidth  # noqa: E402
from pipelines.loading.load_engine import load_engine  # noqa: E402

RESULTS = Path(__file__).parent / "results" / "long_context.json"
PEER = Path(__file__).with_name("long_context_peer.py")
VOCABULARY = 32_000


def write_model(folder: Path, num_layers: int, context: int) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3}
    config = LlamaConfig(
        **shape,
        num_hidden_layers=num_layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=context,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


def ours(folder: Path, cache: str, num_tokens: int, prompt: list[int]) -> Callable[[], float]:
    """Return what decodes after the prompt, which is computed once and kept by the prefix cache."""
    settings = [f"quant.kv_cache={cache}", "device=cpu", "model.tokenizer=null", "device.kv_cache_memory=3GB"]
    engine = load_engine(compose_run_config(settings, {"model.path": str(folder)}), 1)

    def decode() -> float:
        settings = DecodeConfig(max_new_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        (output,) = engine.generate([engine.request(0, prompt, settings)])
        return (num_tokens - 1) / (output.finished_s - (output.first_token_s or 0.0))

    decode()
    return decode


def step_bytes(folder: Path, num_layers: int, length: int, cache: str) -> int:
    """Return the bytes that a step reads: the weights, with the tied head once, and the keys and values."""
    token = torch.zeros(3, 64, dtype=torch.bfloat16)  # of a layer: 3 heads of 64 channels
    vectors = sum(part.nbytes for format in FORMATS[cache] for part in format.encode(token))
    return num_layers * length * vectors + sum(file.stat().st_size for file in folder.glob("*.safetensors"))


@contextmanager
def peer(command: list[str], prompt: list[int]) -> Iterator[Callable[[], float]]:
    """Yield what decodes after the prompt in the peer's process, which ends with the block."""
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    assert process.stdin is not None
    assert process.stdout is not None
    asked, answers = process.stdin, process.stdout

    def ask(line: str) -> str:
        print(line, file=asked, flush=True)
        for answer in answers:
            if answer.startswith(("ready", '{"decode"')):
                return answer
        raise RuntimeError(f"{command} has ended")

    try:
        ask(json.dumps(prompt))
        yield lambda: float(json.loads(ask(""))["decode"])
    finally:
        process.kill()
        process.wait()


def measure(args: argparse.Namespace, folder: Path, length: int, cache: str, bandwidth: float) -> dict[str, Any]:
    prompt = [random.Random(length).randrange(5, VOCABULARY) for _ in range(length)]
    peers = {}
    if args.llama_cpp:
        (file,) = (folder / "gguf").glob("*.gguf")
        peers["llama.cpp"] = [args.llama_cpp, str(PEER), "llama.cpp", str(file), cache, str(args.new_tokens)]
    if args.vllm and cache == "none":
        peers["vllm"] = [args.vllm, str(PEER), "vllm", str(folder / "model"), cache, str(args.new_tokens)]
    with ExitStack() as running:
        engines = {name: running.enter_context(peer(command, prompt)) for name, command in peers.items()}
        engines["ours"] = ours(folder / "model", cache, args.new_tokens, prompt)
        speeds: dict[str, list[float]] = {name: [] for name in engines}
        for _ in range(args.rounds):
            for name, decode in engines.items():
                speeds[name].append(decode())
    row: dict[str, Any] = {name: round(statistics.median(values), 2) for name, values in speeds.items()}
    for name in engines.keys() - {"ours"}:
        ratios = [mine / theirs for mine, theirs in zip(speeds["ours"], speeds[name], strict=True)]
        row[f"over {name}"] = round(statistics.median(ratios), 2)
    read = step_bytes(folder / "model", args.layers, length, cache)
    row |= {"MB a step": round(read / 1e6, 1), "of the bandwidth": round(row["ours"] * read / bandwidth, 2)}
    return row | {"spread of ours": round(max(speeds["ours"]) / min(speeds["ours"]), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--llama-cpp")
    parser.add_argument("--vllm")
    parser.add_argument("--tokenizer", type=Path, required=True, help="Llama 2's, of 32,000 tokens, for the GGUF file")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--caches", nargs="+", default=["none", "int8", "int4"], choices=["none", "int8", "int4"])
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    args = parser.parse_args()
    rows: dict[str, Any] = {}
    bandwidth = memory_bandwidth(torch.device("cpu"))
    about: dict[str, Any] = {
        "what": (__doc__ or "").splitlines()[0],
        "date": str(date.today()),
        "environment": environment(),
    }
    about["bandwidth_gb_per_s"] = round(bandwidth / 1e9, 1)
    about |= {"layers": args.layers, "new_tokens": args.new_tokens, "rounds": args.rounds}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_model(folder / "model", args.layers, max(args.lengths) + 1024)
        for name in ("tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"):
            shutil.copy(args.tokenizer / name, folder / "model" / name)
        if args.llama_cpp:
            convert = ["task=convert", "convert.format=gguf", f"model.path={folder / 'model'}"]
            arguments = [*convert, f"convert.output={folder / 'gguf'}", f"hydra.run.dir={folder / 'run'}"]
            subprocess.run(
                [sys.executable, "run.py", *arguments], cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL
            )
        for length in args.lengths:
            for cache in args.caches:
                start = time.perf_counter()
                rows[f"{length} tokens, cache {cache}"] = measure(args, folder, length, cache, bandwidth)
                write_atomically(args.out, [json.dumps(about | {"rows": rows}, indent=1) + "\n"])
                print(
                    length,
                    cache,
                    rows[f"{length} tokens, cache {cache}"],
                    f"{time.perf_counter() - start:.0f} s",
                    flush=True,
                )


if __name__ == "__main__":
    main()
