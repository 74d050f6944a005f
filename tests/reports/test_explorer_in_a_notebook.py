"""The explorer inside the frame that a notebook shows."""

import time

import pytest
from chromium import PROGRAM, Page

from launched import PATIENCE
from sinklab.lab.short_road import open_run

pytestmark = pytest.mark.skipif(
    PROGRAM is None, reason="no chromium at hand: the page is not rendered"
)


@pytest.mark.slow
def test_the_page_runs_in_a_frame_that_reaches_nothing_of_the_notebook(make_study, tmp_path):
    notebook = tmp_path / "notebook.html"
    run = open_run(make_study("tiny", added=1).path)
    notebook.write_text(
        f"<!doctype html><script>token = 'secret'</script>{run._repr_html_()}", "utf-8"
    )
    with Page(tmp_path) as page:
        page.call("Page.navigate", url=notebook.as_uri())
        end = time.monotonic() + PATIENCE
        # a sandboxed frame is a process of its own
        while not (
            frames := [
                one
                for one in page.call("Target.getTargets")["targetInfos"]
                if one["type"] == "iframe"
            ]
        ):
            assert time.monotonic() < end, "no frame of its own"
        (frame,) = frames
        page._session = page.call(
            "Target.attachToTarget", targetId=frame["targetId"], flatten=True
        )["sessionId"]
        page.call("Network.enable")
        page.call("Log.enable")
        page.wait("document.getElementById('explorer')?.dataset.ready === 'true'")
        assert page.run("self.origin") == "null"
        assert (
            page.run(
                "(() => { try { return parent.token } catch (error) { return error.name } })()"
            )
            == "SecurityError"
        )
        assert page.complaints == []
