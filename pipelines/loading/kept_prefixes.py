"""Files of task=prefix: keys and values of prompts, which `device.kept_prefixes` loads into a later KV cache.

A safetensors file holds `tokens` int64 [N], the tokens of all prompts in order, and for each layer the cache's tensors
[M, G, *], by cache slot. M is N plus the virtual tokens of soft prefixes. Layers with windows hold all tokens too, so that
a prompt that shares any part of a kept prompt finds it. A recurrent layer has its state after each prompt instead,
`layers.N.state.I` [prompts, *]. The metadata holds the identity of the model and settings, and the prompts' boundaries.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from conf.errors import UserError
from conf.quantization import QuantConfig
from conf.schema import Weights
from kernels import build
from models.formats.huggingface import SafetensorsFile
from models.formats.safetensors_writer import save_tensors
from models.sharding import ParallelLayout
from pipelines.engine import Engine
from pipelines.engine.block_hashes import extend_hashes
from pipelines.engine.kv_cache import unsharded_token
from pipelines.engine.operations import WriteBlocks, WriteState
from pipelines.jobs.journal import Fingerprint
from pipelines.loading.fingerprint import code_digest, file_fingerprint, plain_quant
from pipelines.loading.model_plan import ModelPlan
from pipelines.loading.model_source import ModelSource

TOKENS = "tokens"
UNSHARED = "is not possible with this model, whose prompts cannot share their beginnings"


@dataclass(frozen=True)
class KeptRow:
    """A prompt of a file."""

    num_tokens: int
    num_prefix_tokens: int
    """Virtual tokens of the soft prefix in front of it."""
    prefix: str
    """Digest of the soft prefix; empty if there is none."""
    adapter: str
    """Digest of the adapter that was used to compute it; empty if there was none."""
    root: str
    """The `root_hash` of its blocks, in hexadecimal digits."""

    @property
    def num_slots(self) -> int:
        return self.num_prefix_tokens + self.num_tokens


@dataclass(frozen=True)
class KeptFile:
    weights: SafetensorsFile
    rows: list[KeptRow]

    @property
    def path(self) -> Path:
        return self.weights.path


def identity(
    source: ModelSource, weights: Weights, quant: QuantConfig, dtype: torch.dtype, device: torch.device
) -> Fingerprint:
    """Return what keys and values depend on, besides the tokens.

    Includes the instruction set and the versions, because they change the rounding.
    """
    cpu = build.instruction_set() if build.library() is not None else "none"
    return {
        "model.dtype": str(dtype).removeprefix("torch."),
        "model.weights": weights.name,
        "quant": plain_quant(quant),
        "kernels": torch.cuda.get_device_name() if device.type == "cuda" else cpu,
        "code": code_digest("*.py", "*.cpp", "*.h"),
        "torch": torch.__version__,
        **file_fingerprint(source.checkpoint.path, "model"),
    }


def save_kept(
    path: Path, identity: Fingerprint, rows: list[KeptRow], token_ids: list[int], stored: dict[str, Tensor]
) -> None:
    """Write a file, which appears when it is complete.

    `stored`: tensors [M, G, *] by the names of `Executor.cache_tensors`, and [rows, *] by the names of
    `Executor.cache_states`.
    """
    metadata = {"identity": json.dumps(identity), "rows": json.dumps([asdict(row) for row in rows])}
    save_tensors(path, {TOKENS: torch.tensor(token_ids, dtype=torch.int64), **stored}, metadata)


def open_kept(names: list[str], plan: ModelPlan) -> list[KeptFile]:
    """Open the files of `device.kept_prefixes`, for the planned model. Reads only their headers.

    Raises UserError for a file that is missing, damaged, or of another model, setting or version, and names the
    differences.
    """
    if not names:
        return []
    source = plan.source
    if plan.parallel_layout != ParallelLayout():
        source.shape.capabilities.refuse_recurrent("device.kept_prefixes with ranks", "give parallel=single")
    if not source.shape.capabilities.shares_prefixes:
        raise UserError(f"device.kept_prefixes {UNSHARED}: leave it out")
    expected = identity(source, plan.options.weights, plan.quant, plan.dtype, plan.device)
    files: list[KeptFile] = []
    for name in names:
        path = Path(name).expanduser()
        if not path.is_file():
            raise UserError(f"device.kept_prefixes: {path} is not a file: make it by task=prefix prefix.output={path}")
        file = SafetensorsFile(path)
        actual = _json(path, file.metadata.get("identity"), dict)
        if differences := sorted(key for key in expected | actual if expected.get(key) != actual.get(key)):
            remedy = "make it again by task=prefix, or leave it out"
            raise UserError(f"device.kept_prefixes: {path} is of other {', '.join(differences)}: {remedy}")
        files.append(KeptFile(file, _rows(path, file)))
    return files


def count_blocks(files: list[KeptFile], block_size: int) -> int:
    """Return how many different full blocks the files' prompts have. Raises UserError for a file without tokens."""
    rows = (hashes for file in files for _, hashes in _hashes(file, _token_ids(file), block_size))
    return len({value for hashes in rows for value in hashes})


def place_kept(engine: Engine, files: list[KeptFile]) -> None:
    """Copy the files' contents into pinned blocks and state slots of the engine, where the prefix cache finds them.

    Raises UserError for tensor shapes that differ from the cache's, for soft prefixes and adapters that the engine does
    not have, for numbers that are not finite, and for too few blocks or slots.
    """
    for file in files:
        _check_tensors(engine, file)
        _check_parts(engine, file)
        token_ids = _token_ids(file)
        missing_blocks = _missing_blocks(engine, file, token_ids)
        _check_room(engine, file, len(missing_blocks))
        table = engine.pin(len(missing_blocks))
        engine.remember(table, missing_blocks)
        windowed = _windowed_layers(engine)
        window_table = engine.pin_windows(missing_blocks) if windowed else []
        places = torch.tensor(list(missing_blocks.values()), dtype=torch.int64)[:, None] + torch.arange(
            engine.block_size
        )  # [blocks, B]
        slots = _pin_states(engine, file, token_ids)
        for name, content in file.weights.read([name for name in file.weights.shapes if name != TOKENS]):
            if not content.float().isfinite().all():  # fp8 has no isfinite
                problem = f"{file.path}: {name} holds NaN or infinite numbers"
                raise UserError(f"device.kept_prefixes: {problem}: make it again by task=prefix")
            if name in engine.executor.cache_states:
                for row, slot in slots.items():
                    engine.executor.run(WriteState(name, content[row], slot))
            else:
                is_windowed = int(name.split(".")[1]) in windowed
                engine.executor.run(WriteBlocks(name, content[places], window_table if is_windowed else table))


def _token_ids(file: KeptFile) -> list[int]:
    if file.weights.dtypes.get(TOKENS) != torch.int64 or len(file.weights.shapes[TOKENS]) != 1:
        raise _damaged(file.path)
    (_, token_ids), *_ = file.weights.read([TOKENS])
    numbers: list[int] = token_ids.tolist()
    return numbers


def _check_room(engine: Engine, file: KeptFile, num_blocks: int) -> None:
    remedy = "raise device.kv_cache_memory, or leave it out"
    if num_blocks >= (num_free := engine.num_free_blocks):  # a row needs at least one block
        problem = f"{file.path} needs {num_blocks} blocks of the KV cache, but {num_free} are free"
        raise UserError(f"device.kept_prefixes: {problem}: {remedy}")
    if (num_free_windows := engine.num_free_window_blocks) is not None and num_blocks > num_free_windows:
        problem = f"{file.path} needs {num_blocks} blocks of layers with windows, but {num_free_windows} are free"
        raise UserError(f"device.kept_prefixes: {problem}: {remedy}")


def _windowed_layers(engine: Engine) -> set[int]:
    """Return the numbers of the layers of all stages that have blocks of their own."""
    if engine.num_free_window_blocks is None:
        return set()
    model = engine.executor.model
    contents = dict(zip(model.local_layers, model.layer_caches, strict=False)) | model.other_caches
    return {number for number, content in contents.items() if content.window is not None}


def _missing_blocks(engine: Engine, file: KeptFile, token_ids: list[int]) -> dict[bytes, int]:
    """Return the hashes of the full blocks that the cache does not hold, each with its first slot in the file."""
    size, missing, first_slot = engine.block_size, dict[bytes, int](), 0
    for row, hashes in _hashes(file, token_ids, size):
        for number in range(row.num_prefix_tokens // size, len(hashes)):
            if not engine.find_cached_blocks([hashes[number]]):
                missing.setdefault(hashes[number], first_slot + number * size)
        first_slot += row.num_slots
    return missing


def _pin_states(engine: Engine, file: KeptFile, token_ids: list[int]) -> dict[int, int]:
    """Pin a slot for the state after each row that ends with a block of the engine. Return the slots by row number."""
    slots = dict[int, int]()
    for number, (row, hashes) in enumerate(_hashes(file, token_ids, engine.block_size)):
        if not engine.executor.cache_states or row.num_slots % engine.block_size:
            continue
        if engine.has_state(hashes[-1]):
            continue
        if engine.num_free_slots < 1:
            problem = f"{file.path} needs a slot for the recurrent state of row {number}, but none is free"
            raise UserError(f"device.kept_prefixes: {problem}: raise device.kv_cache_memory, or leave it out")
        slots[number] = engine.pin_state(hashes[-1])
    return slots


def _hashes(file: KeptFile, token_ids: list[int], block_size: int) -> Iterator[tuple[KeptRow, list[bytes]]]:
    """Yield each row of the file with the hashes of its full blocks."""
    first = 0
    for row in file.rows:
        hashes: list[bytes] = []
        row_token_ids, root = token_ids[first : first + row.num_tokens], bytes.fromhex(row.root)
        extend_hashes(hashes, row_token_ids, row.num_slots // block_size, block_size, root, row.num_prefix_tokens)
        yield row, hashes
        first += row.num_tokens


def _check_tensors(engine: Engine, file: KeptFile) -> None:
    num_slots, stored = sum(row.num_slots for row in file.rows), engine.executor.cache_tensors
    expected = {name: f"{t.dtype}{[num_slots, heads.whole_keys, *t.shape[3:]]}" for name, (t, heads) in stored.items()}
    expected |= {name: f"{t.dtype}{[len(file.rows), *t.shape[1:]]}" for name, t in engine.executor.cache_states.items()}
    for number, content in engine.executor.model.other_caches.items():
        for name, token in unsharded_token(content, engine.executor.cache).items():
            expected[f"layers.{number}.{name}"] = f"{token.dtype}{[num_slots, *token.shape]}"
    expected[TOKENS] = f"{torch.int64}{[sum(row.num_tokens for row in file.rows)]}"
    file_forms = {name: f"{file.weights.dtypes[name]}{list(shape)}" for name, shape in file.weights.shapes.items()}
    if wrong := sorted(name for name in expected | file_forms if expected.get(name) != file_forms.get(name)):
        problem = f"{wrong[0]} is {file_forms.get(wrong[0], 'missing')}, not {expected.get(wrong[0], 'in this cache')}"
        raise UserError(f"device.kept_prefixes: {file.path}: {problem}: make it again by task=prefix")


def _check_parts(engine: Engine, file: KeptFile) -> None:
    prefixes = {(prefix.digest, prefix.num_tokens) for prefix in engine.requests.prefixes.values()} | {("", 0)}
    adapters = {adapter.digest for adapter in engine.adapters.ids} | {""}
    for row in file.rows:
        if (row.prefix, row.num_prefix_tokens) not in prefixes:
            part, setting = f"after the soft prefix {row.prefix[:12]}...", "model.prefixes"
        elif row.adapter not in adapters:
            part, setting = f"with the adapter {row.adapter[:12]}...", "model.adapters"
        else:
            continue
        problem = f"{file.path} holds a prompt {part}, which is not in {setting}"
        raise UserError(f"device.kept_prefixes: {problem}: give it too, or leave the file out")


def _rows(path: Path, file: SafetensorsFile) -> list[KeptRow]:
    rows: list[KeptRow] = []
    for values in _json(path, file.metadata.get("rows"), list):
        try:
            row = KeptRow(**values)
            counts = type(row.num_tokens) is type(row.num_prefix_tokens) is int
            if not counts or row.num_tokens < 1 or row.num_prefix_tokens < 0:
                raise ValueError
            bytes.fromhex(row.prefix + row.adapter)
            bytes.fromhex(row.root)
        except (TypeError, ValueError) as error:
            raise _damaged(path) from error
        rows.append(row)
    return rows


def _json(path: Path, text: str | None, kind: type) -> Any:
    try:
        values = json.loads(text or "")
    except (ValueError, RecursionError) as error:
        raise _damaged(path) from error
    if not isinstance(values, kind):
        raise _damaged(path)
    return values


def _damaged(path: Path) -> UserError:
    return UserError(f"device.kept_prefixes: {path} is damaged, or was not made by task=prefix: make it again")
