"""Compare the bits that two versions of the code compute: `python tests/bench/same_bits.py BEFORE [AFTER]`.

BEFORE and AFTER are git revisions; AFTER defaults to HEAD. Each version runs the same sweeps of its own `run.py`: every golden family,
`tiny` and the small real models, in every dtype and cache format, and in every scheme; `tiny` and the real ones in every scheme with every
cache format. Rows are greedy, seeded, beams and several samples, in ragged batches, with the 100 likeliest log probabilities of every
position. Equal `predictions.jsonl` files mean equal bits.
Prints the jobs that differ, and exits with 1 if there are any.
"""

import argparse
import contextlib
import hashlib
import json
import random
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
REAL = REPOSITORY.parent / "shared" / "data" / "models"
GREEDY = {"max_new_tokens": 9, "temperature": 0.0}
LOGPROBS = {"logprobs": 100}
DECODES = (
    GREEDY | LOGPROBS | {"prompt_logprobs": 100},
    {"max_new_tokens": 13, "temperature": 0.8, "top_p": 0.9, "seed": 7, "repetition_penalty": 1.2} | LOGPROBS,
    {"max_new_tokens": 6, "temperature": 1.0, "seed": 3, "n": 2} | LOGPROBS,
    GREEDY | {"num_beams": 3},
)
FLOATS = ("quant=none", "model.dtype=float32,bfloat16,float16", "quant.kv_cache=none,int8,fp8,int4")
CODES = (
    ("quant=int8,fp8",),
    ("quant=int4", "quant.group_size=-1", "quant.activations=none,auto"),
    ("quant=a8w8", "quant.method=rtn", "quant.activations=dynamic"),
)
CALIBRATED = (
    ("quant=int4", "quant.group_size=32", "quant.method=gptq"),
    ("quant=int4", "quant.group_size=32", "quant.symmetric=false", "quant.method=awq"),
    ("quant=a8w8", "quant.method=smoothquant", "quant.activations=static"),
    ("quant=fp8", "quant.activations=static"),
    ("quant=int8", "quant.kv_cache=int8", "quant.kv_cache_scales=static"),
    ("quant=none", "quant.kv_cache=fp8", "quant.kv_cache_scales=static"),
)
CACHES = "quant.kv_cache=none,int8,fp8,int4"
COMMON = (
    "model.allow_pickle=true",
    "model.tokenizer=null",
    "device=cpu",
    "device.threads=1",
    "predict.batch_size=5",
    "decode.ignore_eos=true",
)
FEW_SAMPLES = ("calibrate.num_samples=8", "calibrate.sequence_length=64")


def write_rows(file: Path, settings: tuple[dict[str, object], ...], lengths: tuple[int, ...]) -> None:
    """A row of each length under each of the settings. Their ids exist in every model's vocabulary."""
    chosen = random.Random(0)
    prompts = [[chosen.randrange(5, 90) for _ in range(length)] for length in lengths]
    rows = [{"prompt_token_ids": prompt, **given} for prompt in prompts for given in settings]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def sweeps(texts: Path) -> Iterator[tuple[list[Path], tuple[str, ...]]]:
    """The models of each sweep and its overrides. `texts` are what calibration reads."""
    goldens = sorted(path for path in (REPOSITORY / "tests" / "goldens").iterdir() if path.is_dir())
    real = [path for path in (REAL / "stories260K", REAL / "babyllama_tok105") if path.is_dir()]
    larger = [REPOSITORY / "models" / "tiny", *real]
    yield [*goldens, *larger], FLOATS
    for codes in CODES:
        yield goldens, codes
        yield larger, (*codes, CACHES)
    for codes in CALIBRATED:
        has_cache = any(part.startswith("quant.kv_cache") for part in codes)
        yield larger, (*codes, f"calibrate.data={texts}", *FEW_SAMPLES, *(() if has_cache else (CACHES,)))


def outcomes(checkout: Path, scratch: Path, pattern: str) -> dict[str, str]:
    """The digest of each job's predictions, or its error, by model and overrides, as the code of `checkout` computes them."""
    rows, texts, found = scratch / "rows.jsonl", scratch / "texts.jsonl", {}
    write_rows(rows, tuple({"decode": decode} for decode in DECODES), (1, 7, 33, 90))
    write_rows(texts, ({},), (64,) * 20)
    for number, (models, overrides) in enumerate(sweeps(texts)):
        chosen = [str(model) for model in models if pattern in f"{model.name} {' '.join(overrides)}"]
        if not chosen:
            continue
        folder, paths = scratch / str(number), ",".join(chosen)
        given = (f"model.path={paths}", f"predict.data={rows}", f"hydra.sweep.dir={folder}", *COMMON, *overrides)
        subprocess.run(
            [sys.executable, "run.py", "-m", *given], cwd=checkout, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        for job in sorted(folder.glob("*/job.json")):
            record = json.loads(job.read_text())
            (path,) = (text for text in record["overrides"] if text.startswith("model.path="))
            varied = [text for text in record["overrides"] if text.startswith(("quant", "model.dtype"))]
            predictions = job.with_name("predictions.jsonl")
            digest = (
                hashlib.sha256(predictions.read_bytes()).hexdigest() if record["error"] is None else record["error"]
            )
            found[" ".join([Path(path).name, *varied])] = digest
        print(f"{scratch.name}: {len(chosen)} models, {' '.join(overrides)}", file=sys.stderr)
    return found


@contextlib.contextmanager
def checked_out(revision: str, folder: Path) -> Iterator[Path]:
    """`folder` with the files of this revision."""
    subprocess.run(["git", "worktree", "add", "--quiet", "--detach", folder, revision], cwd=REPOSITORY, check=True)
    try:
        yield folder
    finally:
        subprocess.run(["git", "worktree", "remove", "--force", folder], cwd=REPOSITORY, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after", nargs="?", default="HEAD")
    parser.add_argument("--only", default="", help="sweeps whose model and overrides contain this text")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as checkouts, ThreadPoolExecutor(2) as pool:
        found = []
        for name in ("before", "after"):
            folder = Path(scratch, name)
            folder.mkdir()
            checkout = checkouts.enter_context(checked_out(getattr(args, name), folder / "checkout"))
            found.append(pool.submit(outcomes, checkout, folder, args.only))
        before, after = (each.result() for each in found)
    names = dict.fromkeys((*before, *after))
    differing = [name for name in names if before.get(name) != after.get(name)]
    failed = [name for name in names if len(before.get(name, "")) != len(hashlib.sha256().hexdigest())]
    for name in differing:
        print(f"differs: {name}\n  before: {before.get(name)}\n  after:  {after.get(name)}")
    print(f"{len(names)} jobs, {len(differing)} differ; {len(failed)} are refused by the first version")
    sys.exit(bool(differing) or not names)


if __name__ == "__main__":
    main()
