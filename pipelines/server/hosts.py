"""Host check against DNS rebinding: a request must name this server in its Host header."""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Scope

from conf.serving import LOOPBACK
from pipelines.server.api.errors import ApiError


class HostRule:
    """The host names of a server: loopback names, configured names, and the address that a request reached."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {name.lower() for name in (*LOOPBACK, *names)}

    def check(self, scope: Mapping[str, Any], header: bytes | None) -> None:
        """Raise ApiError if the Host header is missing or names another server. `scope`: ASGI scope."""
        if header is None and scope.get("http_version") == "1.0":  # no browser uses HTTP/1.0
            return
        if header is None:
            raise ApiError(400, "the header Host is missing: give it")
        name = re.sub(r":\d*$", "", header.decode("latin-1")).strip("[]").lower()
        if name not in self._names and not _is_own_address(name, scope):
            raise ApiError(421, "the header Host names another server: add the name to serve.allowed_hosts")


def in_origin_form(scope: Scope) -> Scope:
    """Convert an absolute-form target to a path. The URL's host replaces the Host header (RFC 9112, 3.2.2)."""
    target = re.fullmatch(r"https?://([^/]+)(/.*)?", scope["path"], re.IGNORECASE | re.DOTALL)
    if target is None:
        return scope
    headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
    host = (b"host", target[1].encode("latin-1", "replace"))
    path = target[2] or "/"
    return {**scope, "path": path, "raw_path": path.encode(), "headers": [host, *headers]}


def _is_own_address(name: str, scope: Mapping[str, Any]) -> bool:
    try:
        return scope.get("server") is not None and ipaddress.ip_address(name) == ipaddress.ip_address(
            scope["server"][0]
        )
    except ValueError:
        return False
