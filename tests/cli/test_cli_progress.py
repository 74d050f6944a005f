"""How far a pass is, said while it lasts."""

import io

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from sinklab.lab.cli.progress import Shown


class Clock:
    """Time that passes when it is told to."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


def shown_on(clock, **terminal):
    console = Console(file=io.StringIO(), width=200, **terminal)
    how = {"auto_refresh": False, "get_time": clock, "speed_estimate_period": 1e9}
    return Shown(Bars(console=console, **how))


def lines(shown):
    return [line[10:].strip() for line in shown._bars.console.file.getvalue().splitlines()]


def test_a_long_pass_says_how_far_it_is_but_seldom(clock):
    shown = shown_on(clock)
    shown.stage("scoring")
    for done in range(101):
        shown.count(done, 100)
        clock.now += 1
    told = lines(shown)
    assert told[:2] == ["scoring", "scoring: 10%, about 0:01:30 left"]
    # every ten seconds at first, later every third of what has passed
    assert 4 < len(told) < 9


def test_a_kind_of_stage_is_told_once_and_a_short_pass_says_nothing(clock):
    shown = shown_on(clock)
    for number in range(30):
        shown.stage(f"writing sample {number} of 30")
    shown.stage("writing the page")
    for done in range(10):
        shown.count(done, 10)
        clock.now += 0.1
    assert lines(shown) == ["writing sample 0 of 30", "writing the page"]


def test_a_terminal_shows_one_line_that_stays(clock):
    shown = shown_on(clock, force_terminal=True)
    for done in range(60):
        shown.stage(f"part {done}")
        shown.count(done, 100)
        clock.now += 1
    (task,) = shown._bars.tasks
    assert (task.completed, task.total, task.description) == (59, 100, "part 59")
    assert lines(shown) == []
