"""The live page in a real browser: a prompt is typed, denoised before the eyes, and a sink is
away.
"""

import threading

import pytest

from sinklab.core.subject import DecodingSettings
from sinklab.lab.checkpoints import load

pytestmark = pytest.mark.ring("extras")

PROMPT = "The house stood at the end of a <b>road</b> 😀 in"
BLOCKED = (
    "[...document.querySelectorAll('.pane')].map((pane) => pane.querySelectorAll('.canvas-text "
    ".blocked').length)"
)
NAMES = "[...document.querySelectorAll('.step-name')].map((name) => name.textContent)"


@pytest.fixture(scope="module")
def served(browser):
    """The page of `sinklab serve tiny-sink`, from a thread; it must not complain, nor ask for
    anything from elsewhere.
    """
    from sinklab.extras.live.server import Live, server_for

    live = Live(load("tiny-sink"), DecodingSettings(block_length=32, temperature=0.7))
    server, listener, guard = server_for(live)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    host = f"127.0.0.1:{listener.getsockname()[1]}"
    browser.requests.clear()
    browser.complaints.clear()
    thread.start()
    try:
        browser.size(1440, 900)
        browser.call("Page.navigate", url=f"http://{host}/?token={guard.token}")
        browser.wait("document.getElementById('write')?.disabled === false")
        assert browser.run("document.cookie") == ""
        yield browser
        assert browser.complaints == []
        hosts = {
            url.split("/")[2] for url in browser.requests if not url.startswith(("data:", "about:"))
        }
        assert hosts == {host}
    finally:
        browser.call("Page.navigate", url="about:blank")
        browser.size(1280, 800)
        server.should_exit = True
        thread.join()
        assert live.end()


@pytest.fixture
def page(served):
    """With a text of 12 tokens, written a moment ago behind a prompt that was typed."""
    served.size(1440, 900)
    served.run("document.getElementById('prompt').select()")
    served.call("Input.insertText", text=PROMPT)
    served.run("document.getElementById('tokens').value = 12")
    served.press("Enter")
    served.wait(
        "document.getElementById('state').textContent === '12 steps' && "
        "!document.getElementById('block').hidden"
    )
    served.settle()
    return served


def text(page, selector):
    return page.run(f"document.querySelector('{selector}').textContent")


def write(page, tokens):
    page.run(f"document.getElementById('tokens').value = {tokens}")
    page.run("document.getElementById('write').click()")


def block(page, key, scope):
    """Click a token and block it; what the table says of it."""
    page.run("document.getElementById('cost').hidden = true")
    page.point(f'.canvas-text [data-key="{key}"]', 0.5, 0.5, click=True)
    page.run(f"document.getElementById('block-{scope}').click()")
    page.wait("!document.getElementById('cost').hidden")
    page.settle()
    return page.run(
        "[...document.querySelectorAll('#tried tbody tr:last-child td')].map((cell) => "
        "cell.textContent)"
    )


def test_a_prompt_is_typed_and_a_sink_clicked_and_blocked(page):
    assert page.run(NAMES) == ["step 6 of 11"]
    assert page.run("document.querySelectorAll('.canvas-text .masked').length") == 6
    assert page.run("document.querySelectorAll('.canvas-text .just-committed').length") == 1
    shown = text(page, ".canvas-text")
    assert shown.startswith("sink") and "<b>road</b>" in shown and "😀◌◌◌ in" in shown
    # a head was chosen: the one whose main sink holds most
    assert "Block it from step 6 on" in text(page, "#which")
    assert text(page, "#block-head").startswith("in layer ")
    page.press("Home")
    page.point('.canvas-text [data-key="0"]', 0.5, 0.5, click=True)
    assert text(page, "#which").startswith("Pinned: added sink. Block it from step 0 on")
    assert block(page, 1, "all")[:3] == ["position 0 “<|startoftext|>”", "everywhere", "0"]
    plain, without = page.run(
        "[...document.querySelectorAll('.texts .said')].map((box) => box.textContent)"
    )
    assert plain.startswith(PROMPT) and without.startswith(PROMPT) and plain != without
    assert page.run("document.querySelectorAll('.texts mark').length") > 0
    assert "Δ loss" in text(page, ".facts") and "main sinks moved" in text(page, ".facts")
    assert page.run(NAMES) == ["step 0 of 11"] * 2 and page.run(BLOCKED) == [0, 1]


def test_only_from_a_step_on_and_only_in_a_head_and_by_keys_alone(page):
    page.press("Home")
    for _ in range(4):
        page.press("ArrowRight")
    row = block(page, 3, "head")
    assert row[0].startswith("position 2 “") and "head" in row[1] and row[2] == "4"
    assert page.run(BLOCKED) == [0, 1]
    page.press("ArrowLeft")
    assert page.run(BLOCKED) == [0, 0]
    page.press("ArrowRight")
    # another head still has it
    page.press("h")
    assert page.run(BLOCKED) == [0, 0]
    page.press("H")
    assert page.run(BLOCKED) == [0, 1]
    page.press("g")
    page.press("x")
    page.wait("document.querySelectorAll('#tried tbody tr').length === 2")
    page.press("?")
    assert "block the position everywhere" in text(page, "#keys")
    page.press("?")


@pytest.mark.parametrize("dark", [False, True])
def test_it_fits_and_is_told_apart_without_colours(page, dark):
    block(page, 1, "all")
    for width, height in ((390, 844), (1440, 900), (2560, 1300)):
        page.size(width, height, phone=width == 390, dark=dark)
        assert page.run("document.documentElement.scrollWidth") <= width
        boxes = page.run(
            "[...document.querySelectorAll('#ask, #block, #cost, .bar, .panel')].filter((box) => "
            "box.offsetParent && getComputedStyle(box).position !== 'fixed').map((box) => "
            "box.getBoundingClientRect().toJSON())"
        )
        assert len(boxes) > 8 and all(box["width"] > 150 and box["right"] <= width for box in boxes)
        styles = "getComputedStyle(document.querySelector('{}')).{}"
        assert "gradient" in page.run(styles.format(".canvas-text .blocked", "backgroundImage"))
        assert page.run(styles.format(".texts mark", "borderBottomStyle")) == "solid"
        ground = page.run(styles.format("body", "backgroundColor"))
        assert ground == ("rgb(18, 19, 23)" if dark else "rgb(246, 245, 241)")


def test_a_page_comes_back_to_its_server_and_writes_again(served):
    """The first script of all keeps the sockets that the page opens."""
    keep = "const Own = WebSocket; self.sockets = []; self.WebSocket = function (...given) { "
    keep += "self.sockets.push(new Own(...given)); return self.sockets.at(-1); };"
    kept = served.call("Page.addScriptToEvaluateOnNewDocument", source=keep)["identifier"]
    served.call("Page.reload")
    served.wait(
        "self.sockets?.length === 1 && document.getElementById('write')?.disabled === false"
    )
    served.run("document.getElementById('seed').value = 3")
    write(served, 3)
    served.wait("document.getElementById('state').textContent === '3 steps'")
    served.run("self.sockets[0].close()")
    served.wait("document.getElementById('failed').textContent.startsWith('Connected again')")
    assert served.run(
        "[...document.querySelectorAll('#block, #progress')].every((part) => part.hidden)"
    )
    assert served.run("document.getElementById('seed').value") == "3"
    write(served, 2)
    served.wait("document.getElementById('state').textContent === '2 steps'")
    assert served.run(
        "document.getElementById('failed').hidden && !document.getElementById('block').hidden"
    )
    served.call("Page.removeScriptToEvaluateOnNewDocument", identifier=kept)


def test_writing_is_stopped_begins_anew_and_says_what_cannot_be(page):
    block(page, 1, "all")
    write(page, 200)
    page.wait("/step [2-9]/.test(document.getElementById('state').textContent)")
    assert page.run("document.querySelectorAll('.pane').length") == 1
    assert page.run("document.getElementById('cost').hidden")
    page.run("document.getElementById('stop').click()")
    assert text(page, "#state") == "stopped"
    write(page, 4000)
    page.wait("!document.getElementById('failed').hidden")
    assert "fit the model's context" in text(page, "#failed")
    write(page, 2)
    page.wait("document.getElementById('state').textContent === '2 steps'")
    assert page.run("document.getElementById('failed').hidden")
