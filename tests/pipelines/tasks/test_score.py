"""`task=score`: transformers' classifiers, Qwen3-Reranker by its model card, cosines of transformers' vectors, the files
of a job, and refused requests."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, Qwen3Model

from conf.compose import dump
from conf.errors import UserError
from conf.pooling import EmbedConfig, PoolingMode, ScoreConfig
from conf.schema import RunConfig, Task
from conf.tasks import PredictConfig
from models.tokenizers.pairs import PAIR, TASK
from pipelines import pipeline
from pipelines.jobs.similarity import cosine_similarities
from pipelines.tasks.score import run_score
from tests.helpers.adapters import write_adapter
from tests.helpers.builders import run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.embedding_models import (
    PAIR_TEMPLATE,
    QUERY,
    write_qwen3_embedding,
    write_qwen3_reranker,
    write_reward_model,
)
from tests.helpers.small_tokenizers import byte_level, save

TOLERANCE = 1e-5  # float32 sums in another order; scores are of order 1
CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello, world"}]


def score_run(folder: Path, data: Path, embed: dict[str, Any] | None = None, **score: Any) -> RunConfig:
    run = run_config(folder)
    return replace(
        run,
        task=Task.score,
        model=replace(run.model, tokenizer=""),
        predict=PredictConfig(data=str(data), batch_size=3),
        score=ScoreConfig(**score),
        embed=EmbedConfig(**(embed or {})),
    )


def scored(folder: Path, tmp_path: Path, rows: list[dict[str, Any]], **settings: Any) -> list[dict[str, Any]]:
    tmp_path.mkdir(exist_ok=True)
    data = tmp_path / "rows.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_score(score_run(folder, data, **settings), tmp_path / "out", dump)
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
    modules = [{"type": f"sentence_transformers.{name}"} for name in ("Transformer", "LogitScore")]
    (tmp_path / "modules.json").write_text(json.dumps(modules))  # without a Pooling: not an embedding model
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


@pytest.mark.long
@each(
    ("embed", "max_seq_length", "prompts"),
    [
        ({}, None, (QUERY, "")),
        ({"instruction": "about: "}, None, ("about: ", "about: ")),
        ({"instruction": ""}, 9, ("", "")),
        ({"pooling": PoolingMode.mean, "normalize": False}, 9, (QUERY, "")),
    ],
)
def test_an_embedding_model_scores_by_cosine(
    tmp_path: Path, embed: dict[str, Any], max_seq_length: int | None, prompts: tuple[str, str]
) -> None:
    reference = write_qwen3_embedding(tmp_path)
    if max_seq_length:
        (tmp_path / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": max_seq_length}))
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    pairs = [("What is 3 + 4?", "It is 7."), ("", "今天天气很好"), ("a", "yes " * 20), ("今天天气很好", "")]
    rows = [{"query": query, "document": document, "id": i} for i, (query, document) in enumerate(pairs)]
    scores = scored(tmp_path, tmp_path, rows, embed=embed)
    is_mean = embed.get("pooling") is PoolingMode.mean
    num_truncated = 0
    for i, (pair, row) in enumerate(zip(pairs, scores, strict=True)):
        texts = [prompt + text for prompt, text in zip(prompts, pair, strict=True)]
        cut = {"truncation": True, "max_length": max_seq_length} if max_seq_length else {}
        ids = [tokenizer(text, **cut).input_ids for text in texts]
        with torch.inference_mode():
            hidden = [reference(torch.tensor([token_ids])).last_hidden_state[0].double() for token_ids in ids]
        vectors = [states.mean(0) if is_mean else states[-1] for states in hidden]
        assert row["scores"] == [pytest.approx(float(torch.cosine_similarity(*vectors, dim=0)), abs=TOLERANCE)]
        lost = sum(map(len, (tokenizer(text).input_ids for text in texts))) - sum(map(len, ids))
        assert (row["index"], row["id"], row["error"], row["num_prompt_tokens"]) == (i, i, None, sum(map(len, ids)))
        assert row.get("num_truncated_tokens", 0) == lost
        num_truncated += lost > 0
    assert json.loads((tmp_path / "out" / "metrics.json").read_text())["num_truncated_rows"] == num_truncated


@pytest.mark.long
def test_pairs_of_an_embedding_model_run_as_rows_run(tmp_path: Path) -> None:
    """With adapters and in any batch they have the bits of cosines of task=embed's vectors."""
    base, adapter = tmp_path / "model", tmp_path / "adapter"
    write_qwen3_embedding(base)
    write_adapter(adapter, base, Qwen3Model, r=4, target_modules=["v_proj"], task_type="FEATURE_EXTRACTION")
    data, tuned = tmp_path / "rows.jsonl", {"adapter": "tuned"}
    pairs = [(f"question {i} " * (i % 3), "answer " * (i % 5)) for i in range(11)]
    rows = [
        {"query": query, "document": document} | (tuned if i % 2 else {}) for i, (query, document) in enumerate(pairs)
    ]
    rows += [{"query": "a", "document": "b", "adapter": "tund"}, {"query": "a", "document": "b " * 300}]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    embedding = pipeline("embedding", model=base, device="cpu", overrides=[f"model.adapters={{tuned: {adapter}}}"])
    expected = []
    for row in rows[:11]:
        named = {"adapter": row["adapter"]} if "adapter" in row else {}
        queries = embedding({"prompt": row["query"], **named}, instruction="query")
        documents = embedding({"prompt": row["document"], **named}, instruction="document")
        expected.append(cosine_similarities([queries[0].tolist(), documents[0].tolist()], [(0, 1)]))
    assert len({round(score, 6) for (score,) in expected}) > 8
    for batch_size in (1, 2, 5, 64):
        run = score_run(base, data)
        predict = replace(run.predict, batch_size=batch_size)
        model = replace(run.model, adapters={"tuned": str(adapter)})
        run_score(replace(run, model=model, predict=predict), tmp_path / str(batch_size), dump)
        written = (tmp_path / str(batch_size) / "scores.jsonl").read_text().splitlines()
        scores = [json.loads(line) for line in written]
        assert [row["scores"] for row in scores] == [*expected, None, None]
        assert "adapter 'tund' does not exist: there are tuned" in scores[11]["error"]
        assert "more than the model takes (max_position_embeddings=256)" in scores[12]["error"]


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
    write_qwen3_embedding(tmp_path / "embedding")
    rows = [
        {"query": "a", "document": "b"}, {"prompt": "a"}, {"query": "a"}, {"query": "a", "document": "\ud83d"},
        {"query": "a", "document": "b", "prediction": "c"},
    ]  # fmt: skip
    good, *bad = scored(tmp_path / "embedding", tmp_path, rows)
    assert -1 < good["scores"][0] < 1
    assert [row["scores"] for row in bad] == [None] * 4
    for row, message in zip(
        bad,
        (
            "an embedding model scores a query and a document: give both, or give task=embed, which writes vectors",
            "the row has a query and no document: give both",
            "the text has half a surrogate pair",
            "a prediction is not used where nothing is generated",
        ),
        strict=True,
    ):
        assert message in row["error"]


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
    write_qwen3_embedding(tmp_path / "embedding")
    for name, settings, message in (
        ("reward", {"instruction": "x"}, "score.instruction is a reranker's, and this model has a head of labels"),
        ("embedding", {"instruction": "x"}, "this is an embedding model: leave it out, or give embed.instruction"),
        ("embedding", {"embed": {"instruction": "qury"}}, "embed.instruction=qury is the name of no prompt"),
        ("reward", {"embed": {"normalize": True}}, "embed.normalize=true is not used by a model without a pooling"),
    ):
        with pytest.raises(UserError, match=message):
            run_score(score_run(tmp_path / name, data, **settings), tmp_path / "out", dump)
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
