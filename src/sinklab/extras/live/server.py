"""The server of the live page: who may ask, one thread that runs the model, and requests that can
be given up.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import Callable, Generator
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextlib import closing, suppress
from dataclasses import dataclass, field
from importlib import resources
from secrets import compare_digest
from threading import Event
from typing import Any

import uvicorn
from jinja2 import Environment, StrictUndefined
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import HTTPConnection
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route, WebSocketRoute
from starlette.types import ASGIApp, Receive, Scope, Send
from starlette.websockets import WebSocket, WebSocketDisconnect

from sinklab.core.errors import one_of
from sinklab.core.subject.settings import DecodingSettings
from sinklab.extras.live.live_text import LiveText, Message
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.files import from_json
from sinklab.lab.reports.payload import script
from sinklab.lab.reports.style import THEMES, asset

HERE = "127.0.0.1"
LONGEST = 1 << 16
"""bytes of a message of the page"""
ASKS = ("write", "block", "stop")
ASSETS = ("/live.js", "/live.css")
"""files of the package, which anybody may read"""


class Guard:
    """Lets in who has the token of the address that was printed; nobody else.

    The token stands in the address of the page and of its socket, and no cookie goes along by
    itself: a page from elsewhere, or a name that resolves to this machine, is refused.
    """

    def __init__(self, app: ASGIApp, port: int) -> None:
        self.app, self.token = app, secrets.token_urlsafe(32)
        self._headers = headers_for([f"{name}:{port}" for name in (HERE, "localhost")])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it; answers bear the headers that keep the page to
        itself.
        """
        app, given = self.app, HTTPConnection(scope).query_params.get("token", "")
        if scope["path"] not in ASSETS and not compare_digest(given.encode(), self.token.encode()):
            app = PlainTextResponse("Open the address that `sinklab serve` printed.\n", 403)

        async def guarded(message: Any) -> None:
            if message["type"].endswith("http.response.start"):
                MutableHeaders(scope=message).update(self._headers)
            await send(message)

        await app(scope, receive, guarded)


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

    messages: Generator[Message]
    number: int = 0
    """Of the requests of its page, from 1; every message bears it, so that late ones are known."""
    is_over: Event = field(default_factory=Event)


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
        loop, live_text = asyncio.get_running_loop(), self.live_text()
        job = Job(_messages(live_text, "{}"))

        def tell(by: Job, message: Message) -> None:
            # the thread of the model waits until the page has taken it
            sent = page.send_text(json.dumps({**message, "request": by.number}))
            asyncio.run_coroutine_threadsafe(sent, loop).result()

        await page.send_json(self.about)
        try:
            async for text in page.iter_text():
                job.is_over.set()
                job = Job(_messages(live_text, text), job.number + 1)
                self._jobs = {one: done for one, done in self._jobs.items() if not done.done()}
                if any(not one.is_over.is_set() for one in self._jobs):
                    await page.send_json({"kind": "waiting", "request": job.number})
                self._jobs[job] = self._thread.submit(self._run, job, tell)
        finally:
            job.is_over.set()

    @staticmethod
    def _run(job: Job, tell: Callable[[Job, Message], object]) -> None:
        """In the thread of the model: tell what comes, until it is given up, or the page or the
        server has gone. What is open in the request ends here too.
        """
        gone = (CancelledError, RuntimeError, WebSocketDisconnect)
        with closing(job.messages), suppress(StopIteration, *gone):
            # a request that was given up in the queue must not begin
            while not job.is_over.is_set():
                tell(job, next(job.messages))

    def end(self) -> bool:
        """Give up all requests; whether the thread was done within a second. A step that runs
        cannot be stopped.
        """
        for job in self._jobs:
            job.is_over.set()
        self._thread.shutdown(wait=False, cancel_futures=True)
        return not wait(self._jobs.values(), timeout=1).not_done


def _messages(live_text: LiveText, text: str) -> Generator[Message]:
    """What becomes of a page's request: the messages of `LiveText`, or why it failed."""
    try:
        given = from_json(text, dict)
        what = given.pop("ask", None)
        one_of("ask", what, ASKS)
        if what != "stop":
            yield from getattr(live_text, what)(**given)
    except Exception as error:
        kind = "" if isinstance(error, ValueError) else f"{type(error).__name__}: "
        yield {"kind": "failed", "text": f"{kind}{error}"}


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
        ready: called with the page's address.

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
    how: dict[str, Any] = {"ws_max_size": LONGEST, "lifespan": "off"}
    # a log would hold the token; who forwards a port says nothing here
    how |= {
        "log_config": None,
        "access_log": False,
        "log_level": "critical",
        "proxy_headers": False,
    }
    how |= {"server_header": False, "timeout_graceful_shutdown": 0}
    return uvicorn.Server(uvicorn.Config(guard, **how)), listener, guard
