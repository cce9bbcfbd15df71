"""Checks of the schema: every bad value is one line with the dotted key, the value and what is allowed."""

import pytest

import conf.decoding
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import DeviceConfig, ModelConfig, ParallelConfig, ParallelMode, RunConfig, Task, Weights
from conf.support.sizes import num_bytes
from conf.tasks import BenchConfig, CheckpointFormat, ConvertConfig, EvaluateConfig, PredictConfig, SweepConfig
from tests.helpers.cases import each

BAD = [
    *[
        (
            SweepConfig,
            {"objective": value},
            "sweep.objective=.* is not allowed: give the name of a metric, a list of such",
        )
        for value in (1, "", [], [""], ["perplexity", 2], {"perplexity": 1})
    ],
    (DecodeConfig, {"max_new_tokens": 0}, "decode.max_new_tokens=0 is not allowed: give a number above 0, or null"),
    (DecodeConfig, {"max_length": -1}, "decode.max_length=-1 "),
    (DecodeConfig, {"min_new_tokens": -1}, "decode.min_new_tokens=-1 "),
    (
        DecodeConfig,
        {"min_new_tokens": 5, "max_new_tokens": 4},
        "decode.min_new_tokens=5 .* at most decode.max_new_tokens=4",
    ),
    (DecodeConfig, {"temperature": -0.1}, r"decode.temperature=-0.1 .*\(0 is greedy\)"),
    (DecodeConfig, {"temperature": float("nan")}, "decode.temperature=nan"),
    (DecodeConfig, {"temperature": float("inf")}, "decode.temperature=inf"),
    (DecodeConfig, {"top_k": -2}, r"decode.top_k=-2 .*\(0 and -1 keep all tokens\)"),
    (DecodeConfig, {"top_p": 0.0}, "decode.top_p=0.0 .* above 0 and up to 1"),
    (DecodeConfig, {"top_p": 1.01}, "decode.top_p=1.01"),
    (DecodeConfig, {"min_p": 1.5}, "decode.min_p=1.5"),
    (DecodeConfig, {"repetition_penalty": 0.0}, "decode.repetition_penalty=0.0"),
    (DecodeConfig, {"presence_penalty": 2.5}, "decode.presence_penalty=2.5 .* -2 to 2"),
    (DecodeConfig, {"frequency_penalty": float("nan")}, "decode.frequency_penalty=nan"),
    (DecodeConfig, {"stop": ["a", ""]}, "decode.stop=.* texts that are not empty"),
    (DecodeConfig, {"stop_token_ids": [-2]}, r"decode.stop_token_ids=\[-2\]"),
    (DecodeConfig, {"logprobs": 101}, "decode.logprobs=101"),
    (DecodeConfig, {"seed": -1}, "decode.seed=-1"),
    (DecodeConfig, {"seed": 2**64}, "decode.seed="),
    (DeviceConfig, {"threads": 0}, "device.threads=0"),
    (DeviceConfig, {"decode_threads": 0}, "device.decode_threads=0 is not allowed: give a number above 0, or null"),
    *[
        (
            DeviceConfig,
            {"kv_cache_memory": size},
            f"device.kv_cache_memory={size[:200]}.* auto, a size such as 1GB, 512MiB or",
        )
        for size in ("0", "-1GB", "1XB", "0.0", "nan", "half", "9" * 400 + "GB")
    ],
    (
        DeviceConfig,
        {"memory_fraction": 0.0},
        "device.memory_fraction=0.0 is not allowed: give a number above 0 and up to 1",
    ),
    (DeviceConfig, {"memory_fraction": 1.1}, "device.memory_fraction=1.1"),
    (ModelConfig, {"path": ""}, "model.path='' .* a folder or a hub id"),
    (ModelConfig, {"path": "x", "max_length": 0}, "model.max_length=0"),
    (
        ModelConfig,
        {"path": "x", "verify": True, "weights": Weights.random},
        "model.verify=true is not allowed: give false, or model.weights=checkpoint",
    ),
    (PredictConfig, {"batch_size": 0}, "predict.batch_size=0"),
    (PredictConfig, {"chat_template": ""}, "predict.chat_template=''"),
    (PredictConfig, {"resume": ""}, "predict.resume='' .* auto, none or the folder of an unfinished job"),
    (PredictConfig, {"max_errors": -1}, "predict.max_errors=-1 .* from 0, or null"),
    (EvaluateConfig, {"data": "x", "window": 1}, "evaluate.window=1 .* from 2, or null"),
    (EvaluateConfig, {"data": "x", "stride": 0}, "evaluate.stride=0 .* from 1, or null"),
    (EvaluateConfig, {"data": "x", "window": 8, "stride": 9}, "evaluate.stride=9 .* at most evaluate.window=8"),
    (EvaluateConfig, {"data": "x", "reference": ""}, "evaluate.reference='' .* a folder, a hub id or none"),
    (EvaluateConfig, {"questions": "x", "window": 8}, "evaluate.window=8 needs a text: give evaluate.data=FILE too"),
    (EvaluateConfig, {"questions": "x", "reference": "y"}, "evaluate.reference=y needs a text"),
]


@each(("config", "values", "message"), BAD)
def test_bad_values_are_refused(config: type, values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        config(**values)


@each(
    ("size", "expected"),
    [("1GB", 10**9), ("512MB", 512 * 10**6), ("0.5GiB", 2**29), ("512 mib", 2**29), ("4096", 4096), ("0.25", 250), ("1", 1)],
)  # fmt: skip
def test_sizes_have_units_or_are_shares_of_a_whole(size: str, expected: int) -> None:
    assert num_bytes(size, whole=1000) == expected
    assert DeviceConfig(kv_cache_memory=size).kv_cache_memory == size


def test_replaced_changes_only_what_is_given() -> None:
    base = DecodeConfig(max_new_tokens=5, stop=["x"])
    changed = base.replaced({"temperature": 1, "stop": "END", "seed": None})
    assert changed == DecodeConfig(max_new_tokens=5, stop=["END"], temperature=1)
    assert base == DecodeConfig(max_new_tokens=5, stop=["x"])


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
        ({"top_p": 0.92}, "decode.top_p=0.92 is not used with decode.temperature=0.0"),  # greedy is what null means
        ({"min_p": 0.1, "temperature": 0.0}, "decode.min_p=0.1 is not used with decode.temperature=0.0"),
        ({"top_k": 5}, "decode.top_k=5 is not used with decode.temperature=0.0 and decode.penalty_alpha=0.0"),
        ({"length_penalty": 2.0, "num_beams": 1}, "decode.length_penalty=2.0 is not used with decode.num_beams=1"),
        ({"early_stopping": True}, "decode.early_stopping=True is not used with decode.num_beams=1"),
    ],
)
def test_what_another_switches_off_is_told_once(
    values: dict[str, object], text: str, caplog: pytest.LogCaptureFixture
) -> None:
    conf.decoding.warn_once.cache_clear()  # others may have been told
    for _ in range(2):
        DecodeConfig().replaced(values).resolved({})
    assert [record.getMessage() for record in caplog.records] == [text]


def test_fewer_texts_than_asked_for_are_an_error() -> None:
    with pytest.raises(UserError, match=r"decode.num_return_sequences=2 is not used with decode.num_beams=1: leave it"):
        DecodeConfig(num_return_sequences=2).resolved({})
    assert (
        DecodeConfig().resolved({"num_return_sequences": 2}).num_return_sequences is None
    )  # a checkpoint's never fails


def test_what_is_used_is_not_told(caplog: pytest.LogCaptureFixture) -> None:
    for values in ({"top_k": 5, "penalty_alpha": 0.6}, {"top_p": 0.9, "temperature": 1.0}, {"length_penalty": 2.0}):
        resolved = DecodeConfig().replaced(values).resolved({"num_beams": 4} if "length_penalty" in values else {})
        assert all(getattr(resolved, name) == value for name, value in values.items())
    assert not caplog.records


@each(
    ("values", "message"),
    [
        ({"temprature": 1.0}, "decode.temprature does not exist: there are max_new_tokens, .*temperature"),
        ({"temperature": "hot"}, "decode.temperature='hot' is not of type float"),
        ({"top_k": 1.5}, "decode.top_k=1.5 is not of type int"),
        ({"top_k": True}, "decode.top_k=True is not of type int"),
        ({"ignore_eos": 1}, "decode.ignore_eos=1 is not of type bool"),
        ({"stop": ["a", 3]}, r"decode.stop=\['a', 3\] is not of type list\[str\]"),
        ({"max_new_tokens": 2.5}, r"decode.max_new_tokens=2.5 is not of type int \| str \| None"),
        ({"max_new_tokens": "5"}, "decode.max_new_tokens='5' is not allowed: give a number above 0, or null, or auto"),
        ({"top_p": 7}, "decode.top_p=7 is not allowed"),
    ],
)
def test_replaced_refuses_names_types_and_values(values: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        DecodeConfig().replaced(values)


def test_settings_of_another_task_are_refused() -> None:
    message = "predict.batch_size=3 is not used by task=bench: leave it at 16, or give task=predict"
    with pytest.raises(UserError, match=message):
        RunConfig(task=Task.bench, predict=PredictConfig(batch_size=3))
    with pytest.raises(
        UserError, match="convert.format=sharded is not used by task=predict: leave it at hf, or give task=convert"
    ):
        RunConfig(convert=ConvertConfig(format=CheckpointFormat.sharded))
    with pytest.raises(UserError, match="convert.overwrite=true is not used by task=bench: leave it at false"):
        RunConfig(task=Task.bench, convert=ConvertConfig(overwrite=True))
    with pytest.raises(UserError, match="predict.data=x is not used by task=bench: leave it at null"):
        RunConfig(task=Task.bench, predict=PredictConfig(data="x"))
    with pytest.raises(
        UserError, match="bench.new_tokens=2 is not used by task=predict: leave it at 64, or give task=bench"
    ):
        RunConfig(task=Task.predict, bench=BenchConfig(new_tokens=2))
    RunConfig(task=Task.bench, bench=BenchConfig(new_tokens=2))
    with pytest.raises(
        UserError, match="bench.prompt_tokens=9 is not used with bench.data, whose prompts have their own"
    ):
        BenchConfig(data="rows.jsonl", prompt_tokens=9)
    RunConfig(task=Task.predict, predict=PredictConfig(batch_size=3, data="x"))


def test_replicas_of_ray_are_for_the_rows_of_jobs() -> None:
    ray = ParallelConfig(ParallelMode.ray, replicas=2)
    for task in (Task.predict, Task.embed, Task.score):
        assert RunConfig(task, parallel=ray).parallel.replicas == 2
    remedies = {Task.bench: "task=predict, embed or score", Task.serve: "serve.replicas"}
    for task, remedy in remedies.items():
        message = f"parallel=ray is not used by task={task.name}: leave it out, or give {remedy}"
        with pytest.raises(UserError, match=message):
            RunConfig(task, parallel=ray)
    with pytest.raises(UserError, match="parallel.replicas=2 is not used by parallel=single: leave it at 1, or give"):
        ParallelConfig(replicas=2)
    with pytest.raises(UserError, match="parallel.replicas=0 is not allowed: give a number from 1"):
        ParallelConfig(ParallelMode.ray, replicas=0)
