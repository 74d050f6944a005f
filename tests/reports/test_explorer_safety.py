"""Nothing of a run is read as markup, nothing leaves the page, and no other script enters it."""

import time
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from browsing import readout

from launched import PATIENCE
from pictures import page_with
from sinklab.lab.short_road import open_run


def test_texts_of_a_run_are_text_and_never_markup(page, make_study, tmp_path):
    evil = (
        "</script><script>document.title = 'broken'</script><img src=x "
        "onerror=\"document.title = 'broken'\">"
    )
    run = make_study(evil[:60], folder="evil", added=1)
    page.open(page_with(of=run, out=tmp_path / "out").as_uri())
    assert page.run("document.title") == "Attention sinks in script><img src="
    foreign = (
        "[...document.querySelectorAll('img')].filter(one => "
        "!one.src.startsWith('data:image/') || one.onerror)"
    )
    assert page.run(f"{foreign}.length") == 0
    assert "<b>man</b>" in page.run("document.querySelector('.canvas-text').textContent")


def test_without_its_script_the_page_still_says_what_was_found(browser, one):
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        browser.call("Page.navigate", url="about:blank")
        browser.call("Page.navigate", url=one)
        browser.wait("document.querySelector('footer') !== null")
        text = browser.run("document.body.innerText")
    finally:
        browser.call("Emulation.setScriptExecutionDisabled", value=False)
    assert "static figures are drawn by sinklab figures" in text
    assert (
        "Do sinks exist?" in text
        and "the strongest token of a head receives" in text
        and "What was run" in text
    )


def test_signs_that_cannot_be_seen_are_named(page, make_study, tmp_path):
    run = make_study(words=["\u202eright\u200b"])
    page.open(page_with(of=run, out=tmp_path / "out").as_uri() + "#key=0")
    assert "“⟨U+202E⟩right⟨U+200B⟩” prompt" in readout(page)


@pytest.mark.usefixtures("no_pictures")
def test_in_a_notebook_the_page_reaches_nothing_of_it(browser, make_study, tmp_path):
    """It runs in a frame of its own."""
    notebook = tmp_path / "notebook.html"
    run = open_run(make_study("tiny", added=1).path)
    notebook.write_text(
        f"<!doctype html><script>token = 'secret'</script>{run._repr_html_()}", "utf-8"
    )
    browser.call("Page.navigate", url=notebook.as_uri())

    def frames():
        targets = browser.call("Target.getTargets")["targetInfos"]
        return [one["targetId"] for one in targets if one["type"] == "iframe"]

    # a sandboxed frame is a process of its own
    until(frames)
    outside, (frame,) = browser._session, frames()
    found = browser.call("Target.attachToTarget", targetId=frame, flatten=True)
    browser.complaints.clear()
    browser._session = found["sessionId"]
    try:
        browser.call("Network.enable")
        browser.call("Log.enable")
        browser.wait("document.getElementById('explorer')?.dataset.ready === 'true'")
        assert browser.run("self.origin") == "null"
        reached = "(() => { try { return parent.token } catch (error) { return error.name } })()"
        assert browser.run(reached) == "SecurityError"
        assert browser.complaints == []
    finally:
        browser._session = outside


class Listener(BaseHTTPRequestHandler):
    """Notes every request that arrives."""

    def __init__(self, heard, *args):
        self.heard = heard
        super().__init__(*args)

    def do_GET(self):
        self.heard.append(self.path)
        self.send_response(204)
        self.send_header("Access-Control-Allow-Origin", "*")
        self.end_headers()

    do_POST = do_GET

    def log_message(self, *_):
        pass


ROADS = """(async (to) => {
  const add = (tag, set, parent = document.body) =>
    parent.append(Object.assign(document.createElement(tag), set));
  await fetch(to + "/fetch", { mode: "no-cors" }).catch(() => 0);
  try { navigator.sendBeacon(to + "/beacon", "x"); } catch {}
  try { new WebSocket(to.replace("http", "ws") + "/socket"); } catch {}
  try { new EventSource(to + "/events"); } catch {}
  new Image().src = to + "/image";
  add("script", { src: to + "/script.js" });
  add("script", { textContent: "document.title = 'broken'" });
  add("iframe", { src: to + "/frame" });
  add("video", { src: to + "/video" });
  add("object", { data: to + "/object" });
  add("link", { rel: "stylesheet", href: to + "/style.css" }, document.head);
  const far = "@font-face { font-family: far; src: url(TO/font) } "
    + "body { font-family: far; background: url(TO/back) }";
  add("style", { textContent: far.replaceAll("TO", to) });
})"""
LAST = """((to) => {
  const form = { action: to + "/form", id: "leak" };
  document.body.append(Object.assign(document.createElement("form"), form));
  document.getElementById("leak").submit();
})"""
"""It leaves the page, and would end what the other roads have begun."""
REPORTED = """document.addEventListener("securitypolicyviolation", (event) => {
  (self.barred ??= []).push(event.blockedURI, event.effectiveDirective);
})"""
OPEN = {"/fetch", "/beacon", "/events", "/image", "/script.js", "/frame", "/video", "/style.css"}


def until(condition):
    """Wait for what the browser is about to do."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_the_policy_lets_nothing_out_and_no_other_script_in(page, one, tmp_path):
    heard: list[str] = []
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Listener, heard))
    Thread(target=server.serve_forever, daemon=True).start()
    address = f"http://127.0.0.1:{server.server_port}"
    try:
        # Without the policy the same roads are open, so that what follows could fail.
        bare = tmp_path / "bare.html"
        bare.write_text("<div id='explorer' data-ready='true'></div>")
        page.open(bare.as_uri())
        page.run(f"{ROADS}('{address}/bare')")
        until(lambda: {f"/bare{road}" for road in OPEN} <= set(heard))
        page.run(f"{LAST}('{address}/bare')")
        until(lambda: "/bare/form?" in heard)
        page.open(one)
        title = page.run("document.title")
        page.run(REPORTED)
        page.run(f"{ROADS}('{address}/page')")
        page.run(f"{LAST}('{address}/page')")
        # the browser says of each road that it was closed; of a frame and an object not where
        # they led
        closed = [f"{address}/page{road}" for road in {*OPEN, "/form?"} - {"/frame"}]
        for one_of in [*closed, "frame-src", "object-src"]:
            page.wait(f"self.barred?.includes('{one_of}')")
        assert [path for path in heard if path.startswith("/page")] == []
        assert page.run("document.title") == title
        answer = page.call(
            "Runtime.evaluate", expression="eval('1')", allowUnsafeEvalBlockedByCSP=False
        )
        assert "EvalError" in str(answer)
    finally:
        server.shutdown()
        server.server_close()
        # The browser complains of each road that was closed, and counts what it did not let out.
        page.complaints.clear()
        page.requests[:] = [one]
