"""The messages between the HTTP process and the engine's process. A frame is a length and a msgpack body.

The type of every field is checked when a frame is read. The content of a frame is never executed.
"""

import hashlib
from collections.abc import Iterator
from typing import Any, Literal, TypeAlias

import msgspec

from conf.errors import UserError
from conf.schema import RunConfig

LENGTH_BYTES = 4
MAX_FRAME_BYTES = 256 << 20
STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
"""Upper bounds of the step-size histogram, in tokens. Equal to the bounds of vLLM's histogram."""


class Start(msgspec.Struct, tag=True, frozen=True):
    """The first frame to the child: the run whose model it loads."""

    run: RunConfig
    log_folder: str | None = None
    """Folder of the engine's log; None: no log."""


class Submit(msgspec.Struct, tag=True, frozen=True):
    """A prompt and its decode settings. `id` identifies the request in all frames."""

    id: int
    prompt_token_ids: list[int]
    decode: dict[str, Any]
    """Fields of DecodeConfig by name. Absent fields have the server's values."""
    adapter: str | None = None
    prefix: str | None = None
    streams: bool = False
    """Whether deltas are sent while tokens are generated, instead of once at the end."""
    is_background: bool = False
    """Whether the request yields to all other waiting requests. True for the lines of batches."""


class SubmitPooled(msgspec.Struct, tag=True, frozen=True):
    """A prompt whose outputs become one vector: see `Ready.pooled`."""

    id: int
    prompt_token_ids: list[int]
    adapter: str | None = None
    cache_salt: str | None = None
    """As in DecodeConfig; None: the server's value."""
    prefix: str | None = None
    is_background: bool = False
    """As in Submit."""


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """The client has abandoned a request. The engine sends nothing more about it."""

    id: int


class LoadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Load a LoRA adapter. No adapter has had its name before."""

    id: int
    """Identifies the change in its answer."""
    name: str
    path: str
    """The adapter's folder."""
    below: list[str] | None = None
    """The folders of which one must contain `path`, and all its files; None: any folder."""
    is_pinned: bool = False
    """Whether the adapter keeps its slot, as in `AdapterSlots.pin`."""
    digest: str | None = None
    """The digest that the adapter must have, as in `AdapterId`; None: any."""

    def of(self, digest: str) -> "LoadAdapter":
        """Return a copy that only loads an adapter of this digest."""
        return msgspec.structs.replace(self, digest=digest)


class UnloadAdapter(msgspec.Struct, tag=True, frozen=True):
    """Unload an adapter that no request uses."""

    id: int
    name: str


Pooled: TypeAlias = Literal["vector", "labels", "answer"]
"""The vector of an embedding model, the outputs of a head of labels, or the probability of yes against no."""
Activation: TypeAlias = Literal["softmax", "sigmoid", "none"]


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The model is loaded."""

    context_length: int
    vocab_size: int
    fingerprint: str | None
    """Identifies everything that determines an answer except the request, its adapter and its seed.

    None if the bits of an answer depend on more, as on a GPU.
    """
    decode: dict[str, Any]
    """Default decode settings of a request: the run's settings, completed by the checkpoint's."""
    num_cache_tokens: int
    """Capacity of the KV cache in tokens."""
    pooled: Pooled | None = None
    """What a pooled prompt gives. None: the model generates text, and its tokenizer has no tokens yes and no."""
    activation: Activation = "none"
    """How outputs of labels become probabilities."""
    labels: list[str] = []
    """The names of the labels."""
    instruction: str = ""
    """Text that is prepended to the input of an embedding if the input is a text; a reranker's instruction."""
    query_instruction: str = ""
    """The same for a query that is compared with documents."""
    document_instruction: str = ""
    """The same for a document."""
    final_token_id: int | None = None
    """Token that ends the prompt of an embedding if the input is a text."""
    max_text_tokens: int | None = None
    """Maximum tokens of this prompt, including the final token: a longer prompt is truncated; None: it is rejected."""
    prefixes: dict[str, int] = {}
    """Number of virtual tokens of each soft prefix, by name."""
    state_slot: str = ""
    """What a state slot costs, for a user; empty if no layer is recurrent."""
    adapters: dict[str, str] = {}
    """Digest of each adapter, by name."""

    @property
    def generates(self) -> bool:
        return self.pooled in (None, "answer")

    def having(self, adapters: dict[str, str]) -> "Ready":
        """Return a copy with these adapters."""
        return msgspec.structs.replace(self, adapters=adapters)

    def with_named(self, adapter: str | None, prefix: str | None) -> "Ready":
        """Return a copy for prompts with an adapter or after a soft prefix, which takes some of the context."""
        num_places = self.context_length - (0 if prefix is None else self.prefixes[prefix])
        most = None if self.max_text_tokens is None else min(self.max_text_tokens, num_places)
        fingerprint = self.fingerprint
        if fingerprint is not None and adapter is not None:
            parts = f"{fingerprint} {self.adapters.get(adapter)}"
            fingerprint = f"fp_{hashlib.sha256(parts.encode()).hexdigest()[:16]}"
        return msgspec.structs.replace(self, context_length=num_places, max_text_tokens=most, fingerprint=fingerprint)


class Unready(msgspec.Struct, tag=True, frozen=True):
    """The model cannot be loaded, for a reason that the user can correct. The child ends."""

    message: str


class Began(msgspec.Struct, tag=True, frozen=True):
    """The engine starts to work on these requests: it prepares, checks or computes them.

    A request between its check and its first step only waits.
    """

    ids: list[int]


class Accepted(msgspec.Struct, tag=True, frozen=True):
    """The engine has checked and queued a request. `seed`: the request's seed, or the seed that was drawn."""

    id: int
    seed: int


class Refused(msgspec.Struct, tag=True, frozen=True):
    """The engine rejects a request."""

    id: int
    message: str


class Logprob(msgspec.Struct, array_like=True, frozen=True):
    """Natural log probabilities at one position: the token's id, log probability and rank, then the top tokens."""

    token_id: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class Delta(msgspec.Struct, array_like=True):
    """New text and tokens of a sample since its previous delta. The last delta has the `finish_reason`."""

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
    """A request has ended. This frame follows all its deltas. Times are in seconds since the submission."""

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
    """Reason for the failure of this request; None: success. A failure does not affect other requests."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """The engine's state after a step. Counts start with the child process. Token counts include recomputed tokens."""

    num_running: int
    num_waiting: int
    cache_usage: float
    """Share of the KV cache blocks in use by running requests, from 0 to 1."""
    num_prompt_tokens: int
    """Computed prompt tokens."""
    num_generated_tokens: int
    num_preemptions: int
    step_s: float
    """Duration of the last step in seconds."""
    num_steps: list[int] = []
    """Histogram of steps by computed tokens. Element i counts steps with at most STEP_TOKENS[i] tokens and more than
    STEP_TOKENS[i - 1]; the last element counts larger steps.
    """
    num_step_tokens: int = 0
    """Total tokens computed by the steps in `num_steps`."""


class AdapterChanged(msgspec.Struct, tag=True, frozen=True):
    """The answer to LoadAdapter and UnloadAdapter."""

    id: int
    digest: str | None = None
    """Digest of the loaded adapter."""
    error: str | None = None
    """The reason why nothing has changed; None: success."""
    is_missing: bool = False
    """Whether the allowed folders do not contain the adapter."""


ToEngine: TypeAlias = Start | Submit | SubmitPooled | Cancel | LoadAdapter | UnloadAdapter
FromEngine: TypeAlias = Ready | Unready | Began | Accepted | Refused | Deltas | Done | Beat | AdapterChanged

_ENCODER = msgspec.msgpack.Encoder()


def encode(frame: ToEngine | FromEngine) -> bytes:
    """Return the bytes of a frame: length, then msgpack body."""
    content = _ENCODER.encode(frame)
    return len(content).to_bytes(LENGTH_BYTES, "big") + content


class FrameReader:
    """Splits a byte stream into frames of one direction."""

    def __init__(self, kind: Any) -> None:
        """`kind`: ToEngine or FromEngine."""
        self._decoder = msgspec.msgpack.Decoder(kind)
        self._buffer = bytearray()

    def read(self, received: bytes) -> Iterator[Any]:
        """Yield the frames that are now complete. Raises UserError for bytes that are not a frame."""
        buffer = self._buffer
        buffer += received
        while len(buffer) >= LENGTH_BYTES:
            length = int.from_bytes(buffer[:LENGTH_BYTES], "big")
            if length > MAX_FRAME_BYTES:
                raise UserError(f"a frame of {length} bytes is longer than {MAX_FRAME_BYTES}")
            if len(buffer) < LENGTH_BYTES + length:
                return
            content = bytes(buffer[LENGTH_BYTES : LENGTH_BYTES + length])
            del buffer[: LENGTH_BYTES + length]
            try:
                yield self._decoder.decode(content)
            except msgspec.DecodeError as error:
                raise UserError(f"a frame cannot be read: {error}") from error
