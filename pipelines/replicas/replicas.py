"""Several engines behind the interface of one.

Each request goes to the engine with the longest likely prefix cache hit.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Sequence

from conf.errors import UserError
from pipelines.replicas.engine_process.client import Answer, EngineClient, EngineGone, EngineRefused
from pipelines.replicas.engine_process.frames import Beat, LoadAdapter, Ready, Submit, SubmitPooled

CHUNK_TOKENS = 16  # tokens of a chunk, as in a block of the KV cache
LEAD = 0.5  # share of serve.batch_size by which an engine may exceed the least busy engine


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
        """The loaded model with the smallest cache, and the adapters of all engines; None while no model is loaded."""
        infos = [info for replica in self._ready() if (info := replica.client.info)]
        if not infos:
            return None
        adapters = {name: digest for info in infos for name, digest in info.adapters.items()}
        return min(infos, key=lambda info: info.num_cache_tokens).having(adapters)

    @property
    def beat(self) -> Beat | None:
        """The sum of the engines' last beats. It is a new object after an engine has sent a new beat."""
        beats = [client.beat for client in self._clients if client.beat is not None]
        if list(map(id, beats)) != list(map(id, self._beats)):
            self._beats, self._beat = beats, _sum(beats) if beats else None
        return self._beat

    @property
    def num_restarts(self) -> int:
        return sum(client.num_restarts for client in self._clients)

    async def start(self) -> None:
        for client in self._clients:
            await client.start()

    async def wait_ready(self) -> Ready:
        """Wait until all models are loaded.

        Raises UserError if one cannot be loaded, or if two would answer differently.
        """
        infos = await asyncio.gather(*(client.wait_ready() for client in self._clients))
        names = sorted({str(info.fingerprint) for info in infos})
        if len(names) > 1:
            raise UserError(f"the replicas would answer differently ({', '.join(names)}): give them equal machines")
        for info in infos:
            if different := {name for name, digest in infos[0].adapters.items() if info.adapters.get(name) != digest}:
                problem = f"the replicas have different adapters {min(different)}"
                raise UserError(f"{problem}: give all machines the same files")
        return min(infos, key=lambda info: info.num_cache_tokens)

    def submit(self, submit: Submit | SubmitPooled, news: asyncio.Event) -> Answer:
        """Send a request to one of the engines. `news`: as for Answer. Raises EngineGone if no engine is ready."""
        chunks = chunks_of(submit)
        chosen = self._choose(chunks, submit.adapter)
        answer = chosen.client.submit(submit, news)
        chosen.remember(chunks)
        return answer

    async def load_adapter(self, adapter: LoadAdapter) -> str:
        """Load an adapter in all engines, and return its digest. Engines that restart load it before any request.

        If one engine cannot load it, no engine keeps it. Raises EngineRefused and EngineGone.
        """
        clients = [client for client in self._clients if client.info is not None]
        loads = (client.load_adapter(adapter) for client in clients)
        results = await asyncio.gather(*loads, return_exceptions=True)
        digests = {result for result in results if isinstance(result, str)}
        errors = [result for result in results if isinstance(result, BaseException)]
        refused = next((error for error in errors if not isinstance(error, EngineGone)), None)
        if refused is None and len(digests) > 1:
            refused = EngineRefused(f"the replicas have different files in {adapter.path}: give all machines the same")
        if refused is not None or not digests:
            await self.unload_adapter(adapter.name)
            raise refused or next(iter(errors), EngineGone("the engines are loading their model"))
        (digest,) = digests
        for client in self._clients:
            client.expect_adapter(adapter.of(digest))
        return digest

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, which no request uses, in all engines. Raises EngineRefused."""
        await asyncio.gather(*(client.unload_adapter(name) for client in self._clients))

    async def ended(self) -> None:
        """Wait until all engines have ended and are not restarted. Raises the exception of the first that ended."""
        await asyncio.gather(*(client.ended() for client in self._clients))

    async def close(self) -> None:
        """End the engines. Requests in progress end with EngineGone."""
        await asyncio.gather(*(client.close() for client in self._clients))

    def _ready(self) -> "list[Replica]":
        """Return the loaded replicas whose fingerprint equals the first one's."""
        ready = [replica for replica in self._replicas if replica.client.info is not None]
        return [replica for replica in ready if replica.fingerprint == ready[0].fingerprint]

    def _choose(self, chunks: list[int], adapter: str | None) -> "Replica":
        ready = [replica for replica in self._ready() if adapter is None or replica.has(adapter)]
        if not ready:
            raise EngineGone("the engines are loading their model")
        least = min(replica.num_requests for replica in ready)
        most = least + int(LEAD * self._batch_size)
        if least < self._batch_size:  # no request waits while another engine has a free slot
            most = min(most, self._batch_size - 1)
        near = [replica for replica in ready if replica.num_requests <= most]
        return max(near, key=lambda replica: (replica.num_known(chunks), -replica.num_requests, -replica.num_chunks))


class Replica:
    """An engine, and an estimate of its prefix cache: the chunks of its latest prompts."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self._chunks: OrderedDict[int, None] = OrderedDict()  # in the order of eviction
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

    def has(self, adapter: str) -> bool:
        """Return whether the engine is loaded and has an adapter of this name."""
        return self.client.info is not None and adapter in self.client.info.adapters

    def num_known(self, chunks: list[int]) -> int:
        """Return how many leading chunks are most likely in the cache."""
        if self._num_restarts != self.client.num_restarts:  # a restarted engine has an empty cache
            self._num_restarts = self.client.num_restarts
            self._chunks.clear()
        return next((i for i, chunk in enumerate(chunks) if chunk not in self._chunks), len(chunks))

    def remember(self, chunks: list[int]) -> None:
        """Add a prompt's chunks.

        Evicts in the order of the prefix cache: the least recently used prompt first, and its last chunks first.
        """
        for chunk in reversed(chunks):
            self._chunks[chunk] = None
            self._chunks.move_to_end(chunk)
        num_kept = self.client.info.num_cache_tokens // CHUNK_TOKENS if self.client.info else 0
        while len(self._chunks) > num_kept:
            self._chunks.popitem(last=False)


def chunks_of(submit: Submit | SubmitPooled) -> list[int]:
    """Return a hash for each full chunk of a prompt.

    Two hashes are equal if the prompts are equal up to the chunk's end and may share blocks.
    """
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
