"""llama.cpp's prompt lookup for copies.py, in an interpreter that has llama_cpp: `python llama_cpp_lookup.py GGUF
NUM_TOKENS`.

Reads lines of JSON ({"prompts": token ids, "drafts": whether to look up}), and prints the decoded tokens per second for
each.
"""

import itertools
import json
import os
import sys
import time

from llama_cpp import Llama
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

path, num_tokens = sys.argv[1], int(sys.argv[2])
settings = {"n_ctx": 1024, "n_threads": os.cpu_count(), "verbose": False}
plain = Llama(path, **settings)
drafting = Llama(
    path, **settings, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=2)
)  # as its documentation recommends for a CPU
for line in sys.stdin:
    wanted = json.loads(line)
    model, seconds = drafting if wanted["drafts"] else plain, 0.0
    for prompt in wanted["prompts"]:
        tokens = model.generate(prompt, temp=0.0, reset=True)
        next(tokens)
        start = time.perf_counter()
        for _ in itertools.islice(tokens, num_tokens - 1):
            pass
        seconds += time.perf_counter() - start
        model.reset()
    print((num_tokens - 1) * len(wanted["prompts"]) / seconds, flush=True)
