"""The server of the live page: who may ask, one thread that runs the model, and requests that can be given up."""

from __future__ import annotations

import asyncio
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

from sinklab.checkpoints.loading import Loaded
from sinklab.errors import from_json, known_fields
from sinklab.live.live_text import LiveText
from sinklab.reports.payload import script
from sinklab.reports.style import THEMES, asset
from sinklab.sampling.settings import DecodingSettings

HERE = "127.0.0.1"
LONGEST = 1 << 16
"""bytes of a message of the page"""
AHEAD = 32
"""messages that the model may be ahead of a page"""
CONNECTIONS = 32
"""that are served at once"""
MOST_TOKENS = 4096
ASKS: dict[str, dict[str, type | tuple[type, ...]]] = {
    "write": {"prompt": str, "new_tokens": int, "seed": int},
    "take": {"step": int, "key": int, "layer": (int, type(None)), "head": (int, type(None))},
    "stop": {},
}
"""what a page may ask, and of which types"""


def parsed(text: str) -> tuple[str, dict[str, Any]]:
    """What a page asks, and its arguments. Raises ValueError for anything but what `ASKS` has, of its types."""
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
    """Lets in who came by the address that was printed, from a page of this server, on this machine; nobody else.

    Of every request Host and Origin are held to this server's own. The token of the address is taken once, for a cookie
    that no script reads and no other site sends.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app, self.name = app, f"sinklab-live-{port}"
        self.hosts = [f"{name}:{port}" for name in (HERE, "localhost")]
        self._headers = headers_for(self.hosts)
        self.token, self._key = secrets.token_urlsafe(32), secrets.token_urlsafe(32)
        self._is_taken = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; answers bear the headers that keep the page to itself."""
        fault = "" if scope["type"] == "lifespan" else self._fault(scope)
        if scope["type"] != "http":
            await (send({"type": "websocket.close", "code": 1008}) if fault else self.app(scope, receive, send))
            return
        app = PlainTextResponse(f"{fault}\n", 403) if fault else self.app
        given = HTTPConnection(scope).query_params.get("token")
        if given is not None and scope["path"] == "/" and not self._is_foreign(scope):
            app = self._exchange(scope, given)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await app(scope, receive, guarded)

    def _fault(self, scope: Scope) -> str:
        """Why a request is refused; empty where it is not."""
        if self._is_foreign(scope):
            return "This server answers pages of its own address alone."
        if not self._has_cookie(scope):
            return "Open the address that `sinklab serve` printed. It works once, in one browser; start anew for more."
        return ""

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
            return PlainTextResponse("This address was used already, or is not the one that was printed.\n", 403)
        self._is_taken = True
        answer.set_cookie(self.name, self._key, path="/", httponly=True, samesite="strict")
        return answer


def headers_for(hosts: list[str]) -> dict[str, str]:
    """Headers of every answer: nothing from elsewhere runs or is asked for, and nobody frames or keeps the page."""
    sockets = " ".join(f"ws://{host}" for host in hosts)
    policy = f"default-src 'none'; script-src 'self'; style-src 'self'; img-src data:; connect-src {sockets}; "
    policy += "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
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
    is_over: Event = field(default_factory=Event)

    def run(self, tell: Callable[[Job, dict[str, Any]], object]) -> None:
        """In the thread of the model: tell what comes, until it is given up. What is open in it ends here too."""
        try:
            # a request that was given up in the queue must not begin
            while not self.is_over.is_set() and (message := next(self.messages, None)) is not None:
                tell(self, message)
        except Exception as error:
            kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
            tell(self, {"kind": "failed", "text": f"{kind}{error}"})
        finally:
            self.messages.close()  # type: ignore[attr-defined]


class Live:
    """Pages and the one thread that runs the model for them, a request after another."""

    def __init__(self, loaded: Loaded, settings: DecodingSettings, *, chat: bool = False) -> None:
        """Raises ValueError as `LiveText` does."""
        self.loaded, self.settings, self.chat = loaded, settings, chat
        palette = {name: {"scale": theme.scale, "lines": theme.lines} for name, theme in THEMES.items()}
        self.about = {"kind": "model", "palette": palette, **self.live_text().about(), "seed": settings.seed or 0}
        self._thread = ThreadPoolExecutor(1, "model")
        self._jobs: dict[Job, Future] = {}

    def live_text(self) -> LiveText:
        """The text of a new page."""
        return LiveText(self.loaded, self.settings, chat=self.chat)

    def app(self) -> Starlette:
        """Page, script, style and socket; to be put behind a `Guard`."""
        explorer = asset("explorer.html").partition('<div id="explorer">')[2]
        page = Environment(autoescape=True, undefined=StrictUndefined).from_string(_own("live.html"))
        html = page.render(name=self.loaded.name, explorer=explorer)
        texts = {"/": (html, "text/html"), "/live.js": (script(_own("live.js")), "text/javascript")}
        texts["/live.css"] = (asset("style.css") + _own("live.css"), "text/css")
        routes: list[Any] = [Route(path, _answer(*told)) for path, told in texts.items()]
        return Starlette(routes=[*routes, WebSocketRoute("/socket", self.talk)])

    async def talk(self, page: WebSocket) -> None:
        """One page, from its opening to its end. A new request gives up the one before; so does the end."""
        await page.accept()
        loop, told = asyncio.get_running_loop(), asyncio.Queue[tuple[Job, dict]](AHEAD)
        live_text, job = self.live_text(), None

        def tell(by: Job, message: dict[str, Any]) -> None:
            if by.is_over.is_set():
                return
            put = asyncio.run_coroutine_threadsafe(told.put((by, message)), loop)
            # a page that reads slowly is waited for, unless it has gone
            while not by.is_over.is_set():
                with suppress(TimeoutError):
                    put.result(0.2)
                    return
            put.cancel()

        async def pass_on() -> None:
            with suppress(WebSocketDisconnect):
                while True:
                    by, message = await told.get()
                    if not by.is_over.is_set():
                        await page.send_json(message)

        sender = asyncio.create_task(pass_on())
        try:
            await page.send_json(self.about)
            while (given := await page.receive())["type"] == "websocket.receive":
                text = given.get("text")
                if text is None or len(text.encode()) > LONGEST:
                    await page.close(1009, "a message is text, and not so long")
                    break
                if job is not None:
                    job.is_over.set()
                job = self._begin(live_text, text, tell)
        finally:
            sender.cancel()
            if job is not None:
                job.is_over.set()

    def _begin(self, live_text: LiveText, text: str, tell: Callable[[Job, dict[str, Any]], None]) -> Job:
        """Put what a page asks into the queue."""
        job = Job(_messages(live_text, text))
        self._jobs = {one: future for one, future in self._jobs.items() if not future.done()}
        self._jobs[job] = self._thread.submit(job.run, tell)
        return job

    def end(self) -> bool:
        """Give up all requests; whether the thread was done within a second. A step that runs cannot be stopped."""
        for job in self._jobs:
            job.is_over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        return not wait(self._jobs.values(), timeout=1).not_done


def _messages(live_text: LiveText, text: str) -> Iterator[dict[str, Any]]:
    what, given = parsed(text)
    if what != "stop":
        yield from getattr(live_text, what)(**given)


def _own(name: str) -> str:
    return resources.files("sinklab.live").joinpath("assets", name).read_text("utf-8")


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
    try:
        listener = socket.create_server((HERE, port))
    except OSError as error:
        raise ValueError(f"port {port} of {HERE} cannot be had: {error.strerror}; take another, 0 for any") from error
    port = listener.getsockname()[1]
    guard = Guard(live.app(), port)
    how: dict[str, Any] = {"http": "h11", "ws": "websockets-sansio", "ws_max_size": LONGEST, "lifespan": "off"}
    # a log would hold the token; who forwards a port says nothing here
    how |= {"log_config": None, "access_log": False, "log_level": "critical", "proxy_headers": False}
    how |= {"server_header": False, "limit_concurrency": CONNECTIONS, "timeout_graceful_shutdown": 0}
    ready(f"http://{HERE}:{port}/?token={guard.token}")
    try:
        with suppress(KeyboardInterrupt):
            uvicorn.Server(uvicorn.Config(guard, **how)).run(sockets=[listener])
    finally:
        if not live.end():
            # a forward of a large model takes seconds, and nothing is kept that could be lost
            os._exit(130)
