"""Loads the model of the first frame in the engine's process."""

from contextlib import AbstractContextManager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from conf.decoding import DecodeConfig
from conf.errors import UserError
from conf.schema import RunConfig
from models.heads import HeadKind
from pipelines.engine import Engine, slot_cost
from pipelines.engine.request_factory import check_pooled
from pipelines.jobs.report import NoProgress, ProgressSink, progress_bar
from pipelines.loading.fingerprint import answer_fingerprint, plain
from pipelines.loading.load_engine import open_engine
from pipelines.loading.memory import explained_out_of_memory
from pipelines.loading.pooler import Pooler
from pipelines.replicas.engine_process.channel import Channel
from pipelines.replicas.engine_process.frames import Ready
from pipelines.replicas.engine_process.pooled import open_served_pooler, pooled_fields


@dataclass(frozen=True)
class Served:
    """A loaded model, ready to serve."""

    engine: Engine
    pooler: Pooler | None
    """Reads vectors or scores from the outputs; None: the model only generates text."""
    decode: DecodeConfig
    """Default decode settings of a request that generates text."""
    pooled_decode: DecodeConfig
    """Default decode settings of a request without generation."""
    ready: Ready


class _WhileWanted(NoProgress):
    """Shows the progress. Ends the process if the other end of the channel closes during loading."""

    def __init__(self, channel: Channel, progress: ProgressSink) -> None:
        self._channel = channel
        self._progress = progress

    def loaded(self, done: int, total: int) -> None:
        self._check()
        self._progress.loaded(done, total)

    def quantized(self, num_layers: int, total_layers: int) -> None:
        self._check()
        self._progress.quantized(num_layers, total_layers)

    def calibrating(self) -> AbstractContextManager[None]:
        return self._progress.calibrating()

    def _check(self) -> None:
        if self._channel.is_closed:
            raise SystemExit(1)


def load_served(run: RunConfig, channel: Channel) -> Served:
    """Load the model of `run` for `serve.batch_size` concurrent requests. Raises UserError as `load_engine` does."""
    with explained_out_of_memory(), progress_bar() as progress:
        sink = _WhileWanted(channel, progress)
        source, engine = open_engine(run, run.serve.batch_size, sink, head=None)
    pooler = open_served_pooler(run, source, engine)
    pooled_decode = decode = run.decode
    if source.architecture.head is HeadKind.vocabulary:
        decode = engine.requests.resolve(_sampled(decode, engine.config.decode_defaults))
        engine.requests.check(decode)
        pooled_decode = DecodeConfig(prefix_cache=decode.prefix_cache, cache_salt=decode.cache_salt)
        # Prepares the vocabulary of guides before the first request. The error means that guides are not available.
        with suppress(UserError):
            engine.requests.prepare(DecodeConfig(guide={"json_object": True}))
    else:
        check_pooled(decode)
    more = {} if pooler is None else {"pooled": pooler.settings}
    fingerprint = answer_fingerprint(replace(run, decode=decode), source, engine, more)
    return Served(engine, pooler, decode, pooled_decode, described(engine, decode, fingerprint, pooler))


def _sampled(decode: DecodeConfig, suggested: dict[str, Any]) -> DecodeConfig:
    """Set temperature to 1, the default of OpenAI's API, unless the run or the checkpoint chooses how to decode."""
    settings = suggested | {name: value for name, value in vars(decode).items() if value is not None}
    if "temperature" in settings or (settings.get("num_beams") or 1) > 1 or settings.get("penalty_alpha"):
        return decode
    return replace(decode, temperature=1.0)


def described(engine: Engine, decode: DecodeConfig, fingerprint: str | None, pooler: Pooler | None = None) -> Ready:
    """Return the Ready frame of a loaded model. `decode`: resolved. `fingerprint`: from `answer_fingerprint`."""
    return Ready(
        context_length=engine.config.context.num_tokens,
        vocab_size=engine.vocab_size,
        fingerprint=fingerprint,
        decode=plain(asdict(decode)),
        num_cache_tokens=engine.requests.num_blocks * engine.block_size,
        prefixes={name: prefix.num_tokens for name, prefix in engine.requests.prefixes.items()},
        state_slot=slot_cost(engine.executor.cache),
        adapters={adapter.name: adapter.digest for adapter in engine.adapters.ids},
        **({} if pooler is None else pooled_fields(pooler)),
    )
