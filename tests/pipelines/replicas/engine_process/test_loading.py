"""The engine process's loaded model and its description: a fingerprint, an embedding model's vectors, adapters."""

import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import LlamaForCausalLM, Qwen3Model

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.quantization import Activations, QuantConfig, QuantScheme
from conf.schema import DType, RunConfig, Task
from conf.serving import ServeConfig
from conf.tasks import PredictConfig
from kernels import build
from models.tokenizers import load_tokenizer
from pipelines.engine.request import FinishReason
from pipelines.jobs.report import NoProgress
from pipelines.loading import fingerprint
from pipelines.python.pooled_pipeline import EmbeddingPipeline
from pipelines.replicas.engine_process.frames import Beat, Deltas, Done, Refused, Submit, SubmitPooled
from pipelines.replicas.engine_process.loading import Served, load_served
from pipelines.server.api.pooled_prompts import PooledBody, TextEncoder
from tests.helpers.adapters import ALL_LINEAR, write_adapter
from tests.helpers.builders import run_config
from tests.helpers.cases import each
from tests.helpers.embedding_models import write_e5_mistral, write_qwen3_embedding
from tests.helpers.engine_script import Script, serve
from tests.helpers.soft_prefixes import write_paddle

TEXTS = ["Once upon a time", "a", "She said: hello, world!"]


def loaded(run: RunConfig, **config: Any) -> Served:
    served = replace(run, task=Task.serve, predict=PredictConfig(), serve=ServeConfig(batch_size=3, **config))
    return load_served(served, Script())  # type: ignore[arg-type]


def of(run: RunConfig, **config: Any) -> str | None:
    return loaded(run, **config).ready.fingerprint


def test_no_request_waits_for_the_tree_of_the_vocabulary(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guides need it, and for a large vocabulary it takes a second. Without llguidance there are no guides."""
    run = run_config(chatty)
    run.model.tokenizer = ""
    assert "_vocabulary" in vars(loaded(run).engine.requests.guides)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    without = loaded(run).engine.requests
    with pytest.raises(UserError, match="needs the package llguidance"):
        without.make(0, [5], DecodeConfig(guide={"json_object": True}))


def test_loading_shows_its_progress(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []

    class Shown(NoProgress):
        def loaded(self, done: int, total: int) -> None:
            seen.append((done, total))

    monkeypatch.setattr("pipelines.replicas.engine_process.loading.progress_bar", lambda: nullcontext(Shown()))
    loaded(run_config(chatty))
    assert seen == sorted(seen)
    assert len({total for _, total in seen}) == 1
    assert seen[-1][0] == seen[-1][1]


def test_a_fingerprint_is_the_same_wherever_the_same_model_is(chatty: Path, tmp_path: Path) -> None:
    subprocess.run(["cp", "-a", str(chatty), str(tmp_path / "copy")], check=True)
    first = of(run_config(chatty))
    assert first is not None
    assert first.startswith("fp_")
    assert [of(run_config(chatty)), of(run_config(tmp_path / "copy"))] == [first, first]
    assert of(replace(run_config(chatty), device=replace(run_config(chatty).device, max_batched_tokens=64))) == first


def test_a_fingerprint_changes_with_all_that_decides_an_answer(
    chatty: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, template = run_config(chatty), tmp_path / "a.jinja"
    template.write_text("{{ messages[0].content }}")
    subprocess.run(["cp", "-a", str(chatty), str(tmp_path / "other")], check=True)
    os.utime(tmp_path / "other" / "model.safetensors", (1, 1))
    seen = [
        of(run),
        of(run_config(tmp_path / "other")),
        of(replace(run, quant=QuantConfig(QuantScheme.int8))),
        of(replace(run, model=replace(run.model, dtype=DType.bfloat16))),
        of(replace(run, decode=DecodeConfig(temperature=0.5))),
        of(run, chat_template=str(template)),
        of(run, response_template="none"),
    ]
    monkeypatch.setattr(build, "library", object)
    for owner, name in ((build, "instruction_set"), (fingerprint, "code_digest")):
        for value in ("one", "another"):
            monkeypatch.setattr(owner, name, lambda *_, value=value, **__: value)
            seen.append(fingerprint.replay_fingerprint({"same": "parts"}))
    assert len(set(seen)) == len(seen)
    assert None not in seen


def test_where_bits_depend_on_more_there_is_not_a_fingerprint(chatty: Path) -> None:
    run = run_config(chatty)
    assert of(replace(run, quant=QuantConfig(QuantScheme.int8, activations=Activations.auto))) is None


def test_defaults_of_a_request_are_reported(chatty: Path) -> None:
    run = replace(run_config(chatty), decode=DecodeConfig(temperature=0.5, stop=["x"], logit_bias={7: 1.5}))
    ready = loaded(replace(run, model=replace(run.model, tokenizer=""))).ready
    assert (ready.decode["temperature"], ready.decode["stop"], ready.decode["logit_bias"]) == (0.5, ["x"], {"7": 1.5})
    assert (ready.context_length, ready.vocab_size, ready.pooled) == (128, 330, None)
    assert ready.num_cache_tokens >= 3 * 128


def test_settings_that_no_request_could_have_are_refused_before_any_comes(chatty: Path) -> None:
    run = replace(run_config(chatty), decode=DecodeConfig(max_length=4096))
    with pytest.raises(UserError, match="decode.max_length=4096 is more than the model takes"):
        loaded(run)


@each("write", [write_qwen3_embedding, lambda f: write_e5_mistral(f, eos_in_tokenizer_json=False)])
def test_vectors_match_task_embed(tmp_path: Path, write: Callable[[Path], Any]) -> None:
    write(tmp_path)
    run = run_config(tmp_path)
    run = replace(run, model=replace(run.model, tokenizer=""))
    served, tokenizer = loaded(run), load_tokenizer(tmp_path)
    assert served.ready.pooled == "vector"
    encoder = TextEncoder(served.ready, tokenizer, PooledBody(), "input")
    prompts = [encoder.text(text, served.ready.instruction) for text in TEXTS]
    script = serve(served, [Submit(9, prompts[0], {}), *(SubmitPooled(*pair) for pair in enumerate(prompts))])
    vectors = [done.vector for done in sorted(script.of(Done), key=lambda done: done.id)]
    expected = EmbeddingPipeline(replace(run, task=Task.embed))(TEXTS)
    np.testing.assert_array_equal(np.array(vectors, np.float32), expected)
    assert [refused.message for refused in script.of(Refused)] == [
        "this model gives vectors or scores of texts and continues none"
    ]
    assert script.of(Deltas) == []
    refused = serve(served, [SubmitPooled(1, list(range(2, 302)))]).of(Refused)
    assert "more than the model takes" in refused[0].message


def test_requests_for_vectors_select_adapters_and_share_prefixes_by_salt(
    tmp_path: Path,
) -> None:
    base, adapter, story = tmp_path / "model", tmp_path / "fr", tmp_path / "story.npy"
    write_qwen3_embedding(base)
    only = {"target_modules": ["v_proj"], "task_type": "FEATURE_EXTRACTION"}
    write_adapter(adapter, base, Qwen3Model, r=4, **only)
    write_paddle(story, 7)
    run = run_config(base, adapters={"fr": str(adapter)}, prefixes={"story": str(story)})
    served = loaded(run)
    prompt = list(range(5, 55))
    kinds = [
        (None, "alice"),
        ("fr", "alice"),
        (None, "bob"),
        (None, "alice"),
        ("fr", "alice"),
        (None, None),
        ("de", None),
        (None, "alice", "story"),
    ]
    turns: list[Any] = []
    for i, kind in enumerate(kinds):
        turns += [[SubmitPooled(i, prompt, *kind)], [], []]  # one after the other
    script = serve(served, *turns)
    done = {frame.id: frame for frame in script.of(Done)}
    shared = [done[i].num_cached_tokens > 0 for i in (*range(6), 7)]
    assert shared == [False, False, False, True, True, False, False]
    assert done[0].vector == done[2].vector == done[3].vector == done[5].vector
    assert done[1].vector == done[4].vector != done[0].vector
    embed = replace(run, task=Task.embed, model=replace(run.model, tokenizer=""))
    rows: list[Any] = [{"prompt_token_ids": prompt, **named} for named in ({}, {"adapter": "fr"}, {"prefix": "story"})]
    vectors = np.array([done[i].vector for i in (0, 1, 7)], np.float32)
    np.testing.assert_array_equal(vectors, EmbeddingPipeline(embed)(rows))
    assert len(np.unique(vectors, axis=0)) == 3
    assert "adapter 'de' does not exist" in script.of(Refused)[0].message


def test_requests_name_adapters(chatty: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path, chatty, LlamaForCausalLM, 1, r=4, target_modules=ALL_LINEAR)
    run = run_config(chatty)
    served = loaded(replace(run, model=replace(run.model, adapters={"fr": str(tmp_path)})))
    decode = {"temperature": 0.0, "max_new_tokens": 8, "ignore_eos": True}
    names = ["fr", None, "fr"]
    script = serve(served, [Submit(i, [5, 6, 7], decode, adapter=name) for i, name in enumerate(names)])
    for i, name in enumerate(names):
        request = served.engine.request(0, [5, 6, 7], DecodeConfig(**decode), adapter=name)
        (output,) = served.engine.generate([request])
        assert script.samples(i)[0].token_ids == output.completions[0].token_ids
    assert script.samples(0)[0].token_ids != script.samples(1)[0].token_ids


def test_samples_that_give_their_blocks_up_are_heard_once(chatty: Path, preempted: list[Any]) -> None:
    """A cache of 20 blocks for two requests of three samples: one of them begins again in the middle of its stream."""
    run = run_config(chatty)
    model = replace(run.model, tokenizer="")
    run = replace(
        run, model=model, device=replace(run.device, block_size=4, kv_cache_memory=str(20 * 4 * 2 * 2 * 2 * 16 * 4))
    )
    served, prompt = loaded(run), list(range(10, 20))
    decode = {"temperature": 1.0, "seed": 3, "n": 3, "max_new_tokens": 14, "ignore_eos": True}
    (output,) = served.engine.generate([served.engine.request(0, prompt, DecodeConfig(**decode))])
    assert not preempted
    script = serve(served, [Submit(i, prompt, decode, streams=True) for i in range(2)])
    assert preempted
    for i in range(2):
        assert [sample.text for sample in script.samples(i)] == [one.text for one in output.completions]
        assert [sample.token_ids for sample in script.samples(i)] == [one.token_ids for one in output.completions]
        assert [sample.finish_reason for sample in script.samples(i)] == [FinishReason.length.value] * 3
    assert script.of(Beat)[-1].num_preemptions == len(preempted)
