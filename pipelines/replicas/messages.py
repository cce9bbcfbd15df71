"""Messages between a job and the replicas that run its rows, as msgpack. Decoding checks all types.

Rows and records are nested JSON, because a row may contain an unpaired surrogate, which only JSON's escapes can
represent.
"""

import json
from dataclasses import asdict
from typing import Any, TypeAlias

import msgspec

from conf.schema import RunConfig
from pipelines.jobs.journal import dumps
from pipelines.jobs.prompts import PromptRow
from pipelines.jobs.rows import Counts, Loaded, Record


class Load(msgspec.Struct, frozen=True):
    """The run whose model a replica loads."""

    run: RunConfig
    num_cpus: int
    """Number of CPUs that only this replica uses, if enough are free; 0: all CPUs are shared."""


class Work(msgspec.Struct, frozen=True):
    """More rows for a replica."""

    seed: int | None
    """Seed of rows that do not set a seed."""
    rows: list[bytes]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A replica has loaded its model."""

    loaded: Loaded
    replay: str
    """Digest of everything that determines the results: fingerprint, code, torch version and CPU instructions."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """An error that the user can correct and that stops all replicas."""

    message: str


class Worked(msgspec.Struct, tag=True, frozen=True):
    """Rows that a replica has finished; empty only if the replica holds no rows."""

    records: list[bytes]
    counts: Counts


Answer: TypeAlias = Ready | Failed | Worked

encode = msgspec.msgpack.Encoder().encode
read_load = msgspec.msgpack.Decoder(Load).decode
read_work = msgspec.msgpack.Decoder(Work).decode
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def read_answer(content: bytes) -> Answer:
    """Return a replica's answer. Raises msgspec.DecodeError for invalid bytes."""
    answer: Answer = _ANSWERS.decode(content)
    return answer


def row_bytes(row: PromptRow) -> bytes:
    return json.dumps(asdict(row)).encode()


def read_row(content: bytes) -> PromptRow:
    values: dict[str, Any] = json.loads(content)
    pair = values.pop("pair")
    return PromptRow(**values, pair=None if pair is None else tuple(pair))


def record_bytes(record: Record) -> bytes:
    return dumps(record).encode()


def read_record(content: bytes) -> Record:
    record: Record = json.loads(content)
    return record
