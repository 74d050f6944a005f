"""Programs that a model wrote run inside bubblewrap, see nothing and leave nothing; where it cannot
be had they are kept, and scored elsewhere.
"""

import gzip
import json
import math

import pandas as pd
import pytest

from commands import cli, error_of, out_of
from refusals import refused
from shared_data import shared
from sinklab.extras.sandbox import humaneval
from sinklab.extras.sandbox.humaneval import passed, program_of, run_completions, run_program
from sinklab.lab.records import open_run

boxed = pytest.mark.skipif(
    bool(humaneval.why_not()), reason=f"bubblewrap: {humaneval.why_not()}: programs do not run"
)


@boxed
@pytest.mark.parametrize(
    "program, fate",
    [
        ("assert 1 + 1 == 2", "passed"),
        ("import numpy\nassert numpy.arange(3).sum() == 3", "passed"),
        ("print('x' * 10 ** 6)", "passed"),
        ("import os; assert not {'HOME', 'SINKLAB_SECRET'} & set(os.environ)", "passed"),
        ("assert 1 + 1 == 3, 'no'", "failed: AssertionError: no"),
        ("def f(:", "failed: SyntaxError"),
        ("input()", "failed: EOFError"),
        # leaving before the tests is no success
        ("import sys; sys.exit(0)", "failed: SystemExit: 0"),
        ("import os; os._exit(0)", "failed: it ended early"),
        ("import os; os.write(1, b'passed'); os._exit(0)", "failed: it ended early"),
        ("x = bytearray(10 ** 10)", "failed: MemoryError"),
    ],
)
def test_fates(program, fate, monkeypatch):
    monkeypatch.setenv("SINKLAB_SECRET", "1")
    assert run_program(program, 3600).startswith(fate)


@boxed
def test_time_ends_a_program():
    assert run_program("while True: pass", 0.2) == "failed: 0.2 s were not enough"


@boxed
@pytest.mark.parametrize(
    "program",
    [
        "open('/etc/passwd')",
        "import os; os.listdir(os.path.expanduser('~'))",
        "open('written', 'w')",
        "open('/tmp/written', 'w')",
        "import os; os.makedirs('/usr/written')",
        "import socket; socket.create_connection(('1.1.1.1', 53), 1)",
        "import os; os.mkdir('/written')",
        "import os; assert len([name for name in os.listdir('/proc') if name.isdigit()]) > 3",
        "import subprocess; subprocess.run(['mount', '-t', 'tmpfs', 'x', '/usr'], check=True)",
    ],
)
def test_there_is_nothing_to_see_and_no_place_to_write(program):
    assert run_program(program, 3600).startswith("failed: ")


def opened(monkeypatch, folder):
    """A program called bwrap that holds nothing: it runs what it is given, here."""
    script = folder / "bwrap"
    script.write_text('#!/bin/sh\nwhile [ "$1" != "-I" ]; do last=$1; shift; done\n"$last" -I -\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder), prepend=":")


def test_a_box_that_leaks_is_no_box(monkeypatch, tmp_path):
    opened(monkeypatch, tmp_path)
    humaneval.why_not.cache_clear()
    try:
        assert "does not hold here: failed: AssertionError: reads a file" in humaneval.why_not()
        monkeypatch.setenv("PATH", str(tmp_path / "empty"))
        humaneval.why_not.cache_clear()
        assert "is not installed" in humaneval.why_not()
    finally:
        monkeypatch.undo()
        humaneval.why_not.cache_clear()


DOC = {
    "task_id": "HumanEval/0",
    "prompt": 'import math\n\n\ndef half(x):\n    return x / 2\n\n\ndef area(r):\n    """It."""\n',
    "canonical_solution": "    return math.pi * half(2 * r) ** 2\n",
    "test": "def check(candidate):\n    assert abs(candidate(1) - 3.14159) < 1e-5\n",
    "entry_point": "area",
}
BODY = DOC["canonical_solution"]


@pytest.mark.parametrize(
    "completion",
    [
        BODY,
        f"{BODY}```\nThat is all.",
        f"```python\n{BODY}```\nThat is all.",
        f"Here it is:\n```python\ndef area(r):\n{BODY}```\nand a test:\n```python\nassert 0\n```",
        f"```\nassert area(1) > 3\n```\n```py\ndef area(r):\n{BODY}```",
        f"```python\ndef area(r):\n{BODY}",
    ],
)
def test_programs_of_plain_and_chat_completions(completion):
    exec(program_of(DOC, completion), {})
    with pytest.raises(AssertionError):
        exec(program_of(DOC, completion.replace("** 2", "** 3").replace("half", "abs")), {})


def test_programs_are_kept_where_they_are_not_run(monkeypatch):
    monkeypatch.setattr(humaneval, "why_not", lambda: "no bubblewrap")
    ((kept,),) = run_completions([[BODY]], [DOC])
    assert kept == program_of(DOC, BODY)
    assert math.isnan(passed(["tests"], [[kept]])["pass@1"])
    assert passed(["tests"], [["passed"]]) == {"pass@1": 1.0}
    assert passed(["tests"], [["failed: it ended early"]]) == {"pass@1": 0.0}


@boxed
@pytest.mark.slow
def test_humanevals_own_solutions_pass():
    path = shared("data/humaneval/HumanEval.jsonl.gz")
    documents = [json.loads(line) for line in gzip.decompress(path.read_bytes()).splitlines()[::20]]
    right = [[document["canonical_solution"]] for document in documents]
    assert run_completions(right, documents) == [["passed"]] * len(documents)
    wrong = run_completions([["    return None\n"]] * len(documents), documents)
    assert all(fate.startswith("failed: ") for (fate,) in wrong)


@pytest.mark.slow
def test_a_run_keeps_its_programs_and_another_machine_scores_them(tmp_path, monkeypatch, capsys):
    pytest.importorskip("lm_eval")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "humaneval").mkdir()
    rows = json.dumps(DOC) + "\n" + json.dumps({**DOC, "task_id": "HumanEval/1"}) + "\n"
    (tmp_path / "humaneval" / "HumanEval.jsonl").write_text(rows)
    asked = f"eval --tasks humaneval --data {tmp_path} --run-code --new-tokens 4 --out run"
    here = humaneval.HumanEvalSandbox
    monkeypatch.setattr(humaneval, "why_not", lambda: "no bubblewrap")
    monkeypatch.setattr(here, "why_not", staticmethod(lambda: "no bubblewrap"))
    said = out_of(asked, capsys)
    assert "2 programs are kept and were not run" in said and "sinklab score RUN" in said
    run = open_run("run")
    kept = run.table("samples")
    assert kept["right"].isna().all() and run.table("scores")["value"].isna().all()
    assert all("check(area)" in json.loads(answer)[0] for answer in kept["answer"])
    assert "are not run here: no bubblewrap" in error_of("score run", capsys)
    # the second of them is solved elsewhere
    monkeypatch.setattr(here, "why_not", staticmethod(lambda: ""))
    monkeypatch.setattr(here, "run", staticmethod(lambda programs: ["failed: no", "passed"]))
    assert "pass@1 (create_test) 0.5000 ± 0.5000 on 2" in out_of("score run", capsys)
    run = open_run("run")
    assert run.info.status == "complete"
    (score,) = run.table("scores").to_dict("records")
    assert (score["value"], score["stderr"], score["kept"]) == (0.5, 0.5, 0)
    scored = run.table("samples")
    assert scored["right"].tolist() == [0.0, 1.0]
    same = ["task", "doc_id", "prompt", "response"]
    pd.testing.assert_frame_equal(scored[same], kept[same])
    assert "keeps no programs" in error_of("score run", capsys)
    assert cli("trace a --new-tokens 2 --out traced") == 0
    assert "of kind 'study'" in error_of("score traced", capsys)


def test_programs_are_refused_without_permission(tmp_path):
    from sinklab.lab.studies.benchmarks import offline
    from sinklab.lab.studies.benchmarks.study import EvalSettings

    settings = EvalSettings(data=str(tmp_path))
    refused(r"inside bubblewrap.*--run-code", offline.task, "humaneval", settings)
