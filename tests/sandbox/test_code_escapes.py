"""Programs that cheat, pry or break things: none passes, none leaves a trace, whichever boundary
holds them.
"""

import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import lazy_loader
import pytest

from sinklab.extras.sandbox.boundary import BOUNDARIES, HOOK, CodeLimits, leaks, run_program

pytest.importorskip("resource")
PATIENT = 3600
"""seconds: no program ends by the clock but those that never end"""
LIMITS = CodeLimits(seconds=PATIENT)
TESTS = "assert square(3) == 9\nassert square(-2) == 4"

# Each is handed the same tests; none of them computes a square.
CHEATS = {
    "patched json.dumps": """
import json
dumps = json.dumps
json.dumps = lambda value, **how: dumps({**value, 'raised': '', 'value': 9, 'status': 'passed'})
def square(x): return 0""",
    "patched json of the driver": """
import sys
json = sys.modules['__main__'].json
json.dumps = lambda value: '{"status": "passed", "reason": ""}'
def square(x): return 0""",
    "patched os.write": """
import os
write = os.write
os.write = lambda number, text: write(number, b'{"status": "passed", "reason": ""}')
def square(x): return 0""",
    "equal to everything": """
class Any:
    def __eq__(self, other): return True
    __hash__ = object.__hash__
def square(x): return Any()""",
    "an int equal to everything": """
class Any(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def square(x): return Any(0)""",
    "a list that changes": """
class Any(list):
    def __eq__(self, other): return True
def square(x): return Any([x])""",
    "leaves at once": "import os\nos._exit(0)",
    "leaves when called": "import os\ndef square(x): os._exit(0)",
    "exits at once": "import sys\nsys.exit(0)",
    "exits when called": "def square(x): raise SystemExit(0)",
    "exits in a handler": "import atexit, os\natexit.register(os._exit, 0)\ndef square(x): raise "
    "KeyboardInterrupt",
    "closes the socket": "import os\ndef square(x): os.closerange(3, 32)",
    "walks through frames": """
import sys
def square(x):
    frame = sys._getframe()
    while frame:
        for name, value in [*frame.f_locals.items(), *frame.f_globals.items()]:
            if isinstance(value, dict) and name in ('said', 'asked'):
                value.update(value=9, status='passed', raised='')
        frame = frame.f_back
    return 0""",
    "walks through the collector": """
import gc
def square(x):
    for each in gc.get_objects():
        if isinstance(each, dict) and 'tag' in each: each['value'] = 9
    return 0""",
    "forges answers": """
import os
for number in range(3, 64):
    try: os.write(number, b'{"tag": "", "value": 9}\\n' * 3)
    except OSError: pass
def square(x): return 0""",
    "forges answers in advance, with the tag": """
import os, sys
def square(x):
    tag = sys._getframe(1).f_locals['asked']['tag']
    for number in range(3, 64):
        try: os.write(number, ('{"tag": "%s", "value": 9}\\n' % tag).encode() * 3)
        except OSError: pass
    return 9""",
    "forges the verdict": """
import os
for number in range(64):
    try: os.write(number, b'{"status": "passed", "reason": ""}\\n')
    except OSError: pass
def square(x): return 0""",
    "patches what packs": """
import sys
sys.modules['__main__'].packed = lambda value: {'dict': [[1, 2, 3]]}
def square(x): return 0""",
    "packs a type that is none": """
import sys
sys.modules['__main__'].packed = lambda value: {'eval': ['9']}
def square(x): return 0""",
    "answers without end": """
import sys
sys.modules['__main__'].packed = lambda value: 'x' * (1 << 22)
def square(x): return 0""",
    "a nest": "def square(x):\n    value = []\n    for _ in range(10 ** 5): value = [value]\n    "
    "return value",
    "a ring": "def square(x):\n    value = []\n    value.append(value)\n    return value",
    "a number of many digits": "def square(x): return 10 ** 10 ** 5",
    "not a number": "def square(x): return float('nan')",
    "a generator": "def square(x): yield x * x",
    "a lambda": "def square(x): return lambda: x * x",
    "patched builtins": """
import builtins
builtins.isinstance = lambda *given: True
builtins.AssertionError = type(None)
builtins.len = builtins.type = lambda *given: 9
def square(x): return 0""",
    "patched comparison": "import operator\noperator.eq = lambda *given: True\ndef square(x): "
    "return 0",
    "traces": "import sys\nsys.settrace(lambda *given: None)\nsys.setprofile(print)\ndef "
    "square(x): return 0",
    "no function": "square = 9",
    "another name": "def cube(x): return x * x",
    "no Python": "def square(x: return x * x",
    "hostile exception": """
class Odd(Exception):
    def __str__(self): return '{"status": "passed"}'
def square(x): raise Odd""",
    "exception that cannot be said": """
class Odd(Exception):
    def __str__(self): raise self
def square(x): raise Odd""",
    "reads the tests": "import sys\ndef square(x): return "
    "eval(open(sys.argv[0]).read().split('==')[1])",
}

# Each has escaped where it runs to its end. OUTSIDE is a folder of the user, with a file in it.
ESCAPES = {
    "opens by a folder": "os.open('new', os.O_WRONLY | os.O_CREAT, dir_fd=os.open(OUTSIDE, 0))",
    "removes by a folder": "os.unlink('kept', dir_fd=os.open(OUTSIDE, 0))",
    "reads by a folder": "os.open('kept', 0, dir_fd=os.open(OUTSIDE, 0))",
    "changes folder": "os.chdir(OUTSIDE); open('new', 'w')",
    "reads": "open(OUTSIDE + '/kept').read()",
    "reads behind ..": "open(os.path.dirname(os.__file__) + '/' + '../' * 20 + OUTSIDE + "
    "'/kept').read()",
    "reads by bytes": "open(os.fsencode(OUTSIDE + '/kept')).read()",
    "reads the shadow file": "open('/etc/shadow').read()",
    "reads the parent's environment": "open(f'/proc/{os.getppid()}/environ').read()",
    "reads its own environment": "open('/proc/self/environ').read()",
    "has an environment": "assert {'HOME', 'PATH', 'SINKLAB_SECRET'} & set(os.environ)",
    "lists": "os.listdir(OUTSIDE)",
    "lists by a folder": "assert os.listdir(os.open(OUTSIDE, 0))",
    "overwrites": "open(OUTSIDE + '/kept', 'w')",
    "appends": "open(OUTSIDE + '/kept', 'ab')",
    "writes without Python's open": "import _io; _io.FileIO(OUTSIDE + '/new', 'x')",
    "removes": "os.remove(OUTSIDE + '/kept')",
    "renames": "os.rename(OUTSIDE + '/kept', OUTSIDE + '/new')",
    "links": "os.link(OUTSIDE + '/kept', OUTSIDE + '/new')",
    "links softly": "os.symlink('/etc', OUTSIDE + '/new')",
    "truncates": "os.truncate(OUTSIDE + '/kept', 0)",
    "chmods": "os.chmod(OUTSIDE + '/kept', 0)",
    "touches": "os.utime(OUTSIDE + '/kept', (1, 1))",
    "makes a folder": "os.mkdir(OUTSIDE + '/new')",
    "makes a fifo": "os.mkfifo(OUTSIDE + '/new')",
    "makes a fifo by another name": "import posix; posix.mkfifo(OUTSIDE + '/new')",
    "makes a node": "os.mknod(OUTSIDE + '/new')",
    "sets an attribute": "os.setxattr(OUTSIDE + '/kept', 'user.x', b'x')",
    "makes a database": "import sqlite3; sqlite3.connect(OUTSIDE + '/new').execute('create table "
    "x(y)')",
    "removes a tree": "import shutil; shutil.rmtree(OUTSIDE)",
    "makes many folders": "for n in range(20_000): os.mkdir(str(n))",
    "writes where it is": "open('new', 'w').write('x')",
    "writes a temporary file": "import tempfile; tempfile.mkstemp()",
    "fills memory through a file": "import tempfile; tempfile.TemporaryFile().write(b'x' * (1 << "
    "28))",
    "shares memory": "from multiprocessing.shared_memory import SharedMemory; "
    "SharedMemory('sinklab', True, 9)",
    "takes memory": "x = bytearray(1 << 34)",
    "forks": "os.fork() or os._exit(0)",
    "spawns": "os.posix_spawn('/bin/true', ['true'], {})",
    "runs": "import subprocess; subprocess.run(['true'])",
    "runs unheard": "from multiprocessing.util import spawnv_passfds as run; run(b'/bin/true', "
    "[b'true'], [])",
    "replaces itself": "os.execv('/bin/true', ['true'])",
    "uses a shell": "assert os.system('true') == 0",
    "begins a thread": "import threading; threading.Thread(target=print).start()",
    "kills its parent": "os.kill(os.getppid() or 1, 0)",
    "kills its parent by a handle": "import signal; "
    "signal.pidfd_send_signal(os.pidfd_open(os.getppid()), 0)",
    "leaves its session": "os.setsid()",
    "opens a socket": "import socket; socket.socket()",
    "asks for a name": "import socket; socket.gethostbyname('localhost')",
    "asks the web": "import urllib.request; urllib.request.urlopen('http://127.0.0.1')",
    "loads a library": "import ctypes; ctypes.CDLL('libc.so.6')",
    "calls the system": "import ctypes; ctypes.CDLL(None).getuid()",
    "becomes the superuser": "os.setuid(0); assert os.getuid() == 0 and os.open('/etc/shadow', 0)",
    "changes its root": "os.chroot('/')",
    "raises its limits": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (-1, -1))",
    "lifts the hook by its names": "import sys; sys.modules['__main__'].HARMLESS = ''; "
    "os.mkdir(OUTSIDE + '/new')",
    "lifts the hook by its builtins": """
import builtins, sys
class Path(str):
    def startswith(self, *given): return True
for names in (vars(builtins), vars(sys.modules['__main__'].__builtins__)):
    names.update(str=Path, type=lambda value: Path, isinstance=lambda *given: True)
open(Path(OUTSIDE + '/kept'))""",
    "mounts": "import ctypes; ctypes.CDLL(None).mount(b'x', b'/', b'tmpfs', 0, 0) and 1 / 0",
    "sleeps": "import time; time.sleep(60)",
    "turns": "while True: pass",
}


def fates(within, outside, cheats=CHEATS):
    """The fate of every program behind this boundary."""
    found = {}
    for name, program in cheats.items():
        found[name] = run_program(program, LIMITS, tests=TESTS, name="square", within=within).status
    for name, program in ESCAPES.items():
        limits = CodeLimits(seconds=0.5) if name in ("sleeps", "turns") else LIMITS
        found[name] = run_program(
            f"OUTSIDE = {outside!r}\nimport os\n{program}", limits, within=within
        ).status
    return found


def left(outside):
    return {
        path.name: (path.read_text(), path.stat().st_mode, path.stat().st_mtime)
        for path in sorted(outside.iterdir())
    }


@pytest.fixture
def outside():
    # not pytest's own folder, which nobody else may enter: what is refused should be refused by the
    # boundary
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o777)
        (Path(folder) / "kept").write_text("kept")
        (Path(folder) / "kept").chmod(0o666)
        yield Path(folder)


def check(found, before, outside):
    assert [name for name, status in found.items() if status == "passed"] == []
    assert left(outside) == before
    assert {name for name, status in found.items() if status == "timeout"} == {"sleeps", "turns"}


@pytest.mark.slow
@pytest.mark.parametrize("within", BOUNDARIES)
def test_no_program_cheats_or_escapes(within, outside, monkeypatch):
    if within == HOOK and os.geteuid() == 0:
        pytest.skip("for ordinary users alone")
    if within != HOOK and leaks(within):
        pytest.skip(f"no {within} here: {leaks(within)}")
    monkeypatch.setenv("SINKLAB_SECRET", "1")
    before = left(outside)
    # what the judge believes depends on no boundary
    cheats = {}
    if within == "bubblewrap" or leaks("bubblewrap"):
        cheats = CHEATS
    check(fates(within, str(outside), cheats), before, outside)
    honest = run_program(
        "def square(x): return x * x", LIMITS, tests=TESTS, name="square", within=within
    )
    assert honest.passed, honest


@pytest.mark.slow
def test_no_program_of_an_ordinary_user_does(outside):
    """Where the tests run as the superuser, another stands in for an ordinary user, with the
    system's Python.
    """
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    supported = "import sys; sys.exit(sys.version_info < (3, 11))"
    if os.geteuid() or python is None or subprocess.run([python, "-c", supported]).returncode:
        pytest.skip("not the superuser, or no Python that others may run")
    root = Path(__file__).parents[2] / "src" / "sinklab"
    names = ("__init__", "core/__init__", "core/errors", "core/registry")
    names += ("extras/__init__",)
    sources = [root / f"{name}.py" for name in names]
    sources += [root / "__init__.pyi", root / "extras" / "sandbox" / "__init__.pyi"]
    with tempfile.TemporaryDirectory() as copy:
        os.chmod(copy, 0o755)
        for source in [*sources, *(root / "extras" / "sandbox").glob("*.*")]:
            target = Path(copy) / source.relative_to(root.parent)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o755)
            shutil.copyfile(source, target)
        # a dependency, which the system's Python need not have
        shutil.copytree(Path(lazy_loader.__file__).parent, Path(copy) / "lazy_loader")
        script = f"import json, sys\nsys.path.insert(0, {copy!r})\n{CHILD}"
        given = {
            "outside": str(outside),
            "cheats": CHEATS,
            "escapes": ESCAPES,
            "tests": TESTS,
            "patient": PATIENT,
        }
        who = {"user": 1000, "group": 1000, "extra_groups": [], "cwd": "/"}
        before = left(outside)
        ran = subprocess.run(
            [python, "-c", script], input=json.dumps(given).encode(), stdout=subprocess.PIPE, **who
        )
    leaked, found = json.loads(ran.stdout)
    check(found, before, outside)
    # what holds for the superuser holds for others too, where the system lets them have namespaces
    # at all
    assert all("AssertionError" not in leaked[name] for name in BOUNDARIES if name != HOOK), leaked
    assert "reads a file of the user" in leaked[HOOK]


CHILD = """
from sinklab.extras.sandbox.boundary import BOUNDARIES, HOOK, CodeLimits, leaks, run_program
given, found = json.load(sys.stdin), {}
patient = CodeLimits(seconds=given["patient"])
for name, program in given["cheats"].items():
    run = run_program(program, patient, tests=given["tests"], name="square", within=HOOK)
    found[name] = run.status
for name, program in given["escapes"].items():
    limits = CodeLimits(seconds=0.5) if name in ("sleeps", "turns") else patient
    program = f"OUTSIDE = {given['outside']!r}\\nimport os\\n{program}"
    found[name] = run_program(program, limits, within=HOOK).status
print(json.dumps([{name: leaks(name) for name in BOUNDARIES}, found]))
"""
