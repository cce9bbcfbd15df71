"""The bundled model: it answers questions that it was not trained on, tells a story, and its corpus separates training
from held-out text."""

import itertools
import json
import re
from pathlib import Path

import pytest
from safetensors import safe_open

from models.tiny.corpus import NAMES, documents, questions, story
from pipelines import TextGenerationPipeline, pipeline
from tests.bench.tiny_questions import held_out_questions, right_answers
from tests.helpers.builders import REPOSITORY
from tests.helpers.cases import each

FOLDER = REPOSITORY / "models" / "tiny"


@pytest.fixture(scope="module")
def pipe() -> TextGenerationPipeline:
    return pipeline("text_generation", model="tiny", device="cpu")


@pytest.mark.long
def test_answers_95_percent_of_held_out_questions(pipe: TextGenerationPipeline) -> None:
    right = right_answers(pipe, held_out_questions(400))
    assert sum(right) / len(right) >= 0.95


@each("beginning", ["Once upon a time", "One sunny day, Lily went to the park.", "Ben had a big red ball."])
def test_continues_a_story_in_words_of_the_language(pipe: TextGenerationPipeline, beginning: str) -> None:
    import random

    text = pipe(beginning, max_new_tokens=200)[0]["text_generation_text"][0]
    known = {word for seed in range(2000) for word in re.findall(r"[A-Za-z]+", story(random.Random(seed)))} | set(NAMES)
    words = re.findall(r"[A-Za-z]+", text)
    assert len(words) > 40
    assert set(words) - known <= set(re.findall(r"[A-Za-z]+", beginning))
    assert text.rstrip()[-1] in '.!"'


def test_speaks_some_chinese(pipe: TextGenerationPipeline) -> None:
    text = pipe("今天是晴天，", max_new_tokens=40, return_full_text=False)[0]["text_generation_text"][0]
    assert re.match(r"小.和小.一起去", text)


def test_chat_template_writes_the_bos_once(pipe: TextGenerationPipeline) -> None:
    tokenizer = pipe.tokenizer
    assert tokenizer is not None
    text, token_ids = tokenizer.encode_messages([{"role": "user", "content": "What is 3 + 4?"}], None)
    assert text == "<|endoftext|><|im_start|>user\nWhat is 3 + 4?<|im_end|>\n<|im_start|>assistant\n"
    assert token_ids.count(0) == 1
    assert tokenizer.encode("Once", add_special_tokens=True)[0] == 0


def test_size_and_shape() -> None:
    assert sum(file.stat().st_size for file in FOLDER.iterdir() if file.is_file()) < 10_000_000
    config = json.loads((FOLDER / "config.json").read_text())
    assert (config["model_type"], config["head_dim"]) == ("llama", 64)
    assert config["num_attention_heads"] > config["num_key_value_heads"]
    with safe_open(FOLDER / "model.safetensors", framework="pt") as file:
        assert {file.get_slice(name).get_dtype() for name in file.keys()} == {"BF16"}  # noqa: SIM118


@pytest.mark.long
def test_held_out_questions_are_never_in_the_training_text() -> None:
    text = "".join(itertools.islice(documents(seed=1), 20_000))
    held_out = {question.prompt for question in held_out_questions(2000)}
    assert len(held_out) > 1500
    assert not [prompt for prompt in held_out if f"user\n{prompt}<" in text]
    trained = {rounds[0].prompt for rounds in itertools.islice(questions(1, held_out=False), 2000)}
    assert not trained & held_out


def test_corpus_is_the_same_every_time() -> None:
    first, second = (list(itertools.islice(documents(seed=5), 50)) for _ in range(2))
    assert first == second
    assert len(set(first)) > 45


def test_no_machine_is_named_in_the_checkpoint() -> None:
    for file in Path(FOLDER).glob("*.json"):
        assert not re.search(r"/(root|home|work|tmp)/", file.read_text(encoding="utf-8"))
