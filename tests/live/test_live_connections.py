"""What becomes of connections that stop reading, never finish a request, or are too many: over real
sockets.
"""

import json
import socket
import threading
import time
from contextlib import ExitStack, contextmanager, suppress
from http.client import HTTPConnection
from unittest.mock import Mock

import pytest
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import connect

from launched import PATIENCE
from sinklab.core.subject.settings import DecodingSettings
from sinklab.extras.live import LiveText, connections, server
from sinklab.extras.live.server import Live, server_for
from sinklab.lab.checkpoints import load

LONG = "x" * (1 << 20)
"""of a message: no buffer between two sockets holds sixty of them"""


class Address:
    """A server that runs in a thread, as its owner and strangers reach it."""

    def __init__(self, port, token, guard=None):
        self.port, self.token, self.guard = port, token, guard
        self.here = f"127.0.0.1:{port}"
        self.origin = f"http://{self.here}"

    def connected(self):
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE)

    def answer(self, method, path, **headers):
        connection = HTTPConnection(self.here, timeout=PATIENCE)
        connection.request(method, path, headers=headers)
        answered = connection.getresponse()
        connection.close()
        return answered.status, answered.getheader("Set-Cookie")

    def cookie(self):
        status, cookie = self.answer("GET", f"/?token={self.token}")
        assert status == 303 and cookie is not None
        return cookie.partition(";")[0]

    def page(self, cookie, **how):
        given = {"origin": self.origin, "additional_headers": {"Cookie": cookie}} | how
        return connect(
            f"ws://{self.here}/socket",
            **given,
            open_timeout=PATIENCE,
            close_timeout=0.1,  # of one that reads nothing
            ping_interval=None,
            max_size=None,
            max_queue=1,
            compression=None,
        )


@contextmanager
def running(live):
    server, listener, guard = server_for(live)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        yield Address(listener.getsockname()[1], guard.token, guard)
    finally:
        server.should_exit = True
        thread.join()
        assert live.end()


@pytest.fixture
def address(monkeypatch):
    """Of a server that hurries nobody: a busy machine may keep the owner from showing the
    cookie.
    """
    monkeypatch.setattr(connections, "INTRODUCTION", 10 * PATIENCE)
    with running(Live(load("tiny"), DecodingSettings())) as address:
        yield address


def told(page):
    message = json.loads(page.recv(PATIENCE))
    return told(page) if message["kind"] == "waiting" else message


def write(page, prompt):
    page.send(json.dumps({"ask": "write", "prompt": prompt, "new_tokens": 1, "seed": 0}))


def writes_much(_, prompt, new_tokens, seed):
    for step in range(60 if prompt == "much" else 1):
        yield {"kind": "step", "step": step, "prompt": prompt, "filling": LONG}


@pytest.mark.slow
def test_a_page_that_stops_reading_keeps_nobody_waiting(address, monkeypatch):
    monkeypatch.setattr(LiveText, "write", writes_much)
    cookie = address.cookie()
    with address.page(cookie) as deaf, address.page(cookie) as other:
        assert told(deaf)["kind"] == told(other)["kind"] == "model"
        write(deaf, "much")
        assert told(deaf)["step"] == 0
        # of what comes now its client reads a message or two ahead, and no more
        write(other, "little")
        assert told(other)["prompt"] == "little"


@pytest.mark.slow
def test_a_page_that_reads_nothing_is_cut_off_and_may_come_again(address, monkeypatch):
    monkeypatch.setattr(LiveText, "write", writes_much)
    monkeypatch.setattr(connections, "READING", 0.5)
    cookie = address.cookie()
    with address.page(cookie) as deaf:
        told(deaf)
        write(deaf, "much")
        # its place among the pages is free again, while it still stands there
        while address.guard._pages:
            time.sleep(0.01)
        with pytest.raises(ConnectionClosed):
            while True:
                told(deaf)
    with address.page(cookie) as again:
        assert told(again)["kind"] == "model"


def test_what_a_page_is_behind_is_bounded(address, monkeypatch):
    monkeypatch.setattr(LiveText, "write", writes_much)
    monkeypatch.setattr(server, "AHEAD", 3 * len(LONG))
    cookie = address.cookie()
    with address.page(cookie) as slow, address.page(cookie) as other:
        assert told(slow)["kind"] == told(other)["kind"] == "model"
        write(slow, "much")
        # whose answer comes when everything is written to the one that reads nothing meanwhile
        write(other, "little")
        assert told(other)["kind"] == "step"
        with pytest.raises(ConnectionClosed) as end:
            while True:
                told(slow)
    assert end.value.rcvd is not None and end.value.rcvd.code == 1013


def test_strangers_who_never_finish_a_request_keep_nobody_out(address):
    with ExitStack() as half_open:
        for _ in range(40):
            stranger = half_open.enter_context(address.connected())
            stranger.sendall(b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n")
        cookie = address.cookie()
        assert address.answer("GET", "/", Cookie=cookie)[0] == 200
        with address.page(cookie) as page:
            assert told(page)["kind"] == "model"


def test_who_shows_no_cookie_is_closed_in_time_and_the_owner_is_not(address, monkeypatch):
    with address.page(address.cookie()) as page:
        assert told(page)["kind"] == "model"
        monkeypatch.setattr(connections, "INTRODUCTION", 0.2)
        strangers = [address.connected() for _ in range(3)]
        strangers[0].sendall(b"GET / HTTP/1.1\r\nHost:")
        strangers[1].sendall(f"GET / HTTP/1.1\r\nHost: {address.here}\r\n\r\n".encode())
        for stranger in strangers:
            with stranger, suppress(ConnectionResetError):
                # what is answered, and then the end
                while stranger.recv(1 << 16):
                    pass
        assert not address.guard.strangers._waiting, "the page is known, and no timer runs for it"
        page.send("{}")
        assert told(page)["kind"] == "failed"


class Loop:
    """A clock and its timers, turned by hand."""

    def __init__(self):
        self.now, self.timers = 0.0, []

    def time(self):
        return self.now

    def call_later(self, seconds, call, *given):
        self.timers.append((call, *given))
        return Mock()

    def fire(self):
        call, *given = self.timers.pop()
        call(*given)


def test_a_server_that_was_kept_from_its_work_gives_the_time_again(monkeypatch):
    """What the owner sent meanwhile is still to be read when the timer comes."""
    loop, strangers, transport = Loop(), connections.Strangers(), Mock()
    monkeypatch.setattr(connections.asyncio, "get_running_loop", lambda: loop)
    strangers.came(transport)
    loop.now += connections.INTRODUCTION + 20
    loop.fire()
    assert not transport.abort.called
    loop.now += connections.INTRODUCTION
    loop.fire()
    assert transport.abort.called and not strangers._waiting


def test_the_oldest_stranger_makes_room(address, monkeypatch):
    monkeypatch.setattr(connections, "STRANGERS", 2)
    with address.connected() as first, address.connected(), address.connected():
        with suppress(ConnectionResetError):
            assert first.recv(1) == b""
        assert address.cookie()


def test_too_many_pages_are_told_so(address, monkeypatch):
    monkeypatch.setattr(server, "PAGES", 1)
    cookie = address.cookie()
    with address.page(cookie) as page:
        told(page)
        with pytest.raises(InvalidStatus, match="503") as refused, address.page(cookie):
            pass
        assert b"Too many pages" in refused.value.response.body
    with pytest.raises(InvalidStatus, match="403"), address.page("no=cookie"):
        pass


def test_a_head_of_the_address_leaves_it_unused(address):
    for method in ("HEAD", "POST", "OPTIONS"):
        assert address.answer(method, f"/?token={address.token}")[1] is None
    assert address.cookie()
