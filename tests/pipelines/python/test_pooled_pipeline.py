"""The Python API of vectors and scores: the results of the command, arguments, errors that list valid names."""

import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from conf.errors import UserError
from pipelines import EmbeddingPipeline, ScorePipeline, pipeline
from pipelines.engine import Output
from pipelines.loading.open_pooler import pooler_of
from tests.helpers.builders import write_llama
from tests.helpers.cases import each
from tests.helpers.embedding_models import write_qwen3_embedding, write_qwen3_reranker
from tests.helpers.small_tokenizers import byte_level

OVERRIDES = ["model.dtype=float32", "predict.batch_size=3", "device.max_batched_tokens=24"]  # long rows end later


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("embedding")
    write_qwen3_embedding(folder)
    return folder


@pytest.fixture(scope="module")
def pipe(folder: Path) -> EmbeddingPipeline:
    return pipeline("embedding", model=folder, device="cpu", overrides=OVERRIDES)


def test_vectors_come_in_the_order_of_the_rows(pipe: EmbeddingPipeline) -> None:
    texts = ["Once upon a time", "a", "She said: hello, world!", "b " * 40, "one more"]
    vectors = pipe(texts)
    assert vectors.dtype == np.float32
    assert vectors.shape == (5, 64)
    alone = np.concatenate([pipe(text) for text in texts])
    np.testing.assert_allclose(vectors, alone, atol=1e-6)  # without the C++ kernels sums may have another order
    np.testing.assert_array_equal(vectors, pipe(iter(texts)))
    np.testing.assert_allclose((vectors**2).sum(-1), 1, atol=1e-6)
    assert pipe([]).shape == (0, 64)


@each(
    ("pooled", "expected"),
    [
        ([3.0, -4.0], [0.6, -0.8]),
        ([0.0, 0.0], [0.0, 0.0]),
        ([1e30, 1e30], [0.5**0.5] * 2),
        ([1e-30, 0.0], [1e-18, 0.0]),
    ],
)
def test_the_length_of_any_vector_is_found(pipe: EmbeddingPipeline, pooled: list[float], expected: list[float]) -> None:
    """In float32 the square of 1e30 is infinite; below 1e-12 torch's normalize leaves vectors short."""
    pooler = pooler_of(pipe.run, pipe._source, pipe.engine)
    vector = pooler.values(Output(0, [], 1, 0, pooled=torch.tensor(pooled)))
    assert torch.equal(vector, torch.tensor(expected))


def test_arguments_of_a_call_beat_those_of_the_constructor(folder: Path, pipe: EmbeddingPipeline) -> None:
    configured = pipeline(
        "embedding",
        model=folder,
        device="cpu",
        overrides=OVERRIDES,
        instruction="query",
        normalize=False,
        pooling="mean",
    )
    plain = pipe("a", instruction="query", normalize=False, pooling="mean")
    np.testing.assert_array_equal(configured("a"), plain)
    assert not np.allclose(configured("a", instruction=""), plain)
    ids = byte_level().encode("a", add_special_tokens=False).ids
    row = {"prompt_token_ids": [*ids, 1]}  # with the eos that the tokenizer adds
    np.testing.assert_array_equal(configured(row, instruction=None, normalize=None, pooling="auto"), pipe("a"))


def test_the_numbers_match_transformers(tmp_path: Path) -> None:
    reference = write_llama(tmp_path)
    pipe = pipeline("embedding", model=tmp_path, device="cpu", pooling="mean", normalize=True)
    with torch.inference_mode():
        expected = normalize(reference.model(torch.tensor([[5, 6, 7]])).last_hidden_state[0].mean(0), dim=0)
    np.testing.assert_allclose(pipe({"prompt_token_ids": [5, 6, 7]})[0], expected, atol=1e-5)


def test_scores_of_pairs(tmp_path: Path, folder: Path, pipe: EmbeddingPipeline) -> None:
    write_qwen3_reranker(tmp_path)
    scorer = pipeline("score", model=tmp_path, device="cpu")
    assert isinstance(scorer, ScorePipeline)
    pairs = [{"query": "What?", "document": text} for text in ("one", "two", "three")]
    scores = scorer(pairs)
    assert scores.shape == (3, 1)
    assert scores.min() > 0
    assert scores.max() < 1
    np.testing.assert_allclose(scorer(pairs[2])[0], scores[2], atol=1e-6)
    assert not np.allclose(scorer(pairs, instruction="Something else"), scores)
    with pytest.raises(UserError, match="score.instruction='' is not allowed"):
        scorer(pairs, instruction="")
    cosines = pipeline("score", model=folder, device="cpu", overrides=OVERRIDES)
    documents = pipe(["one", "two", "three"], instruction="document")
    np.testing.assert_allclose(cosines(pairs), documents @ pipe("What?", instruction="query").T, atol=1e-6)
    assert cosines(pairs).dtype == np.float32
    with pytest.raises(UserError, match="row 1: an embedding model scores a query and a document: give both"):
        cosines([pairs[0], "a"])
    np.testing.assert_allclose(cosines(iter(pairs)), cosines(pairs, batch_size=1), atol=1e-6)  # also after an error


@each(
    ("rows", "arguments", "message"),
    [
        ("a", {"poling": "mean"}, "argument poling does not exist: there are adapter, .*: did you mean pooling"),
        ("a", {"max_new_tokens": 3}, "argument max_new_tokens does not exist"),
        ("a", {"pooling": "max"}, "pooling=max does not exist: there are auto, mean, last, cls"),
        ("a", {"normalize": 1}, "normalize=1 is of type int, not bool or None"),
        ("a", {"batch_size": 4}, "batch_size=4 is more than the 3 that this pipeline was made for"),
        ("a", {"batch_size": 0}, "predict.batch_size=0 is not allowed"),
        ("a", {"instruction": "qury"}, "embed.instruction=qury is the name of no prompt: there are query, document: did you mean"),
        ("a", {"prefix": "fr"}, "prefix 'fr' does not exist: give model.prefixes"),
        ("a", {"prefix": ""}, "predict.prefix='' is not allowed"),
        ({"prompt": "a", "prefix": ""}, {}, "row 0: prefix '' does not exist"),
        ("a", {"adapter": "fr"}, "predict.adapter=fr is none of model.adapters"),
        ({"prompt": "a", "adapter": "fr"}, {}, "row 0: adapter 'fr' does not exist: there are none"),
        (["a", 3], {}, "row 1: of type int: give a text"),
        ([{"prompt": "a"}, {"prompt": "b", "prediction": "c"}], {}, "row 1: a prediction is not used where nothing is generated"),
        ([{"prompt": "a", "decode": {"logprobs": 2}}], {}, "row 0: decode.logprobs=2 is not used where nothing is generated"),
    ],
)  # fmt: skip
def test_rows_and_arguments_that_cannot_be_run_are_refused(
    pipe: EmbeddingPipeline, rows: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        pipe(rows, **arguments)
    assert pipe("still there").shape == (1, 64)


def test_a_pipeline_is_not_pickled(pipe: EmbeddingPipeline) -> None:
    with pytest.raises(UserError, match="cannot be pickled or copied: make one in each process"):
        pickle.dumps(pipe)


def test_decode_settings_are_refused_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}))
    with pytest.raises(UserError, match="is not used where nothing is generated"):
        pipeline("embedding", model=tmp_path, device="cpu", decode="sampling")
