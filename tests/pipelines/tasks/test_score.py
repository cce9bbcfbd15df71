"""`task=score`: transformers' classifiers and Qwen3-Reranker by its model card, the files of a job, and refused
requests."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from conf.compose import dump
from conf.errors import UserError
from conf.pooling import ScoreConfig
from conf.schema import RunConfig, Task
from conf.tasks import PredictConfig
from models.tokenizers.pairs import PAIR, TASK
from pipelines.tasks.score import run_score
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.embedding_models import PAIR_TEMPLATE, write_qwen3_reranker, write_reward_model
from tests.helpers.small_tokenizers import byte_level, save

TOLERANCE = 1e-5  # float32 sums in another order; scores are of order 1
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello, world"}]


def score_run(folder: Path, data: Path, **score: Any) -> RunConfig:
    run = run_config(folder)
    return replace(
        run,
        task=Task.score,
        model=replace(run.model, tokenizer=""),
        predict=PredictConfig(data=str(data), batch_size=3),
        score=ScoreConfig(**score),
    )


def scored(folder: Path, tmp_path: Path, rows: list[dict[str, Any]], **score: Any) -> list[dict[str, Any]]:
    tmp_path.mkdir(exist_ok=True)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_score(score_run(folder, data, **score), tmp_path / "out", dump)
    return [json.loads(line) for line in (tmp_path / "out" / "scores.jsonl").read_text().splitlines()]


@each("num_labels", [1, 3])
def test_a_reward_model(tmp_path: Path, num_labels: int) -> None:
    reference = write_reward_model(tmp_path, PAIR_TEMPLATE, num_labels=num_labels)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pair = [{"role": "query", "content": "Where?"}, {"role": "document", "content": "今天 here"}]
    text = tokenizer.apply_chat_template(CHAT, tokenize=False)
    assert text.endswith("world</s>")
    ids = [
        tokenizer(text, add_special_tokens=False).input_ids,
        tokenizer("Once upon a time").input_ids,
        [5, 6, 7, 1, 1],
        [1, 1, 1],
        tokenizer.apply_chat_template(pair, return_dict=False),
    ]
    rows = [
        {"messages": CHAT},
        {"prompt": "Once upon a time"},
        *({"prompt_token_ids": token_ids} for token_ids in ids[2:4]),
        {"query": "Where?", "document": "今天 here"},
    ]
    for row, prompt in zip(scored(tmp_path, tmp_path, rows), ids, strict=True):
        with torch.inference_mode():
            expected = reference(torch.tensor([prompt])).logits[0]
        assert row["error"] is None
        torch.testing.assert_close(torch.tensor(row["scores"]), expected, atol=TOLERANCE, rtol=TOLERANCE)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["num_values"] == num_labels
    assert {file.name for file in (tmp_path / "out").iterdir()} == {
        "scores.jsonl", "metrics.json", "config.yaml", "environment.json",
    }  # fmt: skip


@torch.inference_mode()
def card_score(reference: Any, tokenizer: Any, query: str, document: str, instruction: str) -> float:
    """Compute by the model card of Qwen3-Reranker."""
    prefix = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    suffix = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    pair = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    ends = [tokenizer.encode(text, add_special_tokens=False) for text in (prefix, suffix)]
    logits = reference(torch.tensor([ends[0] + tokenizer(pair).input_ids + ends[1]])).logits[0, -1]
    yes, no = (logits[tokenizer.convert_tokens_to_ids(answer)] for answer in ("yes", "no"))
    return float(torch.stack([no, yes]).log_softmax(0)[1].exp())


@each("instruction", [None, "Given a story, find its moral"])
def test_qwen3_reranker(tmp_path: Path, instruction: str | None) -> None:
    reference = write_qwen3_reranker(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pairs = [("What is 3 + 4?", "It is 7."), ("yes or no", "\n\nno </s>"), ("", "今天天气很好"), ("a", "yes " * 20)]
    options = {} if instruction is None else {"instruction": instruction}
    rows = [{"query": query, "document": document} for query, document in pairs]
    told = ScoreConfig(**options).instruction
    expected = [card_score(reference, tokenizer, *pair, told) for pair in pairs]
    scores = scored(tmp_path, tmp_path, rows, **options)
    assert [row["scores"] for row in scores] == [[pytest.approx(score, abs=TOLERANCE)] for score in expected]
    assert len({round(score, 3) for score in expected}) > 1


def test_the_next_pair_finds_the_instruction_in_the_prefix_cache(tmp_path: Path) -> None:
    write_qwen3_reranker(tmp_path)
    scored(tmp_path, tmp_path, [{"query": "the same", "document": f"{i}"} for i in range(9)])
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert metrics["num_cached_tokens"] > metrics["num_prompt_tokens"] / 2


def test_bad_rows_are_errors(tmp_path: Path) -> None:
    write_reward_model(tmp_path)
    rows = [
        {"prompt": "one"}, {"query": "a", "document": "b"}, {"query": "a"}, {"document": "b"}, {"prompt": "x " * 200},
    ]  # fmt: skip
    scores = scored(tmp_path, tmp_path, rows)
    assert [row["scores"] is None for row in scores] == [False, True, True, True, True]
    errors = [row["error"] for row in scores]
    assert "query and document need a chat template with the roles query and document" in errors[1]
    assert "the row has a query and no document: give both" in errors[2]
    assert "the row has none of prompt" in errors[3]
    assert "more than the model takes (max_position_embeddings=128)" in errors[4]


def test_models_that_cannot_score_are_refused(tmp_path: Path) -> None:
    data = tmp_path / "rows.jsonl"
    data.write_text('{"query": "a", "document": "b"}\n')
    write_llama(tmp_path / "plain", vocab_size=330)
    save(byte_level(), tmp_path / "plain")
    with pytest.raises(
        UserError, match="the tokens yes and no, which this tokenizer does not have: give a reward model"
    ):
        run_score(score_run(tmp_path / "plain", data), tmp_path / "out", dump)
    run = score_run(tmp_path / "plain", data)
    with pytest.raises(UserError, match="scores by its tokens yes and no: give model.tokenizer=PATH"):
        run_score(replace(run, model=replace(run.model, tokenizer=None)), tmp_path / "out", dump)
    write_reward_model(tmp_path / "reward")
    with pytest.raises(UserError, match="score.instruction is a reranker's, and this model has a head of labels"):
        run_score(score_run(tmp_path / "reward", data, instruction="x"), tmp_path / "out", dump)
    assert not (tmp_path / "out").exists()


def test_a_causal_model_judges_in_its_own_chat_template(tmp_path: Path) -> None:
    """The same instruction as Qwen3-Reranker's, in a user turn. Without a template only prompts are scored."""
    reference = write_llama(tmp_path, vocab_size=340, max_position_embeddings=512)
    tokenizer = byte_level()
    tokenizer.add_tokens(["yes", "no"])
    save(tokenizer, tmp_path)
    pair, rows = {"query": "a", "document": "b"}, [{"query": "a", "document": "b"}, {"prompt": "Is it?"}]
    score, _ = scored(tmp_path, tmp_path, rows)
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    asked = f"{TASK}\n\n{PAIR.format(instruction=ScoreConfig().instruction, **pair)}"
    turns = [{"role": "user", "content": asked}]
    ids = theirs.apply_chat_template(turns, tokenize=True, add_generation_prompt=True, return_dict=False)
    with torch.inference_mode():
        logits = reference(torch.tensor([ids])).logits[0, -1]
    answers = logits[theirs.convert_tokens_to_ids(["no", "yes"])].softmax(0)
    assert score["scores"] == [pytest.approx(float(answers[1]), abs=TOLERANCE)]
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    del settings["chat_template"]
    file.write_text(json.dumps(settings))
    bare, prompt = scored(tmp_path, tmp_path / "bare", rows)
    assert (
        "need Qwen3-Reranker's token <|im_start|> or a chat template, and this tokenizer has neither" in bare["error"]
    )
    assert 0 < prompt["scores"][0] < 1
