"""The arguments of vLLM's LLM(...), up to version 0.33.

Each maps to one of our settings, or to an error or warning of one line.
"""

import logging
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch

from conf.errors import UserError, list_known_names
from conf.schema import ModelConfig
from pipelines.loading.model_source import resolve_model

log = logging.getLogger(__name__)

SETTINGS = {
    "max_model_len": "model.max_length",
    "max_num_batched_tokens": "device.max_batched_tokens",
    "block_size": "device.block_size",
    "gpu_memory_utilization": "device.memory_fraction",
    "kv_cache_memory_bytes": "device.kv_cache_memory",
    "max_loras": "model.max_adapters",
}
"""Arguments that pass their value to one of our settings; None leaves the setting unset."""
CHOICES: dict[str, dict[Any, str]] = {
    "load_format": {
        "auto": "",
        "hf": "",
        "safetensors": "",
        "gguf": "",
        "pt": "model.allow_pickle=true",
        "dummy": "model.weights=random",
    },
    "kv_cache_dtype": {
        "auto": "",
        "fp8": "quant.kv_cache=fp8",
        "fp8_e4m3": "quant.kv_cache=fp8",
        "int8": "quant.kv_cache=int8",
        "int8_per_token_head": "quant.kv_cache=int8",
    },
    "device": {"auto": "", "cpu": "device=cpu", "cuda": "device=cuda"},
    "enforce_eager": {False: "", True: "device.cuda_graphs=false", None: ""},
    "enable_prefix_caching": {None: "", True: "", False: "decode.prefix_cache=false"},
    "enable_expert_parallel": {False: "", True: "parallel.experts=whole"},
    "skip_tokenizer_init": {False: "", True: "model.tokenizer=null"},
}
"""Arguments with a fixed set of values, and our setting for each value; "" is the default behaviour."""


OF_A_GPU = {
    "gpu_memory_utilization": "device.kv_cache_memory is a CPU's",
    "enforce_eager": "graphs are captured there alone",
}
"""Arguments that a CPU does not use, with the reason."""


class Answer(NamedTuple):
    """The error or warning for an argument that does not map to a setting."""

    reason: str
    neutral_values: tuple[Any, ...] | None = None
    """Values equal to this engine's behaviour, accepted silently; None: any empty value, and auto."""
    is_refused: bool = True
    """True: any other value is an error. False: it is a warning, because the output does not depend on the value."""


def _refused(reason: str, names: str) -> dict[str, Answer]:
    return dict.fromkeys(names.split(), Answer(reason))


def _unused(reason: str, names: str) -> dict[str, Answer]:
    return dict.fromkeys(names.split(), Answer(reason, is_refused=False))


def _one(reason: str, names: str) -> dict[str, Answer]:
    return dict.fromkeys(names.split(), Answer(reason, (1, None)))


SECRETS = ("hf_token",)
"""Arguments whose values are not shown in errors."""
NO_CODE = "no code of a checkpoint is ever run"
OWN_KERNELS = "this engine has kernels and steps of its own"
NO_GRAPHS = "device.cuda_graphs alone decides which steps are captured"
TEXT_ALONE = "prompts are texts and token ids alone"
NO_PICTURES = "no pictures, sounds or videos are read"
LOGS = "an offline script has no such logs or metrics: task=serve has /metrics"
WEIGHTS_AT_ONCE = "weights are read once, at the start"
ONE_GROUP = "an engine is one group of processes, by tensor_parallel_size and pipeline_parallel_size"
REPLICAS = "an LLM is one engine: replicas are run.py's parallel=ray parallel.replicas=2"
FROM_CONFIG = "the architecture comes from the checkpoint's config.json: change it in a copy of the folder"
TRANSFERS = "nothing is moved between engines"
ADAPTERS = "adapters are read by overrides=['model.adapters={NAME: FOLDER}'], and a call names one as lora_request"
ANY_ADAPTER = "adapters have any rank, and are read when they are named"
DRAFTS = "drafts are set by speculative_config"
PLACES = "weights and KV cache are each in one memory"
RECURRENT = "recurrent states have one form here"
GUIDES = "structured outputs are llguidance's, as SamplingParams gives them"
ANSWERS: dict[str, Answer] = {
    **_unused(NO_CODE, "trust_remote_code code_revision"),
    **_unused(
        OWN_KERNELS,
        "attention_backend attention_config moe_backend linear_backend sparse_indexer_topk_backend kernel_config ir_op_priority "
        "monokernel enable_flashinfer_autotune gdn_prefill_backend kda_prefill_backend kda_decode_backend mamba_backend mamba_config "
        "mamba_ssu_algorithm disable_custom_all_reduce disable_async_output_proc async_scheduling num_scheduler_steps "
        "multi_step_stream_outputs use_v2_block_manager num_lookahead_slots disable_cascade_attn jit_monitor_mode jit_monitor_verbose "
        "enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold enable_shm_tensor_arena "
        "disable_hybrid_kv_cache_manager kv_sharing_fast_prefill swa_bounded_replay prefix_caching_hash_algo "
        "prefix_cache_retention_interval prefix_match_unit replayssm_buffer_len use_replayssm numa_bind numa_bind_nodes numa_bind_cpus "
        "cp_kv_cache_interleave_size dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size enable_cumem_allocator "
        "enable_batch_sharded_sampling enable_hc_sp fully_sharded_loras specialize_active_lora enable_mixed_moe_lora_format "
        "enable_moe_shared_loras max_parallel_loading_workers renderer_num_workers tokenizer_pool_size tokenizer_pool_type "
        "tokenizer_pool_extra_config all2all_backend use_fp64_gumbel stream_interval optimization_level performance_mode",
    ),
    **_unused(
        NO_GRAPHS,
        "compilation_config cudagraph_capture_sizes cuda_graph_sizes max_cudagraph_capture_size max_seq_len_to_capture "
        "max_context_len_to_capture",
    ),
    **_unused(
        NO_PICTURES,
        "limit_mm_per_prompt mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm mm_encoder_only "
        "mm_shm_cache_max_object_size_mb mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
        "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin mm_tensor_ipc "
        "mm_processor_device mm_ipc_gpu_memory_gb mm_device_do_normalize media_io_kwargs interleave_mm_strings skip_mm_profiling "
        "video_pruning_rate video_pruning_method disable_mm_preprocessor_cache disable_chunked_mm_input language_model_only "
        "allowed_local_media_path allowed_media_domains ec_transfer_config ec_manager_config enable_multimodal_encoder_data_parallel "
        "enable_tower_connector_lora default_mm_loras",
    ),
    **_unused(
        LOGS,
        "aggregate_engine_logging show_hidden_metrics_for_version otlp_traces_endpoint collect_detailed_traces kv_cache_metrics "
        "kv_cache_metrics_sample cudagraph_metrics enable_layerwise_nvtx_tracing enable_mfu_metrics enable_logging_iteration_details "
        "enable_mm_processor_stats per_request_spec_decode_metrics custom_histogram_buckets logging_config log_level log_config_file "
        "profiler_config ray_workers_use_nsight watchdog_config shutdown_timeout served_model_name use_tqdm_on_load",
    ),
    "disable_log_stats": Answer(LOGS, (True, None), is_refused=False),
    **_unused(
        WEIGHTS_AT_ONCE,
        "safetensors_load_strategy safetensors_prefetch_num_threads safetensors_prefetch_block_size model_loader_extra_config "
        "ignore_patterns pt_load_map_location enable_ep_weight_filter",
    ),
    **_unused(
        "requests that make room for others are computed again: nothing is swapped",
        "swap_space preemption_mode watermark",
    ),
    **_unused(
        "prompts are computed as device.max_batched_tokens has room",
        "long_prefill_token_threshold long_prefill_token_threshold_adaptive max_num_partial_prefills max_long_partial_prefills "
        "max_num_scheduled_tokens scheduler_reserve_full_isl prefill_schedule_interval scheduler_delay_factor max_num_active_seqs",
    ),
    "enable_chunked_prefill": Answer("prompts are always cut as steps have room", (True, None), is_refused=False),
    "scheduling_policy": Answer("prompts of a call begin in their order", ("fcfs",)),
    **_refused("the scheduler is this engine's own", "scheduler_cls worker_cls worker_extension_cls additional_config"),
    **_refused("a call runs all of its prompts", "max_num_queued_reqs max_num_queued_tokens"),
    "max_logprobs": Answer("logprobs may be up to 100", is_refused=False),
    "logprobs_mode": Answer("log probabilities are of the model's logits", ("raw_logprobs", None)),
    "tokenizer_mode": Answer("the tokenizer's own files say how it is read", ("auto", "hf", None)),
    "config_format": Answer("the folder's files say what it is", ("auto", "hf", None)),
    "model_impl": Answer("a model is run by the code of this engine alone", ("auto", "vllm", None)),
    "convert": Answer('give runner="pooling" for vectors', ("auto", "none", None)),
    "generation_config": Answer("give SamplingParams() to generate, for settings of vLLM alone", ("auto", None)),
    "override_generation_config": Answer("give SamplingParams to generate"),
    "distributed_executor_backend": Answer("ranks are processes of this machine", ("mp", "uni", None)),
    "hf_token": Answer("the hub's client reads HF_TOKEN of the environment, or hf auth login", (None, True)),
    "download_dir": Answer("the hub's cache is where HF_HOME or MODELSCOPE_CACHE of the environment says"),
    **_refused(FROM_CONFIG, "hf_overrides rope_scaling rope_theta hf_config_path model_class_overrides disable_sliding_window"),
    **_refused("give the model as model", "model_weights"),
    **_refused("give overrides=['quant=int8'], or a quantised checkpoint", "quantization_config quantization_param_path"),
    **_unused("a checkpoint is read as its config.json says", "allow_deprecated_quantization"),
    **_refused("static scales are the checkpoint's own: task=quantize makes them", "calculate_kv_scales"),
    **_refused("all layers have the same KV cache", "kv_cache_dtype_skip_layers"),
    **_refused("give overrides=['device.kv_cache_memory=4GB']", "num_gpu_blocks_override"),
    **_refused(
        PLACES,
        "cpu_offload_gb cpu_offload_params offload_backend offload_group_size offload_prefetch_step offload_params "
        "kv_offloading_size enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names",
    ),
    **_unused(PLACES, "offload_num_in_group kv_offloading_backend sleep_mode_backend"),
    **_refused(
        "pooling is set by overrides, such as ['embed.pooling=mean']", "pooler_config override_pooler_config"
    ),
    **_refused(TEXT_ALONE, "enable_prompt_embeds enable_mm_embeds io_processor_plugin tokens_only"),
    **_refused(TRANSFERS, "kv_transfer_config kv_events_config weight_transfer_config enable_nccl_comm_suspend"),
    **_refused(ADAPTERS, "enable_lora lora_target_modules enable_prompt_adapter enable_lora_bias qlora_adapter_name_or_path"),
    **_unused(
        ANY_ADAPTER,
        "max_lora_rank max_cpu_loras lora_dtype lora_extra_vocab_size long_lora_scaling_factors "
        "max_lora_cls_labels max_prompt_adapters max_prompt_adapter_token",
    ),
    **_refused(
        DRAFTS,
        "speculative_model num_speculative_tokens speculative_draft_tensor_parallel_size speculative_max_model_len "
        "speculative_disable_by_batch_size speculative_disable_mqa_scorer speculative_model_quantization ngram_prompt_lookup_max "
        "ngram_prompt_lookup_min spec_decoding_acceptance_method typical_acceptance_sampler_posterior_threshold "
        "typical_acceptance_sampler_posterior_alpha disable_logprobs_during_spec_decoding spec_method spec_model spec_tokens",
    ),
    **_one(
        ONE_GROUP,
        "prefill_context_parallel_size decode_context_parallel_size nnodes",
    ),
    **_refused(ONE_GROUP, "node_rank device_ids worker_use_ray enable_fault_tolerance fault_tolerance_config"),
    **_unused(ONE_GROUP, "master_addr master_port distributed_timeout_seconds cpu_distributed_timeout_seconds"),
    **_one(REPLICAS, "data_parallel_size data_parallel_size_local"),
    **_refused(
        REPLICAS,
        "data_parallel_rank data_parallel_start_rank data_parallel_hybrid_lb data_parallel_external_lb "
        "data_parallel_multi_port_external_lb enable_elastic_ep enable_eplb",
    ),
    **_unused(
        REPLICAS,
        "data_parallel_address data_parallel_rpc_port data_parallel_backend elastic_ep_max_dp_size dp_sync_interval eplb_config "
        "disable_nccl_for_dp_synchronization num_redundant_experts eplb_window_size eplb_step_interval eplb_log_balancedness "
        "expert_placement_strategy",
    ),
    **_unused(
        RECURRENT,
        "mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size mamba_cache_mode enable_mamba_shared_prefix_checkpoint "
        "enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds",
    ),
    **_unused(
        GUIDES,
        "guided_decoding_backend structured_outputs_config guided_decoding_disable_fallback "
        "guided_decoding_disable_any_whitespace guided_decoding_disable_additional_properties",
    ),
    **_unused("texts are given whole, reasoning included", "reasoning_parser reasoning_parser_plugin enable_reasoning"),
    **_refused("give the model's own template, or a prompt without reasoning", "reasoning_config"),
    **_refused("no code of the caller runs in a step: see logit_bias, bad_words and structured_outputs", "logits_processors"),
    **_refused("outputs are texts, token ids and log probabilities", "enable_return_routed_experts return_sampling_mask "),
    **_refused("there is no such model here", "diffusion_config engram_config override_neuron_config"),
    **_refused("texts have no watermark", "watermark_config"),
    **_refused("outputs are what the model says", "enable_trace_replay aux_output_config"),
    **_unused("an argument is checked, and no variable of the environment", "fail_on_environ_validation"),
}  # fmt: skip
OWN = ("model", "tokenizer", "dtype", "quantization", "seed", "runner", "task", "max_num_seqs", "chat_template")
"""Arguments that LLM reads itself."""
DRAFTING = {"ngram": "ngram", "draft_model": "model", "mtp": "mtp", "deepseek_mtp": "mtp"}
"""vLLM's methods of speculative_config, and ours."""


def run_settings(arguments: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    """Return vLLM's arguments as our overrides, and text settings by name.

    Raises UserError, with the reason, for an unknown argument and for an unsupported value. An argument that does not
    change the output is a warning.
    """
    overrides, texts = list(_parallel(arguments)), _revision(arguments)
    for name, value in arguments.items():
        if name in ("tensor_parallel_size", "pipeline_parallel_size", "revision", "tokenizer_revision"):
            continue
        if name == "speculative_config":
            drafts, path = _drafts(value or {})
            overrides += drafts
            texts |= path
        elif name in OF_A_GPU and value and not torch.cuda.is_available():
            log.warning("%s=%s is not used without a GPU: %s", name, value, OF_A_GPU[name])
        elif name in SETTINGS:
            overrides += [] if value is None else [f"{SETTINGS[name]}={value}"]
        elif name in CHOICES:
            overrides += _chosen(name, value)
        elif name in ANSWERS:
            _answer(name, value, ANSWERS[name])
        else:
            known = [*OWN, *SETTINGS, *CHOICES, "tensor_parallel_size", "pipeline_parallel_size", "revision"]
            raise UserError(f"argument {name} does not exist: {list_known_names([*known, 'speculative_config'], name)}")
    return overrides, texts


def _answer(name: str, value: Any, answer: Answer) -> None:
    neutral_values = answer.neutral_values
    if (
        (not value or value == "auto")
        if neutral_values is None
        else any(value == neutral_value for neutral_value in neutral_values)
    ):
        return
    if answer.is_refused:
        argument = name if name in SECRETS else f"{name}={value!r}"
        raise UserError(f"{argument} is not taken: leave it out; {answer.reason}")
    log.warning("%s=%r changes nothing: %s", name, value, answer.reason)


def _chosen(name: str, value: Any) -> list[str]:
    for vllm_value, setting in CHOICES[name].items():
        if value == vllm_value:
            return [setting] if setting else []
    raise UserError(f"{name}={value!r} is not allowed: give one of {', '.join(map(str, CHOICES[name]))}")


def _parallel(arguments: Mapping[str, Any]) -> Iterator[str]:
    sizes = {}
    for option, vllm_name in (("tp", "tensor_parallel_size"), ("pp", "pipeline_parallel_size")):
        size = arguments.get(vllm_name)
        if size is not None and (type(size) is not int or size < 1):
            raise UserError(f"{vllm_name}={size!r} is not allowed: give a number above 0")
        if size is not None and size > 1:
            sizes[option] = size
    if sizes:
        yield f"parallel={'_'.join(sizes)}"
        yield from (f"parallel.{name}={size}" for name, size in sizes.items())


def _revision(arguments: Mapping[str, Any]) -> dict[str, str]:
    revision, of_tokenizer = arguments.get("revision"), arguments.get("tokenizer_revision")
    if of_tokenizer not in (None, revision):
        raise UserError(
            f"tokenizer_revision={of_tokenizer!r} contradicts revision={revision!r}, which the tokenizer has too: "
            "give the same, or tokenizer=FOLDER"
        )
    return {} if revision is None else {"model.revision": str(revision)}


def _drafts(config: Mapping[str, Any]) -> tuple[list[str], dict[str, str]]:
    if not isinstance(config, Mapping):
        raise UserError(
            f"speculative_config is of type {type(config).__name__}: give a dictionary, such as {{'method': 'ngram'}}"
        )
    settings = {name: value for name, value in config.items() if value is not None}
    path = settings.pop("model", None)
    method = settings.pop("method", "draft_model" if path else None)
    if method is None and not settings:
        return [], {}
    if not isinstance(method, str) or method not in DRAFTING:
        raise UserError(f"speculative_config: method {method!r} is not here: give one of {', '.join(DRAFTING)}")
    keys = {"num_speculative_tokens": "num_tokens"}
    if DRAFTING[method] == "ngram":
        keys |= {"prompt_lookup_max": "max_ngram", "prompt_lookup_min": "min_ngram"}
    overrides = [f"decode.speculate={DRAFTING[method]}"]
    for name, value in settings.items():
        if name not in keys:
            raise UserError(
                f"speculative_config: {name} is not taken with {method}: {list_known_names(list(keys), name)}"
            )
        overrides.append(f"decode.speculation.{keys[name]}={value}")
    drafts = DRAFTING[method] == "model"
    return overrides, {"decode.speculation.model_path": str(path)} if drafts and path else {}


def check_quantization(name: str, model: ModelConfig) -> None:
    """Raise UserError if `quantization`, a name of vLLM, is not the method of the model's checkpoint."""
    checkpoint = resolve_model(model).checkpoint
    config = checkpoint.config.raw("quantization_config")
    method = config.get("quant_method") if isinstance(config, dict) else None
    if checkpoint.path.suffix == ".gguf":
        method = "gguf"
    if name.lower().removesuffix("_marlin").replace("_", "-") != str(method).replace("_", "-"):
        has = f"has {method}" if method else "is not quantised: give overrides=['quant=int4'] to quantise it"
        raise UserError(f"quantization={name!r} contradicts the checkpoint {model.path}, which {has}")
