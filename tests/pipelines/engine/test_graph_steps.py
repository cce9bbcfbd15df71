"""Decode steps in graphs of a few sizes compared with unpadded steps. A replay here computes the captured function
again."""

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from conf.decoding import DecodeConfig
from kernels.kv_format import Unquantised
from models.batch import Batch, BatchShape
from pipelines.engine import Engine
from pipelines.engine.graph_steps import GraphSteps, fill, graph_sizes
from pipelines.engine.kv_cache import allocate_kv_cache
from pipelines.engine.steps import StepOutputs
from tests.helpers.adapters import load_with, write_adapter
from tests.helpers.builders import engine_of, generate, run_config, write_llama
from tests.helpers.cases import each
from tests.helpers.observed_steps import CPU, compute_again, pad

CAPTURED = ["captured plain", "captured adapted"]


def batch_of(lengths: list[int], width: int = 2, num_prompt_features: int = 1) -> Batch:
    rows = list(range(len(lengths)))
    return Batch.of(
        token_ids=[length % 7 for length in lengths],
        positions=[length - 1 for length in lengths],
        slots=[10 * row + length for row, length in zip(rows, lengths, strict=True)],
        block_tables=[[row + 1] * width for row in rows],
        query_starts=[*rows, len(rows)],
        context_lengths=lengths,
        prompt_lengths=[3 for _ in rows],
        prompt_features=[(5,) * num_prompt_features for _ in rows],
        output_rows=rows,
        output_starts=[*rows, len(rows)],
    )


def test_sizes() -> None:
    assert [graph_sizes(most) for most in (1, 2, 3, 8, 9)] == [[1], [1, 2], [1, 2, 3], [1, 2, 4, 8], [1, 2, 4, 8, 9]]
    assert graph_sizes(26) == [1, 2, 4, 8, 16, 24, 26]


@each("shape", [BatchShape(1, 1, 1, 0, 1), BatchShape(5, 3, 4, 2, 2), BatchShape(7, 7, 3, 1, 7)])
def test_fields_are_aligned_and_apart(shape: BatchShape) -> None:
    """Each begins at a multiple of 16 bytes, whatever the sizes, and none overlap."""
    numbers = torch.zeros(shape.num_numbers, dtype=torch.int64)
    batch = Batch(numbers, shape)
    for field in shape.fields:
        part = getattr(batch, field)
        assert (part.data_ptr() - numbers.data_ptr()) % 16 == 0
        part += 1
    assert set(numbers.tolist()) <= {0, 1}
    assert int(numbers.sum()) == sum(getattr(batch, field).numel() for field in shape.fields)


def test_padding_is_sequences_without_tokens() -> None:
    target = Batch(torch.full((100,), 77), BatchShape(4, 4, 3, 1, 4))
    fill(target, batch_of([9, 4], width=2))
    assert target.token_ids.tolist() == [2, 4, 0, 0]
    assert target.slots.tolist() == [9, 14, -1, -1]  # nothing is stored there
    assert target.query_starts.tolist() == [0, 1, 2, 2, 2]
    assert target.context_lengths.tolist() == [9, 4, 0, 0]
    assert target.prompt_lengths.tolist() == [3, 3, 1, 1]
    assert target.prompt_features.tolist() == [[5], [5], [0], [0]]
    assert target.output_rows.tolist() == [0, 1, 0, 0]
    assert target.block_tables[:2, :2].tolist() == [[1, 1], [2, 2]]
    fill(target, batch_of([3] * 4, width=4))  # of a table that was widened to a power of two
    assert target.block_tables.tolist() == [[row] * 3 for row in (1, 2, 3, 4)]


@torch.inference_mode()
def test_a_batch_runs_in_the_smallest_step_that_holds_it() -> None:
    ran: list[int] = []

    def compute(batch: Batch, token_ids: Tensor | None) -> StepOutputs:
        ran.append(len(batch.token_ids))
        rows = (batch.context_lengths * 100 + batch.block_tables[:, 0])[batch.output_rows, None].double()
        rows[batch.context_lengths == 0] = torch.nan  # outputs of padding rows are not used
        return StepOutputs(rows, 2 * rows, rows[:, 0].isfinite())

    steps = GraphSteps(compute, compute_again, 9, 2, 1, CPU)
    assert ran == [9, 9, 8, 4, 2, 1]  # from large to small; the first call determines the sizes of the outputs
    ran.clear()
    assert steps.sizes == [1, 2, 4, 8, 9]
    for lengths in [
        [4],
        [5, 6],
        [7, 8, 9],
        [1] * 4,
        [2] * 5,
        [3] * 9,
        [11],
        [6] * 10,
    ]:  # the last shape has no graph
        hidden, logits, finite = steps(batch_of(lengths))
        assert hidden[:, 0].tolist() == [100 * length + row + 1 for row, length in enumerate(lengths)]
        assert torch.equal(logits, 2 * hidden)
        assert finite.tolist() == [True] * len(lengths)
    assert ran == [1, 2, 4, 4, 8, 9, 1, 10]


@torch.inference_mode()
def test_operations_that_a_graph_cannot_hold_are_computed_each_time(caplog: pytest.LogCaptureFixture) -> None:
    def refuse(compute: Callable[[], None]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    def compute(batch: Batch, token_ids: Tensor | None) -> StepOutputs:
        return StepOutputs(batch.positions, batch.slots, batch.slots >= 0)

    with caplog.at_level(logging.WARNING):
        steps = GraphSteps(compute, refuse, 4, 2, 1, CPU)
    assert "decode steps are launched one by one, because a CUDA graph cannot hold them: operation not" in caplog.text
    assert steps.sizes == []
    assert steps(batch_of([5])).hidden.tolist() == [4]


def test_an_engine_gives_the_same_tokens(tmp_path: Path) -> None:
    """Rows that end one after the other, a group of samples, beams, and more sequences than the largest graph has."""
    write_llama(tmp_path)
    prompts = [[3 + i] * (2 * i + 1) for i in range(7)]
    for decode in (
        DecodeConfig(max_new_tokens=9, logprobs=3),
        DecodeConfig(max_new_tokens=6, n=3, temperature=1.0, seed=1),
        DecodeConfig(max_new_tokens=7, num_beams=3),
    ):
        results = []
        for is_padded in (False, True):
            engine = engine_of(tmp_path, batch_size=5, block_size=4)
            shapes = pad(engine, 8) if is_padded else []
            if not is_padded:
                engine.executor.decode_steps = engine.executor.compute
            outputs = generate(engine, prompts, decode)
            results.append([[c.token_ids for c in output.completions] for output in outputs])
            assert not is_padded or 8 in {shape.num_sequences for shape in shapes}
        assert results[0] == results[1]


def test_rows_with_adapters_have_graphs_of_their_own(tmp_path: Path) -> None:
    """Also with rows without an adapter, in slots that change their adapters. Steps without adapters use the ordinary
    graphs."""
    write_llama(tmp_path / "base")
    names = ["fr", "de"]
    for seed, name in enumerate(names):
        settings: dict[str, Any] = {"r": 4 * seed + 3, "target_modules": ["q_proj", "up_proj", "down_proj"]}
        write_adapter(tmp_path / name, tmp_path / "base", LlamaForCausalLM, seed, **settings)
    rows = [("fr", 5), (None, 30), (None, 9), ("de", 7), (None, 4), ("fr", 3)]

    def said(engine: Engine) -> list[Any]:
        requests = [
            engine.request(i, [7 + i, 3, 9], DecodeConfig(max_new_tokens=count, logprobs=2), adapter=name)
            for i, (name, count) in enumerate(rows)
        ]
        outputs = sorted(engine.generate(requests), key=lambda output: output.request_id)
        assert not any(output.error for output in outputs)
        return [output.completions for output in outputs]

    run = run_config(tmp_path / "base", max_adapters=1)
    engine = load_with(run, {name: tmp_path / name for name in names})
    expected = said(engine)
    shapes = pad(engine, 5)
    assert said(engine) == expected
    assert {shape.num_adapted for shape in shapes} > {0, 4}
    assert all(shape.num_adapted in (0, shape.num_sequences) for shape in shapes)


def test_a_gpu_captures_for_adapters_where_there_are_some(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch uses the graphs of its kind, a prompt none. The GPU is a device that computes nothing."""
    write_llama(tmp_path / "base")
    for name, rank in (("fr", 4), ("small", 2), ("large", 5)):
        write_adapter(tmp_path / name, tmp_path / "base", LlamaForCausalLM, r=rank, target_modules=["q_proj"])
    ran: list[str] = []

    class Captured:
        def __init__(self, *_: Any, with_adapters: bool = False, is_recurrent: bool, is_windowed: bool) -> None:
            assert not is_recurrent
            assert not is_windowed
            self._name = "adapted" if with_adapters else "plain"
            ran.append(f"captured {self._name}")

        def __call__(self, batch: Batch, token_ids: Tensor | None = None) -> None:
            ran.append(self._name)

    def happened(engine: Engine, *batches: Batch) -> list[str]:
        for batch in batches:
            engine.executor.execute(batch)
        happened = list(ran)
        ran.clear()
        return happened

    monkeypatch.setattr("pipelines.engine.executor.GraphSteps", Captured)
    monkeypatch.setattr("pipelines.engine.executor.GraphPool", lambda: SimpleNamespace(capture=compute_again))
    monkeypatch.setattr("pipelines.engine.executor.Executor.compute", lambda *_: ran.append("computed"))
    engine = engine_of(tmp_path / "base")
    model = engine.executor.model
    formats = [(Unquantised(), Unquantised())] * len(model.attention_heads)
    plain, prompt = batch_of([3, 4]), Batch(torch.zeros(100, dtype=torch.int64), BatchShape(5, 2, 1, 0, 2))
    adapted = Batch(torch.zeros(100, dtype=torch.int64), BatchShape(2, 2, 1, 0, 2, 2))
    engine.run_over(model, allocate_kv_cache(model.layer_caches, 9, 4, formats, torch.float32, torch.device("meta")), 4)
    assert happened(engine, plain, prompt) == ["captured plain", "plain", "computed"]
    engine.load_adapter("fr", tmp_path / "fr")  # the first one creates the tables
    assert happened(engine, plain, adapted, prompt) == [*CAPTURED, "plain", "adapted", "computed"]
    engine.load_adapter("small", tmp_path / "small")  # these graphs use its table
    assert happened(engine, adapted) == ["adapted"]
    engine.load_adapter("large", tmp_path / "large")  # its rank requires larger tables
    assert happened(engine, adapted) == [*CAPTURED, "adapted"]
