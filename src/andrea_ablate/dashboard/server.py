"""The dashboard's server: a list of sweeps and a page for each, read only, for one person on one machine.

It answers on loopback unless told otherwise, and then only to who knows the token: it comes once in the address and
stays in a cookie. On loopback it wants to be addressed as such, so that a web page elsewhere cannot reach it through a
name of its own.
"""

from __future__ import annotations

import hmac
import ipaddress
import shlex
from html import escape
from http import HTTPStatus
from http.cookies import SimpleCookie
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, quote, unquote, urlsplit

from andrea_ablate.dashboard.live import find, sweeps
from andrea_ablate.registry import ConfigError
from andrea_ablate.report.contents import contents
from andrea_ablate.report.page import document, render

HERE = Path(__file__).parent
POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'; img-src data:"
COOKIE = "andrea_ablate"


def is_loopback(host: str) -> bool:
    """Whether a name or address is this machine's own alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Dashboard(ThreadingHTTPServer):
    """Serves the sweeps of a folder.

    Args:
        address: host and port; port 0 takes a free one. token: None only on loopback.
    """

    daemon_threads = True

    def __init__(self, address: tuple[str, int], sweeps: Path, runs: Path, token: str | None = None) -> None:
        if token is None and not is_loopback(address[0]):
            raise ConfigError(f"--host {address[0]} is not loopback: others could read the runs; give a --token")
        super().__init__(address, Handler)
        self.sweeps, self.runs, self.token = sweeps, runs, token

    @property
    def url(self) -> str:
        host, port = self.server_address[:2]
        return f"http://{host!s}:{port}/" + (f"?token={quote(self.token)}" if self.token else "")


class Handler(BaseHTTPRequestHandler):
    server: Dashboard

    def do_GET(self) -> None:
        self._answer()

    do_HEAD = do_GET  # noqa: N815 (the base class names it so)

    def _answer(self) -> None:
        asked = urlsplit(self.path)
        given = parse_qs(asked.query).get("token", [""])[0]
        if not self._allowed(given):
            return self._send(
                HTTPStatus.FORBIDDEN, _note("Not allowed", "Open the address that the dashboard printed.")
            )
        try:
            page, version = self._page(unquote(asked.path))
        except ConfigError as error:
            return self._send(HTTPStatus.NOT_FOUND, _note("Not found", str(error)))
        except OSError as error:
            return self._send(HTTPStatus.INTERNAL_SERVER_ERROR, _note("Cannot read the runs", str(error)))
        return self._send(HTTPStatus.OK, page, version, given)

    def _allowed(self, given: str) -> bool:
        if self.server.token is None:
            return is_loopback(urlsplit(f"//{self.headers.get('Host', '')}").hostname or "")
        kept = SimpleCookie(self.headers.get("Cookie", "")).get(COOKIE)
        known = (given, unquote(kept.value) if kept else "")
        return any(hmac.compare_digest(one.encode(), self.server.token.encode()) for one in known)

    def _page(self, path: str) -> tuple[str, str]:
        """The page and its version. A request for the version alone (HEAD) makes no page."""
        server = self.server
        if path == "/":
            known = sweeps(server.sweeps, server.runs)
            version = "-".join(f"{sweep.version[:8]}" for sweep in known.values())
            lines = []
            for name, sweep in known.items():
                ended, planned = sweep.progress()
                lines.append(
                    f'<li><a href="/sweep/{quote(name)}">{escape(name)}</a>: {ended} of {planned} runs ended</li>'
                )
            body = f"<h1>Sweeps</h1>\n<ul>\n{chr(10).join(lines)}\n</ul>" if lines else "<h1>No sweeps yet</h1>"
            return self._live("Sweeps", body, version), version
        if not path.startswith("/sweep/"):
            raise ConfigError(f"'{path}' is no page; / lists the sweeps")
        sweep = find(path.removeprefix("/sweep/"), server.sweeps, server.runs)
        version = sweep.version
        if self.command == "HEAD":
            return "", version
        ended, planned = sweep.progress()
        command = shlex.join(
            ["python", "-m", "andrea_ablate.report", str(sweep.folder), "--runs", str(sweep.store.root)]
        )
        asked = shlex.join(["python", "-m", "andrea_ablate", *sweep.plan.command]) if sweep.plan else ""
        title, body = render([contents(sweep.folder.name, sweep.comparison(), sweep.store, asked, command)])
        top = f'<p class="note"><a href="/">All sweeps</a> · {ended} of {planned} runs ended</p>\n'
        return self._live(title, top + body, version), version

    @staticmethod
    def _live(title: str, body: str, version: str) -> str:
        script = (HERE / "live.js").read_text(encoding="utf-8")
        return document(title, body, head=f'<meta name="version" content="{version}">\n', script=script)

    def _send(self, status: HTTPStatus, page: str, version: str = "", given: str = "") -> None:
        content = page.encode()
        self.send_response(status)
        headers = {
            "Content-Type": "text/html; charset=utf-8",
            "Content-Length": str(len(content)),
            "Cache-Control": "no-store",
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
        }
        if version:
            headers["ETag"] = f'"{version}"'
        if given and self.server.token is not None:
            headers["Set-Cookie"] = f"{COOKIE}={quote(given)}; HttpOnly; SameSite=Strict; Path=/"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: an address may hold the token."""


def _note(title: str, text: str) -> str:
    return document(title, f"<h1>{escape(title)}</h1>\n<p>{escape(text)}</p>")
