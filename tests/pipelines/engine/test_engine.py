"""The engine: stops, lengths, seeds and log probabilities, alone and in a batch."""

import itertools
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from conf.decoding import DecodeConfig
from conf.errors import UserError
from pipelines.engine import Completion, Engine, Output
from pipelines.engine.request import SequenceGroup, Sink, TokenLogprobs
from tests.helpers.builders import all_logits, complete, engine_of, generate, write_llama
from tests.helpers.cases import each

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13, 14, 15], [16, 17], [5, 6, 7]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    write_llama(folder)
    return folder


@pytest.fixture(scope="module")
def engine(folder: Path) -> Engine:
    return engine_of(folder, batch_size=3)


@pytest.fixture(scope="module")
def texts(chatty: Path) -> Engine:
    return engine_of(chatty, tokenizer="")


def one(engine: Engine, prompt: list[int], **decode: object) -> Completion:
    return complete(engine, [prompt], DecodeConfig(**decode))[0]  # type: ignore[arg-type]


def test_same_seed_other_batch_mates_same_tokens(engine: Engine) -> None:
    decode = DecodeConfig(max_new_tokens=20, temperature=1.0, top_p=0.9, seed=7)
    alone = [one(engine, prompt, max_new_tokens=20, temperature=1.0, top_p=0.9, seed=7).token_ids for prompt in PROMPTS]
    together = [output.token_ids for output in complete(engine, PROMPTS, decode)]
    backwards = [output.token_ids for output in complete(engine, PROMPTS[::-1], decode)][::-1]
    assert alone == together == backwards
    assert together[0] == together[4]
    assert one(engine, PROMPTS[0], max_new_tokens=20, temperature=1.0, seed=8).token_ids != alone[0]


def test_no_seed_is_random(engine: Engine) -> None:
    assert len({tuple(one(engine, [5], max_new_tokens=20, temperature=1.0).token_ids) for _ in range(4)}) == 4


def test_low_temperature_and_top_k_1_are_greedy(engine: Engine) -> None:
    greedy = one(engine, [5, 6], max_new_tokens=12).token_ids
    assert one(engine, [5, 6], max_new_tokens=12, temperature=1e-3, seed=1).token_ids == greedy
    assert one(engine, [5, 6], max_new_tokens=12, temperature=5.0, top_k=1, seed=1).token_ids == greedy


def test_stop_token_ends_the_row_and_is_counted(engine: Engine) -> None:
    free = one(engine, [5, 6], max_new_tokens=12).token_ids
    stopped = one(engine, [5, 6], max_new_tokens=12, stop_token_ids=[free[4]])
    first = free.index(free[4])
    assert stopped.token_ids == free[: first + 1]
    assert stopped.finish_reason.value == "stop"
    assert one(engine, [5, 6], max_new_tokens=5).finish_reason.value == "length"


def test_eos_from_the_config_ends_the_row_unless_ignored(tmp_path: Path, engine: Engine) -> None:
    free = one(engine, [5, 6], max_new_tokens=12).token_ids
    write_llama(tmp_path, eos_token_id=[95, free[3]])
    ending = engine_of(tmp_path)
    assert one(ending, [5, 6], max_new_tokens=12).token_ids == free[: free.index(free[3]) + 1]
    assert one(ending, [5, 6], max_new_tokens=12, ignore_eos=True).token_ids == free
    long = one(ending, [5, 6], max_new_tokens=12, min_new_tokens=9).token_ids
    assert len(long) >= 9
    assert not {95, free[3]} & set(long[:9])


def test_finished_places_are_refilled_at_once(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, sizes = [2, 9, 2, 2, 2], []
    requests = [engine.request(i, [5 + i], DecodeConfig(max_new_tokens=n)) for i, n in enumerate(lengths)]
    execute = engine.executor.execute
    monkeypatch.setattr(
        engine.executor,
        "execute",
        lambda batch, *rest: (sizes.append(batch.shape.num_sequences), execute(batch, *rest))[1],
    )
    order = [output.request_id for output in engine.generate(requests)]
    assert sizes == [3, 3, 3, 3, 1, 1, 1, 1, 1]
    assert order == [0, 2, 3, 4, 1]


def test_batch_size_caps_what_runs(engine: Engine) -> None:
    requests = [engine.request(i, [5], DecodeConfig(max_new_tokens=3)) for i in range(4)]
    seen = []
    for _ in engine.generate(requests, max_num_requests=1):
        seen.append(len(engine.scheduler.running))
    assert seen == [0, 0, 0, 0]


def test_requests_are_taken_as_places_become_free(engine: Engine) -> None:
    taken = []

    def source():  # type: ignore[no-untyped-def]
        for i in range(6):
            taken.append(i)
            yield engine.request(i, [5], DecodeConfig(max_new_tokens=2))

    outputs = engine.generate(source())
    next(outputs)
    assert taken == [0, 1, 2]
    outputs.close()


def test_closing_the_iterator_gives_everything_back(engine: Engine) -> None:
    requests = [engine.request(i, [5, 6], DecodeConfig(max_new_tokens=2 + 50 * i)) for i in range(3)]
    outputs = engine.generate(requests)
    next(outputs)
    assert engine.scheduler.running
    outputs.close()
    assert not engine.scheduler.running
    engine.scheduler.check_integrity()
    assert one(engine, [5], max_new_tokens=2).token_ids


def test_a_failing_sink_gives_everything_back(texts: Engine) -> None:
    def fail(*piece: object) -> None:
        raise OSError("gone")

    finishing = texts.request(0, [0, 70, 71], DecodeConfig(max_new_tokens=1))  # in the same step
    failing = texts.request(1, [0, 70, 71], DecodeConfig(max_new_tokens=1, ignore_eos=True), fail)
    with pytest.raises(OSError, match="gone"):
        list(texts.generate([finishing, failing, texts.request(2, [0], DecodeConfig(max_new_tokens=30))]))
    texts.scheduler.check_integrity()
    assert not texts.scheduler.running


def test_logprobs_match_the_unmodified_distribution(engine: Engine) -> None:
    prompt = [5, 6, 7]
    output = one(engine, prompt, max_new_tokens=6, logprobs=3, temperature=3.0, repetition_penalty=1.8, seed=2)
    expected = all_logits(engine, prompt + output.token_ids[:-1])[len(prompt) - 1 :].log_softmax(-1)
    assert output.logprobs is not None
    for step, row, token in zip(output.logprobs, expected, output.token_ids, strict=True):
        assert set(step.logprobs) == {*row.topk(3).indices.tolist(), token}
        assert step.ranks[token] == 1 + int((row > row[token]).sum())
        for id, value in step.logprobs.items():
            assert value == pytest.approx(row[id].item(), abs=1e-5)  # prefill and decode sum in another order
    assert one(engine, prompt, max_new_tokens=2).logprobs is None


def test_prompt_logprobs_match_the_next_prompt_token(engine: Engine, tmp_path: Path) -> None:
    write_llama(tmp_path)
    prompt = list(range(5, 45))
    expected = all_logits(engine, prompt)[:-1].log_softmax(-1)
    small = engine_of(tmp_path, max_batched_tokens=7, block_size=4)
    for other in (engine, small, small):  # at once, in chunks, and with the prompt in the prefix cache
        output = next(other.generate([other.request(0, prompt, DecodeConfig(max_new_tokens=3, prompt_logprobs=2))]))
        assert output.prompt_logprobs is not None
        for step, row, token in zip(output.prompt_logprobs, expected, prompt[1:], strict=True):
            assert set(step.logprobs) == {*row.topk(2).indices.tolist(), token}
            assert step.ranks[token] == 1 + int((row > row[token]).sum())
            assert step.logprobs[token] == pytest.approx(row[token].item(), abs=1e-5)  # chunks sum in another order
        assert output.num_cached_tokens == 0
    (single,) = engine.generate([engine.request(0, [5], DecodeConfig(max_new_tokens=1, prompt_logprobs=2))])
    assert single.prompt_logprobs == []


@each(
    "decode, blocks",
    [({}, 16), ({"num_beams": 2}, 22), ({"n": 3, "temperature": 1.0}, 26), ({"penalty_alpha": 0.6, "top_k": 3}, 20)],
)
def test_prompt_logprobs_are_whole_after_preemption(
    engine: Engine, folder: Path, decode: dict[str, Any], blocks: int, preempted: list[SequenceGroup]
) -> None:
    preempted.clear()
    prompts = [list(range(5 + i, 25 + 2 * i)) for i in range(4)]
    settings = DecodeConfig(max_new_tokens=12, prompt_logprobs=0, **decode)
    expected = [list(engine.generate([engine.request(0, prompt, settings)]))[0] for prompt in prompts]
    small = engine_of(folder, max_batched_tokens=13, block_size=4, kv_cache_memory=str(blocks * 4 * KEY_VALUE_BYTES))
    for output, expected_output in zip(generate(small, prompts, settings), expected, strict=True):
        assert output.prompt_logprobs is not None
        assert expected_output.prompt_logprobs is not None
        assert len(output.prompt_logprobs) == output.num_prompt_tokens - 1
        for ours, theirs in zip(output.prompt_logprobs, expected_output.prompt_logprobs, strict=True):
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-5)  # chunks sum in another order
    assert preempted


def test_samples_match_the_seed_and_the_first_is_that_of_one_alone(engine: Engine) -> None:
    decode = {"max_new_tokens": 15, "temperature": 1.0, "seed": 7}
    single = [one(engine, prompt, **decode).token_ids for prompt in PROMPTS]
    outputs = generate(engine, PROMPTS, DecodeConfig(n=4, **decode))  # type: ignore[arg-type]
    assert [output.completions[0].token_ids for output in outputs] == single
    for output in outputs:
        assert len({tuple(completion.token_ids) for completion in output.completions}) == 4
    again = generate(engine, PROMPTS[1:2], DecodeConfig(n=2, **decode))[0]  # type: ignore[arg-type]
    assert [c.token_ids for c in again.completions] == [c.token_ids for c in outputs[1].completions[:2]]


def test_samples_with_preemption_and_single_token_blocks(
    engine: Engine, tmp_path: Path, preempted: list[SequenceGroup]
) -> None:
    write_llama(tmp_path)
    decode = DecodeConfig(max_new_tokens=15, temperature=1.0, seed=7, n=3, prefix_cache=False)
    expected = [[c.token_ids for c in output.completions] for output in generate(engine, PROMPTS, decode)]
    small = engine_of(tmp_path, block_size=1, kv_cache_memory=str(62 * KEY_VALUE_BYTES))
    assert [[c.token_ids for c in output.completions] for output in generate(small, PROMPTS, decode)] == expected
    assert preempted


def test_samples_of_one_text_are_refused(engine: Engine) -> None:
    with pytest.raises(UserError, match="decode.n=2 is not allowed with decode.temperature=0"):
        engine.request(0, [5], DecodeConfig(n=2))


Pieces = dict[int, tuple[list[int], str, list[TokenLogprobs]]]


def streamed(engine: Engine, prompts: list[list[int]], decode: DecodeConfig) -> tuple[list[Output], list[Pieces]]:
    """Return the outputs, and the joined pieces that each sink received, by sample."""
    pieces: list[Pieces] = [{} for _ in prompts]

    def sink_of(row: int) -> Sink:
        def sink(sample: int, token_ids: list[int], text: str, logprobs: list[TokenLogprobs]) -> None:
            ids, texts, known = pieces[row].get(sample, ([], "", []))
            pieces[row][sample] = ids + token_ids, texts + text, known + logprobs

        return sink

    requests = [engine.request(i, prompt, decode, sink_of(i)) for i, prompt in enumerate(prompts)]
    return sorted(engine.generate(requests), key=lambda output: output.request_id), pieces


@each("logprobs", [None, 1])
@each("n", [1, 3])
def test_sinks_have_the_pieces_of_every_sample(texts: Engine, n: int, logprobs: int | None) -> None:
    prompts = [[0, 70, 71], [0, 75]]
    decode = DecodeConfig(max_new_tokens=25, temperature=1.0, seed=4, n=n, logprobs=logprobs, stop=["a", "e"])
    outputs, pieces = streamed(texts, prompts, decode)
    expected = generate(texts, prompts, decode)
    assert outputs == expected
    for output, had in zip(outputs, pieces, strict=True):
        assert [had[i] for i in range(n)] == [(c.token_ids, c.text, c.logprobs or []) for c in output.completions]


def test_samples_that_begin_again_repeat_no_piece(engine: Engine, tmp_path: Path) -> None:
    write_llama(tmp_path)
    decode = DecodeConfig(max_new_tokens=15, temperature=1.0, seed=7, n=3, prefix_cache=False)
    small = engine_of(tmp_path, block_size=1, kv_cache_memory=str(62 * KEY_VALUE_BYTES))
    outputs, pieces = streamed(small, PROMPTS, decode)
    assert outputs == generate(engine, PROMPTS, decode)
    assert sum(output.num_preemptions for output in outputs) > 0
    for output, had in zip(outputs, pieces, strict=True):
        assert {i: ids for i, (ids, _, _) in had.items()} == {i: c.token_ids for i, c in enumerate(output.completions)}


def test_outputs_say_when_and_how_they_ended(texts: Engine) -> None:
    before = time.monotonic()
    (free,) = generate(texts, [[0, 70, 71]], DecodeConfig(max_new_tokens=30, ignore_eos=True))
    assert free.first_token_s is not None
    assert before <= free.queued_s <= free.first_token_s <= free.finished_s <= time.monotonic()
    assert free.num_preemptions == 0
    completion = free.completions[0]
    assert completion.stop_reason is None
    assert completion.text is not None
    token, string = completion.token_ids[9], completion.text[10:13]
    for decode, reason in ({"stop_token_ids": [token]}, token), ({"stop": ["never said", string]}, string):
        stopped = one(texts, [0, 70, 71], max_new_tokens=30, ignore_eos=True, **decode)
        assert (stopped.finish_reason.value, stopped.stop_reason) == ("stop", reason)


def test_a_waiting_request_is_queued_before_it_begins(engine: Engine) -> None:
    requests = [engine.request(i, [5], DecodeConfig(max_new_tokens=3)) for i in range(4)]
    groups = [engine.add(request) for request in requests]  # three run at once
    while any(group.sequences for group in groups):
        engine.step()
    *_, last = (group.output() for group in groups)
    assert last.first_token_s is not None
    assert last.queued_s < groups[0].finished_s <= last.first_token_s < last.finished_s


def test_small_budgets_change_no_token(engine: Engine) -> None:
    """The caller's budgets split prompts into chunks. Every generating sequence still gets its token."""
    decode = DecodeConfig(max_new_tokens=12, logprobs=2, prefix_cache=False)
    prompts = [list(range(3, 3 + 20 * n)) for n in (1, 2, 3)]
    expected = complete(engine, prompts, decode)
    groups = [engine.add(engine.request(i, prompt, decode)) for i, prompt in enumerate(prompts)]
    budgets = itertools.cycle([1, 7, 2, 30])
    while any(group.sequences for group in groups):
        engine.step(next(budgets))
        engine.scheduler.check_integrity()
    for group, alone in zip(groups, expected, strict=True):
        assert group.completions[0].token_ids == alone.token_ids


def test_bans_and_biases_by_text_and_id(texts: Engine) -> None:
    prompt = [0, 70, 71]
    free = one(texts, prompt, max_new_tokens=20, ignore_eos=True)
    assert free.text is not None
    assert texts.tokenizer is not None
    token = next(token for token in free.token_ids if texts.tokenizer.decode([token], True).isascii())
    word = texts.tokenizer.decode([token], True)
    assert token not in one(texts, prompt, max_new_tokens=20, ignore_eos=True, bad_words=[word]).token_ids
    phrase = texts.tokenizer.decode(free.token_ids[:2], True)
    assert (
        one(texts, prompt, max_new_tokens=20, ignore_eos=True, bad_words=[phrase]).token_ids[:2] != free.token_ids[:2]
    )
    allowed = one(texts, prompt, max_new_tokens=20, ignore_eos=True, allowed_token_ids=[80, 90])
    assert set(allowed.token_ids) <= {80, 90}
    assert set(one(texts, prompt, max_new_tokens=5, ignore_eos=True, logit_bias={90: 100.0}).token_ids) == {90}
    with pytest.raises(UserError, match="allowed token id 330 is not in the vocabulary: give ids from 0 to 329"):
        texts.request(0, prompt, DecodeConfig(allowed_token_ids=[330]))
    with pytest.raises(UserError, match="logit_bias token id 999 is not in the vocabulary"):
        texts.request(0, prompt, DecodeConfig(logit_bias={999: 1.0}))


def test_a_row_whose_tokens_are_all_banned_ends_alone(engine: Engine) -> None:
    nothing = DecodeConfig(max_new_tokens=5, allowed_token_ids=[7], no_repeat_ngram_size=1)
    requests = [engine.request(0, [5, 6], nothing), engine.request(1, [5, 6], DecodeConfig(max_new_tokens=5))]
    outputs = {output.request_id: output.completions[0] for output in engine.generate(requests)}
    assert (outputs[0].token_ids, outputs[0].finish_reason.value) == ([7], "no_token")
    assert outputs[1].token_ids == one(engine, [5, 6], max_new_tokens=5).token_ids


def test_included_stops_end_the_text(texts: Engine) -> None:
    prompt, decode = [0, 70, 71], {"max_new_tokens": 60, "ignore_eos": True}
    free = one(texts, prompt, **decode)
    assert free.text is not None
    stop = free.text[10:13]
    at = free.text.index(stop)
    assert one(texts, prompt, **decode, stop=[stop], include_stop=True).text == free.text[: at + 3]
    stopped = one(texts, prompt, **decode, stop_token_ids=[free.token_ids[9]], include_stop=True)
    special = one(texts, prompt, **decode, stop=["</s>"], logit_bias={1: 100.0})
    assert (special.token_ids, special.text, special.stop_reason) == ([1], "", "</s>")
    last = free.token_ids.index(free.token_ids[9])
    assert stopped.text == one(texts, prompt, max_new_tokens=last + 1, ignore_eos=True).text


def test_cancelling_one_of_several(engine: Engine) -> None:
    keep = engine.add(engine.request(0, [5, 6, 7], DecodeConfig(max_new_tokens=9)))
    settings: list[dict[str, object]] = [
        {},
        {"n": 3, "temperature": 1.0},
        {"num_beams": 3},
        {"penalty_alpha": 0.5, "top_k": 3},
    ]
    for decode in settings:
        for steps in (0, 1, 2):
            other = engine.add(engine.request(1, [8, 9], DecodeConfig(max_new_tokens=9, **decode)))  # type: ignore[arg-type]
            for _ in range(steps):
                if keep.sequences:
                    engine.step()
            engine.scheduler.cancel(other)
            engine.scheduler.check_integrity()
    while keep.sequences:
        engine.step()
    assert keep.completions[0].token_ids == one(engine, [5, 6, 7], max_new_tokens=9).token_ids
    blocks = engine.scheduler.block_manager
    assert blocks.num_free_blocks == blocks.num_blocks


def test_text_and_pieces_of_a_row_agree(texts: Engine) -> None:
    pieces: list[str] = []
    decode = DecodeConfig(max_new_tokens=60, ignore_eos=True)
    request = texts.request(0, [0, 70, 71], decode, lambda sample, ids, text, logprobs: pieces.append(text))
    output = next(texts.generate([request])).completions[0]
    assert texts.tokenizer is not None
    full_text = texts.tokenizer.decode([0, 70, 71, *output.token_ids], skip_special_tokens=True)
    assert (
        "".join(pieces)
        == output.text
        == full_text[len(texts.tokenizer.decode([0, 70, 71], skip_special_tokens=True)) :]
    )
    assert len(pieces) > 10


def test_stop_string_is_left_out_of_the_text_and_ends_the_row(texts: Engine) -> None:
    free = one(texts, [0, 70, 71], max_new_tokens=60, ignore_eos=True)
    assert free.text is not None
    stop = free.text[10:13]
    at = free.text.index(stop)
    stopped = one(texts, [0, 70, 71], max_new_tokens=60, ignore_eos=True, stop=[stop])
    assert stopped.text == free.text[:at]
    assert stopped.finish_reason.value == "stop"
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    late = one(texts, [0, 70, 71], max_new_tokens=60, ignore_eos=True, stop=[stop], min_new_tokens=60)
    assert late.text == free.text


def test_text_of_a_stop_token_is_left_out_and_special_tokens_are_shown_on_request(texts: Engine) -> None:
    free = one(texts, [0, 70, 71], max_new_tokens=30, ignore_eos=True)
    assert texts.tokenizer is not None
    i = next(i for i in range(5, 30) if len(texts.tokenizer.decode([free.token_ids[i]], True)) > 1)
    first = free.token_ids.index(free.token_ids[i])
    stopped = one(texts, [0, 70, 71], max_new_tokens=30, ignore_eos=True, stop_token_ids=[free.token_ids[i]])
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.text == one(texts, [0, 70, 71], max_new_tokens=first, ignore_eos=True).text
    assert one(texts, [0, 70, 71, 1], max_new_tokens=3, ignore_eos=True, skip_special_tokens=False).text is not None


def test_the_coldest_temperature_is_still_a_distribution(engine: Engine) -> None:
    greedy = one(engine, [5, 6], max_new_tokens=12).token_ids
    assert one(engine, [5, 6], max_new_tokens=12, temperature=1e-300, seed=1).token_ids == greedy


def test_damaged_weights_end_in_one_clear_error(tmp_path: Path) -> None:
    model = write_llama(tmp_path)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nan
    model.save_pretrained(tmp_path)
    engine = engine_of(tmp_path)
    (output,) = engine.generate([engine.request(0, [5, 6], DecodeConfig(max_new_tokens=2))])
    assert isinstance(output.error, UserError)
    assert "the model's logits are not finite: the weights are damaged" in str(output.error)


@each(
    "num_prompt, decode, expected",
    [
        (10, {"max_new_tokens": 5}, 5),
        (10, {"max_length": 15}, 5),
        (10, {"max_length": 15, "max_new_tokens": 3}, 3),
        (10, {"max_length": 15, "max_new_tokens": 100}, 5),
        (10, {"max_length": 128}, 118),
        (10, {}, 118),
        (127, {"max_new_tokens": 1}, 1),
        (10, {"max_new_tokens": "auto"}, 118),
        (70, {"max_new_tokens": "auto"}, 58),
        (10, {"max_new_tokens": "auto", "max_length": 15}, 5),
        (10, {"max_new_tokens": 118}, 118),  # the same error as for 129
    ],
)
def test_lengths_count_as_they_say(
    engine: Engine, num_prompt: int, decode: dict[str, int | str], expected: int
) -> None:
    assert len(one(engine, [5] * num_prompt, **decode).token_ids) == expected


@each(
    "num_prompt, decode, message",
    [
        (
            10,
            {"max_length": 129},
            r"decode.max_length=129 is more than the model takes \(max_position_embeddings=128\)",
        ),
        (
            10,
            {"max_new_tokens": 129},
            r"decode.max_new_tokens=129 is more than the model takes \(max_position_embeddings=128\): "
            "give at most 118 with 10 tokens of prompt, or auto",
        ),
        (
            10,
            {"max_new_tokens": 119},
            r"10 tokens and decode.max_new_tokens=119, .*max_position_embeddings=128: give at most 118",
        ),
        (128, {}, r"the prompt has 128 tokens, which leaves no room .*max_position_embeddings=128\): shorten .* 127"),
        (300, {}, r"the prompt has 300 tokens, which leaves no room"),
        (10, {"max_length": 10}, r"the prompt has 10 tokens, which leaves no room .*decode.max_length=10\): shorten"),
        (
            10,
            {"max_length": 12, "min_new_tokens": 3},
            r"decode.min_new_tokens=3 is more than the 2 new tokens that fit: give at most that many",
        ),
        (0, {}, "the prompt has no tokens"),
        (1, {"stop": ["x"]}, "needs a tokenizer"),
    ],
)
def test_requests_that_do_not_fit_are_refused_with_the_numbers(
    engine: Engine, num_prompt: int, decode: dict[str, object], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        engine.request(0, [5] * num_prompt, DecodeConfig(**decode))  # type: ignore[arg-type]


@each("token", [-1, 96, 10**9])
def test_ids_outside_the_vocabulary_are_refused(engine: Engine, token: int) -> None:
    with pytest.raises(UserError, match=f"prompt token id {token} is not in the vocabulary: give ids from 0 to 95"):
        engine.request(0, [5, token], DecodeConfig())


KEY_VALUE_BYTES = (
    2 * 2 * 2 * 16 * 4
)  # of a token in `tests.helpers.builders.SMALL`: K and V, layers, heads, channels, float32


@each(
    "device",
    [
        {"max_batched_tokens": 3},
        {"max_batched_tokens": 5, "block_size": 1},
        {"block_size": 4, "kv_cache_memory": str(11 * 4 * KEY_VALUE_BYTES)},
        {"block_size": 4, "kv_cache_memory": str(11 * 4 * KEY_VALUE_BYTES), "max_batched_tokens": 4},
        {"block_size": 64},
    ],
)
@each("prefix_cache", [True, False])
def test_chunks_blocks_preemption_and_prefix_cache_change_no_token(
    engine: Engine, folder: Path, device: dict[str, object], prefix_cache: bool, preempted: list[SequenceGroup]
) -> None:
    preempted.clear()
    prompts = [[*range(5, 25), last] for last in (3, 4, 3)] + PROMPTS
    decode = DecodeConfig(max_new_tokens=20, prefix_cache=False)
    expected = [one(engine, prompt, max_new_tokens=20, prefix_cache=False).token_ids for prompt in prompts]
    other = engine_of(folder, batch_size=3, **device)
    outputs = generate(other, prompts, replace(decode, prefix_cache=prefix_cache))
    assert [output.completions[0].token_ids for output in outputs] == expected
    assert bool(preempted) == ("kv_cache_memory" in device)
    again = generate(other, prompts, replace(decode, prefix_cache=prefix_cache))
    assert [output.completions[0].token_ids for output in again] == expected
    hits = sum(output.num_cached_tokens for output in again)
    assert (hits > 0) == (prefix_cache and device.get("block_size") != 64)


def test_requests_that_can_never_fit_fail_alone_and_at_once(tmp_path: Path) -> None:
    write_llama(tmp_path)
    small = engine_of(tmp_path, block_size=4, kv_cache_memory=str(11 * 4 * KEY_VALUE_BYTES))
    with pytest.raises(UserError, match="prompt and new tokens are 60, but the KV cache holds 44"):
        small.request(0, [5] * 10, DecodeConfig(max_new_tokens=50))
    assert len(one(small, [5] * 10, max_new_tokens=34).token_ids) == 34


def test_dynamic_rotary_scaling_shares_no_beginnings(tmp_path: Path) -> None:
    write_llama(tmp_path, rope_scaling={"rope_type": "dynamic", "factor": 4.0}, max_position_embeddings=16)
    engine = engine_of(tmp_path, block_size=4)
    prompts = [list(range(5, 25)), list(range(5, 45))]
    outputs = [generate(engine, [prompt], DecodeConfig(max_new_tokens=3))[0] for prompt in prompts * 2]
    assert [output.num_cached_tokens for output in outputs] == [0] * 4
    assert outputs[0].completions == outputs[2].completions
