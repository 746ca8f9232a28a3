"""Access control of the viewer: who may ask, from where, for what, and which headers every answer carries.

Text of agents is hostile, and so are other pages in the browser and other users of the machine. The token in
the printed address is taken once and becomes an HttpOnly cookie; only GET and HEAD exist.
"""

from __future__ import annotations

import ipaddress
import logging
import secrets

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

log = logging.getLogger(__name__)
MAX_CONNECTIONS = 64
MAX_URL_CHARS = 4096
SECURITY_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self';"
    " font-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " require-trusted-types-for 'script'; trusted-types 'none'"
)
HEADERS = {
    "Content-Security-Policy": SECURITY_POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
DOWNLOAD_HEADERS = {"Content-Security-Policy": "sandbox; default-src 'none'"}


def is_loopback(host: str) -> bool:
    """Return whether a server bound to `host` is reachable from this machine only."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """Middleware that refuses every request the viewer should not answer."""

    def __init__(self, host: str, port: int) -> None:
        """Guard the server at host:port."""
        self.token = secrets.token_urlsafe(32)
        self._cookie = f"insitu_{port}"
        named = f"[{host}]" if ":" in host else host
        self._hosts = {f"{name}:{port}" for name in (named, "127.0.0.1", "localhost", "[::1]")}
        # A server on every address has names that it cannot list; its token still guards it.
        self._any_host = host in ("0.0.0.0", "::")
        self._open = 0

    @property
    def middleware(self) -> Middleware:
        """The aiohttp middleware."""

        @web.middleware
        async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
            if self._open >= MAX_CONNECTIONS:
                return refusal(503, "too many requests at the same time")
            self._open += 1
            try:
                return self._refusal(request) or self._entry(request) or await handler(request)
            except web.HTTPException as error:
                return refusal(error.status, error.reason)
            except Exception as error:  # whatever is stored, one page must not end the viewer
                log.exception("page failed path=%s", request.path)
                return refusal(500, f"this page cannot be shown: {type(error).__name__}")
            finally:
                self._open -= 1

        return guard

    def _refusal(self, request: web.Request) -> web.Response | None:
        host = request.headers.get("Host", "")
        if not self._any_host and host not in self._hosts:
            return refusal(421, "this server answers to its own address only")
        if request.method not in ("GET", "HEAD"):
            return refusal(405, "only GET and HEAD")
        site = request.headers.get("Sec-Fetch-Site", "none")
        # A link from another page may open the viewer, but may not read from it.
        if (
            site not in ("same-origin", "none")
            or request.headers.get("Origin", f"http://{host}") != f"http://{host}"
        ):
            return refusal(403, "requests of other sites are refused")
        if len(request.raw_path) > MAX_URL_CHARS:
            return refusal(414, "the address is too long")
        return None

    def _entry(self, request: web.Request) -> web.Response | None:
        """Exchange the token of the address for a cookie; refuse a request without either."""
        given = request.query.get("token", "")
        if request.path == "/" and given and self._matches(given):
            answer = web.Response(status=303, headers={**HEADERS, "Location": "/"})
            answer.set_cookie(self._cookie, self.token, httponly=True, samesite="Strict", path="/")
            return answer
        bearer = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if self._matches(request.cookies.get(self._cookie, "")) or self._matches(bearer):
            return None
        return refusal(401, "open the address that insitu view printed: it has a token")

    def _matches(self, given: str) -> bool:
        return secrets.compare_digest(given.encode("utf-8", "replace"), self.token.encode())


def refusal(status: int, text: str) -> web.Response:
    """Return an error as JSON with the headers of every answer."""
    return web.json_response({"error": text}, status=status, headers=HEADERS)
