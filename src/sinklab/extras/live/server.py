"""The server of the live page: who may ask, one thread that runs the model, and requests that can
be given up.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field
from importlib import resources
from threading import Event
from typing import Any

import uvicorn
from jinja2 import Environment, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from sinklab.core.errors import known_fields
from sinklab.core.subject.settings import DecodingSettings
from sinklab.extras.live.connections import READING, PageConnection, Strangers, http_connection
from sinklab.extras.live.live_text import LiveText
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.files import from_json
from sinklab.lab.reports.payload import script
from sinklab.lab.reports.style import THEMES, asset

HERE = "127.0.0.1"
LONGEST = 1 << 16
"""bytes of a message of the page"""
AHEAD = 1 << 28
"""bytes that the model may be ahead of a page"""
PAGES = 16
"""that are open at once"""
TOO_SLOW = 1013
"""number under which a page is told that it fell too far behind: it may come again"""
MOST_TOKENS = 4096
ASKS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "write": {"prompt": str, "new_tokens": int, "seed": int},
    "block": {"step": int, "key": int, "layer": (int, type(None)), "head": (int, type(None))},
    "stop": {},
}
"""what a page may ask, and of which types"""


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """What a page asks, and its arguments. Raises ValueError for anything but what `ASKS` has, of
    its types.
    """
    given = from_json(text, dict)
    what = given.pop("ask", None)
    if not isinstance(what, str) or what not in ASKS:
        raise ValueError(f"a page asks one of {', '.join(ASKS)}, not {what!r}")
    known_fields(what, given, ASKS[what])
    for name, kind in ASKS[what].items():
        if not isinstance(given.get(name), kind) or isinstance(given[name], bool):
            raise ValueError(f"{name} of {what} has another type than it should")
    if not 1 <= given.get("new_tokens", 1) <= MOST_TOKENS:
        raise ValueError(f"new_tokens must be 1 to {MOST_TOKENS}, but is {given['new_tokens']}")
    return what, given


class Guard:
    """Lets in who came by the address that was printed, from a page of this server, on this
    machine; nobody else.

    Of every request Host and Origin are held to this server's own. The token of the address is
    taken once, for a cookie that no script reads and no other site sends.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app, self.name = app, f"sinklab-live-{port}"
        self.hosts = [f"{name}:{port}" for name in (HERE, "localhost")]
        self.strangers, self._pages = Strangers(), 0
        self._headers = headers_for(self.hosts)
        self.token, self._key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._is_taken = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; answers bear the headers that keep the page to
        itself.
        """
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
            return
        app = self._refusal(scope) or self.app
        given = HTTPConnection(scope).query_params.get("token")
        is_address = (
            scope["type"] == "http" and scope["path"] == "/" and not self._is_foreign(scope)
        )
        if is_address and given is not None:
            app = self._exchange(scope, given)

        async def guarded(message: Message) -> None:
            if message["type"].endswith("http.response.start"):
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        is_page = scope["type"] == "websocket" and app is self.app
        self._pages += is_page
        try:
            await app(scope, receive, guarded)
        finally:
            self._pages -= is_page

    def _refusal(self, scope: Scope) -> Response | None:
        """The answer to a request that is refused; None where it is not."""
        if self._is_foreign(scope):
            return _refused("This server answers pages of its own address alone.", 403)
        if not self._has_cookie(scope):
            once = "It works once, in one browser; start anew for more."
            return _refused(f"Open the address that `sinklab serve` printed. {once}", 403)
        self.strangers.forget(scope["client"])
        if scope["type"] == "websocket" and self._pages >= PAGES:
            return _refused(
                f"Too many pages: {PAGES} are open; close one, and load this one again.", 503
            )
        return None

    def _is_foreign(self, scope: Scope) -> bool:
        headers = Headers(scope=scope)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if len(hosts) != 1 or hosts[0] not in self.hosts:
            return True
        # a browser names the origin of every socket; of a page that is opened, none
        if origins != [f"http://{hosts[0]}"] and (origins or scope["type"] == "websocket"):
            return True
        return headers.get("sec-fetch-site", "none") not in ("none", "same-origin")

    def _has_cookie(self, scope: Scope) -> bool:
        given = HTTPConnection(scope).cookies.get(self.name, "")
        return secrets.compare_digest(given.encode(), self._key.encode())

    def _exchange(self, scope: Scope, given: str) -> Response:
        """A cookie for the token, once; who has the cookie already goes on to the page."""
        answer = RedirectResponse("/", 303)
        if self._has_cookie(scope):
            return answer
        if self._is_taken or not secrets.compare_digest(given.encode(), self.token.encode()):
            return _refused(
                "This address was used already, or is not the one that was printed.", 403
            )
        # who only looks whether there is a page, as previews of links do, leaves the address to its
        # owner
        if scope["method"] == "GET":
            self._is_taken = True
            answer.set_cookie(self.name, self._key, path="/", httponly=True, samesite="strict")
        return answer


def _refused(text: str, status: int) -> Response:
    return PlainTextResponse(f"{text}\n", status)


def headers_for(hosts: list[str]) -> dict[str, str]:
    """Headers of every answer: nothing from elsewhere runs or is asked for, and nobody frames or
    keeps the page.
    """
    sockets = " ".join(f"ws://{host}" for host in hosts)
    policy = (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; "
        f"connect-src {sockets}; "
    )
    policy += (
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'"
    )
    return {
        "content-security-policy": policy,
        "cross-origin-opener-policy": "same-origin",
        "cross-origin-resource-policy": "same-origin",
        "x-content-type-options": "nosniff",
        "referrer-policy": "no-referrer",
        "cache-control": "no-store",
    }


@dataclass(eq=False)
class Job:
    """One request of one page."""

    messages: Iterator[dict[str, Any]]
    number: int = 1
    """Of the requests of its page, from 1; every message bears it, so that late ones are known."""
    is_over: Event = field(default_factory=Event)

    def run(self, tell: Callable[[Job, dict[str, Any]], object]) -> None:
        """In the thread of the model: tell what comes, until it is given up. What is open in it
        ends here too.
        """
        try:
            # a request that was given up in the queue must not begin
            while not self.is_over.is_set() and (message := next(self.messages, None)) is not None:
                tell(self, message)
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            tell(self, {"kind": "failed", "text": f"{kind}{error}"})
        finally:
            self.messages.close()  # type: ignore[attr-defined]


class Outbox:
    """Messages that wait until a page takes them. Of a request that was given up none is told."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[Job, str] | None] = asyncio.Queue()
        self._size = 0

    def put(self, by: Job, text: str) -> None:
        """Add a message, which never waits. A page that is too far behind loses all of them, and
        its request.
        """
        if by.is_over.is_set():
            return
        self._size += len(text)
        if self._size <= AHEAD:
            self._waiting.put_nowait((by, text))
            return
        by.is_over.set()
        while not self._waiting.empty():
            self._waiting.get_nowait()
        self._waiting.put_nowait(None)

    async def take(self) -> str | None:
        """The next message, once there is one; None where the page has fallen too far behind."""
        while (one := await self._waiting.get()) is not None:
            by, text = one
            self._size -= len(text)
            if not by.is_over.is_set():
                return text
        return None


class Live:
    """Pages and the one thread that runs the model for them, a request after another."""

    def __init__(self, loaded: Loaded, settings: DecodingSettings, *, chat: bool = False) -> None:
        """Raises ValueError as `LiveText` does."""
        self.loaded, self.settings, self.chat = loaded, settings, chat
        self.about = {
            "kind": "model",
            "palette": {name: theme.scale for name, theme in THEMES.items()},
            **self.live_text().about(),
            "seed": settings.seed or 0,
        }
        self._thread = ThreadPoolExecutor(1, "model")
        self._jobs: dict[Job, Future] = {}

    def live_text(self) -> LiveText:
        """The text of a new page."""
        return LiveText(self.loaded, self.settings, chat=self.chat)

    def app(self) -> Starlette:
        """Page, script, style and socket; to be put behind a `Guard`."""
        explorer = asset("explorer.html").partition('<div id="explorer">')[2]
        page = Environment(autoescape=True, undefined=StrictUndefined).from_string(
            _own("live.html")
        )
        html = page.render(explorer=explorer, **self.about)
        texts = {"/": (html, "text/html"), "/live.js": (script(_own("live.js")), "text/javascript")}
        texts["/live.css"] = (asset("style.css") + _own("live.css"), "text/css")
        routes: list[Any] = [Route(path, _answer(*told)) for path, told in texts.items()]
        return Starlette(routes=[*routes, WebSocketRoute("/socket", self.talk)])

    async def talk(self, page: WebSocket) -> None:
        """One page, from its opening to its end. A new request gives up the one before; so does the
        end.
        """
        await page.accept()
        loop, outbox = asyncio.get_running_loop(), Outbox()
        live_text, job, number = self.live_text(), None, 0

        def tell(by: Job, message: dict[str, Any]) -> None:
            # the thread of the model hands over and goes on; RuntimeError: the server has ended
            if not by.is_over.is_set():
                with suppress(RuntimeError):
                    numbered = {**message, "request": by.number}
                    loop.call_soon_threadsafe(outbox.put, by, json.dumps(numbered))

        async def pass_on() -> None:
            with suppress(WebSocketDisconnect):
                while (text := await outbox.take()) is not None:
                    await page.send_text(text)
                await page.close(TOO_SLOW, "the page fell too far behind the model")

        await page.send_json(self.about)
        sender = asyncio.create_task(pass_on())
        try:
            while (given := await page.receive())["type"] == "websocket.receive":
                text = given.get("text")
                if text is None or len(text.encode()) > LONGEST:
                    await page.close(1009, "a message is text, and not so long")
                    break
                if job is not None:
                    job.is_over.set()
                number += 1
                job = self._begin(Job(_messages(live_text, text), number), tell)
        finally:
            sender.cancel()
            if job is not None:
                job.is_over.set()

    def _begin(self, job: Job, tell: Callable[[Job, dict[str, Any]], None]) -> Job:
        """Put the request of a page into the queue."""
        self._jobs = {one: future for one, future in self._jobs.items() if not future.done()}
        if any(not one.is_over.is_set() for one in self._jobs):
            tell(job, {"kind": "waiting"})
        self._jobs[job] = self._thread.submit(job.run, tell)
        return job

    def end(self) -> bool:
        """Give up all requests; whether the thread was done within a second. A step that runs
        cannot be stopped.
        """
        for job in self._jobs:
            job.is_over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        return not wait(self._jobs.values(), timeout=1).not_done


def _messages(live_text: LiveText, text: str) -> Iterator[dict[str, Any]]:
    what, given = parsed(text)
    if what != "stop":
        yield from getattr(live_text, what)(**given)


def _own(name: str) -> str:
    return resources.files("sinklab.extras.live").joinpath("assets", name).read_text("utf-8")


def _answer(text: str, kind: str) -> Callable[[Any], Response]:
    return lambda _: Response(text, media_type=kind)


def serve(
    loaded: Loaded,
    settings: DecodingSettings | None = None,
    *,
    port: int = 0,
    chat: bool = False,
    ready: Callable[[str], object] = print,
) -> None:
    """Serve the live page on this machine (127.0.0.1) until Ctrl-C.

    Args:
        loaded: a model that fills masks.
        settings: how it decodes; the page chooses the seed.
        port: 0 takes any that is free.
        chat: put prompts into the model's chat format.
        ready: called with the page's address, which works once, in one browser.

    Raises:
        ValueError: for a model that cannot be watched so, and a port that is taken.
    """
    live = Live(loaded, settings or DecodingSettings(), chat=chat)
    server, listener, guard = server_for(live, port)
    ready(f"http://{HERE}:{listener.getsockname()[1]}/?token={guard.token}")
    try:
        with suppress(KeyboardInterrupt):
            server.run(sockets=[listener])
    finally:
        if not live.end():
            # a forward of a large model takes seconds, and nothing is kept that could be lost
            os._exit(130)


def server_for(live: Live, port: int = 0) -> tuple[uvicorn.Server, socket.socket, Guard]:
    """The server of pages, the socket that it is to run with, and who guards it. Raises ValueError
    for a taken port.
    """
    try:
        listener = socket.create_server((HERE, port))
    except OSError as error:
        raise ValueError(
            f"port {port} of {HERE} cannot be had: {error.strerror}; take another, 0 for any"
        ) from error
    guard = Guard(live.app(), listener.getsockname()[1])
    how: dict[str, Any] = {"http": http_connection(guard.strangers), "ws": PageConnection}
    how |= {"ws_max_size": LONGEST, "ws_ping_timeout": READING, "lifespan": "off"}
    # a log would hold the token; who forwards a port says nothing here
    how |= {
        "log_config": None,
        "access_log": False,
        "log_level": "critical",
        "proxy_headers": False,
    }
    how |= {"server_header": False, "timeout_graceful_shutdown": 0}
    return uvicorn.Server(uvicorn.Config(guard, **how)), listener, guard
