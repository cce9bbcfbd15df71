"""The host rule of what listens: a request must name this machine. A page whose name was made to mean it (DNS rebinding) does not."""

import ipaddress
import re
from collections.abc import Iterable, Mapping
from typing import Any

from starlette.types import Scope

from conf.serving import LOOPBACK
from pipelines.api.errors import ApiError


class HostRule:
    """Knows the names of a server: this machine's, those given, and the address to which a request came."""

    def __init__(self, names: Iterable[str]) -> None:
        self._names = {name.lower() for name in (*LOOPBACK, *names)}

    def check(self, scope: Mapping[str, Any], header: bytes | None) -> None:
        """Raise ApiError for a request whose header Host is missing or names another server. `scope`: ASGI's."""
        if header is None and scope.get("http_version") == "1.0":  # which has no such header, and no browser speaks it
            return
        if header is None:
            raise ApiError(400, "there is no header Host: give one")
        name = re.sub(r":\d*$", "", header.decode("latin-1")).strip("[]").lower()
        if name not in self._names and not _is_own_address(name, scope):
            raise ApiError(421, "the header Host names another server: give its name to serve.allowed_hosts")


def in_origin_form(scope: Scope) -> Scope:
    """Return a scope whose target is a whole URL as one of its path. The URL's host replaces the header's (RFC 9112, 3.2.2)."""
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
