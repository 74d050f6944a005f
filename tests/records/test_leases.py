"""Claims: one holder at a time, followed when it is gone, whatever its machine, its number and its
clock say.
"""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

import sinklab
from refusals import refusing
from sinklab.lab.records import RunWriter, leases, open_run
from sinklab.lab.records.leases import RUN, Claims

RUN_OF = {"kind": "study", "model": {}, "settings": {}, "seed": 0}
HOLDER = """
import os, sys, time
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from sinklab.lab.records.leases import Claims
os.getpid = lambda: 4711
held = Claims(Path(sys.argv[2])).take("part")
print("held" if held else "refused", flush=True)
time.sleep(600)
"""


class Clock:
    """A clock that stands still unless somebody sleeps, or a test turns it; signs of life come from
    tests alone.
    """

    def __init__(self):
        self.now = 1000.0
        self.meanwhile = lambda: None

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds
        self.meanwhile()


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(leases, "time", clock)
    monkeypatch.setattr(leases, "BEAT", threading.TIMEOUT_MAX)
    return clock


def elsewhere(lease):
    """The same claim, as if its holder ran under another kernel."""
    lease._holder = lease._holder.replace(lease._holder.split(" ")[0], "another-kernel", 1)
    lease._sign()
    return lease


def silent(lease):
    """The same claim, whose holder gives no signs of life any more, but keeps the file open."""
    lease._ends.set()
    lease._thread.join()
    return lease


def test_one_holds_it_and_the_next_one_when_it_is_free(tmp_path):
    one, other = Claims(tmp_path), Claims(tmp_path)
    with one.take("part") as lease:
        assert lease is not None
        assert lease.is_held()
        assert [path.name for path in Path(".claims").iterdir()] == ["part.1"]
        assert one.take("part") is None, "nor does the same process have it twice"
        assert other.take("part") is None
        assert other.seek("part") is None
        assert other.is_held("part")
        with other.take("else") as free:
            assert free is not None
    assert not Path(".claims").exists()
    lease.release()
    assert not other.is_held("part")
    with other.take("part") as again:
        assert again is not None


@pytest.mark.slow
def test_a_killed_holder_is_followed_at_once_whatever_its_number(tmp_path, clock):
    arguments = [
        sys.executable,
        "-c",
        HOLDER,
        str(Path(sinklab.__file__).parents[1]),
        str(tmp_path),
    ]
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        # another process that has the same number, as in two containers
        with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as same:
            assert same.stdout.readline() == "refused\n"
            same.kill()
        claims = Claims(tmp_path)
        assert claims.take("part") is None
        assert claims.is_held("part")
        holder.kill()
        holder.wait()
    with subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True) as follower:
        assert follower.stdout.readline() == "held\n", (
            "the same number again is not the same process"
        )
        assert [path.name for path in Path(".claims").iterdir()] == ["part.2"]
        follower.kill()
    began = clock.now
    with claims.take("part") as lease:
        assert lease is not None
    assert clock.now == began, "the kernel knows at once that it is gone"


def test_a_holder_on_another_machine_counts_as_gone_once_it_is_silent_for_long(tmp_path, clock):
    holder = elsewhere(Claims(tmp_path).take("part"))
    mine = Claims(tmp_path)
    assert mine.take("part") is None
    assert mine.is_held("part") is False, "nobody knows yet"
    clock.meanwhile = holder._sign
    assert mine.seek("part") is None, "once it gave a sign of life"
    silent(holder)
    clock.now += leases.EXPIRY
    assert mine.take("part") is None
    clock.now += 0.1
    lease = mine.take("part")
    assert lease is not None
    # the first one wakes up
    assert not holder.is_held()
    assert lease.is_held()
    holder.path.unlink(missing_ok=True)
    os.close(holder._file)
    lease.release()


@pytest.mark.parametrize("skew", [-(10**8), 10**8])
def test_clocks_are_not_compared(tmp_path, clock, monkeypatch, skew):
    """The holder's clock, and that of the file server, are years away."""
    monkeypatch.setattr(time, "time", lambda: 1e9 + skew)
    holder, mine = elsewhere(Claims(tmp_path).take("part")), Claims(tmp_path)
    for _ in range(9):
        holder._sign()
        os.utime(holder.path, (1e9 + skew, 1e9 + skew))
        assert mine.take("part") is None, "it lives"
        clock.now += leases.EXPIRY / 3
    silent(holder)
    os.utime(holder.path, (1e9 - skew, 1e9 - skew))
    assert mine.take("part") is None
    clock.now += leases.EXPIRY
    lease = mine.take("part")
    assert lease is not None
    os.close(holder._file)
    lease.release()


def test_where_files_cannot_be_locked_signs_of_life_decide(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(leases, "_locks", lambda descriptor, *, alone: False)
    holder, mine = Claims(tmp_path).take("part"), Claims(tmp_path)
    assert mine.take("part") is None
    clock.meanwhile = holder._sign
    assert mine.seek("part") is None
    clock.meanwhile = lambda: None
    silent(holder)
    with mine.hold("part") as lease:
        assert not holder.is_held()
        assert lease.is_held()
    os.close(holder._file)


def test_where_every_lock_is_granted_none_is_believed(tmp_path, clock, monkeypatch):
    monkeypatch.setattr(leases, "_locks", lambda descriptor, *, alone: True)
    with Claims(tmp_path).take("part") as holder:
        mine = Claims(tmp_path)
        for _ in range(20):
            assert mine.take("part") is None
            holder._sign()
            clock.now += leases.EXPIRY / 3
        assert holder.is_held()


@pytest.mark.usefixtures("clock")
def test_a_claim_that_was_killed_while_it_was_made_expires(tmp_path):
    Path(".claims").mkdir()
    (tmp_path / ".claims" / "part.1").touch()
    assert Claims(tmp_path).take("part") is None, "its maker may be about to write"
    with Claims(tmp_path).hold("part") as lease:
        assert lease.path.name == "part.2"


def test_many_take_turns(tmp_path, monkeypatch):
    monkeypatch.setattr(leases, "POLL", 0.0005)
    count = tmp_path / "count"
    count.write_text("0")

    def add():
        claims = Claims(tmp_path)
        for _ in range(15):
            with claims.hold("count") as lease:
                number = int(count.read_text())
                time.sleep(0)
                assert lease.is_held()
                count.write_text(str(number + 1))

    with ThreadPoolExecutor(4) as pool:
        for job in [pool.submit(add) for _ in range(4)]:
            job.result()
    assert count.read_text() == "60"
    assert not Path(".claims").exists()


def test_a_run_has_one_writer_and_says_where():
    with RunWriter("run", **RUN_OF) as run:
        run.table("a", {"x": [1]})
        for how in ({"resume": True}, {"overwrite": True}):
            with (
                refusing(r"run is being written by .* on"),
                RunWriter("run", **RUN_OF, **how),
            ):
                pass
        run.table("b", {"x": [1]})
    assert open_run("run").tables == ("a", "b")
    assert not list(Path("run").glob(".*"))


def test_a_writer_that_was_stopped_for_too_long_writes_no_list_any_more(tmp_path):
    with (
        refusing("taken over by another process"),
        RunWriter("run", **RUN_OF) as run,
    ):
        run.table("a", {"x": [1]})
        (tmp_path / "run" / ".claims" / f"{RUN}.1").rename(
            tmp_path / "run" / ".claims" / f"{RUN}.2"
        )
        run.table("b", {"x": [1]})
    assert open_run("run").tables == ("a",)


def test_several_writers_of_one_run_keep_what_the_others_wrote():
    def write(first):
        with RunWriter("run", **RUN_OF, resume=True, shared=True) as run:
            run.is_last = False
            for part in range(first, 20, 4):
                run.table("t", {"part": [part]}, part=part)

    threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    run = open_run("run")
    assert run.info.status == "running", "none of them said that it was the last"
    assert run.table("t")["part"].tolist() == list(range(20))
    assert len(run.info.checksums) == 20
