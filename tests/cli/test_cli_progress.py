"""How far a pass is, said while it lasts."""

import io
import re

import pytest
from rich.console import Console
from rich.progress import Progress as Bars

from sinklab.lab.cli.progress import Shown, waiting, working
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


def test_a_long_pass_says_how_far_it_is_but_not_often(shown, clock):
    shown.stage("scoring")
    for done in range(101):
        shown.count(done, 100)
        clock.now += 1
    told = lines(shown)
    assert told[0] == "scoring" and told[1] == "5 of 100, 1 a second, about 95 s left"
    # every five seconds at first, later every tenth of what has passed
    assert 8 < len(told) < 21
    assert all(
        re.fullmatch(r"\d+ of 100, 1 a second, about \d+ (s|min) left", line) for line in told[1:]
    )


def test_a_short_pass_says_nothing(shown, clock):
    for done in range(10):
        shown.count(done, 10)
        clock.now += 0.1
    assert lines(shown) == []


def test_a_slow_first_part_is_no_measure_of_the_rest(shown, clock):
    shown.count(0, 200)
    clock.now += 6
    shown.count(1, 200)
    assert lines(shown) == []
    clock.now += 6
    shown.count(25, 200)
    assert lines(shown) == ["25 of 200, 4 a second, about 44 s left"]


def test_a_terminal_shows_a_bar_and_no_lines(clock):
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with Bars(console=console, auto_refresh=False) as bars:
        shown = Shown(console, bars, clock)
        for done in range(60):
            shown.count(done, 100)
            clock.now += 1
        assert bars.tasks[0].completed == 59 and bars.tasks[0].total == 100
    assert "left" not in console.file.getvalue()


def test_a_slow_part_is_counted_while_it_is_done_and_names_what_it_takes(shown, clock):
    for part in range(9):
        shown.count(part / 8, 4)
        clock.now += 10
    # eighths of ten seconds each: eighty seconds a part
    assert "0 of 4, 80 s each, about 5" in lines(shown)[0]


def test_the_parts_of_a_pass_deep_inside_are_counted_where_a_command_shows_them(shown, clock):
    assert [*counted("reading weights", "abc", 3)] == [*"abc"]
    before = COUNT.set(shown.count)
    try:
        for _ in counted("reading weights", range(40), 40):
            clock.now += 1
    finally:
        COUNT.reset(before)
    told = lines(shown)
    assert told[0] == "reading weights: 5 of 40, 1 a second, about 35 s left"
    with working():
        assert COUNT.get() is not None
    assert COUNT.get() is None


def test_what_is_quick_is_not_announced(capsys):
    with waiting("reading a config"):
        pass
    assert capsys.readouterr().err == ""
