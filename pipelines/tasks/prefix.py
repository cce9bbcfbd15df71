"""`task=prefix`: compute prompts once, and write their keys and values to a file for `device.kept_prefixes`."""

import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig
from conf.support.terminal import escape_line
from pipelines.engine import Engine, Request, Sequence
from pipelines.engine.block_hashes import root_hash
from pipelines.jobs import report
from pipelines.jobs.prompt_encoder import PromptEncoder
from pipelines.jobs.prompts import GIVE, PromptRow, read_prompts
from pipelines.loading.build_engine import build_engine
from pipelines.loading.device import prepare_device
from pipelines.loading.kept_prefixes import UNSHARED, KeptRow, identity, save_kept
from pipelines.loading.model_source import resolve_model
from pipelines.loading.quantize.calibrated import calibrated
from pipelines.tasks.row_tasks import read_batch_line


def run_prefix(run: RunConfig, output_dir: Path, dump: report.Dump) -> None:
    """Write the file.

    Raises UserError, before the file exists, if a prompt cannot be computed or no prompt fills a cache block.
    """
    if run.prefix.data is None:
        raise UserError(f"prefix.data is missing: {GIVE}")
    if run.prefix.output is None:
        raise UserError("prefix.output is missing: give the file to make")
    replace(run.decode, cache_salt=None).check_unset("by task=prefix", "leave it out")
    target = Path(os.path.abspath(Path(run.prefix.output).expanduser()))
    _check_target(target)
    prompts, start = read_prompts(run.prefix.data, read_batch_line), time.perf_counter()
    with report.progress_bar() as progress:
        device = prepare_device(run.device)
        ready = calibrated(run, resolve_model(run.model), progress)
        if run.parallel.mode.divides:
            ready.source.shape.capabilities.refuse_recurrent("task=prefix with ranks", "give parallel=single")
        engine = build_engine(ready, device, run.device, run.parallel, run.decode, 1, progress)
        if not engine.capabilities.shares_prefixes:
            raise UserError(f"task=prefix {UNSHARED}")
        load_s, start = time.perf_counter() - start, time.perf_counter()
        prefix_file = _Kept(engine)
        encoder = PromptEncoder(engine.tokenizer, run.prefix.add_special_tokens, run.prefix.chat_template)
        for row in prompts:
            try:
                prefix_file.add(_request(engine, encoder, row, run.decode))
            except UserError as error:
                raise UserError(f"row {row.index} of prefix.data: {error}") from error
    if not prefix_file.rows:
        problem = f"no prompt of prefix.data fills a block of the KV cache, device.block_size={engine.block_size}"
        raise UserError(f"{problem}: give longer prompts, or smaller blocks")
    prefix_file.save(target, identity(ready.source, ready.options.weights, ready.quant, engine.dtype, engine.device))
    metrics = {
        **prefix_file.metrics,
        "num_blank_lines": prompts.num_blank_lines,
        "unused_fields": prompts.unused_fields,
        "bytes_written": target.stat().st_size,
        "start_s": report.START_S,
        "load_s": load_s,
        "prefix_s": time.perf_counter() - start,
        "weight_bytes": engine.executor.weight_bytes,
        "peak_memory_bytes": report.peak_memory_bytes(engine.device),
    }
    report.write_run(output_dir, dump(run, output_dir), {"metrics.json": json.dumps(metrics, indent=2) + "\n"})
    _print(metrics, target, output_dir)


def _check_target(target: Path) -> None:
    if target.exists():
        raise UserError(f"prefix.output={target} exists: remove it, or give another file")
    if not target.parent.is_dir():
        raise UserError(f"prefix.output={target}: there is no folder {target.parent}: make it, or give another file")


def _request(engine: Engine, encoder: PromptEncoder, row: PromptRow, decode: DecodeConfig) -> Request:
    """Return the request that computes a row's prompt, with the cache salt of later requests."""
    salt = decode.replaced(row.decode).cache_salt
    settings = DecodeConfig(max_new_tokens=1, ignore_eos=True, prefix_cache=True, cache_salt=salt)
    return engine.request(row.index, encoder.encode(row).token_ids, settings, prefix=row.prefix, adapter=row.adapter)


class _Kept:
    """The full blocks of prompts, and the recurrent states after them, copied before later prompts evict them."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.rows: list[KeptRow] = []
        self._token_ids: list[int] = []
        executor = engine.executor
        self._stored: dict[str, list[Tensor]] = {name: [] for name in (*executor.cache_tensors, *executor.cache_states)}
        self._known: set[bytes] = set()  # hashes of the blocks that are kept; with recurrent states, of the last ones
        self._num_prompts = self._num_prompt_tokens = 0

    @property
    def metrics(self) -> dict[str, Any]:
        return {
            "num_prompts": self._num_prompts,
            "num_prompt_tokens": self._num_prompt_tokens,
            "num_kept_prompts": len(self.rows),
            "num_kept_tokens": len(self._token_ids),
        }

    def add(self, request: Request) -> None:
        """Compute a prompt alone. Keep its full blocks, unless an earlier prompt has all of them."""
        engine, prefix, num_prompt_tokens = self._engine, request.prefix, len(request.prompt_token_ids)
        num_blocks = (prefix.num_tokens + num_prompt_tokens) // engine.block_size
        num_tokens = num_blocks * engine.block_size - prefix.num_tokens
        self._num_prompts += 1
        self._num_prompt_tokens += num_prompt_tokens
        if num_tokens < 1:
            return
        # A second new token, which is not computed, keeps blocks and slot. With log probabilities no step runs ahead.
        params = replace(request.params, max_new_tokens=2, logprobs=1)
        # The state after the last full block exists only at the end of a prompt. Other models compute the whole prompt:
        # its length decides which side of a long RoPE threshold its keys are on.
        token_ids = request.prompt_token_ids[: num_tokens if engine.executor.cache_states else None]
        group = engine.add(replace(request, prompt_token_ids=token_ids, params=params))
        (sequence,) = group.sequences
        while group.sequences and sequence.num_computed_tokens < len(token_ids):
            engine.step()
        if group.error:
            raise group.error
        if sequence.block_hashes[num_blocks - 1] not in self._known:
            self._copy(sequence, num_blocks, num_tokens)
        engine.cancel(group)

    def _copy(self, sequence: Sequence, num_blocks: int, num_tokens: int) -> None:
        executor, request, prefix = self._engine.executor, sequence.request, sequence.prefix
        for name, (tensor, _) in executor.cache_tensors.items():
            self._stored[name].append(tensor[sequence.block_table[:num_blocks]].flatten(0, 1).cpu())
        for name, tensor in executor.cache_states.items():
            self._stored[name].append(tensor[sequence.state_slots[-1:]].cpu())
        hashes = sequence.block_hashes[:num_blocks]
        self._known.update(hashes[-1:] if executor.cache_states else hashes)
        self._token_ids += sequence.token_ids[:num_tokens]
        adapter = "" if request.adapter is None else request.adapter.digest
        root = root_hash(sequence).hex()
        self.rows.append(KeptRow(num_tokens, prefix.num_tokens, prefix.digest, adapter, root))

    def save(self, path: Path, parts: dict[str, Any]) -> None:
        stored = {name: torch.cat(parts) for name, parts in self._stored.items()}
        save_kept(path, parts, self.rows, self._token_ids, stored)


def _print(metrics: dict[str, Any], target: Path, output_dir: Path) -> None:
    if metrics["unused_fields"]:
        print(escape_line(f"fields of the rows that are not used: {', '.join(metrics['unused_fields'])}"))
    report.print_table(
        [
            ("prompts", f"{metrics['num_kept_prompts']} kept of {metrics['num_prompts']}"),
            ("tokens", f"{metrics['num_kept_tokens']:,} kept of {metrics['num_prompt_tokens']:,}"),
            ("kept", f"{metrics['bytes_written'] / 1e6:,.1f} MB in {target}"),
            ("load", f"{metrics['load_s']:.2f} s"),
            ("compute", f"{metrics['prefix_s']:.2f} s"),
        ]
    )
    print(f"output: {output_dir}")
