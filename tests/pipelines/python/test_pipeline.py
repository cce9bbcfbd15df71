"""The Python API `pipeline`: names, arguments, shapes of the result, errors that list valid names."""

import copy
import pickle
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
import torch

import conf.decoding
from conf.decoding import DecodeConfig
from conf.errors import UserError
from pipelines import TextGenerationPipeline, TextStreamer, pipeline
from tests.helpers.cases import each
from tests.helpers.small_tokenizers import byte_level, save

OVERRIDES = ["model.dtype=float32", "predict.batch_size=3"]


@pytest.fixture(scope="module")
def pipe(chatty: Path) -> TextGenerationPipeline:
    return pipeline("text_generation", model=chatty, device="cpu", overrides=OVERRIDES)


def text(pipe: TextGenerationPipeline, prompt: object, **arguments: object) -> str:
    (row,) = pipe(prompt, **arguments)
    (result,) = row["text_generation_text"]
    return result


def test_one_dictionary_per_prompt_with_the_prompt_in_front(pipe: TextGenerationPipeline) -> None:
    prompts = ["I love Beijing, because", "LLaMA is a"]
    outputs = pipe(prompts, max_length=60, do_sample=False, top_k=3, top_p=1)
    assert [list(row) for row in outputs] == [["text_generation_text"]] * 2
    for prompt, row in zip(prompts, outputs, strict=True):
        assert row["text_generation_text"][0].startswith(prompt)
        assert row["text_generation_text"][0] == prompt + text(pipe, prompt, max_length=60, return_full_text=False)


def test_call_arguments_beat_constructor_arguments(chatty: Path) -> None:
    pipe = pipeline(
        "text_generation", model=chatty, device="cpu", overrides=OVERRIDES, max_new_tokens=3, return_full_text=False
    )
    three, five = text(pipe, "Once"), text(pipe, "Once", max_new_tokens=5)
    assert five.startswith(three.rstrip("\ufffd"))
    assert text(pipe, "Once", return_full_text=True) == "Once" + three


def test_long_prompts_are_cut_and_the_settings_of_jobs_are_refused(chatty: Path) -> None:
    cut = ["predict.truncate=left", "predict.max_prompt_tokens=3"]
    pipe = pipeline("text_generation", model=chatty, device="cpu", overrides=OVERRIDES + cut, max_new_tokens=2)
    long, short = pipe(["Once upon a time", "x"])
    assert long["num_truncated_tokens"] == len(pipe.tokenizer.encode("Once upon a time", True)) - 3  # type: ignore[union-attr]
    assert list(short) == ["text_generation_text"]
    for setting in ("predict.output_file=/tmp/x", "predict.export=true"):
        with pytest.raises(UserError, match="is of jobs, which run.py runs: leave it out"):
            pipeline("text_generation", model=chatty, overrides=[setting])


def test_a_call_may_ask_for_as_many_tokens_as_fit(pipe: TextGenerationPipeline) -> None:
    fitting = text(pipe, "Once", max_new_tokens="auto", ignore_eos=True)
    assert (
        fitting
        == text(pipe, "Once", max_length=128, ignore_eos=True)
        != text(pipe, "Once", max_length=127, ignore_eos=True)
    )


def test_memory_of_a_gpu_that_ends_is_one_line(pipe: TextGenerationPipeline, monkeypatch: pytest.MonkeyPatch) -> None:
    def fills(*args: object, **named: object) -> None:
        raise torch.OutOfMemoryError(
            "CUDA out of memory. Tried to allocate 2.00 GiB.\nIf reserved memory is large, read"
        )

    message = r"^the GPU's memory is full \(Tried to allocate 2.00 GiB.\): give less .* or batch_size, .* uses the GPU$"
    with monkeypatch.context() as full:
        full.setattr(pipe.engine, "step", fills)
        with pytest.raises(UserError, match=message):
            pipe("Once")
    assert text(pipe, "Once", max_new_tokens=2)  # failed rows hold no blocks
    monkeypatch.setattr(import_module(TextGenerationPipeline.__module__), "load_engine", fills)
    with pytest.raises(UserError, match=message):
        pipeline("text_generation", device="cpu")


def test_do_sample_false_warns_of_what_it_leaves_unused(
    pipe: TextGenerationPipeline, caplog: pytest.LogCaptureFixture
) -> None:
    conf.decoding.warn_once.cache_clear()  # other workers may have been told
    greedy = text(pipe, "Once", max_new_tokens=9)
    assert text(pipe, "Once", max_new_tokens=9, do_sample=False, temperature=0.7, top_k=3, top_p=1) == greedy
    assert caplog.messages[0] == "do_sample=False makes no use of temperature=0.7"
    assert caplog.messages[1].startswith("decode.top_k=3 is not used with decode.temperature=0.0")
    caplog.clear()
    text(pipe, "Once", max_new_tokens=2, do_sample=False, penalty_alpha=0.6, top_k=3)
    assert caplog.messages == []


def test_do_sample_switches_sampling_on_and_off(chatty: Path, pipe: TextGenerationPipeline) -> None:
    greedy = text(pipe, "Once", max_new_tokens=20)
    assert text(pipe, "Once", max_new_tokens=20, do_sample=True, seed=1) != greedy
    assert text(pipe, "Once", max_new_tokens=20, do_sample=True, temperature=1.0, seed=1) == text(
        pipe, "Once", max_new_tokens=20, do_sample=True, seed=1
    )
    sampling = pipeline("text_generation", model=chatty, decode="sampling", device="cpu", overrides=OVERRIDES)
    assert text(sampling, "Once", max_new_tokens=20, do_sample=False) == greedy
    assert text(sampling, "Once", max_new_tokens=20, seed=3) != greedy


def test_a_call_wins_over_a_constructor_that_says_the_opposite(chatty: Path) -> None:
    greedy = pipeline(
        "text_generation", model=chatty, device="cpu", overrides=OVERRIDES, do_sample=False, max_new_tokens=20
    )
    cold = pipeline(
        "text_generation", model=chatty, device="cpu", overrides=OVERRIDES, temperature=0.0, max_new_tokens=20
    )
    expected = text(greedy, "Once", temperature=0.9, seed=4)
    assert expected != text(greedy, "Once")
    assert text(cold, "Once", do_sample=True, temperature=0.9, seed=4) == expected
    assert text(cold, "Once", do_sample=True, seed=4) != text(cold, "Once")


def test_batch_size_of_the_constructor_bounds_that_of_the_call(chatty: Path) -> None:
    pipe = pipeline("text_generation", model=chatty, device="cpu", overrides=OVERRIDES, batch_size=2)
    with pytest.raises(UserError, match="batch_size=3 is more than the 2 that this pipeline was made for"):
        pipe("Once", batch_size=3)
    assert pipe(["a", "b", "c"], batch_size=1, max_new_tokens=3) == pipe(["a", "b", "c"], max_new_tokens=3)


def test_tokens_and_templates_reach_the_prompt(pipe: TextGenerationPipeline, tmp_path: Path) -> None:
    template = tmp_path / "shout.jinja"
    template.write_text("{{ messages[0].content | upper }}!")
    short = {"max_new_tokens": 6, "ignore_eos": True}
    shouted = text(pipe, "hello", chat_template=template, **short)
    assert shouted == text(pipe, "HELLO!", add_special_tokens=False, **short)
    assert shouted != text(pipe, "HELLO!", **short)  # with a BOS in front
    with pytest.raises(UserError, match="messages need a chat template, but predict.chat_template=none"):
        pipe({"messages": [{"role": "user", "content": "hi"}]}, chat_template="none")


def test_rows_may_be_dictionaries(pipe: TextGenerationPipeline) -> None:
    assert pipe.tokenizer is not None
    ids = pipe.tokenizer.encode("Once", add_special_tokens=True)
    plain, by_ids = pipe(["Once", {"prompt_token_ids": ids}], max_new_tokens=8)
    assert plain == by_ids
    chat = text(pipe, {"messages": [{"role": "user", "content": "hi"}]}, max_new_tokens=1)
    assert chat.startswith("<s>[user] hi\n[assistant] ")
    assert len(text(pipe, {"prompt": "x", "decode": {"max_new_tokens": 1}}, return_full_text=False)) <= 8


def test_conversations_are_lists_of_messages(pipe: TextGenerationPipeline) -> None:
    one, two = ([{"role": "user", "content": content}] for content in ("hi", "bye"))
    short = {"max_new_tokens": 4}
    expected = pipe([{"messages": one}, {"messages": two}, "Once"], **short)
    assert pipe(one, **short) == expected[:1]
    assert pipe([one, two, "Once"], **short) == expected
    assert pipe((two,), **short) == expected[1:2]


def test_a_generator_is_read_as_places_become_free(pipe: TextGenerationPipeline) -> None:
    """The generator never ends, so it cannot be read whole; it is at most one batch ahead of the results."""
    ahead, short = [], {"max_new_tokens": 3, "ignore_eos": True}
    num_read = 0

    def endless() -> Iterator[str]:
        nonlocal num_read
        while True:
            num_read += 1
            yield f"story {num_read - 1}"

    free = pipe.engine.scheduler.block_manager.num_free_blocks
    results = pipe(endless(), **short)
    for i in range(40):
        assert next(results) == pipe([f"story {i}"], **short)[0]  # other calls run in between
        ahead.append(num_read - i - 1)
    assert max(ahead) <= 3  # predict.batch_size
    results.close()
    assert pipe.engine.scheduler.block_manager.num_free_blocks == free


def test_a_generator_gives_results_in_order_and_ends(pipe: TextGenerationPipeline) -> None:
    rows = [{"prompt": "a", "decode": {"max_new_tokens": size, "ignore_eos": True}} for size in (9, 1, 5, 2, 1, 7)]
    results = pipe(iter(rows))
    assert iter(results) is results
    assert list(results) == pipe(rows)
    assert list(pipe(iter([]))) == []


def test_a_call_between_two_results_may_finish_the_rows_that_wait(pipe: TextGenerationPipeline) -> None:
    rows = [{"prompt": "a", "decode": {"max_new_tokens": size, "ignore_eos": True}} for size in (1, 4, 6)]
    expected = pipe(rows)
    results = pipe(iter(rows))
    assert next(results) == expected[0]
    pipe("other", max_new_tokens=20, ignore_eos=True)  # its steps are the other rows' steps, too
    assert list(results) == expected[1:]


def test_unsupported_options_of_a_generator_are_refused(pipe: TextGenerationPipeline) -> None:
    with pytest.raises(UserError, match="a streamer needs to know how many prompts there are: give a list"):
        pipe(iter(["a"]), streamer=TextStreamer())
    with pytest.raises(UserError, match="batch_size=9 is more than the 3 that this pipeline was made for"):
        pipe(iter(["a"]), batch_size=9)
    results = pipe(iter(["a", {"promt": "b"}]), max_new_tokens=2)
    with pytest.raises(UserError, match="prompt 1: unknown fields promt"):
        list(results)
    with pytest.raises(UserError, match="cannot call the pipeline that calls it: .* nor can a generator of prompts"):
        list(pipe(str(pipe("x")) for _ in range(1)))
    assert text(pipe, "Once", max_new_tokens=2)


def test_log_probabilities_are_in_the_result(pipe: TextGenerationPipeline) -> None:
    (row,) = pipe("Once", max_new_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0)
    decode = DecodeConfig(max_new_tokens=4, ignore_eos=True, logprobs=2, prompt_logprobs=0, temperature=0.0)
    assert pipe.tokenizer is not None
    prompt = pipe.tokenizer.encode("Once", add_special_tokens=True)
    output = next(pipe.engine.generate([pipe.engine.request(0, prompt, decode)]))
    (completion,) = output.completions
    assert (row["token_ids"], row["prompt_token_ids"]) == ([completion.token_ids], prompt)
    for steps, expected in (
        (row["logprobs"][0], completion.logprobs),
        (row["prompt_logprobs"], output.prompt_logprobs),
    ):
        assert expected
        for step, there in zip(steps, expected, strict=True):
            assert {token: (one["logprob"], one["rank"]) for token, one in step.items()} == {
                token: (value, there.ranks[token]) for token, value in there.logprobs.items()
            }
    samples = pipe("Once", max_new_tokens=4, do_sample=True, n=2, logprobs=0)[0]
    assert [len(steps) for steps in samples["logprobs"]] == [len(ids) for ids in samples["token_ids"]]


def test_a_sampled_result_has_the_seed_that_repeats_it(pipe: TextGenerationPipeline) -> None:
    rows = ["Once", {"prompt": "Once", "decode": {"seed": 5}}, {"prompt": "Once", "decode": {"temperature": 0}}, "Once"]
    short = {"max_new_tokens": 9, "do_sample": True}
    results = pipe(rows, **short)
    assert [result.get("seed") for result in results[1:3]] == [5, None]
    assert results[0]["seed"] != results[3]["seed"]  # drawn for each
    for i in (0, 1, 3):
        assert pipe("Once", seed=results[i]["seed"], **short) == [results[i]]


def test_a_file_is_named_without_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model.gguf").write_bytes(b"something else")
    with pytest.raises(UserError, match="model.gguf is a file: model.path must be a folder .*, a GGUF file"):
        pipeline("text_generation", model="model.gguf", device="cpu")


def test_dtype_and_tokenizer_are_arguments(chatty: Path, tmp_path: Path) -> None:
    save(byte_level(), tmp_path / "it's ${another}, {x}")
    for dtype in ("bfloat16", torch.bfloat16):
        pipe = pipeline(
            "text_generation", model=chatty, device="cpu", dtype=dtype, tokenizer=tmp_path / "it's ${another}, {x}"
        )
        assert pipe.engine.dtype == torch.bfloat16
        assert pipe.tokenizer is not None
        assert pipe.tokenizer.source == tmp_path / "it's ${another}, {x}"


def test_repr_says_what_runs(chatty: Path) -> None:
    pipe = pipeline(
        "text_generation", model=chatty, quant="int8", device="cpu", overrides=OVERRIDES, temperature=0.5, stop="END"
    )
    weights = f"{pipe.engine.executor.weight_bytes / 1e6:.1f} MB"
    assert repr(pipe) == (
        f"TextGenerationPipeline(model={chatty}, dtype=float32, device=cpu, quant=int8, kv_cache=none, weights={weights}, "
        "context=128, batch_size=3, temperature=0.5, stop=['END'])"
    )


def test_pickling_and_copying_are_refused_in_words(pipe: TextGenerationPipeline) -> None:
    for attempt in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(UserError, match="cannot be pickled or copied: make one in each process, by pipeline"):
            attempt(pipe)


def test_engine_takes_token_ids(pipe: TextGenerationPipeline) -> None:
    request = pipe.engine.request(0, [0, 70], DecodeConfig(max_new_tokens=4, ignore_eos=True))
    assert len(next(pipe.engine.generate([request])).completions[0].token_ids) == 4


def test_no_prompts_give_no_results(pipe: TextGenerationPipeline) -> None:
    assert pipe([]) == []


def test_threads_take_turns(pipe: TextGenerationPipeline) -> None:
    expected = [text(pipe, f"story {i}", max_new_tokens=12) for i in range(4)]
    got: dict[int, str] = {}
    threads = [
        threading.Thread(target=lambda i=i: got.update({i: text(pipe, f"story {i}", max_new_tokens=12)}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [got[i] for i in range(4)] == expected


@each(
    ("arguments", "message"),
    [
        ({"max_tokens": 3}, "argument max_tokens does not exist: there are max_new_tokens, .*streamer"),
        ({"temprature": 1}, ": did you mean temperature"),
        ({"top_p": 1.5}, "decode.top_p=1.5 is not allowed: give a number above 0 and up to 1"),
        ({"top_k": "3"}, "decode.top_k='3' is not of type int"),
        ({"batch_size": 0}, "batch_size=0 is not allowed: give a number above 0"),
        ({"batch_size": True}, "batch_size=True is not allowed: give a number above 0"),
        ({"do_sample": "no"}, "do_sample='no' is not allowed: give True or False"),
        ({"do_sample": True, "temperature": 0}, "do_sample=True contradicts temperature=0"),
        (
            {"do_sample": True, "num_beams": 4},
            "^do_sample=True contradicts num_beams=4, which does not sample: leave one",
        ),
        ({"do_sample": True, "penalty_alpha": 0.6}, "^do_sample=True contradicts penalty_alpha=0.6, which does not"),
        ({"max_new_tokens": 128}, "prompt 0: decode.max_new_tokens=128 is more .*: give at most 12[0-9] with [0-9]"),
        ({"streamer": 5}, "streamer=5 is no streamer"),
        ({"chat_template": 5}, "chat_template=5 is not allowed: give auto, none or a path"),
        ({"stop_token_ids": [330]}, "stop token id 330 is not in the vocabulary: give ids from 0 to 329"),
        ({"max_length": 129}, "prompt 0: decode.max_length=129 is more than the model takes"),
        ({"chat_template": "/nowhere.jinja"}, "predict.chat_template=/nowhere.jinja cannot be read"),
    ],
)
def test_bad_arguments_are_refused(pipe: TextGenerationPipeline, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pipe("Once", **arguments)


@each(
    ("prompts", "message"),
    [
        (["fine", {"promt": "x"}], "prompt 1: unknown fields promt: there are prompt, messages"),
        (7, "prompt 0: of type int: give a text, a list of messages or a dictionary"),
        ([[{"role": "user"}]], 'prompt 0: messages must be objects with a text "role"'),
        ({"prompt": "x", "decode": {"seeds": 1}}, "prompt 0: decode.seeds does not exist: there are max_new_tokens"),
    ],
)
def test_bad_prompts_are_refused_before_any_is_run(pipe: TextGenerationPipeline, prompts: object, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pipe(prompts)


@each(
    ("task", "arguments", "message"),
    [
        ("translation", {}, "task 'translation' does not exist: there are text_generation"),
        (
            "text_generation",
            {"model": "tinny"},
            "model=tinny is neither a folder or file nor an option: there are .*: did you mean tiny",
        ),
        ("text_generation", {"model": "./nowhere"}, "there is no folder ./nowhere"),
        (
            "text_generation",
            {"decode": "greedyy"},
            "decode=greedyy does not exist: there are beam, .*sampling",
        ),
        (
            "text_generation",
            {"quant": "int3"},
            "quant=int3 does not exist: there are a8w8, auto, fp8, int4, int8, mxfp4, none",
        ),
        ("text_generation", {"dtype": "float64"}, "float64.*auto, float32, bfloat16, float16"),
        ("text_generation", {"dtype": torch.int8}, "int8.*auto, float32, bfloat16, float16"),
        (
            "text_generation",
            {"tokenizer": object()},
            "tokenizer is of type object, not a path or a tokenizer: give the folder",
        ),
        ("text_generation", {"tokenizer": "/nowhere"}, "model.tokenizer=/nowhere is not a folder with tokenizer files"),
        ("text_generation", {"overrides": ["decode.temprature=1"]}, "temprature"),
        ("text_generation", {"overrides": "decode.seed=1"}, "overrides='decode.seed=1' is one text: give a list"),
        ("text_generation", {"max_tokens": 1}, "argument max_tokens does not exist"),
        ("text_generation", {"model": "tiny", "temperature": -5.0}, "decode.temperature=-5.0 is not allowed"),
    ],
)
def test_bad_names_are_refused(chatty: Path, task: str, arguments: dict[str, object], message: str) -> None:
    with pytest.raises(UserError, match=message):
        pipeline(task, **{"model": chatty, "device": "cpu", **arguments})  # type: ignore[arg-type]
