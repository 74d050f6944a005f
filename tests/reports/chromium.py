"""A real browser for tests: headless Chromium, driven over the DevTools protocol on a pipe."""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Self

from launched import PATIENCE

PROGRAM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-sync",
    "--disable-component-update",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
    "--window-size=1280,800",
)
# Chromium reads commands from descriptor 3 and answers on 4.
LAUNCH = """import fcntl, os, sys
read, write = (fcntl.fcntl(int(number), fcntl.F_DUPFD, 10) for number in sys.argv[1:3])
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])"""
KEYS = {
    " ": ("Space", 32),
    "ArrowRight": ("ArrowRight", 39),
    "ArrowLeft": ("ArrowLeft", 37),
    "ArrowUp": ("ArrowUp", 38),
    "ArrowDown": ("ArrowDown", 40),
    "Home": ("Home", 36),
    "End": ("End", 35),
}


class Page:
    """One tab; ``requests``, ``complaints`` and ``errors`` collect what the browser says of it."""

    def __init__(self, folder: Path) -> None:
        assert PROGRAM is not None
        read, self._to = os.pipe()
        self._from, write = os.pipe()
        profile = f"--user-data-dir={folder / 'profile'}"
        command = [
            sys.executable,
            "-c",
            LAUNCH,
            str(read),
            str(write),
            PROGRAM,
            *FLAGS,
            profile,
            "about:blank",
        ]
        self._process = subprocess.Popen(
            command,
            pass_fds=(read, write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env=os.environ | {"HOME": str(folder)},
        )
        os.close(read)
        os.close(write)
        self._rest, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.complaints: list[str] = []

    def __enter__(self) -> Self:
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(info["targetId"] for info in targets if info["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)[
            "sessionId"
        ]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._to)
        self._process.terminate()
        self._process.wait(PATIENCE)
        os.close(self._from)

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, (method, answer)
                return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], PATIENCE)
            assert ready, "the browser does not answer"
            more = os.read(self._from, 1 << 16)
            assert more, "the browser is gone"
            self._rest += more
        message, self._rest = self._rest.split(b"\0", 1)
        answer = json.loads(message)
        self._note(answer.get("method", ""), answer.get("params", {}))
        return answer

    def _note(self, event: str, params: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event == "Runtime.consoleAPICalled":
            self.complaints.append(str(params["args"]))
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(str(params["exceptionDetails"]))
        elif event == "Log.entryAdded":
            self.complaints.append(str(params["entry"]))

    def open(self, address: str) -> None:
        """Go to an address and wait until the explorer is drawn."""
        # The same page with another fragment would not load again.
        self.call("Page.navigate", url="about:blank")
        self.call("Page.navigate", url=address)
        self.wait("document.getElementById('explorer')?.dataset.ready === 'true'")
        self.settle()

    def show(self, view: str) -> None:
        """Go to another view of the page that is open."""
        self.run(f"location.hash = {json.dumps(view)}")
        self.settle()

    def run(self, script: str) -> Any:
        """The value of an expression, promises awaited."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait(self, condition: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + PATIENCE
        while not self.run(condition):
            assert time.monotonic() < end, f"never true: {condition}; {self.complaints}"
            time.sleep(0.02)

    def settle(self) -> None:
        """Wait until no sample is unpacked any more, and let two frames pass, so that what was
        asked for is drawn.
        """
        self.wait("!document.querySelector('[aria-busy=true]')")
        self.run(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => "
            "done(true))))"
        )

    def press(self, key: str) -> None:
        """A key pressed and let go."""
        code, number = KEYS.get(key, ("", ord(key[0])))
        text = {"text": key} if len(key) == 1 else {}
        shared = {"key": key, "code": code, "windowsVirtualKeyCode": number}
        self.call("Input.dispatchKeyEvent", type="keyDown", **shared, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **shared)
        self.settle()

    def point(self, selector: str, across: float, down: float, *, click: bool = False) -> None:
        """Move the pointer over an element, to a place given as parts of its width and height;
        maybe click.
        """
        self.run(
            f"document.querySelector({json.dumps(selector)}).scrollIntoView({{block: 'center'}})"
        )
        box = self.run(
            f"document.querySelector({json.dumps(selector)}).getBoundingClientRect().toJSON()"
        )
        at = {"x": box["x"] + across * box["width"], "y": box["y"] + down * box["height"]}
        self.call("Input.dispatchMouseEvent", type="mouseMoved", **at)
        if click:
            for kind in ("mousePressed", "mouseReleased"):
                self.call("Input.dispatchMouseEvent", type=kind, button="left", clickCount=1, **at)
        self.settle()

    def size(self, width: int, height: int, *, phone: bool = False, dark: bool = False) -> None:
        """Size of the window and the appearance the reader prefers."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=phone,
        )
        self.settle()

    def pixels(self, selector: str) -> str:
        """The picture of a canvas, as text that can be compared."""
        return self.run(f"document.querySelector({json.dumps(selector)}).toDataURL()")
