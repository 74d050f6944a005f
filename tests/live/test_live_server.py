"""Who may ask the live page's server, what, and what becomes of a request that is given up."""

import itertools
import json
import os
import re
import signal
import socket
import subprocess
import threading
from contextlib import contextmanager

import pytest
from starlette.testclient import TestClient
from starlette.websockets import WebSocketDisconnect
from websockets.exceptions import ConnectionClosedError, InvalidStatus
from websockets.sync.client import connect

from launched import PATIENCE
from sinklab.core.subject.settings import DecodingSettings
from sinklab.extras.live import LiveText
from sinklab.extras.live.server import LONGEST, Guard, Live
from sinklab.lab.checkpoints import load

PORT = 8750
HERE = f"http://127.0.0.1:{PORT}"
PAGES = ("/", "/nothing")


@pytest.fixture(scope="module")
def live():
    live = Live(load("tiny"), DecodingSettings(seed=7))
    yield live
    assert live.end()


@pytest.fixture
def guard(live):
    return Guard(live.app(), PORT)


@pytest.fixture
def stranger(guard):
    async def app(scope, *how):
        # all pages of a client share the loop of its lifespan, which the server itself has none of
        await (guard.app if scope["type"] == "lifespan" else guard)(scope, *how)

    with TestClient(app, base_url=HERE) as client:
        yield client


@pytest.fixture
def client(stranger, guard):
    """A browser that came by the address."""
    stranger.params = {"token": guard.token}
    return stranger


def socket_of(client):
    """The socket that a page opens, by the address that it has itself."""
    return client.websocket_connect(f"ws://127.0.0.1:{PORT}/socket?{client.params}")


@pytest.mark.parametrize("token", [None, "", "x", "first 40 letters"])
def test_nobody_is_let_in_without_the_address(stranger, guard, token):
    if token is not None:
        stranger.params = {"token": token.replace("first 40 letters", guard.token[:40])}
    for path in PAGES:
        answer = stranger.get(path)
        assert answer.status_code == 403 and "sinklab serve" in answer.text
    with pytest.raises(WebSocketDisconnect), socket_of(stranger):
        pass


def test_no_cookie_lets_anybody_in(client):
    """What a browser sends along by itself, a page from elsewhere could use."""
    assert client.get("/").status_code == 200 and not client.cookies
    client.params = {}
    assert client.get("/").status_code == 403


def test_the_page_asks_for_nothing_from_elsewhere_and_holds_no_script(client):
    page, script, style = (client.get(path) for path in ("/", "/live.js", "/live.css"))
    for answer in (page, script, style, client.get("/nothing", params={"token": ""})):
        policy = answer.headers["content-security-policy"]
        assert (
            "unsafe" not in policy
            and "*" not in policy
            and "script-src 'self';" in policy
            and "http" not in policy
        )
        assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy
        assert (
            answer.headers["referrer-policy"] == "no-referrer"
            and answer.headers["cache-control"] == "no-store"
        )
        assert answer.headers["x-content-type-options"] == "nosniff"
    assert [answer.status_code for answer in (page, script, style)] == [200] * 3
    assert re.findall(r"<script[^>]*>([^<]*)", page.text) == [""]
    assert "The model is <b>tiny</b>" in page.text and "6 layers of 6 heads" in page.text
    assert not re.search(r"\sstyle=|\son\w+=|<style|javascript:", page.text)
    assert not re.search(
        r"https?://(?!www\.w3\.org/2000/svg)", page.text + script.text + style.text
    )


@contextmanager
def opened(client):
    """A page that knows its model."""
    with socket_of(client) as page:
        assert page.receive_json()["kind"] == "model"
        yield page


def heard(page, *kinds):
    """Messages up to the first of one of these kinds."""
    messages = [page.receive_json()]
    while messages[-1]["kind"] not in kinds:
        messages.append(page.receive_json())
    return messages


def ask(page, what, **given):
    page.send_text(json.dumps({"ask": what, **given}))


def test_a_text_is_written_and_a_sink_blocked(client):
    with socket_of(client) as page:
        about = page.receive_json()
        assert (about["kind"], about["layers"], about["heads"], about["seed"]) == ("model", 6, 6, 7)
        ask(page, "block", step=0, key=0, layer=None, head=None)
        assert "write one first" in heard(page, "failed", "written")[-1]["text"]
        ask(page, "write", prompt="The house", new_tokens=4, seed=0)
        told = heard(page, "failed", "written")
        assert [one.get("step") for one in told] == [0, 1, 2, 3, None] and told[-1]["steps"] == 4
        ask(page, "block", step=2, key=0, layer=None, head=None)
        told = heard(page, "failed", "written")
        kinds = ["again", "again", "step", "step", "measuring", "measuring", "written"]
        assert [one["kind"] for one in told] == kinds
        assert {one["request"] for one in told} == {3}, (
            "by which a page knows late ones of another request"
        )
        assert {"plain_loss", "edited_loss", "moved"} <= told[-1]["measured"].keys()
        for asked, message in (
            ('{"ask": "load", "model": "/etc"}', "must be one of write, block, stop"),
            ("{}", "must be one of"),
            (
                '{"ask": "write", "prompt": "a", "model": "x"}',
                "unexpected keyword argument 'model'",
            ),
            ("[]", "must hold a dict"),
        ):
            page.send_text(asked)
            assert message in heard(page, "failed")[-1]["text"]
        ask(page, "write", prompt="\ud800", new_tokens=4, seed=0)
        assert "UTF-8" in heard(page, "failed", "written")[-1]["text"]


class Slow:
    """In place of a text: steps without an end, one for each permit."""

    def __init__(self):
        self.began, self.ended = (threading.Semaphore(0) for _ in range(2))
        self.permits = threading.Semaphore(0)
        self.running = []

    def end(self):
        """Let steps run until one request has ended: when the server has heard of its end, nobody
        knows.
        """
        for _ in range(20 * PATIENCE):
            self.permits.release()
            if self.ended.acquire(timeout=0.05):
                return
        raise AssertionError("the request goes on")

    def write(self, live_text, prompt, new_tokens, seed):
        try:
            self.running.append(threading.current_thread().name)
            self.began.release()
            for step in itertools.count():
                assert self.permits.acquire(timeout=PATIENCE)
                yield {"kind": "step", "step": step, "prompt": prompt}
        finally:
            self.ended.release()


@pytest.fixture
def slow(monkeypatch):
    slow = Slow()
    monkeypatch.setattr(
        LiveText, "write", lambda live_text, **given: slow.write(live_text, **given)
    )
    return slow


def write(page, prompt):
    ask(page, "write", prompt=prompt, new_tokens=1, seed=0)


def test_a_new_request_gives_up_the_one_before(client, slow):
    with opened(client) as page:
        write(page, "first")
        slow.permits.release()
        assert page.receive_json()["prompt"] == "first"
        write(page, "second")
        slow.end()
        slow.permits.release(2)
        prompts = [page.receive_json()["prompt"]]
        while prompts[-2:] != ["second", "second"]:
            prompts.append(page.receive_json()["prompt"])
        assert prompts == sorted(prompts), "nothing comes of a request that was given up"
        ask(page, "stop")
        slow.end()
    assert len(slow.running) == 2


def test_a_page_that_is_closed_gives_up_its_request(client, slow):
    with opened(client) as page:
        write(page, "first")
        assert slow.began.acquire(timeout=PATIENCE)
    slow.end()


def test_requests_of_two_pages_run_one_after_another_in_one_thread(client, slow):
    with opened(client) as one:
        with opened(client) as other:
            write(one, "one")
            assert slow.began.acquire(timeout=PATIENCE)
            write(other, "other")
            assert other.receive_json()["kind"] == "waiting"
            slow.permits.release(2)
            assert [one.receive_json()["prompt"] for _ in range(2)] == ["one", "one"]
            assert len(slow.running) == 1
            ask(one, "stop")
            slow.end()
            slow.permits.release()
            assert other.receive_json()["prompt"] == "other"
        slow.end()
    assert set(slow.running) == {"model_0"}


def test_a_request_that_is_given_up_in_the_queue_never_begins(client, slow):
    with opened(client) as one:
        write(one, "one")
        assert slow.began.acquire(timeout=PATIENCE)
        with opened(client) as other:
            write(other, "other")
            write(other, "again")
            assert other.receive_json()["kind"] == "waiting"
        # requests run in the order in which they come: what begins now is behind those of the page
        # that has gone
        write(one, "last")
        slow.end()
        assert slow.began.acquire(timeout=PATIENCE)
        ask(one, "stop")
        slow.end()
    assert len(slow.running) == 2


def test_an_error_that_nobody_expected_is_told_and_the_thread_goes_on(client, monkeypatch):
    def fails(*_, **__):
        yield {"kind": "step"}
        raise RuntimeError("out of memory")

    with opened(client) as page:
        with monkeypatch.context() as patched:
            patched.setattr(LiveText, "write", fails)
            write(page, "a")
            assert heard(page, "failed")[-1]["text"] == "RuntimeError: out of memory"
        write(page, "a")
        assert heard(page, "failed", "written")[-1]["kind"] == "written"


@pytest.mark.slow
def test_the_command_serves_this_machine_alone_and_ctrl_c_ends_it(python):
    command = [python, "-m", "sinklab", "serve", "--model", "tiny", "--port", "0"]
    started = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
    )
    try:
        assert started.stdout is not None
        found = re.match(
            r"open http://127\.0\.0\.1:(\d+)/\?token=(\S+)\n", started.stdout.readline()
        )
        assert found is not None, started.stderr and started.stderr.read()
        port = int(found[1])
        here = f"127.0.0.1:{port}"

        def page(token=found[2]):
            return connect(f"ws://{here}/socket?token={token}", open_timeout=PATIENCE)

        with (
            pytest.raises(OSError),
            socket.create_connection(("127.0.0.2", port), timeout=PATIENCE),
        ):
            pass
        taken = subprocess.run([*command[:-1], str(port)], capture_output=True, text=True)
        assert taken.returncode == 2 and f"port {port} of 127.0.0.1 cannot be had" in taken.stderr
        with pytest.raises(InvalidStatus, match="403"), page("x"):
            pass
        with page() as socket_of_page:
            assert json.loads(socket_of_page.recv(PATIENCE))["kind"] == "model"
            socket_of_page.send("x" * (LONGEST + 1))
            with pytest.raises(ConnectionClosedError, match="1009"):
                socket_of_page.recv(PATIENCE)
        with page() as socket_of_page:
            socket_of_page.recv(PATIENCE)
            socket_of_page.send(
                json.dumps({"ask": "write", "prompt": "a", "new_tokens": 200, "seed": 0})
            )
            assert json.loads(socket_of_page.recv(PATIENCE))["step"] == 0
            started.send_signal(signal.SIGINT)
            assert started.wait(PATIENCE) == 0
        assert started.stdout.read().endswith("ended\n") and started.stderr
        said = started.stderr.read().splitlines()
        assert all(line.endswith("loading tiny") for line in said) and len(said) == 1
    finally:
        started.kill()
        started.communicate()
