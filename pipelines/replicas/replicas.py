"""Several engines as one. Each request goes where its prompt's beginning most likely is in the cache."""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from conf.errors import UserError
from pipelines.engine_process.client import Answer, EngineClient, EngineGone
from pipelines.engine_process.frames import Beat, Ready, Submit, SubmitPooled

CHUNK_TOKENS = 16  # of a prompt that are remembered together, as in a block of the KV cache
LEAD = 0.5  # of serve.batch_size: requests that an engine may have more than the one with the fewest


class Replicas:
    """Engines with the methods of one `EngineClient`."""

    def __init__(self, clients: Sequence[EngineClient], batch_size: int) -> None:
        """`batch_size`: requests that run at once in an engine."""
        self._replicas = [Replica(client) for client in clients]
        self._clients = clients
        self._batch_size = batch_size
        self._beats: list[Beat] = []
        self._beat: Beat | None = None

    @property
    def info(self) -> Ready | None:
        """The models that are loaded, None while there is none. Of their caches the smallest."""
        infos = [replica.client.info for replica in self._ready()]
        return min((info for info in infos if info), key=lambda info: info.num_cache_tokens, default=None)

    @property
    def beat(self) -> Beat | None:
        """The sum of the engines' last beats: another object once one of them has sent another."""
        beats = [client.beat for client in self._clients if client.beat is not None]
        if list(map(id, beats)) != list(map(id, self._beats)):
            self._beats, self._beat = beats, _sum(beats) if beats else None
        return self._beat

    @property
    def num_restarts(self) -> int:
        return sum(client.num_restarts for client in self._clients)

    async def start(self) -> None:
        """Begin to load the models."""
        for client in self._clients:
            await client.start()

    async def wait_ready(self) -> Ready:
        """Wait until all models are loaded. Raises UserError where one cannot be, or where the answers of two would differ."""
        infos = await asyncio.gather(*(client.wait_ready() for client in self._clients))
        names = sorted({str(info.fingerprint) for info in infos})
        if len(names) > 1:
            raise UserError(f"the replicas would answer differently ({', '.join(names)}): give them equal machines")
        return min(infos, key=lambda info: info.num_cache_tokens)

    def submit(self, submit: Submit | SubmitPooled, news: asyncio.Event) -> Answer:
        """Send a request to one of the engines. news: as for Answer. Raises EngineGone where none is ready."""
        chunks = chunks_of(submit)
        chosen = self._choose(chunks)
        answer = chosen.client.submit(submit, news)
        chosen.remember(chunks)
        return answer

    async def ended(self) -> None:
        """Wait until nobody keeps the engines running. Raises what ended the first."""
        await asyncio.gather(*(client.ended() for client in self._clients))

    async def close(self) -> None:
        """End the engines. Requests on their way end with EngineGone."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def _ready(self) -> "list[Replica]":
        """Return the replicas whose model is loaded, and answers as the first one's does."""
        ready = [replica for replica in self._replicas if replica.client.info is not None]
        return [each for each in ready if each.fingerprint == ready[0].fingerprint]

    def _choose(self, chunks: list[int]) -> "Replica":
        """Return the replica that knows most of a prompt, of those that are not too busy for it."""
        ready = self._ready()
        if not ready:
            raise EngineGone("the engines are loading their model")
        least = min(replica.num_requests for replica in ready)
        most = least + int(LEAD * self._batch_size)
        if least < self._batch_size:  # nobody waits while another engine has room
            most = min(most, self._batch_size - 1)
        near = [replica for replica in ready if replica.num_requests <= most]
        return max(near, key=lambda replica: (replica.num_known(chunks), -replica.num_requests, -replica.num_chunks))


class Replica:
    """An engine, and what its cache most likely holds: the prompts that it had last."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._chunks: OrderedDict[int, None] = OrderedDict()  # the next to be forgotten first
        self._num_restarts = 0

    @property
    def fingerprint(self) -> str | None:
        return None if self.client.info is None else self.client.info.fingerprint

    @property
    def num_requests(self) -> int:
        return self.client.num_requests

    @property
    def num_chunks(self) -> int:
        return len(self._chunks)

    def num_known(self, chunks: list[int]) -> int:
        """Return how many chunks from the beginning the cache most likely holds."""
        if self._num_restarts != self.client.num_restarts:  # with an empty cache
            self._num_restarts = self.client.num_restarts
            self._chunks.clear()
        return next((i for i, chunk in enumerate(chunks) if chunk not in self._chunks), len(chunks))

    def remember(self, chunks: list[int]) -> None:
        """Take what the cache will hold. As there, the ends of what was used longest ago are forgotten."""
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        num_kept = self.client.info.num_cache_tokens // CHUNK_TOKENS if self.client.info else 0
        while len(self._chunks) > num_kept:
            self._chunks.popitem(last=False)


def chunks_of(submit: Submit | SubmitPooled) -> list[int]:
    """Return a number for each whole chunk of a prompt: equal where all up to its end is equal, and may be shared."""
    token_ids, numbers = submit.prompt_token_ids, list[int]()
    salt = submit.decode.get("cache_salt") if isinstance(submit, Submit) else submit.cache_salt
    last = hash((submit.adapter, submit.prefix, salt))
    for end in range(CHUNK_TOKENS, len(token_ids) + 1, CHUNK_TOKENS):
        last = hash((last, *token_ids[end - CHUNK_TOKENS : end]))
        numbers.append(last)
    return numbers


def _sum(beats: list[Beat]) -> Beat:
    return Beat(
        num_running=sum(beat.num_running for beat in beats),
        num_waiting=sum(beat.num_waiting for beat in beats),
        cache_usage=sum(beat.cache_usage for beat in beats) / len(beats),
        num_prompt_tokens=sum(beat.num_prompt_tokens for beat in beats),
        num_generated_tokens=sum(beat.num_generated_tokens for beat in beats),
        num_preemptions=sum(beat.num_preemptions for beat in beats),
        step_s=max(beat.step_s for beat in beats),
        num_steps=[sum(counts) for counts in zip(*(beat.num_steps for beat in beats), strict=True)],
        num_step_tokens=sum(beat.num_step_tokens for beat in beats),
    )
