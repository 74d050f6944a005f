"""Programs that a model wrote pass by answering every call of the tests right, and by nothing
else.
"""

import gzip
import json
import os
import shutil

import pytest

from refusals import refused
from shared_data import shared
from sinklab.extras.sandbox import boundary as module
from sinklab.extras.sandbox.boundary import (
    BOUNDARIES,
    HOOK,
    CodeLimits,
    boundary,
    leaks,
    run_program,
    run_programs,
)
from sinklab.extras.sandbox.humaneval import pass_at_k, program_of, run_completions

pytest.importorskip("resource")
LIMITS = CodeLimits(seconds=3600)
NO_BOUNDARY = os.geteuid() == 0 and all(leaks(name) for name in BOUNDARIES if name != HOOK)
pytestmark = pytest.mark.skipif(NO_BOUNDARY, reason="the superuser, and no boundary")


@pytest.mark.parametrize(
    "program, status, reason",
    [
        ("assert 1 + 1 == 2", "passed", ""),
        ("assert 1 + 1 == 3, 'no'", "failed", "AssertionError: no"),
        ("def f(:", "failed", "SyntaxError"),
        ("input()", "failed", "EOFError"),
        # leaving before the tests is no success
        ("import sys; sys.exit(0)", "failed", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "failed", "KeyboardInterrupt"),
        ("import os; os._exit(0)", "error", "ended before its last answer"),
        ("import os; os.abort()", "error", "ended before its last answer"),
        ("x = bytearray(10 ** 10)", "failed", "MemoryError"),
        ("import os; assert not {'HOME', 'SINKLAB_SECRET'} & set(os.environ)", "passed", ""),
        ("print('x' * 10 ** 6)", "passed", ""),
        (
            "import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nassert A().x "
            "== 1",
            "passed",
            "",
        ),
        ("def f(n): return n and 1 + f(n - 1)\nassert f(900) == 900", "passed", ""),
        ("import numpy\nassert numpy.arange(3).sum() == 3", "passed", ""),
    ],
)
def test_fates(program, status, reason, monkeypatch):
    monkeypatch.setenv("SINKLAB_SECRET", "1")
    result = run_program(program, LIMITS)
    assert (result.status, reason in result.reason) == (status, True), result
    assert result.passed is (status == "passed")


MODULES = """\
abc array ast asyncio base64 bisect calendar cmath collections concurrent.futures contextlib copy
csv ctypes datetime decimal difflib enum fractions functools gc hashlib heapq inspect io itertools
json locale logging math numbers operator os pathlib pickle pprint queue random re secrets shutil
signal socket sqlite3 statistics string struct subprocess tempfile textwrap threading time timeit
types typing unicodedata unittest urllib.request uuid weakref xml.etree.ElementTree zlib"""


def test_a_program_may_import_what_it_needs():
    result = run_program(f"import {', '.join(MODULES.split())}", LIMITS)
    assert result.passed, result


def test_literals_arrive_as_they_are():
    values = [
        None,
        True,
        3,
        -(2**70),
        1e-320,
        -0.0,
        "ä\ud800\n",
        b"\x00x",
        1 + 2j,
        [],
        [[1], (2,)],
        {1: {2}},
        set(),
    ]
    values += [(frozenset({(1, "a")}), {(1, None): [0.1]}), "x" * 10**5]
    tests = f"""
for value in [float("inf"), 10**5000, *{values!r}]:
    assert repr(same(value)) == repr(value) == repr(same(x=value)), value
"""
    result = run_program("def same(x): return x", LIMITS, tests=tests, name="same")
    assert result.passed, result


def test_tests_that_call_with_no_literal_are_told_apart():
    result = run_program("def f(x): return x", LIMITS, tests="assert f(object())", name="f")
    assert (
        str(result)
        == "unjudged: its tests call it with what cannot be sent: a object is no literal"
    )


def test_a_boundary_is_what_held(monkeypatch):
    """Programs that are there and hold nothing are not taken for a boundary."""
    leaks.cache_clear()
    boundary.cache_clear()
    unshare = [
        "unshare",
        *([] if os.geteuid() == 0 else ["--user", "--map-root-user"]),
        "--pid",
        "--fork",
    ]
    sees_all = {"namespaces": lambda folder: unshare, "absent": lambda folder: ["no-such-program"]}
    if shutil.which("bwrap"):
        # as the superuser it reads the shadow file
        words = [
            "bwrap",
            "--ro-bind",
            "/",
            "/",
            "--dev-bind",
            "/dev/null",
            "/dev/null",
            "--unshare-all",
            "--uid",
            "65534",
            "--",
        ]
        sees_all["bubblewrap"] = lambda folder: words
    monkeypatch.setattr(module, "BOUNDARIES", {**sees_all, HOOK: lambda folder: []})
    try:
        assert all(leaks(name) for name in sees_all)
        assert (
            leaks("absent") == "error: no-such-program cannot be started: No such file or directory"
        )
        if shutil.which("bwrap"):
            assert "reads /etc/passwd" in leaks(
                "bubblewrap"
            ) and "reads a file of the user" in leaks("bubblewrap")
        if os.geteuid() == 0:
            refused(r"without a boundary.*absent", boundary)
        else:
            assert boundary() == HOOK
    finally:
        leaks.cache_clear()
        boundary.cache_clear()


def test_time_ends_a_program():
    result = run_program("while True: pass", CodeLimits(seconds=0.2))
    assert str(result) == "timeout: 0.2 s by the clock"


def test_results_come_in_the_order_of_their_programs():
    results = run_programs([(f"assert {n} % 2 == 0", "", "") for n in range(4)], LIMITS, workers=2)
    assert [result.passed for result in results] == [True, False, True, False]
    assert run_programs([]) == []


@pytest.mark.parametrize(
    "limits, message",
    [
        ({"seconds": 0}, "seconds must be more than 0, but is 0"),
        ({"memory": 1 << 20}, "memory must be at least 2.68435e.08, but is 1048576"),
    ],
)
def test_limits_that_let_nothing_run_are_refused(limits, message):
    refused(message, CodeLimits, **limits)


DOCUMENT = {
    "prompt": 'def one() -> int:\n    """One."""\n',
    "test": "def check(candidate):\n    assert candidate() == 1\n",
    "entry_point": "one",
}


def test_completions_become_fates_and_fates_a_score():
    texts = [
        ["    return 1\n", "    return 2\n"],
        ["```python\ndef one():\n    return 1\n```\nDone."],
    ]
    fates = run_completions(texts, [DOCUMENT, DOCUMENT])
    assert fates == [["passed", "failed: AssertionError"], ["passed"]]
    assert pass_at_k(["tests"], [fates[0]], k=[1, 2]) == {"pass@1": 0.5, "pass@2": 1.0}
    assert pass_at_k(["tests"], [["failed"]], k=[1]) == {"pass@1": 0.0}
    refused(r"1 to 1 tries, .* k is 5", pass_at_k, ["tests"], [fates[1]], k=[1, 5])


@pytest.mark.slow
def test_lm_eval_scores_programs(tmp_path):
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.model import LM
    from lm_eval.tasks import TaskManager

    from sinklab.lab.studies.benchmarks import offline

    class Twice(LM):
        """Solves the first question, and not the second."""

        def generate_until(self, requests):
            return [f"    return {1 + request.doc_id}\n" for request in requests]

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    row = {**DOCUMENT, "task_id": "HumanEval/0", "canonical_solution": "    return 1\n"}
    manager = TaskManager(include_defaults=False)
    (tmp_path / "humaneval").mkdir()
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(
        gzip.compress((json.dumps(row) + "\n").encode() * 2)
    )
    tasks = offline.tasks(["humaneval"], tmp_path, run_code=True)
    refused("unsafe", lm_eval.simple_evaluate, Twice(), tasks=tasks, task_manager=manager)
    tasks = offline.tasks(["humaneval"], tmp_path, run_code=True)
    results = lm_eval.simple_evaluate(
        Twice(), tasks=tasks, task_manager=manager, confirm_run_unsafe_code=True, bootstrap_iters=2
    )
    scores = results["results"]["humaneval"]
    assert scores["pass@1,create_test"] == 0.5
    assert scores["pass@1_stderr,create_test"] == pytest.approx(0.5)
    fates = [row["filtered_resps"] for row in results["samples"]["humaneval"]]
    assert fates == [[["passed"]], [["failed: AssertionError"]]]


@pytest.mark.slow
def test_humanevals_own_solutions_pass():
    path = shared("data/humaneval/HumanEval.jsonl.gz")
    documents = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[::20]]
    solutions = [[document["canonical_solution"], "    return None\n"] for document in documents]
    assert all(right == "passed" != wrong for right, wrong in run_completions(solutions, documents))


PROMPT = (
    'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """Of a circle."""\n'
)
BODY = "    return math.pi * half(2 * r) ** 2\n"


@pytest.mark.parametrize(
    "completion",
    [
        BODY,
        f"{BODY}```\nThat is all.",
        f"```python\n{BODY}```\nThat is all.",
        f"Here it is:\n```python\ndef area(r):\n{BODY}```\nand a test:\n```python\nassert area(1) "
        "> 3\n```",
        f"```\nassert area(1) > 3\n```\n```py\ndef area(r):\n{BODY}```",
        f"```python\ndef area(r):\n{BODY}",
    ],
)
def test_programs_of_plain_and_chat_completions(completion):
    space = {}
    exec(program_of(PROMPT, completion, "area"), space)
    assert space["area"](1) == pytest.approx(3.14159, abs=1e-5)


def test_a_plain_completion_is_taken_as_it_is():
    assert program_of(PROMPT, BODY, "area") == PROMPT + BODY
