"""Programs that a model wrote pass by running to their end, and by nothing else."""

import gzip
import json
import os
from pathlib import Path

import pytest

from sinklab.studies.benchmarks.code import CodeLimits, pass_at_k, run_completions, run_program, run_programs

pytest.importorskip("resource")
LIMITS = CodeLimits(seconds=20)


@pytest.mark.parametrize(
    ("program", "status", "reason"),
    [
        ("assert 1 + 1 == 2", "passed", ""),
        ("assert 1 + 1 == 3, 'no'", "failed", "AssertionError: no"),
        ("def f(:", "failed", "SyntaxError"),
        ("input()", "failed", "EOFError"),
        # leaving before the tests is no success
        ("import sys; sys.exit(0)", "failed", "SystemExit: 0"),
        ("raise KeyboardInterrupt", "failed", "KeyboardInterrupt"),
        ("import os; os._exit(0)", "error", "left with status 0 before its last line"),
        ("import os, atexit; atexit.register(os._exit, 0); assert False", "failed", "AssertionError"),
        ("import os; os.abort()", "error", "was ended by SIGABRT"),
        # memory, files, processes, the network
        ("x = bytearray(10 ** 10)", "failed", "MemoryError"),
        ("f = open('a', 'w')\nwhile True: f.write('x' * 10 ** 5)", "failed", "File too large"),
        ("import os; os.fork()", "failed", "not allowed: os.fork"),
        ("import subprocess; subprocess.run(['ls'])", "failed", "not allowed: subprocess.Popen"),
        ("import os; os.system('ls')", "failed", "not allowed: os.system"),
        ("import os; os.kill(os.getppid(), 9)", "failed", "not allowed: os.kill"),
        ("import socket; socket.socket()", "failed", "not allowed: socket"),
        ("import ctypes; ctypes.CDLL('libc.so.6')", "failed", "not allowed: ctypes.dlopen"),
        ("import gc; gc.get_objects()", "failed", "not allowed: gc.get_objects"),
        ("import resource; resource.setrlimit(resource.RLIMIT_AS, (-1, -1))", "failed", "not allowed: resource"),
        ("open('a', 'w').write('x'); assert open('a').read() == 'x'", "passed", ""),
        ("import os; os.mkdir('b'); os.rmdir('b')", "passed", ""),
        ("import os; assert not {'HOME', 'SINKLAB_SECRET'} & set(os.environ)", "passed", ""),
        ("print('x' * 10 ** 6)", "passed", ""),
        ("import dataclasses\n@dataclasses.dataclass\nclass A:\n    x: int = 1\nassert A().x == 1", "passed", ""),
        ("def f(n): return n and 1 + f(n - 1)\nassert f(900) == 900", "passed", ""),
    ],
)
def test_fates(program: str, status: str, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SINKLAB_SECRET", "1")
    result = run_program(program, LIMITS)
    assert (result.status, reason in result.reason) == (status, True), result
    assert result.passed is (status == "passed")


@pytest.mark.parametrize("call", ["open({!r}, 'a')", "os.remove({!r})", "os.rename({!r}, 'x')", "os.chmod({!r}, 0)"])
def test_nothing_outside_the_folder_is_changed(call: str, tmp_path: Path) -> None:
    path = tmp_path / "kept"
    path.write_text("kept")
    result = run_program(f"import os\n{call.format(str(path))}", LIMITS)
    assert (result.status, "outside the working folder" in result.reason) == ("failed", True), result
    assert path.read_text() == "kept"


@pytest.mark.parametrize("program", ["while True: pass", "import time; time.sleep(60)"])
@pytest.mark.slow
def test_time_ends_a_program(program: str) -> None:
    result = run_program(program, CodeLimits(seconds=0.5))
    assert str(result) == "timeout: 0.5 s by the clock"


def test_what_a_program_reports_itself_does_not_count() -> None:
    forged = 'import os\nfor n in range(3, 9):\n    try: os.write(n, b\'{"token": "", "raised": ""}\')\n'
    result = run_program(f"{forged}    except OSError: pass\nos._exit(0)", LIMITS)
    assert result.status == "error"
    reached = "import sys\nsys._getframe(1).f_locals['outcome'].append('')\nassert False"
    assert run_program(reached, LIMITS).status == "failed"


def test_the_superuser_steps_down_where_python_can_be_read() -> None:
    if os.geteuid() != 0:
        pytest.skip("not the superuser")
    # traversable by others all the way, so that nobody can read Python's own files
    readable = all(parent.stat().st_mode & 0o005 == 0o005 for parent in Path(os.__file__).resolve().parents)
    result = run_program(f"import os\nassert os.geteuid() == {65534 if readable else 0}", LIMITS)
    assert result.passed, result


def test_results_come_in_the_order_of_their_programs() -> None:
    results = run_programs([f"assert {n} % 2 == 0" for n in range(4)], LIMITS, workers=2)
    assert [result.passed for result in results] == [True, False, True, False]
    assert run_programs([]) == []


@pytest.mark.parametrize(
    ("limits", "message"),
    [
        ({"seconds": 0}, "seconds must be more than 0, but is 0"),
        ({"memory": 1 << 20}, "memory must be at least 2.68435e.08, but is 1048576"),
        ({"file_size": 1}, "file_size must be at least 4096, but is 1"),
    ],
)
def test_limits_that_let_nothing_run_are_refused(limits: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        CodeLimits(**limits)


DOCUMENT = {
    "prompt": 'def one() -> int:\n    """One."""\n',
    "test": "def check(candidate):\n    assert candidate() == 1\n",
    "entry_point": "one",
}


def test_completions_become_fates_and_fates_a_score() -> None:
    texts = [["    return 1\n", "    return 2\n"], ["```python\ndef one():\n    return 1\n```\nDone."]]
    fates = run_completions(texts, [DOCUMENT, DOCUMENT])
    assert fates == [["passed", "failed: AssertionError"], ["passed"]]
    assert pass_at_k(["tests"], [fates[0]], k=[1, 2]) == {"pass@1": 0.5, "pass@2": 1.0}
    assert pass_at_k(["tests"], [["failed"]], k=[1]) == {"pass@1": 0.0}
    with pytest.raises(ValueError, match=r"pass@k needs 1 to 1 tries, as many as completions, but k is 5"):
        pass_at_k(["tests"], [fates[1]], k=[1, 5])


@pytest.mark.slow
def test_lm_eval_scores_programs(tmp_path: Path) -> None:
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.model import LM

    from sinklab.studies.benchmarks import offline

    class Twice(LM):
        """Solves the first question, and not the second."""

        def generate_until(self, requests):
            return [f"    return {1 + request.doc_id}\n" for request in requests]

        def loglikelihood(self, requests):
            raise NotImplementedError

        loglikelihood_rolling = loglikelihood

    row = {**DOCUMENT, "task_id": "HumanEval/0", "canonical_solution": "    return 1\n"}
    (tmp_path / "humaneval").mkdir()
    (tmp_path / "humaneval" / "HumanEval.jsonl.gz").write_bytes(gzip.compress((json.dumps(row) + "\n").encode() * 2))
    tasks, manager = offline.tasks(["humaneval"], tmp_path, run_code=True, cache=tmp_path / "cache")
    with pytest.raises(ValueError, match="unsafe"):
        lm_eval.simple_evaluate(Twice(), tasks=tasks, task_manager=manager)
    tasks, manager = offline.tasks(["humaneval"], tmp_path, run_code=True, cache=tmp_path / "cache")
    results = lm_eval.simple_evaluate(
        Twice(), tasks=tasks, task_manager=manager, confirm_run_unsafe_code=True, bootstrap_iters=2
    )
    scores = results["results"]["humaneval"]
    assert scores["pass@1,create_test"] == 0.5
    assert scores["pass@1_stderr,create_test"] == pytest.approx(0.5)
    fates = [row["filtered_resps"] for row in results["samples"]["humaneval"]]
    assert fates == [[["passed"]], [["failed: AssertionError"]]]


def test_humanevals_own_solutions_pass() -> None:
    shared = os.environ.get("SINKLAB_SHARED") or Path(__file__).resolve().parents[3] / "shared"
    path = Path(shared) / "data" / "humaneval" / "HumanEval.jsonl.gz"
    if not path.is_file():
        pytest.skip(f"no benchmark files at {path}; set SINKLAB_SHARED")
    documents = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[:8]]
    solutions = [[document["canonical_solution"], "    return None\n"] for document in documents]
    assert all(right == "passed" != wrong for right, wrong in run_completions(solutions, documents))
