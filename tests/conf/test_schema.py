"""Checks of the schema: every invalid value is one line with the dotted key, the value and the allowed values."""

import re
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, cast

import pytest

import conf.decoding
from conf.constraints import Constraint
from conf.decoding import DecodeConfig
from conf.errors import ErrorCode, UserError
from conf.pooling import EmbedConfig, ScoreConfig
from conf.quantization import (
    Activations,
    CalibrateConfig,
    GptqConfig,
    KVCacheScales,
    QuantConfig,
    QuantizeConfig,
    QuantMethod,
    QuantScheme,
    SmoothConfig,
    SparsityConfig,
    SparsityMethod,
    SparsityPattern,
)
from conf.schema import (
    Backend,
    DeviceConfig,
    ExpertPlacement,
    ModelConfig,
    ParallelConfig,
    ParallelMode,
    RunConfig,
    Sum,
    Task,
    Weights,
)
from conf.serving import ChatConfig, ServeConfig
from conf.speculation import Acceptance, Speculate, SpeculationConfig
from conf.support.sizes import num_bytes
from conf.tasks import (
    BenchConfig,
    CheckpointFormat,
    ConvertConfig,
    ConvertDType,
    EvaluateConfig,
    ExportConfig,
    OutputForm,
    PredictConfig,
    PrefixConfig,
    SweepConfig,
    Truncation,
    VerifyConfig,
)
from conf.thinking import ThinkingConfig
from conf.tracker import Tracker, TrackerConfig
from tests.helpers.cases import each

RANGE, VALUE, FORM = ErrorCode.out_of_range, ErrorCode.unknown_value, ErrorCode.malformed
NEEDS, EXCLUDES = ErrorCode.needs_other, ErrorCode.excludes
NAN, INF, HALF = float("nan"), float("inf"), "\ud83d"
SINGLE: list[tuple[type, str, ErrorCode, dict[str, list[Any]]]] = [
    (ModelConfig, "model", RANGE, {"max_length": [0], "max_adapters": [0, 1025]}),
    (ModelConfig, "model", FORM, {"path": [""], "revision": [""], "prefixes": ["p", {"p": ""}], "adapters": [{1: "a"}]}),
    (ParallelConfig, "parallel", RANGE, {"tp": [1, 513], "pp": [1], "replicas": [0, 4097], "heartbeat_s": [4.9, INF, NAN]}),
    (ParallelConfig, "parallel", NEEDS, {"tp": [2], "pp": [2], "replicas": [2], "backend": [Backend.gloo], "heartbeat_s": [6.0]}),
    (ParallelConfig, "parallel", NEEDS, {"sum": [Sum.reduce], "experts": [ExpertPlacement.whole], "dry_run": [True], "topology": ["x"]}),
    (DeviceConfig, "device", RANGE, {"threads": [0], "decode_threads": [0], "max_batched_tokens": [0], "block_size": [0]}),
    (DeviceConfig, "device", RANGE, {"memory_fraction": [0.0, 1.1]}),
    (DeviceConfig, "device", FORM, {"kv_cache_memory": ["0", "-1GB", "1XB", "0.0", "nan", "half", "9" * 400 + "GB"]}),
    (DeviceConfig, "device", FORM, {"kept_prefixes": [[""]]}),
    (DeviceConfig, "device", FORM, {"kv_cache_tiers": [["disk:1GB"], ["memory:0"], ["memory:0.5"], ["memory"], ["memory:a:1GB"]]}),
    (DeviceConfig, "device", FORM, {"kv_cache_tiers": [["file:1GB"], ["file::1GB"], ["file:a"], ["memory:1GB", "memory:1GB"], [5]]}),
    (SmoothConfig, "quant.smooth", RANGE, {"alpha": [-0.1, 1.1]}),
    (GptqConfig, "quant.gptq", RANGE, {"damping": [0.0]}),
    (SparsityConfig, "quant.sparsity", RANGE, {"ratio": [0.0, 1.0]}),
    (SparsityConfig, "quant.sparsity", NEEDS, {"ratio": [0.4], "pattern": [SparsityPattern["2:4"]]}),
    (QuantConfig, "quant", VALUE, {"group_size": [3]}),
    (QuantConfig, "quant", NEEDS, {"group_size": [64, None], "symmetric": [False], "per_tensor": [True], "shift": [True]}),
    (QuantConfig, "quant", NEEDS, {"auto_clip": [True], "overrides": [{"a": "int8"}], "skip": [["a"]]}),
    (QuantConfig, "quant", NEEDS, {"kv_cache_scales": [KVCacheScales.static]}),
    (QuantConfig, "quant", RANGE, {"bits": [0.0], "max_bytes": [0], "probe_kl": [-0.1]}),
    (QuantConfig, "quant", NEEDS, {"bits": [5.0], "max_bytes": [9], "plan": ["x"], "embedding": ["int8"], "imatrix": ["x"]}),
    (QuantConfig, "quant", EXCLUDES, {"method": [QuantMethod.gptq], "activations": [Activations.dynamic]}),
    (CalibrateConfig, "calibrate", RANGE, {"num_samples": [0], "sequence_length": [1], "seed": [-1]}),
    (SpeculationConfig, "decode.speculation", RANGE, {"num_tokens": [0, 16], "min_ngram": [0, 17], "max_ngram": [1, 17]}),
    (SpeculationConfig, "decode.speculation", RANGE, {"verify_window": [0], "max_candidates": [65]}),
    (ThinkingConfig, "decode.thinking", RANGE, {"max_tokens": [-1, 2**31]}),
    (ThinkingConfig, "decode.thinking", FORM, {"start": ["\ud800"], "end": ["", "x" * 4097], "closing": ["x" * 4097]}),
    (DecodeConfig, "decode", RANGE, {"max_new_tokens": [0], "min_new_tokens": [-1], "max_length": [-1], "min_length": [-1]}),
    (DecodeConfig, "decode", RANGE, {"temperature": [-0.1, NAN, INF], "top_k": [-2, 2**31], "top_p": [0.0, 1.01], "min_p": [1.5]}),
    (DecodeConfig, "decode", RANGE, {"n": [0, 257], "num_beams": [0], "length_penalty": [11], "num_return_sequences": [0]}),
    (DecodeConfig, "decode", RANGE, {"penalty_alpha": [2], "repetition_penalty": [0.0], "presence_penalty": [2.5]}),
    (DecodeConfig, "decode", RANGE, {"frequency_penalty": [NAN], "no_repeat_ngram_size": [1025], "seed": [-1, 2**64]}),
    (DecodeConfig, "decode", RANGE, {"logprobs": [101], "prompt_logprobs": [-1]}),
    (DecodeConfig, "decode", RANGE, {"typical_p": [0.0, 1.1], "top_n_sigma": [-2, INF], "xtc_probability": [-0.1, 2]}),
    (DecodeConfig, "decode", RANGE, {"xtc_threshold": [NAN, 1.1], "dynatemp_range": [-1], "dynatemp_exponent": [0.0]}),
    (DecodeConfig, "decode", RANGE, {"dry_multiplier": [-1, INF], "dry_base": [0.9], "dry_allowed_length": [-1, 2**31]}),
    (DecodeConfig, "decode", RANGE, {"dry_penalty_last_n": [-2, 2**31]}),
    (DecodeConfig, "decode", FORM, {"dry_sequence_breakers": [[""], [5], "a", ["a" * 1000], ["a"] * 65, [HALF]]}),
    (DecodeConfig, "decode", VALUE, {"max_new_tokens": ["5"], "early_stopping": ["x"]}),
    (DecodeConfig, "decode", FORM, {"logit_bias": [{1: 101}], "bad_words": [[" "]], "bad_words_ids": [[[]]], "suppress_tokens": [[-1]]}),
    (DecodeConfig, "decode", FORM, {"sequence_bias": [[[[1], NAN]]], "forced_bos_token_id": [[1]], "forced_eos_token_id": [-1]}),
    (DecodeConfig, "decode", FORM, {"allowed_token_ids": [[-1]], "stop": [["a", ""], [HALF]], "stop_token_ids": [[-2]]}),
    (PredictConfig, "predict", RANGE, {"batch_size": [0], "max_errors": [-1], "max_prompt_tokens": [0]}),
    (PredictConfig, "predict", FORM, {"chat_template": ["", None], "prefix": [""], "resume": [""], "output_file": [""]}),
    (PredictConfig, "predict", NEEDS, {"truncate": [Truncation.left], "max_prompt_tokens": [5]}),
    (PredictConfig, "predict", NEEDS, {"output_form": [OutputForm.paddlenlp]}),
    (BenchConfig, "bench", RANGE, {"prompt_tokens": [0], "new_tokens": [0], "batch_size": [0], "repeats": [0], "warmup": [-1]}),
    (EvaluateConfig, "evaluate", RANGE, {"window": [1], "stride": [0], "num_fewshot": [-1], "limit": [0]}),
    (EvaluateConfig, "evaluate", FORM, {"reference": [""], "against": [""], "gate": [{}, {"acuracy": 1}, {"kl_mean": "x"}]}),
    (EvaluateConfig, "evaluate", RANGE, {"seed": [-1]}),
    (EvaluateConfig, "evaluate", NEEDS, {"window": [8], "stride": [8], "reference": ["y"]}),
    (EvaluateConfig, "evaluate", NEEDS, {"tasks_folder": ["x"], "num_fewshot": [0], "limit": [1]}),
    (ConvertConfig, "convert", RANGE, {"tp": [0], "pp": [0]}),
    (ConvertConfig, "convert", FORM, {"output": [""], "lora": [""], "max_shard_size": ["0"]}),
    (ConvertConfig, "convert", NEEDS, {"tp": [2], "pp": [2], "imatrix": ["x"]}),
    (ConvertConfig, "convert", EXCLUDES, {"dtype": [ConvertDType.q4_0]}),
    (ExportConfig, "export", RANGE, {"tp": [0, 513], "pp": [0]}),
    (ExportConfig, "export", FORM, {"output": [""]}),
    (PrefixConfig, "prefix", FORM, {"output": [""], "chat_template": [""]}),
    (VerifyConfig, "verify", RANGE, {"rows": [0], "seed": [-1]}),
    (VerifyConfig, "verify", FORM, {"folder": [""]}),
    (TrackerConfig, "tracker", NEEDS, {"uri": ["sqlite:///a.db"], "experiment": ["x"]}),
    (ScoreConfig, "score", FORM, {"instruction": [""]}),
    (SweepConfig, "sweep", FORM, {"objective": [1, "", [], [""], ["perplexity", 2], {"perplexity": 1}]}),
    (SweepConfig, "sweep", RANGE, {"baseline": [-1]}),
    (ChatConfig, "chat", RANGE, {"port": [-1]}),
    (ChatConfig, "chat", FORM, {"url": ["localhost"], "host": [""], "chat_template": [""]}),
    (ChatConfig, "chat", NEEDS, {"model": ["m"], "host": ["::1"], "port": [1]}),
    (ServeConfig, "serve", RANGE, {"port": [-1, 65536], "batch_size": [0], "max_waiting": [-1], "max_waiting_tokens": [0]}),
    (ServeConfig, "serve", RANGE, {"max_step_ms": [0], "request_timeout_s": [0], "send_timeout_s": [NAN], "keep_alive_s": [0, INF]}),
    (ServeConfig, "serve", RANGE, {"drain_s": [-1], "stall_s": [0], "max_connections": [0], "replicas": [0]}),
    (ServeConfig, "serve", FORM, {"host": [""], "model_name": [""], "chat_template": [""], "max_body": ["0"], "max_upload": ["x"]}),
    (ServeConfig, "serve", FORM, {"response_template": [""], "response_store": [""], "response_store_size": ["x"], "traces": ["x"]}),
    (ServeConfig, "serve", RANGE, {"response_store_count": [0], "response_store_age_s": [0, NAN]}),
    (ServeConfig, "serve", NEEDS, {"max_upload": ["1GB"], "response_store_size": ["1GB"], "admin_keys": ["keys"], "trace_texts": [True]}),
    (ServeConfig, "serve", NEEDS, {"response_store_count": [1], "response_store_age_s": [1.0]}),
]  # fmt: skip
"""Values that are invalid in themselves, by field: config, group, code."""
RAY, BENCH = ParallelConfig(ParallelMode.ray, replicas=2), {"task": Task.bench}
AUTO = QuantConfig(QuantScheme.int8, activations=Activations.auto)
LOSSY = SpeculationConfig(acceptance=Acceptance.top_p_window)
MLFLOW = {"kind": Tracker.mlflow}
TIERED = DeviceConfig(kv_cache_tiers=["memory:1GB"])
TP, GUIDE = {"mode": ParallelMode.tp}, {"regex": "a"}
PRUNED = {"method": SparsityMethod.wanda}
TOGETHER: list[tuple[type, dict[str, Any], ErrorCode, str]] = [
    (ModelConfig, {"path": "x", "verify": True, "weights": Weights.random}, NEEDS, "model.verify"),
    (ModelConfig, {"path": "x", "keep_packed": True, "weights": Weights.random}, NEEDS, "model.keep_packed"),
    (ModelConfig, {"path": "x", "prefixes": {"a": "b"}, "adapters": {"a": "c"}}, EXCLUDES, "model.prefixes.a"),
    (ParallelConfig, {"mode": ParallelMode.auto, "topology": "x"}, NEEDS, "parallel.topology"),
    (ParallelConfig, {"mode": ParallelMode.ray, "sum": Sum.reduce}, NEEDS, "parallel.sum"),
    (SmoothConfig, {"alpha": 0.4, "piecewise": True}, EXCLUDES, "quant.smooth.alpha"),
    (SparsityConfig, {**PRUNED, "ratio": 0.4, "pattern": SparsityPattern["2:4"]}, EXCLUDES, "quant.sparsity.ratio"),
    (QuantConfig, {"smooth": SmoothConfig(alpha=0.4)}, NEEDS, "quant.smooth.alpha"),
    (QuantConfig, {"gptq": GptqConfig(act_order=False)}, NEEDS, "quant.gptq.act_order"),
    (QuantConfig, {"scheme": QuantScheme.auto, "bits": 5.0, "plan": "x"}, EXCLUDES, "quant.bits"),
    (QuantConfig, {"probe": False, "probe_kl": 0.2}, NEEDS, "quant.probe_kl"),
    (DecodeConfig, {"min_new_tokens": 5, "max_new_tokens": 4}, RANGE, "decode.min_new_tokens"),
    (DecodeConfig, {"num_beams": 2, "num_return_sequences": 3}, RANGE, "decode.num_return_sequences"),
    (DecodeConfig, {"penalty_alpha": 0.6, "top_k": 1}, RANGE, "decode.top_k"),
    (DecodeConfig, {"temperature": 0.5, "num_beams": 2}, EXCLUDES, "decode.temperature"),
    (DecodeConfig, {"temperature": 0.5, "penalty_alpha": 0.6}, EXCLUDES, "decode.temperature"),
    (DecodeConfig, {"n": 2, "num_beams": 2}, EXCLUDES, "decode.n"),
    (DecodeConfig, {"n": 2, "penalty_alpha": 0.6}, EXCLUDES, "decode.n"),
    (DecodeConfig, {"n": 2, "temperature": 0.0}, EXCLUDES, "decode.n"),
    (DecodeConfig, {"penalty_alpha": 0.6, "num_beams": 2}, EXCLUDES, "decode.penalty_alpha"),
    (DecodeConfig, {"logprobs": 0, "num_beams": 2}, EXCLUDES, "decode.logprobs"),
    (DecodeConfig, {"guide": GUIDE, "ignore_eos": True}, EXCLUDES, "decode.guide"),
    (DecodeConfig, {"guide": GUIDE, "num_beams": 2}, EXCLUDES, "decode.guide"),
    (DecodeConfig, {"guide": GUIDE, "penalty_alpha": 0.6, "top_k": 4}, EXCLUDES, "decode.guide"),
    (DecodeConfig, {"guide": GUIDE, "speculate": Speculate.ngram, "speculation": LOSSY}, EXCLUDES, "decode.guide"),
    (DecodeConfig, {"thinking": ThinkingConfig(5), "num_beams": 2}, EXCLUDES, "decode.thinking.max_tokens"),
    (DecodeConfig, {"thinking": ThinkingConfig(5), "penalty_alpha": 0.6}, EXCLUDES, "decode.thinking.max_tokens"),
    (ThinkingConfig, {"start": "x"}, NEEDS, "decode.thinking.start"),
    (ThinkingConfig, {"end": "x"}, NEEDS, "decode.thinking.end"),
    (ThinkingConfig, {"closing": "x</think>"}, NEEDS, "decode.thinking.closing"),
    (ThinkingConfig, {"is_open": False}, NEEDS, "decode.thinking.is_open"),
    (ThinkingConfig, {"max_tokens": 5, "closing": "x"}, FORM, "decode.thinking.closing"),
    (PredictConfig, {"prefix": "p", "adapter": "a"}, EXCLUDES, "predict.prefix"),
    (BenchConfig, {"data": "rows.jsonl", "prompt_tokens": 9}, EXCLUDES, "bench.prompt_tokens"),
    (EvaluateConfig, {"data": "x", "window": 8, "stride": 9}, RANGE, "evaluate.stride"),
    (EvaluateConfig, {"data": "x", "gate": {"kl_mean": 1}}, NEEDS, "evaluate.gate.kl_mean"),
    (ConvertConfig, {"max_shard_size": "1GB", "format": CheckpointFormat.gguf}, NEEDS, "convert.max_shard_size"),
    (TrackerConfig, {**MLFLOW, "uri": "mlflow.db"}, FORM, "tracker.uri"),
    (TrackerConfig, {**MLFLOW, "experiment": ""}, FORM, "tracker.experiment"),
    (ChatConfig, {"url": "http://a", "chat_template": "x"}, EXCLUDES, "chat.chat_template"),
    (RunConfig, {**BENCH, "predict": PredictConfig(batch_size=3)}, NEEDS, "predict.batch_size"),
    (RunConfig, {**BENCH, "predict": PredictConfig(data="x")}, NEEDS, "predict.data"),
    (RunConfig, {**BENCH, "convert": ConvertConfig(overwrite=True)}, NEEDS, "convert.overwrite"),
    (RunConfig, {**BENCH, "quantize": QuantizeConfig(dry_run=True)}, NEEDS, "quantize.dry_run"),
    (RunConfig, {**BENCH, "model": ModelConfig("x", adapters={"a": "b"})}, NEEDS, "model.adapters"),
    (RunConfig, {**BENCH, "model": ModelConfig("x", prefixes={"a": "b"})}, NEEDS, "model.prefixes"),
    (RunConfig, {**BENCH, "device": DeviceConfig(kept_prefixes=["a"])}, NEEDS, "device.kept_prefixes"),
    (RunConfig, {**BENCH, "device": TIERED}, NEEDS, "device.kv_cache_tiers"),
    (RunConfig, {"parallel": ParallelConfig(**TP), "device": TIERED}, NEEDS, "device.kv_cache_tiers"),
    (RunConfig, {"parallel": RAY, "device": TIERED}, NEEDS, "device.kv_cache_tiers"),
    (
        RunConfig,
        {"task": Task.serve, "serve": ServeConfig(replicas=2), "device": TIERED},
        NEEDS,
        "device.kv_cache_tiers",
    ),
    (RunConfig, {**BENCH, "calibrate": CalibrateConfig(seed=2)}, NEEDS, "calibrate"),
    (RunConfig, {**BENCH, "parallel": RAY}, NEEDS, "parallel.mode"),
    (RunConfig, {"task": Task.serve, "parallel": RAY}, NEEDS, "parallel.mode"),
    (RunConfig, {"bench": BenchConfig(new_tokens=2)}, NEEDS, "bench.new_tokens"),
    (RunConfig, {"evaluate": EvaluateConfig(data="x")}, NEEDS, "evaluate.data"),
    (RunConfig, {"export": ExportConfig(tp=2)}, NEEDS, "export.tp"),
    (RunConfig, {"prefix": PrefixConfig(output="x")}, NEEDS, "prefix.output"),
    (RunConfig, {"embed": EmbedConfig(instruction="x")}, NEEDS, "embed.instruction"),
    (RunConfig, {"score": ScoreConfig("x")}, NEEDS, "score.instruction"),
    (RunConfig, {"chat": ChatConfig(system="x")}, NEEDS, "chat.system"),
    (RunConfig, {"verify": VerifyConfig(rows=1)}, NEEDS, "verify.rows"),
    (RunConfig, {"task": Task.verify, "parallel": ParallelConfig(**TP)}, EXCLUDES, "verify.folder"),
    (RunConfig, {"serve": ServeConfig(port=1)}, NEEDS, "serve.port"),
    (RunConfig, {"quant": QuantConfig(sparsity=SparsityConfig(**PRUNED))}, NEEDS, "quant.sparsity.method"),
    (RunConfig, {"decode": DecodeConfig(speculate=Speculate.ngram), "quant": AUTO}, EXCLUDES, "decode.speculate"),
    (RunConfig, {"predict": PredictConfig(adapter="a")}, VALUE, "predict.adapter"),
    (RunConfig, {"task": Task.quantize, "parallel": ParallelConfig(**TP, sum=Sum.reduce)}, EXCLUDES, "parallel.sum"),
    (
        RunConfig,
        {"task": Task.quantize, "parallel": ParallelConfig(**TP, experts=ExpertPlacement.whole)},
        EXCLUDES,
        "parallel.experts",
    ),
    (RunConfig, {"task": Task.embed, "predict": PredictConfig(export=True)}, NEEDS, "predict.export"),
]
BAD = [
    (config, {**({"path": "x"} if config is ModelConfig else {}), name: value}, code, f"{group}.{name}")
    for config, group, code, by_name in SINGLE
    for name, values in by_name.items()
    for value in values
] + TOGETHER


@each(("config", "values", "code", "key"), BAD)
def test_bad_values_are_refused(config: type, values: dict[str, Any], code: ErrorCode, key: str) -> None:
    with pytest.raises(UserError) as raised:
        config(**values)
    assert (raised.value.code, raised.value.key) == (code, key)
    message = str(raised.value)
    assert message.startswith("parallel=" if key == "parallel.mode" else key)
    assert re.search(": (give|leave|make) |another one|there are|, too", message), message
    assert "\n" not in message


def constraints(config: type, prefix: str = "") -> Iterator[tuple[str, Constraint]]:
    for each_field in fields(config):
        key = f"{prefix}{each_field.name}"
        if "constraint" in each_field.metadata:
            yield key, each_field.metadata["constraint"]
        if is_dataclass(each_field.type):
            yield from constraints(cast(type, each_field.type), f"{key}.")


def test_every_constraint_has_a_bad_value() -> None:
    known = {(code, key) for _, _, code, key in BAD}
    for key, constraint in constraints(RunConfig):
        codes = {
            RANGE: constraint.has_limits,
            VALUE: constraint.choices,
            FORM: constraint.form,
            NEEDS: constraint.only_with,
            EXCLUDES: constraint.not_with or constraint.choices_by,
        }
        for code in (code for code, is_declared in codes.items() if is_declared):
            assert any(code is known_code and f"{other}.".startswith(f"{key}.") for known_code, other in known), (
                code,
                key,
            )


def test_errors_of_constraints_say_value_limit_and_remedy() -> None:
    expected = {
        "decode.temperature=-0.1 is not allowed: give a finite number from 0, or null (0 is greedy)": (
            DecodeConfig,
            {"temperature": -0.1},
        ),
        "parallel.tp=2 is not used by parallel=single: leave it at null, or give parallel=tp, tp_pp or ray": (
            ParallelConfig,
            {"tp": 2},
        ),
        "evaluate.window=8 needs evaluate.data: give evaluate.data=FILE too, or leave it at null": (
            EvaluateConfig,
            {"questions": "x", "window": 8},
        ),
        "decode.n=2 is not allowed with decode.num_beams=4, which does not sample: give decode.n=1, or decode.num_beams=1": (
            DecodeConfig,
            {"n": 2, "num_beams": 4},
        ),
        "quant.method=smoothquant is not allowed with quant=int4: give rtn, gptq or awq, or quant=a8w8 or fp8": (
            QuantConfig,
            {"scheme": QuantScheme.int4, "method": QuantMethod.smoothquant},
        ),
        "bench.new_tokens=2 is not used by task=predict: leave it at 64, or give task=bench": (
            RunConfig,
            {"bench": BenchConfig(new_tokens=2)},
        ),
    }
    for message, (config, values) in expected.items():
        with pytest.raises(UserError) as raised:
            config(**values)
        assert str(raised.value) == message


@each(
    ("size", "expected"),
    [("1GB", 10**9), ("512MB", 512 * 10**6), ("0.5GiB", 2**29), ("512 mib", 2**29), ("4096", 4096), ("0.25", 250), ("1", 1)],
)  # fmt: skip
def test_sizes_have_units_or_are_shares_of_a_whole(size: str, expected: int) -> None:
    assert num_bytes(size, total=1000) == expected
    assert DeviceConfig(kv_cache_memory=size).kv_cache_memory == size


def test_replaced_changes_only_what_is_given() -> None:
    base = DecodeConfig(max_new_tokens=5, stop=["x"])
    changed = base.replaced({"temperature": 1, "stop": "END", "seed": None})
    assert changed == DecodeConfig(max_new_tokens=5, stop=["END"], temperature=1)
    assert base == DecodeConfig(max_new_tokens=5, stop=["x"])
    limited = base.replaced({"thinking": {"max_tokens": 3, "start": "", "is_open": None}})
    assert limited.thinking == ThinkingConfig(3, "")
    assert limited.replaced({"thinking": {"max_tokens": 4}}).thinking == ThinkingConfig(4, "")
    assert limited.replaced({"thinking": None}) == base


def test_a_row_uses_what_its_job_gave_and_did_not_use() -> None:
    job = DecodeConfig(temperature=0.0, top_p=0.95, length_penalty=2.0).resolved({"top_p": 0.5})
    sampled, beams = job.replaced({"temperature": 0.7}), job.replaced({"num_beams": 4})
    assert (sampled.top_p, sampled.resolved({"top_p": 0.5}).top_p, beams.resolved({}).length_penalty) == (
        0.95,
        0.95,
        2.0,
    )


@each(
    ("values", "text"),
    [
        ({"top_p": 0.91, "temperature": 0.0}, "decode.top_p=0.91 is not used with decode.temperature=0.0"),
        ({"top_p": 0.92}, "decode.top_p=0.92 is not used with decode.temperature=0.0"),  # null means greedy
        ({"min_p": 0.1, "temperature": 0.0}, "decode.min_p=0.1 is not used with decode.temperature=0.0"),
        ({"top_k": 5}, "decode.top_k=5 is not used with decode.temperature=0.0 and decode.penalty_alpha=0.0"),
        ({"length_penalty": 2.0, "num_beams": 1}, "decode.length_penalty=2.0 is not used with decode.num_beams=1"),
        ({"early_stopping": True}, "decode.early_stopping=True is not used with decode.num_beams=1"),
    ],
)
def test_a_setting_that_another_switches_off_is_warned_of_once(
    values: dict[str, object], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    conf.decoding.warn_once.cache_clear()  # other workers may have been told
    for _ in range(2):
        DecodeConfig().replaced(values).resolved({})
    assert [record.getMessage() for record in caplog.records] == [text]


def test_fewer_texts_than_asked_for_are_an_error() -> None:
    with pytest.raises(UserError, match=r"decode.num_return_sequences=2 is not used with decode.num_beams=1: leave it"):
        DecodeConfig(num_return_sequences=2).resolved({})
    assert (
        DecodeConfig().resolved({"num_return_sequences": 2}).num_return_sequences is None
    )  # reading a checkpoint's value never fails


def test_used_settings_are_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    for values in ({"top_k": 5, "penalty_alpha": 0.6}, {"top_p": 0.9, "temperature": 1.0}, {"length_penalty": 2.0}):
        resolved = DecodeConfig().replaced(values).resolved({"num_beams": 4} if "length_penalty" in values else {})
        assert all(getattr(resolved, name) == value for name, value in values.items())
    assert not caplog.records


@each(
    ("values", "code"),
    [
        ({"temprature": 1.0}, ErrorCode.unknown_name),
        ({"temperature": "hot"}, ErrorCode.wrong_type),
        ({"top_k": 1.5}, ErrorCode.wrong_type),
        ({"top_k": True}, ErrorCode.wrong_type),
        ({"ignore_eos": 1}, ErrorCode.wrong_type),
        ({"stop": ["a", 3]}, ErrorCode.wrong_type),
        ({"max_new_tokens": 2.5}, ErrorCode.wrong_type),
        ({"max_new_tokens": "5"}, ErrorCode.unknown_value),
        ({"top_p": 7}, ErrorCode.out_of_range),
        ({"thinking": 5}, ErrorCode.wrong_type),
        ({"thinking": {"max_token": 5}}, ErrorCode.unknown_name),
        ({"thinking": {"max_tokens": 5.0}}, ErrorCode.wrong_type),
        ({"thinking": {"start": None}}, ErrorCode.wrong_type),
    ],
)
def test_replaced_refuses_names_types_and_values(values: dict[str, object], code: ErrorCode) -> None:
    with pytest.raises(UserError) as raised:
        DecodeConfig().replaced(values)
    ((name, value),) = values.items()
    key = f"decode.{name}.{next(iter(value))}" if isinstance(value, dict) else f"decode.{name}"
    assert (raised.value.code, raised.value.key) == (code, key)


def test_settings_of_the_runs_task_and_null_are_allowed() -> None:
    for name in vars(DecodeConfig()).keys() - {"speculate", "speculation", "thinking"}:
        assert getattr(DecodeConfig(**{name: None}), name) is None
    RunConfig(task=Task.bench, bench=BenchConfig(new_tokens=2))
    RunConfig(task=Task.predict, predict=PredictConfig(batch_size=3, data="x"))
    for task in (Task.predict, Task.embed, Task.score):
        assert RunConfig(task, parallel=RAY).parallel.replicas == 2
