"""How far a pass is, said while it lasts."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from sinklab.lab.cli.progress import Shown, pace, working
from sinklab.lab.files import COUNT, counted


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def shown(clock):
    """Progress away from a terminal."""
    console = Console(file=io.StringIO(), width=200)
    with Bars(console=console, disable=True) as bars:
        yield Shown(console, bars, clock)


def lines(shown):
    return [line[10:].strip() for line in shown._console.file.getvalue().splitlines()]


def test_a_long_pass_says_how_far_it_is_but_seldom(shown, clock):
    shown.stage("scoring")
    for done in range(101):
        shown.count(done, 100)
        clock.now += 1
    told = lines(shown)
    assert told[:2] == ["scoring", "scoring: 10 of 100, 1 a second, about 90 s left"]
    # every ten seconds at first, later every third of what has passed
    assert 4 < len(told) < 9


def test_a_kind_of_stage_is_told_once(shown):
    for number in range(30):
        shown.stage(f"writing sample {number} of 30")
    shown.stage("writing the page")
    assert lines(shown) == ["writing sample 0 of 30", "writing the page"]


def test_a_short_pass_says_nothing(shown, clock):
    for done in range(10):
        shown.count(done, 10)
        clock.now += 0.1
    assert lines(shown) == []


def test_nothing_is_said_of_the_rest_before_a_twentieth_is_done():
    assert pace(9, 200, 0, 60) == "9 of 200"
    assert pace(10, 200, 0, 60) == "10 of 200, 6 s each, about 19 min left"
    assert pace(10, 200, 0, 2) == "10 of 200", "nor at once"
    # what was there before has no rate
    assert pace(110, 200, 100, 10) == "110 of 200, 1 a second, about 90 s left"
    assert pace(100, 200, 100, 10) == "100 of 200"


def test_a_terminal_shows_one_line_that_stays(clock):
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with Bars(console=console, auto_refresh=False) as bars:
        shown = Shown(console, bars, clock)
        for done in range(60):
            shown.stage(f"part {done}")
            shown.count(done, 100)
            clock.now += 1
        (task,) = bars.tasks
        assert (task.completed, task.total, task.description) == (59, 100, "part 59")
        assert task.fields["pace"] == "59 of 100, 1 a second, about 41 s left"
        assert console.file.getvalue().count("\n") == 0


def test_the_parts_of_a_pass_deep_inside_are_counted_where_a_command_shows_them(shown, clock):
    assert [*counted("reading weights", "abc", 3)] == [*"abc"]
    before = COUNT.set(shown.count)
    try:
        for _ in counted("reading weights", range(40), 40):
            clock.now += 1
    finally:
        COUNT.reset(before)
    told = lines(shown)
    assert told[0] == "reading weights: 10 of 40, 1 a second, about 30 s left"
    with working():
        assert COUNT.get() is not None
    assert COUNT.get() is None
