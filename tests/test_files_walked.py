"""How many files of the package a trace and a blocked key run through."""

import json

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from launched import ROOT, launch, script
from sinklab.core import errors
from sinklab.core.subject import schedules

files_walked = script("benchmarks/files_walked")


@pytest.mark.parametrize("name", ["tracing", "blocked_key"])
def test_a_walk_enters_a_bounded_number_of_files(python, name):
    done = launch(python, ROOT / "benchmarks" / "files_walked.py", "--run", name)
    assert done.returncode == 0, done
    functions = json.loads(done.stdout.splitlines()[-1])
    files = list(dict.fromkeys(file for file, *_ in functions))
    assert len(files) <= files_walked.LIMITS[name], files
    handed = {file for file, *_, is_handed in functions if is_handed}
    assert 0 < len(handed) <= files_walked.HANDED[name], handed


def test_what_is_entered_is_counted_and_what_comes_after_the_kernel_is_not():
    q_BHQD = torch.ones(1, 1, 2, 4)
    with files_walked.Walk() as walk:
        errors.check_count("k", 1, "it counts keys")
        scaled_dot_product_attention(q_BHQD, q_BHQD, q_BHQD)
        schedules.commit_counts(4, 2)
    entered = {file for file, *_ in walk.functions()}
    assert "core/subject/schedules.py" in entered
    before = {file for file, *_ in walk.functions(to_kernel=True)}
    assert before == {"core/errors.py"} < entered


def test_files_beyond_a_limit_are_named_with_the_one_that_enters_them():
    functions = [["a.py", "one", "", "", True], ["a.py", "two", "", "a.py", True]]
    functions += [["b.py", "three", "", "a.py", False]]
    assert files_walked.merged(functions, 1) == ["b.py (1 functions, from a.py)"]
    assert files_walked.merged(functions, 2) == []
