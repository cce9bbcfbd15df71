"""Loading the draft model: a mismatch with the run is refused in one line, before a weight is read."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from conf.compose import dump
from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig
from conf.speculation import Speculate, SpeculationConfig
from conf.tasks import PredictConfig
from pipelines.loading.load_engine import load_engine
from pipelines.tasks.predict import run_predict
from tests.helpers.adapters import write_adapter
from tests.helpers.builders import REPOSITORY, complete, engine_of, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.deepseek import NextTokenReference
from tests.helpers.small_tokenizers import byte_fallback, save


def drafting_run(folder: Path, draft: Path | None, tokenizer: str | None = "") -> RunConfig:
    run = run_config(folder)
    decode = DecodeConfig(
        speculate=Speculate.model, speculation=SpeculationConfig(model_path=None if draft is None else str(draft))
    )
    return replace(run, model=replace(run.model, tokenizer=tokenizer), decode=decode)


def change(file: str, **values: Any) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        path = folder / file
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return apply


def other_tokenizer(folder: Path) -> None:
    save(byte_fallback(), folder)


def swapped_tokens(folder: Path) -> None:
    text = (folder / "tokenizer.json").read_text(encoding="utf-8")
    tokenizer = json.loads(text)
    vocab = tokenizer["model"]["vocab"]
    first, second = (token for token, id in vocab.items() if id in (300, 301))
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer), encoding="utf-8")


@each(
    ("damage", "message"),
    [
        (
            change("config.json", vocab_size=329),
            r"its vocabulary has 329 tokens, but the model's 330: give a smaller model",
        ),
        (
            change("config.json", max_position_embeddings=64),
            r"it takes 64 tokens, but the run max_position_embeddings=128: ",
        ),
        (change("config.json", model_type="elman"), r"model_type='elman' is not supported"),
        (other_tokenizer, r"its token 0 is '<unk>', but the model's '<s>': give a smaller model of the same family"),
        (swapped_tokens, r"its token 300 is .*, but the model's .*: give a smaller model of the same family"),
    ],
)
def test_refuses(
    chatty: Path, tmp_path: Path, damage: Callable[[Path], None], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    draft = tmp_path / "draft"
    shutil.copytree(chatty, draft)
    damage(draft)
    run = drafting_run(chatty, draft)
    monkeypatch.setattr("pipelines.loading.weight_loading.load_weights", lambda *_: pytest.fail("weights are read"))
    with pytest.raises(UserError, match=message) as refused:
        load_engine(run, 1)
    assert str(refused.value).startswith(f"decode.speculation.model_path={draft}: ")
    assert "\n" not in str(refused.value)


def padded_copy(folder: Path, to: Path, num_tokens: int) -> Path:
    """Return the checkpoint with further tokens, which no text has: their rows of embedding and head are zeros."""
    shutil.copytree(folder, to)
    tensors = load_file(to / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        tensors[name] = torch.nn.functional.pad(tensors[name], (0, 0, 0, num_tokens))
    save_file(tensors, to / "model.safetensors", {"format": "pt"})
    change("config.json", vocab_size=len(tensors["lm_head.weight"]))(to)
    return to


@each("larger", ["model", "draft"])
def test_vocabularies_of_one_tokenizer_may_be_padded_to_other_lengths(
    chatty: Path, tmp_path: Path, larger: str
) -> None:
    padded = padded_copy(chatty, tmp_path / "padded", 7)
    model, draft = (padded, chatty) if larger == "model" else (chatty, padded)
    run = drafting_run(model, draft)
    engine = load_engine(run, 3)
    prompts = [[0, 70, 71], [0, 90] * 4, [0, 336 if larger == "model" else 300, 5]]
    settings = replace(run.decode.speculation, model_path=None, adaptive=False)
    for decode in (
        DecodeConfig(max_new_tokens=20, ignore_eos=True, logprobs=2),
        DecodeConfig(max_new_tokens=20, temperature=1.0, seed=2, logit_bias={329: 1.0}, repetition_penalty=1.3),
    ):
        drafted = replace(decode, speculate=Speculate.model, speculation=settings)
        before = engine.speculator.counts
        assert complete(engine, prompts, drafted) == complete(engine, prompts, decode)
        counts = engine.speculator.counts.since(before)
        assert counts.num_drafted_tokens > 0
        assert decode.temperature or counts.acceptance == 1
    with pytest.raises(UserError, match=r"its vocabulary has 33\d tokens, but the model's 33\d: give a smaller model"):
        load_engine(drafting_run(model, draft, tokenizer=None), 1)


def test_the_path_is_asked_for(chatty: Path) -> None:
    with pytest.raises(UserError, match=r"needs the model that drafts: give decode.speculation.model_path=FOLDER"):
        load_engine(drafting_run(chatty, None), 1)


def test_a_path_that_is_not_there(chatty: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"decode.speculation.model_path=.*/none: .*none"):
        load_engine(drafting_run(chatty, tmp_path / "none"), 1)


def test_a_shorter_context_does_where_the_run_has_no_longer_one(tmp_path: Path) -> None:
    write_llama(tmp_path / "model")
    write_llama(tmp_path / "draft", max_position_embeddings=64)
    run = drafting_run(tmp_path / "model", tmp_path / "draft", tokenizer=None)
    engine = load_engine(replace(run, model=replace(run.model, max_length=64)), 1)
    assert Speculate.model in engine.speculator.proposers


def test_a_model_that_sees_prompts_whole_cannot_draft(tmp_path: Path) -> None:
    golden = REPOSITORY / "tests" / "goldens" / "chatglm"
    with pytest.raises(
        UserError, match=r"a prompt that sees itself whole cannot be drafted for: give decode.speculate=ngram"
    ):
        load_engine(drafting_run(golden, golden, tokenizer=None), 1)


def test_rows_may_ask_only_for_a_model_that_is_loaded(chatty: Path) -> None:
    with pytest.raises(UserError, match=r"decode.speculate=model"):
        engine_of(chatty).request(0, [5], DecodeConfig(speculate=Speculate.model))
    engine = load_engine(drafting_run(chatty, chatty), 1)
    engine.request(0, [5], DecodeConfig(speculate=Speculate.model))
    with pytest.raises(UserError, match=r"decode.speculate=mtp"):
        engine.request(0, [5], DecodeConfig(speculate=Speculate.mtp))


@each("decode", [{}, {"temperature": 0.9, "top_p": 0.9, "seed": 3, "n": 2}])
def test_a_jobs_predictions_match_a_plain_one(chatty: Path, tmp_path: Path, decode: dict[str, Any]) -> None:
    data = tmp_path / "prompts.jsonl"
    rows: list[dict[str, Any]] = [{"prompt": text} for text in ("Once upon a time", "x", "a good day " * 5)]
    data.write_text("\n".join(map(json.dumps, rows)))
    predictions = []
    for speculate in Speculate.none, Speculate.model:
        run = drafting_run(chatty, chatty)
        settings = replace(run.decode, max_new_tokens=20, speculate=speculate, **decode)
        run = replace(run, decode=settings, predict=PredictConfig(data=str(data), batch_size=2))
        run_predict(run, tmp_path / speculate.name, dump)
        predictions.append((tmp_path / speculate.name / "predictions.jsonl").read_bytes())
    assert predictions[0] == predictions[1]


def test_an_adapter_for_all_rows_is_the_models_alone(chatty: Path, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "fr", chatty, LlamaForCausalLM, r=4, target_modules=["q_proj"])
    rows = []
    for speculate in Speculate.none, Speculate.model:
        run = drafting_run(chatty, chatty)
        model, decode = replace(run.model, adapters={"fr": str(folder)}), replace(run.decode, max_new_tokens=12)
        predict = PredictConfig(data="Once upon a time", adapter="fr")
        run = replace(run, model=model, decode=replace(decode, speculate=speculate), predict=predict)
        run_predict(run, tmp_path / speculate.name, dump)
        rows.append((tmp_path / speculate.name / "predictions.jsonl").read_bytes())
    assert rows[0] == rows[1]


def test_models_that_are_kept_packed_have_files_of_their_own(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("QUINTET_OUTPUTS", str(tmp_path))
    draft = tmp_path / "draft"
    write_llama(draft, vocab_size=330, hidden_size=32, num_hidden_layers=1)
    run = drafting_run(chatty, draft)
    run = replace(run, model=replace(run.model, keep_packed=True))
    decode = DecodeConfig(speculate=Speculate.model, max_new_tokens=12)
    texts = [complete(load_engine(run, 1), [[5, 6, 7]], decode)[0].token_ids for _ in range(2)]
    assert len(list((tmp_path / "packed").iterdir())) == 2
    assert texts[0] == texts[1]
    ahead = tmp_path / "deepseek"
    NextTokenReference(ahead)
    for speculate in (Speculate.none, Speculate.mtp, Speculate.none):
        run = run_config(ahead, keep_packed=True)
        load_engine(replace(run, decode=DecodeConfig(speculate=speculate)), 1)
    assert len(list((tmp_path / "packed").iterdir())) == 4
