"""`task=serve`: bind the port, start the engine, answer requests, and shut down in order."""

import asyncio
import logging
import math
import os
import signal
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from conf.errors import UserError
from conf.schema import RunConfig
from conf.serving import ServeConfig
from conf.support.sizes import num_bytes
from pipelines.jobs.report import Dump, write_atomically
from pipelines.jobs.run_log import log_in
from pipelines.replicas.cluster import replicas_of
from pipelines.replicas.engine_process.client import EngineClient
from pipelines.server.api.conversation import Chat
from pipelines.server.api.errors import ApiError
from pipelines.server.app import create_app
from pipelines.server.batches.jobs import BatchJobs
from pipelines.server.guard import MAX_HEAD_BYTES, NO_KEYS, check_host, read_admin_keys, read_keys, whole_error
from pipelines.server.records import RecordLog, RequestLog
from pipelines.server.service import Service, open_traces

log = logging.getLogger(__name__)

HEAD_S = 30.0  # time limit for the first request of a connection
LAST_S = 5.0  # time to deliver the error events after drain_s has passed
SIGNALS = (signal.SIGINT, signal.SIGTERM)


def run_serve(run: RunConfig, output_dir: Path, dump: Dump) -> None:
    """Serve the model of `run` until a signal arrives. Raises UserError if the start fails.

    A second signal during shutdown raises SystemExit.
    """
    config = run.serve
    keys = read_keys(config.api_keys)
    admins = read_admin_keys(config, keys)
    check_host(config, keys)
    with _bound(config) as listener:
        jobs = _jobs(config)
        chat = Chat.open(run.model, config)
        output_dir.mkdir(parents=True, exist_ok=True)
        log_in(output_dir)
        write_atomically(output_dir / "config.yaml", [dump(run, output_dir)])
        traces = open_traces(config)
        request_log = RequestLog(output_dir / "requests.jsonl")

        def say(url: str) -> None:
            print(f"ready: {url}", flush=True)
            if server.state_slot:
                print(server.state_slot, flush=True)

        try:
            server = _Server(run, chat, request_log, keys, admins, jobs, traces)
            number = asyncio.run(server.run(listener, say, SIGNALS))
        finally:
            request_log.close()
            chat.close()
            if traces is not None:
                traces.close()
    if number is not None:
        raise SystemExit(128 + number)


@contextmanager
def local_server(run: RunConfig, folder: Path) -> Iterator[str]:
    """Serve the model of `run` in a thread within the block and yield the URL. Raises UserError.

    Writes requests.jsonl to `folder`.
    """
    ready: Future[str] = Future()
    with (
        _bound(run.serve) as listener,
        closing(Chat.open(run.model, run.serve)) as chat,
        closing(RequestLog(folder / "requests.jsonl")) as request_log,
    ):
        server = _Server(run, chat, request_log)

        def serve() -> None:
            try:
                asyncio.run(server.run(listener, ready.set_result))
            except BaseException as error:
                if ready.done():
                    log.error("the server ended: %s", error)
                else:
                    ready.set_exception(error)

        thread = Thread(target=serve, name="server")
        thread.start()
        try:
            yield ready.result()
        finally:
            server.end()
            thread.join()


def _bound(config: ServeConfig) -> socket.socket:
    """Return a listening socket. Raises UserError if the address is not available."""
    try:
        family, _, _, _, address = socket.getaddrinfo(config.host, config.port, type=socket.SOCK_STREAM)[0]
        listener = socket.create_server(address[:2], family=family, backlog=2048)
        # Accepted connections inherit this option. asyncio sets it only for sockets with an explicit protocol. Without
        # it the first token is delayed by 40 ms.
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return listener
    except OSError as error:
        where = f"serve.host={config.host} serve.port={config.port}"
        reason = error.strerror if isinstance(error, socket.gaierror) else os.strerror(error.errno or 0)
        remedy = "give another port, or serve.port=0 for a free one"
        raise UserError(f"{where} cannot be listened on ({reason}): {remedy}") from error


class _Server:
    """The HTTP server, the engine and the batch jobs of one process."""

    def __init__(
        self,
        run: RunConfig,
        chat: Chat,
        request_log: RequestLog,
        keys: Mapping[str, bytes] = NO_KEYS,
        admins: Mapping[str, bytes] = NO_KEYS,
        jobs: BatchJobs | None = None,
        traces: RecordLog | None = None,
    ) -> None:
        self._config = run.serve
        self._engine = EngineClient(run) if run.serve.replicas == 1 else replicas_of(run)
        self._service = Service(run.model, run.serve, self._engine, request_log, traces)
        self._jobs = jobs
        chat.prepare()
        app = create_app(self._service, chat, keys, jobs, admins)
        self._http = _Uvicorn(
            uvicorn.Config(
                app,
                http=_protocol(self._config.max_connections, self._config.keep_alive_s),
                timeout_keep_alive=math.ceil(self._config.keep_alive_s),
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                proxy_headers=False,
                server_header=False,
                h11_max_incomplete_event_size=MAX_HEAD_BYTES,
                timeout_graceful_shutdown=1,
            )
        )
        logging.getLogger("uvicorn.error").setLevel(logging.ERROR)  # otherwise any client could write to the log
        self._signals = asyncio.Queue[int]()
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def state_slot(self) -> str:
        """The cost of a state slot. It is empty before the model is loaded, and if no layer is recurrent."""
        return self._engine.info.state_slot if self._engine.info else ""

    def end(self) -> None:
        """Shut down as after a signal. Callable from any thread. Does nothing before and after `run`."""
        with suppress(RuntimeError):  # the loop is already closed
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._signals.put_nowait, signal.SIGTERM)

    async def run(
        self, listener: socket.socket, say: Callable[[str], object], signals: Iterable[int] = ()
    ) -> int | None:
        """Serve until a signal arrives. Return the number of the second signal, or None if all requests ended in time.

        `say` is called with the URL when the model is loaded. `signals`: the signals that end the server; main thread
        only. Raises UserError.
        """
        self._loop = loop = asyncio.get_running_loop()
        for number in signals:
            loop.add_signal_handler(number, self._signals.put_nowait, number)
        http = asyncio.create_task(self._http.serve([listener]))
        ending = asyncio.create_task(self._end_by_signals())
        try:
            await self._engine.start()
            if self._jobs is not None:
                self._jobs.start()
            ready = asyncio.create_task(self._engine.wait_ready())
            await asyncio.wait({ready, ending}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                say(f"{_url(listener)}/v1")
            ready.cancel()
            ended = asyncio.create_task(self._engine.ended())
            await asyncio.wait({ended, ending}, return_when=asyncio.FIRST_COMPLETED)
            if not ending.done():  # without an engine the server cannot answer
                ended.result()
                raise UserError("the engine's process ended and is not restarted: see the log")
            ended.cancel()
            return await ending
        finally:
            ending.cancel()
            await self._close_jobs()
            self._http.should_exit = True
            await asyncio.gather(http, self._engine.close(), return_exceptions=True)
            if self._service.response_store is not None:
                await self._service.response_store.close()

    async def _end_by_signals(self) -> int | None:
        """Wait for a signal, then until all requests have ended, the time limits pass, or a second signal arrives."""
        await self._signals.get()
        service = self._service
        service.is_draining = True
        await self._close_jobs()
        second = asyncio.create_task(self._signals.get())
        try:
            for seconds in (self._config.drain_s, LAST_S):
                idle = asyncio.create_task(service.idle.wait())
                done, _ = await asyncio.wait({idle, second}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                idle.cancel()
                if done:
                    break
                service.stopping.set()
            return second.result() if second.done() else None
        finally:
            second.cancel()

    async def _close_jobs(self) -> None:
        """Stop the batches. The next server continues them."""
        jobs, self._jobs = self._jobs, None
        if jobs is not None:
            await jobs.close()


def _jobs(config: ServeConfig) -> BatchJobs | None:
    if config.batches is None:
        return None
    return BatchJobs(Path(config.batches).expanduser(), config.batch_size, num_bytes(config.max_body))


class _Uvicorn(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave the signals to `_Server`."""
        yield


def _url(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _protocol(max_connections: int, keep_alive_s: float) -> type[H11Protocol]:
    """Return uvicorn's protocol with limits on connections and with errors in OpenAI's format."""

    class Bounded(H11Protocol):
        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            self.app_state = {**self.app_state, "abort": transport.abort, "write_now": self._write_now}
            if len(self.connections) > max_connections:
                self._refuse(
                    ApiError(503, "there are too many connections: try again", "server_error", code="connections")
                )
            else:
                self._wait_for_request(HEAD_S)

        def on_response_complete(self) -> None:
            super().on_response_complete()
            self._wait_for_request(keep_alive_s)

        def _wait_for_request(self, seconds: float) -> None:
            self.loop.call_later(seconds, self._close_if_silent, self.cycle)

        def _write_now(self, part: bytes) -> bool:
            """Write a part of a chunked body. Return False if `send` must do so: to wait, or for a client of HTTP/1.0.

            h11's objects, a timeout and the layers above cost more processor time than the part itself.
            """
            if self.flow.write_paused or self.cycle.disconnected or self.conn.their_http_version != b"1.1":
                return False
            self.transport.write(b"%x\r\n%b\r\n" % (len(part), part))
            return True

        def send_400_response(self, msg: str) -> None:
            self._refuse(ApiError(400, "the request is not valid HTTP"))

        def _refuse(self, error: ApiError) -> None:
            if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE) and (
                self.cycle is None or self.cycle.response_complete
            ):
                self.transport.write(whole_error(error))
            self.transport.close()

        def _close_if_silent(self, last: Any) -> None:
            if self.cycle is last and (last is None or last.response_complete):
                self.transport.close()

    return Bounded
