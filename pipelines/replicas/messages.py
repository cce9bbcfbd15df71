"""The messages between a job and the replicas that run its rows, as msgpack. Every type is checked where one is read.

Rows and records are JSON inside: a row may hold half a surrogate pair, which only JSON's escapes carry.
"""

import json
from dataclasses import asdict
from typing import Any, TypeAlias

import msgspec

from conf.schema import RunConfig
from pipelines.journal import dumps
from pipelines.prompts import PromptRow
from pipelines.rows import Counts, Loaded, Record


class Load(msgspec.Struct, frozen=True):
    """The run whose model a replica loads."""

    run: RunConfig
    num_cpus: int
    """Processors that it has to itself, if there are so many; 0: it shares all."""


class Work(msgspec.Struct, frozen=True):
    """Further rows for a replica."""

    seed: int | None
    """Of the rows that name none."""
    rows: list[bytes]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """A replica has loaded its model."""

    loaded: Loaded
    replay: str
    """Digest of the fingerprint, the code and the instructions that compute."""


class Failed(msgspec.Struct, tag=True, frozen=True):
    """No replica can go on, for a reason that the user can mend."""

    message: str


class Worked(msgspec.Struct, tag=True, frozen=True):
    """Rows that a replica has done, at least one unless it has none."""

    records: list[bytes]
    counts: Counts


Answer: TypeAlias = Ready | Failed | Worked

encode = msgspec.msgpack.Encoder().encode
read_load = msgspec.msgpack.Decoder(Load).decode
read_work = msgspec.msgpack.Decoder(Work).decode
_ANSWERS = msgspec.msgpack.Decoder(Answer)


def read_answer(content: bytes) -> Answer:
    """Return a replica's answer. Raises msgspec.DecodeError for bytes that are none."""
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
