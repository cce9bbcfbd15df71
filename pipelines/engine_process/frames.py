"""The messages between the HTTP process and the engine's, and how they cross a socket: a length and msgpack.

Every type is checked where a frame is read. Nothing of a frame is ever run.
"""

from collections.abc import Iterator
from typing import Any, TypeAlias

import msgspec

from conf.errors import UserError
from conf.schema import RunConfig

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Bounds of the tokens of a step by which steps are counted: those of vLLM's histogram."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first frame to the child: the run whose model it loads."""

    run: RunConfig
    log_folder: str | None = None
    """Where its log is; None: it has none."""


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A prompt and how to continue it. `id` names the request in all frames."""

    id: int
    prompt_token_ids: list[int]
    decode: dict[str, Any]
    """Settings of DecodeConfig by their names; the others are the server's."""
    adapter: str | None = None
    prefix: str | None = None
    streams: bool = False
    """Whether deltas are sent as tokens come, and not all at the end."""
    is_background: bool = False
    """Whether it waits until no other request waits, as the lines of batches do."""


class SubmitPooled(msgspec.Struct, tag=True, frozen=True):
    """A prompt whose vector is wanted."""

    id: int
    prompt_token_ids: list[int]
    adapter: str | None = None
    cache_salt: str | None = None
    """As in DecodeConfig; None: the server's."""
    prefix: str | None = None
    is_background: bool = False
    """As in Submit."""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """The client of a request has left. Nothing more is sent of it."""

    id: int


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded."""

    context_length: int
    vocab_size: int
    fingerprint: str | None
    """Names all that decides an answer beside the request and its seed; None where bits depend on more, as on a GPU."""
    decode: dict[str, Any]
    """The settings that hold where a request says nothing: the run's, completed by the checkpoint's."""
    num_cache_tokens: int
    """Tokens that the KV cache holds."""
    embeds: bool = False
    """Whether the model gives vectors and no continuations."""
    instruction: str = ""
    """Text that the vector's prompt begins with, where the prompt is a text."""
    final_token_id: int | None = None
    """Token that the vector's prompt ends with, where the prompt is a text."""
    max_text_tokens: int | None = None
    """Tokens to which such a text is cut, the final one among them; None: it is refused where it is too long."""
    prefixes: dict[str, int] = {}
    """The numbers of virtual tokens of soft prefixes, by name."""

    def after(self, prefix: str | None) -> "Ready":
        """Return what holds for prompts after a prefix, which takes its places of the context."""
        num_places = self.context_length - (0 if prefix is None else self.prefixes[prefix])
        most = None if self.max_text_tokens is None else min(self.max_text_tokens, num_places)
        return msgspec.structs.replace(self, context_length=num_places, max_text_tokens=most)


class Unready(msgspec.Struct, tag=True, frozen=True):
    """The model cannot be loaded, for a reason that the user can mend. The child ends."""

    message: str


class Began(msgspec.Struct, tag=True, frozen=True):
    """From here on the engine has something to do for these requests. Between its check and its first step a request only waits."""

    ids: list[int]


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The engine has checked and queued a request. `seed`: the given or the drawn one."""

    id: int
    seed: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """A request cannot be run."""

    id: int
    message: str


class Logprob(msgspec.Struct, array_like=True, frozen=True):
    """Natural log probabilities at one token: id, log probability and rank of the token, then of the most likely ones."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, array_like=True):
    """New text and tokens of a sample since its last delta. The last delta has the `finish_reason`."""

    id: int
    sample: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprob]
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class Deltas(msgspec.Struct, tag=True, frozen=True):
    deltas: list[Delta]


class Done(msgspec.Struct, tag=True, frozen=True):
    """A request has ended: after all of its deltas. Times are seconds since it was submitted."""

    id: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    queue_s: float
    first_token_s: float | None
    total_s: float
    prompt_logprobs: list[Logprob] | None = None
    vector: list[float] | None = None
    error: str | None = None
    """Why it failed on its way; the other requests went on."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """The state of the engine after a step. Counts are since the child began; those of tokens count what was computed again, too."""

    num_running: int
    num_waiting: int
    cache_usage: float
    """Share of the KV cache's blocks that running requests have, from 0 to 1."""
    num_prompt_tokens: int
    """Computed tokens of prompts."""
    num_generated_tokens: int
    num_preemptions: int
    step_s: float
    """Seconds of the last step."""
    num_steps: list[int] = []
    """How many steps computed at most as many tokens as each of STEP_TOKENS and more than the one before; last those with more."""
    num_step_tokens: int = 0
    """Tokens that all of these steps computed."""


ToEngine: TypeAlias = Start | Submit | SubmitPooled | Cancel
FromEngine: TypeAlias = Ready | Unready | Began | Accepted | Refused | Deltas | Done | Beat

_ENCODER = msgspec.msgpack.Encoder()


def encode(frame: ToEngine | FromEngine) -> bytes:
    """Return a frame as it crosses the socket."""
    content = _ENCODER.encode(frame)
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


class FrameReader:
    """Cuts the bytes of a socket into frames of one direction."""

    def __init__(self, kind: Any) -> None:
        """`kind`: ToEngine or FromEngine."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._rest = bytearray()

    def read(self, received: bytes) -> Iterator[Any]:
        """Yield the frames that are whole now. Raises UserError for bytes that are no frame."""
        rest = self._rest
        rest += received
        while len(rest) >= LENGTH_BYTES:
            length = int.from_bytes(rest[:LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise UserError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
            if len(rest) < LENGTH_BYTES + length:
                return
            content = bytes(rest[LENGTH_BYTES : LENGTH_BYTES + length])
            del rest[: LENGTH_BYTES + length]
            try:
                yield self._decoder.decode(content)
            except msgspec.DecodeError as error:
                raise UserError(f"a frame cannot be read: {error}") from error
