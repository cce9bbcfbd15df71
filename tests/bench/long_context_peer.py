"""Decode speed of llama.cpp and vLLM after a long context, for long_context.py, in an interpreter that has the engine.

`python long_context_peer.py llama.cpp FILE CACHE NUM_TOKENS` or `... vllm FOLDER CACHE NUM_TOKENS`. CACHE is none, int8
or int4 (llama.cpp only). Reads the prompt's token ids, a line of JSON, and computes them. For each further line it
generates NUM_TOKENS after the prompt and prints tokens/s.
"""

import json
import os
import sys
import time
from collections.abc import Callable

os.environ.update(
    VLLM_CPU_KVCACHE_SPACE="4", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1", VLLM_ENABLE_V1_MULTIPROCESSING="0"
)
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", f"0-{(os.cpu_count() or 1) - 1}")
NEXT = 7  # an arbitrary token: its id does not change the time


def of_llama_cpp(path: str, cache: str, num_tokens: int, prompt: list[int]) -> Callable[[], float]:
    import llama_cpp

    kinds = {"none": llama_cpp.GGML_TYPE_F16, "int8": llama_cpp.GGML_TYPE_Q8_0, "int4": llama_cpp.GGML_TYPE_Q4_0}
    kind = kinds[cache]
    cores = os.cpu_count() or 1
    model = llama_cpp.Llama(
        path, n_ctx=len(prompt) + num_tokens + 8, n_threads=cores, n_threads_batch=cores, n_batch=512, flash_attn=True,
        type_k=kind, type_v=kind, verbose=False,
    )  # fmt: skip
    model.eval(prompt)

    def decode() -> float:
        model.n_tokens = len(prompt)  # eval removes later entries of the cache
        model.eval([NEXT])
        start = time.perf_counter()
        for _ in range(num_tokens - 1):
            model.eval([NEXT])
        return (num_tokens - 1) / (time.perf_counter() - start)

    return decode


def of_vllm(path: str, cache: str, num_tokens: int, prompt: list[int]) -> Callable[[], float]:
    from vllm import LLM, SamplingParams

    kind = "fp8" if cache == "int8" else "auto"
    length = len(prompt) + num_tokens + 8
    engine = LLM(path, dtype="bfloat16", max_model_len=length, enable_prefix_caching=True, kv_cache_dtype=kind)

    def seconds(count: int) -> float:
        settings = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)
        start = time.perf_counter()
        engine.generate([{"prompt_token_ids": prompt}], settings, use_tqdm=False)
        return time.perf_counter() - start

    seconds(1)

    def decode() -> float:
        first = seconds(1)
        return (num_tokens - 1) / (seconds(num_tokens) - first)

    return decode


def main() -> None:
    make = {"llama.cpp": of_llama_cpp, "vllm": of_vllm}[sys.argv[1]]
    prompt = json.loads(sys.stdin.readline())
    decode = make(sys.argv[2], sys.argv[3], int(sys.argv[4]), prompt)
    print("ready", flush=True)
    for _ in sys.stdin:
        print(json.dumps({"decode": decode()}), flush=True)


if __name__ == "__main__":
    main()
