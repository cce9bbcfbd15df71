"""Show that a change of the code changes no bit of the results.

    python tests/bit_equality.py record FILE.json     before the change
    python tests/bit_equality.py compare FILE.json    after it: one line for each difference, and exit code 1 if there is one

`--only NAME_PART` takes the groups whose name contains this text. `compare` refuses a file of other instructions, threads or versions, and
reports a model that is absent. The script uses command lines of `run.py` and files of runs alone, so names of modules may change between
both calls. A group is a list of sweeps. A job of a sweep is a case, and each of its files is compared by its SHA-256. Predictions contain
the 100 likeliest log probabilities of each position: equal files mean equal logits.
"""

import argparse
import hashlib
import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, logging

REPOSITORY = Path(__file__).resolve().parents[1]
GOLDENS = REPOSITORY / "tests" / "goldens"
REAL = REPOSITORY.parent / "shared" / "data" / "models"
SMOLLM = "real/smollm2_135m_instruct/SmolLM2-135M-Instruct.Q4_1.gguf"
LLAMA, EXPERTS = "goldens/llama3", "goldens/qwen2_moe"
GLM = "goldens/chatglm,goldens/chatglm_28layers,goldens/chatglm_bin"  # their prompts need special tokens
OTHER_GOLDENS = ",".join(sorted({f"goldens/{name}" for name in os.listdir(GOLDENS)} - {*GLM.split(",")}))
THREADS = 1
NOT_RESULTS = {
    *("metrics.json", "environment.json", "config.yaml", ".log", "job.json", "report.md"),  # times, paths, versions
    # names of operators, and digests of files with such names
    *("graph.pt2", "adapted.pt2", "export.json", "manifest.json"),
}
EXACT_METRICS = "nll_per_token perplexity kl_mean top1_agreement accuracy num_cached_tokens num_drafted_tokens num_accepted_tokens".split()
GREEDY = {"max_new_tokens": 9, "temperature": 0.0}
SAMPLED = {"max_new_tokens": 13, "temperature": 0.8, "seed": 7, "logprobs": 100}
DECODES: list[dict[str, Any]] = [
    GREEDY | {"logprobs": 100, "prompt_logprobs": 100},
    GREEDY | {"no_repeat_ngram_size": 2, "logit_bias": {"50": 2.5}, "logprobs": 5},
    GREEDY | {"num_beams": 4, "num_return_sequences": 2, "length_penalty": 0.5},
    GREEDY | {"penalty_alpha": 0.6, "top_k": 4},
    SAMPLED | {"n": 2},
    SAMPLED | {"top_p": 0.9, "repetition_penalty": 1.2},
    SAMPLED | {"top_k": 50, "min_p": 0.05, "presence_penalty": 0.5, "frequency_penalty": 0.1},
]
TEXT = "Once upon a time, there was a little girl. She had a red ball, and she loved to play with it in the park. "
SIZES: dict[str, Any] = {
    **{"vocab_size": 96, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 8},
    **{"bos_token_id": 1, "eos_token_id": None, "pad_token_id": None},
}
MIXTURE = {"num_experts": 8, "num_local_experts": 8, "n_routed_experts": 8, "num_experts_per_tok": 3}
MIXTURE |= {"moe_intermediate_size": 32, "n_group": 2, "topk_group": 1, "sliding_window": None}
LATENT = {"num_key_value_heads": 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8, "first_k_dense_replace": 1}
FAMILIES: dict[str, dict[str, Any]] = {  # families without a golden, by transformers' classes
    **dict.fromkeys("cohere2 ernie4_5 exaone4 falcon gemma3_text glm glm4 gpt_neox granite ministral3".split(), {}),
    **dict.fromkeys("olmo2 olmo3 phi phi3 seed_oss smollm3 starcoder2".split(), {}),
    **dict.fromkeys("ernie4_5_moe glm4_moe minimax_m2 qwen3_moe".split(), MIXTURE),
    **dict.fromkeys("deepseek_v2 deepseek_v3 glm4_moe_lite".split(), MIXTURE | LATENT),
}
CPU = f"device=cpu device.threads={THREADS} "
IDS = f"{CPU}model.tokenizer=null model.allow_pickle=true predict.batch_size=16 decode.ignore_eos=true "
ROWS = f"{IDS}predict.data=rows.jsonl "
TINY = f"{CPU}model=tiny predict.data=rows.jsonl predict.batch_size=5 decode.stop=[.] "
CACHES = "quant.kv_cache=none,int8,fp8,int4"
TEXTS = "calibrate.data=texts.jsonl calibrate.num_samples=8 calibrate.sequence_length=64 "
INT4, A8W8 = "quant=int4 quant.group_size=-1 ", "quant=a8w8 quant.method=rtn quant.activations=dynamic "
SCHEMES = ("quant=none,int8,fp8 ", f"{INT4}quant.activations=none,auto ", A8W8)
PAIRS = ("quant=int8 quant.kv_cache=int8", "quant=fp8 quant.kv_cache=fp8", f"{INT4}quant.kv_cache=int4", A8W8)
FLOATS = "model.dtype=float32,bfloat16"
DRAFTS = "decode.speculation.adaptive=false decode.speculate="  # adaptive drafts depend on times
EVALUATE = "evaluate.data=text.txt evaluate.questions=questions.jsonl evaluate.window=128 evaluate.stride=64 "
OUTPUT = "output=${hydra:runtime.output_dir}/model "  # in the job's folder
GROUPS: dict[str, list[str]] = {
    "decoding": [  # in small steps, with drafts, cached prefixes, an adapter
        f"{TINY}device.max_batched_tokens=16,2048 decode.prefix_cache=true,false",
        f"{TINY}device.block_size=32 {DRAFTS}ngram quant.kv_cache=none,int8",
        f"{ROWS}model.path={LLAMA} {DRAFTS}model decode.speculation.model_path={LLAMA} quant=none,int8",
        f"{ROWS}model.path={LLAMA} model.adapters={{one:adapter}} predict.adapter=one quant=none,int8",
    ],
    "ranks": [
        f"{ROWS}model.path={EXPERTS} parallel=tp parallel.tp=2 parallel.sum=gather,reduce",
        f"{ROWS}model.path={LLAMA} parallel=pp parallel.pp=2",
    ],
    "files": [
        f"task=convert model=tiny convert.{OUTPUT}convert.format=hf,gguf convert.dtype=auto,float16",
        f"task=convert model=tiny convert.{OUTPUT}convert.format=gguf convert.dtype=q4_0,q5_1,q8_0,q3_k_m,q4_k_m,q6_k",
        f"task=convert model=tiny convert.{OUTPUT}convert.format=sharded convert.tp=2 convert.pp=2",
        f"task=convert model.path={LLAMA} convert.{OUTPUT}convert.lora=adapter",
        f"task=quantize model=tiny quantize.{OUTPUT}{CPU}{TEXTS}quant=int8 quantize.format=compressed_tensors,vllm_cpu",
        f"task=quantize model=tiny quantize.{OUTPUT}{CPU}{TEXTS}quant=int4 quant.group_size=32 quant.method=gptq quantize.format=awq,gptq",
        f"task=quantize model=tiny quantize.{OUTPUT}{CPU}{TEXTS}quant=fp8,a8w8 quant.sparsity.method=none,wanda",
        f"{ROWS}model.path=tiny quant=int8 predict.export=true",
    ],
    "figures": [
        f"task=evaluate model=tiny {CPU}{EVALUATE}evaluate.reference=tiny quant=none,int8,fp8 {CACHES}",
        f"task=embed model=tiny {CPU}predict.data=text.txt embed.pooling=last,mean quant=none,int8",
    ],
    "schemes": [f"{ROWS}model.path=tiny,{EXPERTS} {scheme}{CACHES}" for scheme in (*SCHEMES, "model.dtype=float16 ")],
    "calibrated": [
        f"{ROWS}model.path=tiny {TEXTS}quant=int4 quant.group_size=32 quant.method=gptq,awq quant.symmetric=true,false",
        f"{ROWS}model.path=tiny {TEXTS}quant=a8w8,fp8 quant.method=smoothquant quant.activations=dynamic,static",
        f"{ROWS}model.path=tiny {TEXTS}quant=none,int8 quant.kv_cache_scales=static quant.kv_cache=int8,fp8",
    ],
    "families": [f"{ROWS}model.path={','.join(FAMILIES)} {options}" for options in ("quant=none", PAIRS[0])],
    "goldens": [f"{ROWS}model.path={OTHER_GOLDENS} {options}" for options in (FLOATS, *PAIRS)],
    "chatglm": [f"{IDS}predict.data=glm_rows.jsonl model.path={GLM} {options}" for options in (FLOATS, *PAIRS)],
    "real/stories260K": [f"{ROWS}model.path=real/stories260K {options}" for options in (*SCHEMES, CACHES)],
    "real/babyllama_tok105": [f"{ROWS}model.path=real/babyllama_tok105 {options}" for options in (*SCHEMES, CACHES)],
    "real/smollm2_135m_instruct": [f"{ROWS}model.path={SMOLLM} {CACHES}"],  # this scheme rejects its codes
}


def make_inputs(folder: Path) -> None:
    """Write the rows, texts and models that the sweeps name without a folder."""
    chosen = random.Random(0)
    ids = [[chosen.randrange(5, 90) for _ in range(90)] for _ in range(20)]  # in every vocabulary
    rows = [{"prompt_token_ids": ids[0][:length], "decode": settings} for length in (7, 90) for settings in DECODES]
    glm_rows = [row | {"prompt_token_ids": [*row["prompt_token_ids"], 301, 304, 281, 284]} for row in rows]
    texts, questions = [{"prompt_token_ids": row[:64]} for row in ids], [{"prompt": TEXT[:16], "answer": "there"}]
    lines = {"rows": rows, "glm_rows": glm_rows, "texts": texts, "questions": questions}
    for name, values in lines.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    (folder / "text.txt").write_text(TEXT * 20)
    for name, target in (("goldens", GOLDENS), ("real", REAL)):
        (folder / name).symlink_to(target)
    make_adapter(folder / "adapter")
    make_families(folder)
    run_command(f"task=convert model=tiny convert.output=tiny hydra.run.dir={folder}/made", folder).check_returncode()


def make_adapter(folder: Path) -> None:
    torch.manual_seed(0)
    tensors = {}
    for name, weight in sorted(load_file(GOLDENS / "llama3" / "model.safetensors").items()):
        if name.endswith(("q_proj.weight", "down_proj.weight")):
            for part, shape in (("lora_A", (4, weight.shape[1])), ("lora_B", (weight.shape[0], 4))):
                tensors[f"base_model.model.{name.replace('weight', part)}.weight"] = torch.randn(shape) / 8
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))


def make_families(folder: Path) -> None:
    logging.disable_progress_bar()
    for name, sizes in FAMILIES.items():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(name, **SIZES | sizes))
        for tensor in filter(torch.is_floating_point, model.state_dict().values()):
            tensor.normal_(std=0.2)
        model.save_pretrained(folder / name)


def run_command(overrides: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run `run.py` in `folder`. Calibrated models stay there, so that models of other runs are not used."""
    env = os.environ | {"OMP_NUM_THREADS": str(THREADS), "QUINTET_OUTPUTS": str(folder / "kept")}
    command = [sys.executable, str(REPOSITORY / "run.py"), *overrides.split()]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)


def cases(sweep: str) -> list[str]:
    """Return the name of each job, in the order of Hydra's sweeps."""
    overrides = [override.partition("=") for override in sweep.split() if override not in ROWS.split()]
    choices = [[f"{key}={value}" for value in values.split(",")] for key, _, values in overrides]
    return list(map(" ".join, itertools.product(*choices)))


def digest(file: Path) -> str:
    """Return the SHA-256 of a file. The weights of an export are hashed without their names, which contain field names
    of the kernels."""
    data = file.read_bytes()
    if file.name == "weights.safetensors":
        tensors = load_file(file).values()
        parts = (
            f"{tensor.dtype} {tensor.shape} ".encode() + bytes(tensor.flatten().view(torch.uint8)) for tensor in tensors
        )
        data = b"".join(sorted(parts))
    return hashlib.sha256(data).hexdigest()


def results(job: Path) -> dict[str, str]:
    """Return the digest of each file that a job wrote, and the metrics that do not depend on time; empty if the job
    failed."""
    metrics = json.loads(file.read_text()) if (file := job / "metrics.json").exists() else {}
    if metrics.get("num_errors"):
        return {}
    paths = sorted(path for path in job.rglob("*") if path.is_file() and not NOT_RESULTS & {path.name, path.suffix})
    exact = {f"metrics: {name}": repr(metrics[name]) for name in EXACT_METRICS if metrics.get(name)}
    return exact | {str(path.relative_to(job)): digest(path) for path in paths}


def run_group(name: str, folder: Path) -> dict[str, str]:
    """Return the results of a group by case and file."""
    if name.startswith("real/") and not (folder / name).exists():
        return {name: "skipped"}
    digests: dict[str, str] = {}
    for number, sweep in enumerate(GROUPS[name]):
        sweep_folder = folder / f"{Path(name).name}-{number}"
        done = run_command(f"-m hydra.sweep.dir={sweep_folder} {sweep}", folder)
        for job, case in enumerate(cases(sweep)):
            of_job = results(sweep_folder / str(job))
            digests |= {f"{name}: {case}: {file}": value for file, value in of_job.items()}
            if not of_job:
                digests[f"{name}: {case}"] = "failed"
                print(f"{case}: {done.stderr[-600:]}", file=sys.stderr)
    return digests


def machine() -> dict[str, Any]:
    """Return the properties of the machine that bits depend on."""
    flags = Path("/proc/cpuinfo").read_text().partition("flags")[2].partition("\n")[0].split()
    vectors = " ".join(sorted(flag for flag in flags if flag.startswith(("avx", "amx", "fma"))))
    return {"instructions": vectors, "threads": THREADS} | {name: version(name) for name in ("torch", "transformers")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", metavar="NAME_PART")
    args = parser.parse_args()
    recorded = json.loads(args.file.read_text()) if args.command == "compare" else {"machine": machine()}
    if recorded["machine"] != machine():
        sys.exit(f"error: {args.file} is of {recorded['machine']}, and this machine is {machine()}")
    after: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        make_inputs(Path(scratch))
        for name in (name for name in GROUPS if args.only in name):
            begin = time.monotonic()
            after |= run_group(name, Path(scratch))
            print(f"{name}: {time.monotonic() - begin:.0f} s, {len(after)} results", flush=True)
    if args.command == "record":
        args.file.write_text(f'{{"machine": {json.dumps(machine())},\n"results": {json.dumps(after, indent=0)}}}\n')
    before = {name: value for name, value in recorded.get("results", after).items() if args.only in name.split(": ")[0]}
    unproved = {"failed"} if args.command == "record" else {"failed", "skipped"}
    bad = [name for name in before | after if before.get(name) != after.get(name) or after[name] in unproved]
    for name in bad:
        print(f"{name}: {before.get(name, 'missing')} before, {after.get(name, 'missing')} after")
    print(f"{len(before | after)} results, {len(bad)} different, failed or not compared")
    sys.exit(bool(bad) or not after)


if __name__ == "__main__":
    main()
