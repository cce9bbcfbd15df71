"""Checks that apply to every request: head size, host name, API key, and type, size and arrival time of the body.

Pure ASGI. Every rejection has the format of its path's API. Every response carries the id of its request.
"""

import asyncio
import hmac
import logging
import os
import re
import stat
import traceback
from collections.abc import Mapping
from http import HTTPStatus
from pathlib import Path
from types import MappingProxyType
from uuid import uuid4

from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from conf.errors import UserError
from conf.serving import LOOPBACK, ServeConfig
from conf.support.sizes import num_bytes
from pipelines.server.api.adapters import ADMIN
from pipelines.server.api.errors import ANTHROPIC, ApiError, draining, failed
from pipelines.server.hosts import HostRule, in_origin_form
from pipelines.server.records import Record
from pipelines.server.service import Service

log = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 << 10
MAX_PATH = 256  # characters of a path in the log
BODY_S = 30.0  # time limit for the arrival of a body
KEYS, ADMIN_KEYS = "QUINTET_API_KEYS", "QUINTET_ADMIN_KEYS"
NO_KEY = ("/health", "/ready")
NO_KEYS: Mapping[str, bytes] = MappingProxyType({})
UPLOAD = ("POST", "/v1/files")  # this body is streamed to disk
WHILE_DRAINING = ("/health", "/metrics", "/version")
TRACE_CONTEXT = ("traceparent", "tracestate")
REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


def read_keys(file: str | None, setting: str = "serve.api_keys", variable: str = KEYS) -> dict[str, bytes]:
    """Return the keys by name, from a file or else from the environment; empty if there are none. Raises UserError.

    `setting`: the setting that names the file. `variable`: the environment variable, which is removed, so that child
    processes do not inherit the keys.
    """
    in_environment = os.environ.pop(variable, "")
    if file is None:
        source, text = variable, in_environment
    else:
        source = f"{setting}={file}"
        try:
            path = Path(file).expanduser()
            text = path.read_text(encoding="utf-8")
            if path.stat().st_mode & stat.S_IROTH:
                log.warning(
                    "%s may be read by every user of this machine: remove the permission with chmod o-r", source
                )
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"{source} cannot be read ({type(error).__name__}): give a file of UTF-8") from error
    keys: dict[str, bytes] = {}
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        if len(words) != 2 or words[0] in keys:
            raise UserError(f"{source}: line {number} is not a new name and its key: give `NAME KEY` in each line")
        keys[words[0]] = words[1].encode()
    if file is not None and not keys:
        raise UserError(f"{source} has no keys: give `NAME KEY` in each line")
    return keys


def read_admin_keys(config: ServeConfig, keys: Mapping[str, bytes]) -> dict[str, bytes]:
    """Return the keys of admins by name. `keys`: the other keys.

    Raises UserError if a name or a key is also one of `keys`, and if adapters may be loaded without a key of an admin.
    """
    admins = read_keys(config.admin_keys, "serve.admin_keys", ADMIN_KEYS)
    if config.adapter_folders and not admins:
        remedy = f"give serve.admin_keys=FILE or the environment's {ADMIN_KEYS}"
        raise UserError(f"serve.adapter_folders needs keys of admins: {remedy}")
    for name, key in admins.items():
        if name in keys or key in keys.values():
            raise UserError(f"serve.admin_keys: {name} or its key is also in serve.api_keys: give it once")
    return admins


def check_host(config: ServeConfig, keys: dict[str, bytes]) -> None:
    """Raise UserError for an address that other machines can reach without a key."""
    if config.host not in LOOPBACK and not keys:
        remedy = f"give serve.api_keys=FILE or the environment's {KEYS}"
        raise UserError(f"serve.host={config.host} is open to other machines and there are no API keys: {remedy}")


class Guard:
    """The outermost application: rejects invalid requests before the routes, and answers unhandled exceptions."""

    def __init__(
        self, app: ASGIApp, service: Service, keys: Mapping[str, bytes], admins: Mapping[str, bytes] = NO_KEYS
    ) -> None:
        """`keys`: the API keys by name; empty: no key is required, except on the paths of admins.

        `admins`: the keys that are valid on all paths.
        """
        config = service.config
        self._app = app
        self._service = service
        self._hosts = HostRule((config.host, *config.allowed_hosts))
        self._keys, self._admins = keys, admins
        self._body_limits = num_bytes(config.max_body), "serve.max_body", BODY_S
        self._upload_limits = num_bytes(config.max_upload), "serve.max_upload", config.request_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope = in_origin_form(scope)
        headers = dict(scope["headers"])
        request_id = headers.get(b"x-request-id", b"").decode("latin-1")
        record = Record(
            request_id if REQUEST_ID.fullmatch(request_id) else uuid4().hex, scope["method"], scope["path"][:MAX_PATH]
        )
        record.trace_context = {
            name: headers[name.encode()].decode("latin-1") for name in TRACE_CONTEXT if name.encode() in headers
        }
        scope.setdefault("state", {})["record"] = record

        more = [(b"x-request-id", record.id.encode())]
        if {
            b"transfer-encoding",
            b"content-length",
        } <= headers.keys():  # the end of the body is ambiguous (RFC 9112, 6.1)
            more.append((b"connection", b"close"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        self._service.began()
        is_known = False
        try:
            self._check_sender(scope, headers, record)
            is_known = True
            self._check(scope, headers)
            is_upload = (scope["method"], scope["path"]) == UPLOAD
            limits = self._upload_limits if is_upload else self._body_limits
            if scope["method"] == "HEAD":  # answered as GET; the HTTP server omits the body
                scope = {**scope, "method": "GET"}
            await self._app(scope, _bounded(receive, headers, *limits), send_with_id)
        except ApiError as error:
            await error_response(error, scope["path"])(scope, receive, send_with_id)
        except Exception:
            log.error("request %s failed:\n%s", record.id, traceback.format_exc())
            if record.status is None:
                await error_response(failed(), scope["path"])(scope, receive, send_with_id)
        finally:
            self._service.done(record, is_known)

    def _check_sender(self, scope: Scope, headers: dict[bytes, bytes], record: Record) -> None:
        if sum(len(name) + len(value) for name, value in scope["headers"]) > MAX_HEAD_BYTES:
            raise ApiError(431, f"the headers have more than {MAX_HEAD_BYTES} bytes: give less")
        self._hosts.check(scope, headers.get(b"host"))
        path = scope["path"]
        changes_adapters = bool(self._admins and self._service.config.adapter_folders)
        if path not in NO_KEY and (self._keys or (path in ADMIN and changes_adapters)):
            record.key = self._name_of(_key(path, headers))
        if path in ADMIN and not changes_adapters:
            remedy = "start the server with serve.adapter_folders=[FOLDER] and serve.admin_keys=FILE"
            raise ApiError(403, f"this server loads no adapters while it runs: {remedy}", "permission_error")
        if path in ADMIN and record.key not in self._admins:
            message = "this API key is not the key of an admin: give one of serve.admin_keys"
            raise ApiError(403, message, "permission_error")

    def _check(self, scope: Scope, headers: dict[bytes, bytes]) -> None:
        path = scope["path"]
        if self._service.is_draining and path not in WHILE_DRAINING:
            raise draining()
        if scope["method"] == "POST" and _has_body(headers):
            content = headers.get(b"content-type", b"").split(b";")[0].strip().lower()
            expected = b"multipart/form-data" if path == UPLOAD[1] else b"application/json"
            if content != expected:
                raise ApiError(415, f"the content-type of the body is not supported: give {expected.decode()}")

    def _name_of(self, presented_key: bytes) -> str:
        """Return the name of a key. All keys are compared in constant time, so that timing reveals nothing."""
        keys = {**self._keys, **self._admins}
        names = [name for name, key in keys.items() if hmac.compare_digest(key, presented_key)]
        if not names:
            remedy = "give the header Authorization: Bearer KEY, or x-api-key to /v1/messages and /v1/models"
            message = f"the API key is missing or unknown: {remedy}"
            raise ApiError(
                401, message, "authentication_error", code="invalid_api_key", headers={"www-authenticate": "Bearer"}
            )
        return names[0]


def _bounded(receive: Receive, headers: dict[bytes, bytes], most: int, setting: str, seconds: float) -> Receive:
    """Return a `receive` that limits the size and the arrival time of the body.

    Raises ApiError (413) for a declared length above the limit. The returned function raises ApiError (400, 413).
    """
    too_long = ApiError(413, f"the body has more than {most} bytes, which {setting} allows")
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > most:
        raise too_long
    deadline = asyncio.get_running_loop().time() + seconds
    size, is_whole = 0, False

    async def bounded() -> Message:
        nonlocal size, is_whole
        if is_whole:
            return await receive()
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError as error:
            late = f"the body took more than {seconds:g} s to arrive"
            raise ApiError(400, late, headers={"connection": "close"}) from error
        if message["type"] == "http.disconnect":
            raise ApiError(400, "the client disconnected before the body arrived")
        size += len(message.get("body", b""))
        is_whole = not message.get("more_body", False)
        if size > most:
            raise too_long
        return message

    return bounded


MODELS = "/v1/models"


def _has_body(headers: dict[bytes, bytes]) -> bool:
    return b"transfer-encoding" in headers or headers.get(b"content-length", b"0") != b"0"


def _key(path: str, headers: dict[bytes, bytes]) -> bytes:
    if path.startswith((ANTHROPIC, MODELS)) and (key := headers.get(b"x-api-key")):
        return key
    kind, _, key = headers.get(b"authorization", b"").partition(b" ")
    return key.strip() if kind.lower() == b"bearer" else b""


def error_response(error: ApiError, path: str = "") -> JSONResponse:
    """Return the response for an error, in the format of the path's API."""
    return JSONResponse(error.body(path), error.status, error.headers)


def whole_error(error: ApiError) -> bytes:
    """Return an error as raw HTTP, for a connection whose request cannot be parsed. It closes the connection."""
    answer = error_response(error)
    lines = [f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}".encode(), b"connection: close"]
    lines += [name + b": " + value for name, value in answer.raw_headers]
    return b"\r\n".join([*lines, b"", bytes(answer.body)])
