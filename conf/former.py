"""Options of other tools and their replacements here: hints of the command line, and the tables of MIGRATION.md.

`python -m conf.former` writes the page.
"""

from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from conf.errors import UserError

PAGE = Path(__file__).resolve().parent.parent / "MIGRATION.md"


class Former(NamedTuple):
    """An option of another tool."""

    option: str
    """As it is typed: a flag, a key, or a key with its value."""
    arguments: str
    """Arguments of run.py; "" if no argument is needed."""
    note: str = ""
    """The difference, or the reason why no argument is needed."""


CUT = "predict.truncate=left predict.max_prompt_tokens=1024"
PADDLENLP = (
    Former("--model_name_or_path", "model.path=FOLDER", "or an option of conf/model: model=llama2_7b"),
    Former("--batch_size", "predict.batch_size=16", "most rows at once: rows join and leave at every step"),
    Former("--max_length", "decode.max_length=2048", "prompt and output together, as there"),
    Former("max_length", "decode.max_length=2048", "prompt and output together, as there"),
    Former("--src_length", CUT, "without it, a row that is too long is an error of its own"),
    Former("predict.src_length", CUT, "without it, a row that is too long is an error of its own"),
    Former("--lora_path", "model.adapters={a:FOLDER} predict.adapter=a", "each row may name another one"),
    Former("--prefix_path", "model.prefixes={p:FOLDER} predict.prefix=p"),
    Former("--export_precache", "model.prefixes={p:FOLDER}", "read at run time, also by an export"),
    Former("--data_file", "predict.data=FILE.jsonl", "rows of src and tgt are read as they are, in its .json, too"),
    Former(
        "output_file",
        "predict.output_file=FILE.json predict.output_form=paddlenlp",
        "predictions.jsonl in the run's folder has more; hydra.run.dir=FOLDER chooses that",
    ),
    Former("--top_k", "decode.top_k=1", "1 is greedy, as there"),
    Former("--model_type", "", "config.json says it"),
    Former("--avx_model", "", "the kernels of this processor are found by themselves"),
    Former("--avx_type", "model.dtype=bfloat16", "or float16, float32"),
    Former("--output_path", "task=export export.output=FOLDER"),
    Former("--device=gpu", "device=cuda"),
    Former("--device", "device=cpu", "or cuda"),
    Former("benchmark", "task=bench bench.prompt_tokens=512 bench.new_tokens=64", "random prompts of exact lengths"),
    Former("--decode_strategy=greedy_search", "decode=greedy", "the default is what the checkpoint suggests"),
    Former("--decode_strategy=sampling", "decode=sampling"),
    Former("--decode_strategy=beam_search", "decode=beam"),
    Former("--decode_strategy", "decode=sampling", "or greedy, beam, contrastive"),
    Former("decode=greedy_search", "decode=greedy"),
    Former("decode=beam_search", "decode=beam"),
    Former("mode", "model.path=FOLDER", "an exported folder is known by its files"),
    Former("inference_model", "", "the engine is always the fused one"),
    Former("block_attn", "", "the cache is always paged: device.block_size=16"),
    Former("append_attn", "", "the cache is always paged: device.block_size=16"),
    Former("quant_type=weight_only_int8", "quant=int8"),
    Former("quant_type=weight_only_int4", "quant=int4"),
    Former("quant_type=a8w8", "quant=a8w8", "next to a folder of PaddleNLP's PTQ it may be left out"),
    Former("quant_type=a8w8_fp8", "quant=fp8"),
    Former("quant_type", "quant=int8", "or int4, a8w8, fp8"),
    Former("quant=weight_only_int8", "quant=int8"),
    Former("quant=weight_only_int4", "quant=int4"),
    Former("quant=a8w8_fp8", "quant=fp8"),
    Former("cachekv_int8_type=dynamic", "quant.kv_cache=int8"),
    Former("cachekv_int8_type", "quant.kv_cache=int8", "with quant.kv_cache_scales=static by calibration"),
    Former("cachekv_int8_type=static", "quant.kv_cache_scales=static quant.kv_cache=int8", "made by task=quantize"),
    Former("speculate_method=inference_with_reference", "decode.speculate=ngram decode.speculation.order=paddle"),
    Former("speculate_max_draft_token_num", "decode.speculation.num_tokens=7"),
    Former("speculate_max_ngram_size", "decode.speculation.max_ngram=5"),
    Former("speculate_verify_window", "decode.speculation.verify_window=2", "exact acceptance is the default here"),
    Former(
        "speculate_max_candidate_len", "decode.speculation.acceptance=top_p_window decode.speculation.max_candidates=5"
    ),
    Former("mp_degree", "parallel=tp parallel.tp=2", "files of any parallel layout are read"),
    Former("paddle.distributed.launch", "parallel=tp", "run.py starts the ranks; torchrun and srun may, too"),
    Former("run_generation.py", "task=predict"),
    Former("predictor.py", "task=predict"),
    Former(
        "export_model.py", "task=export export.output=FOLDER", "predict.export=true exports and predicts in one run"
    ),
    Former("device=npu", "device=cpu", "kernels are for CPUs and NVIDIA's GPUs alone"),
    Former("device=xpu", "device=cpu", "kernels are for CPUs and NVIDIA's GPUs alone"),
)
MINDFORMERS = (
    Former("--config", "--config-path FOLDER", "the folder of a run, which has a config.yaml; groups replace the rest"),
    Former("run_mode", "task=predict"),
    Former("--predict_data", "predict.data=FILE.txt", "a prompt, a file, or - for standard input"),
    Former("--predict_batch_size", "predict.batch_size=16"),
    Former("load_checkpoint", "model.path=FOLDER"),
    Former("use_parallel", "parallel=tp"),
    Former("model_parallel", "parallel=tp parallel.tp=2"),
    Former("pipeline_stage", "parallel=pp parallel.pp=2"),
    Former("data_parallel", "parallel=ray parallel.replicas=2"),
    Former("auto_trans_ckpt", "", "files of any parallel layout are read by any number of ranks"),
    Former("src_strategy_path_or_dir", "", "files of any parallel layout are read by any number of ranks"),
    Former("run_mindformer.py", "task=predict"),
    Former("msrun_launcher.sh", "parallel=tp", "run.py starts the ranks; torchrun and srun may, too"),
    Former("--device_id", "device=cuda", "CUDA_VISIBLE_DEVICES says which"),
    Former("--seq_length", "model.max_length=4096"),
    Former("text_generation_result.txt", "hydra.run.dir=FOLDER", "the same file and form, in the run's folder"),
    Former("decode.do_sample", "decode=sampling", "decode.temperature=0 is greedy"),
)
VLLM = (
    Former("--model", "model.path=FOLDER"),
    Former("--tokenizer", "model.tokenizer=FOLDER", "or a hub id"),
    Former("--dtype", "model.dtype=bfloat16"),
    Former("--max-model-len", "model.max_length=4096"),
    Former("tensor_parallel_size", "parallel=tp parallel.tp=2"),
    Former("--pipeline-parallel-size", "parallel=pp parallel.pp=2"),
    Former("gpu_memory_utilization", "device.memory_fraction=0.9", "of a GPU; on a CPU device.kv_cache_memory=4GB"),
    Former("--kv-cache-dtype", "quant.kv_cache=fp8"),
    Former("--max-num-seqs", "task=serve serve.batch_size=64", "of a job: predict.batch_size"),
    Former("--max-num-batched-tokens", "device.max_batched_tokens=2048"),
    Former("--block-size", "device.block_size=16"),
    Former("--served-model-name", "task=serve serve.model_name=NAME"),
    Former("--api-key", "task=serve serve.api_keys=FILE", "keys are in a file, so that no process list shows them"),
    Former("--enable-lora", "model.adapters={a:FOLDER}"),
    Former("--speculative-config", "decode.speculate=ngram", "or model, or mtp"),
    Former("--max-loras", "model.adapters={a:FOLDER} model.max_adapters=8"),
    Former("--max-lora-rank", "", "any rank is taken"),
    Former("--lora-modules", "model.adapters={a:FOLDER}"),
    Former("--host", "task=serve serve.host=127.0.0.1"),
    Former("--port", "task=serve serve.port=8000"),
    Former("--seed", "decode=sampling decode.seed=1"),
    Former("--data-parallel-size", "task=serve serve.replicas=2"),
    Former("--chat-template", "predict.chat_template=FILE.jinja", "of a server serve.chat_template"),
    Former("--enable-prefix-caching", "decode.prefix_cache=true", "which is the default"),
    Former("--enable-chunked-prefill", "", "long prompts always come in chunks: device.max_batched_tokens"),
    Former("--swap-space", "", "a row that is put off is computed again"),
    Former("--cpu-offload-gb", "", "a model is on one device"),
    Former("--load-format", "", "a file's form is found by itself"),
    Former("--quantization", "", "a quantised folder is known by its config.json; quant=int8 quantises a float one"),
    Former("--enable-auto-tool-choice", "", "tools work where the model's template has them"),
    Former("--tool-call-parser", "", "the model's template says the form of its calls"),
    Former("--reasoning-parser", "", "the model's template says how reasoning is marked"),
    Former("--trust-remote-code", "", "no remote code is ever run"),
    Former("--enforce-eager", "device.cuda_graphs=false"),
    Former("quant=awq", "", "a quantised folder is known by its config.json; quant.method=awq makes one"),
    Former("quant=gptq", "", "a quantised folder is known by its config.json; quant.method=gptq makes one"),
    Former("quant=w8a8", "quant=a8w8"),
    Former("vllm serve", "task=serve"),
    Former("vllm bench", "task=bench"),
    Former("vllm run-batch", "predict.data=FILE.jsonl", "lines of OpenAI's batches"),
    Former("vllm chat", "task=chat"),
)
SWIFT = (
    Former(
        "--model_id_or_path",
        "model.hub=modelscope model.path=org/name",
        "or a folder; without model.hub Hugging Face's",
    ),
    Former("--max_new_tokens", "decode.max_new_tokens=256"),
    Former("--temperature", "decode.temperature=0.3"),
    Former("--top_p", "decode.top_p=0.7"),
    Former("--repetition_penalty", "decode.repetition_penalty=1.05"),
    Former("--stream", "", "task=chat and the server can, without an option"),
    Former("--infer_backend", "", "there is one engine"),
    Former("--ckpt_dir", "model.adapters={a:FOLDER} predict.adapter=a", "of a merged model model.path=FOLDER"),
    Former("--merge_lora", "task=convert convert.lora=FOLDER convert.output=FOLDER"),
    Former("--load-8bit", "quant=int8"),
    Former("--num-gpus", "parallel=tp parallel.tp=2"),
    Former("--model-names", "task=serve serve.model_name=NAME"),
    Former("fastchat.serve.controller", "task=serve serve.replicas=2", "one command has the replicas"),
    Former("fastchat.serve.model_worker", "task=serve"),
    Former("fastchat.serve.openai_api_server", "task=serve"),
    Former("fastchat.serve.cli", "task=chat"),
    Former("swift infer", "task=chat"),
    Former("swift deploy", "task=serve"),
    Former("fastchat.serve.gradio_web_server", "task=chat chat.web=true"),
    Former("--revision", "model.revision=v1.0.0", "a branch, tag or commit; null: the default branch"),
)
LLAMA_CPP = (
    Former("-m FILE.gguf", "model.path=FILE.gguf", "-m alone sweeps"),
    Former("-p", "predict.data=TEXT"),
    Former("-n", "decode.max_new_tokens=64"),
    Former("--temp", "decode.temperature=0.8"),
    Former("-ngl", "device=cuda", "all layers, or none with device=cpu"),
    Former("--ctx-size", "model.max_length=4096"),
    Former("-f", "predict.data=FILE.txt", "a prompt in each line"),
    Former("-t", "device.threads=1"),
    Former("--threads", "device.threads=1"),
    Former("--repeat-penalty", "decode.repetition_penalty=1.1"),
    Former("--min-p", "decode=sampling decode.min_p=0.05"),
    Former("--typical", "decode=sampling decode.typical_p=0.9"),
    Former("--top-nsigma", "decode=sampling decode.top_n_sigma=1.0"),
    Former(
        "--xtc-probability", "decode=sampling decode.xtc_probability=0.5", "--xtc-threshold is decode.xtc_threshold"
    ),
    Former(
        "--dynatemp-range", "decode=sampling decode.dynatemp_range=0.5", "--dynatemp-exp is decode.dynatemp_exponent"
    ),
    Former(
        "--dry-multiplier", "decode.dry_multiplier=0.8", "the other settings of DRY have the same names: decode.dry_*"
    ),
    Former("--n-predict", "decode.max_new_tokens=64"),
    Former("--cache-type-k", "quant.kv_cache=int8", "keys and values alike"),
    Former("--cache-type-v", "quant.kv_cache=int8", "keys and values alike"),
    Former("--parallel", "task=serve serve.batch_size=64"),
    Former("--json-schema", "decode.guide={json_schema:{type:object}}"),
    Former("--grammar-file", "decode.guide={regex:TEXT}", "or lark, in llguidance's form"),
    Former("--reasoning-budget", "decode.thinking.max_tokens=256", "its message is decode.thinking.closing"),
    Former("--lora", "model.adapters={a:FOLDER} predict.adapter=a"),
    Former("--conversation", "task=chat"),
    Former("llama-cli", "task=predict"),
    Former(
        "./build/bin/main",
        "task=export export.output=FOLDER",
        "make runner builds what runs it without Python: quintet-runner FOLDER prompt=TEXT",
    ),
    Former("convert_hf_to_gguf.py", "task=convert convert.format=gguf convert.output=FOLDER"),
    Former(
        "llama-quantize",
        "task=convert convert.format=gguf convert.dtype=q4_k_m convert.output=FOLDER",
        "floats, q4_0, q4_1, q5_0, q5_1, q8_0, q3_k_m, q4_k_m, q5_k_m and q6_k; --imatrix FILE is convert.imatrix=FILE",
    ),
    Former(
        "llama-imatrix",
        "quant=q4_k_m quant.method=imatrix calibrate.data=FILE.txt",
        "keeps its file in outputs/imatrix",
    ),
    Former("llama-perplexity", "task=evaluate evaluate.data=FILE.txt"),
    Former("llama-bench", "task=bench"),
    Former("llama-server", "task=serve"),
)
SECTIONS = {
    "PaddleNLP": PADDLENLP,
    "MindFormers": MINDFORMERS,
    "vLLM": VLLM,
    "SWIFT and FastChat": SWIFT,
    "llama.cpp": LLAMA_CPP,
}
"""By tool, in the order of the page."""
INTRODUCTIONS = {
    "PaddleNLP": "Its checkpoints, quantised folders, `pre_caches.npy` and rows of `src` and `tgt` are read as they are.",
    "MindFormers": "Its `.ckpt` files, whole or of ranks, are read as they are; `parallel=` starts the ranks itself. Scripts of its\n"
    "`pipeline` run with `from pipelines.mindformers import` for their import.",
    "vLLM": "`from pipelines import LLM, SamplingParams` runs its offline scripts; `task=serve` is its server.\n"
    "`VLLM_USE_MODELSCOPE=True` is `model.hub=modelscope`.",
    "SWIFT and FastChat": "A server and a chat are tasks; replicas are `serve.replicas=2`.",
    "llama.cpp": "A GGUF file is a model: `model.path=FILE.gguf`.",
}


def refuse_former(arguments: list[str]) -> None:
    """Raise UserError for an option of another tool, with its replacement.

    A folder of --config-dir may have options with the same names, and -p is a Hydra flag with --cfg.
    """
    if any(argument.startswith(("--config-d", "-cd", "--cfg", "-c")) for argument in arguments):
        return
    for argument, following in pairwise([*arguments, ""]):
        has_value = argument.startswith("--") and "=" not in argument and not following.startswith("-")
        _refuse(argument, f"{argument}={following}" if has_value else argument)


def _refuse(argument: str, with_value: str) -> None:
    """Raise UserError if the argument is an option of another tool.

    with_value: the argument joined with its possible value.
    """
    for typed in (with_value, argument, argument.partition("=")[0]):
        for tool, rows in SECTIONS.items():
            for row in rows:
                if row.option == typed or (typed.startswith("--") and _flag(typed) == _flag(row.option)):
                    raise UserError(f"{argument} is an option of {tool}: {_answer(row)}; MIGRATION.md has the others")
    if argument.endswith(".gguf") and "=" not in argument:
        raise UserError(
            f"{argument} is not an option: give model.path={argument}; MIGRATION.md has llama.cpp's options"
        )


def page() -> str:
    """Return MIGRATION.md."""
    lines = [
        "# Coming from another tool",
        "",
        "What to give `run.py` instead of an option or a command of another tool. The command line answers these names with",
        "the same hint. `python -m conf.former` writes this page. `device=gpu` means `device=cuda`.",
    ]
    for tool, rows in SECTIONS.items():
        lines += ["", f"## {tool}", "", INTRODUCTIONS[tool], "", "| theirs | here | what differs |", "|---|---|---|"]
        lines += [
            f"| `{row.option}` | {f'`{row.arguments}`' if row.arguments else 'nothing'} | {row.note} |" for row in rows
        ]
    return "\n".join(lines) + "\n"


def _flag(name: str) -> str:
    """Return the name of a flag without leading dashes, with underscores for inner dashes."""
    return name.lstrip("-").replace("-", "_")


def _answer(row: Former) -> str:
    if not row.arguments:
        return f"leave it out, {row.note}"
    return f"give {row.arguments} here" + (f" ({row.note})" if row.note else "")


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
