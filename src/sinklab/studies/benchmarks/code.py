"""HumanEval for lm-eval: completions are run when its filters are applied, and its metric counts those that passed."""

import contextlib
import importlib.util
import json
import math
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path
from typing import Any

from sinklab.errors import Checked, limited

NO_ANSWER = "[invalid]"
"""What lm-eval's regex filters give where an answer lacks their pattern."""

_FENCE = re.compile(r"^```[\w+-]*[ \t]*\n(.*?)(?:^```|\Z)", re.DOTALL | re.MULTILINE)


def marked_answer(text: str, *, published: bool = False) -> str | None:
    """What stands behind the last ``####`` of a worked problem, to the end of its line; None where there is none.

    Args:
        text: all that was written.
        published: the released code's expression, ``#### (.*)$``, which knows the text's last line alone and takes all
            behind the first mark in it. Source: One Token Is Enough (2601.19657), ``evaluate_gsm8k``.
    """
    if published:
        found = re.findall("#### (.*)$", text)
        return found[-1] if found else None
    _, mark, rest = text.rpartition("####")
    answer = rest.strip(" \t").split("\n")[0].strip()
    return answer if mark and answer else None


def same_answer(one: str, other: str, *, published: bool = False) -> bool:
    """Whether two answers to a worked problem are the same number; where one is no number, the same text.

    Args:
        one: an answer, as written: "$1,080.00", "18 eggs." is read as 18.
        other: another.
        published: as the released code compares without antlr4: as text, without dollars and thousands' commas, so
            that "18.0" is not "18".
    """
    if published:
        return _plain(one) == _plain(other)
    first, second = number_of(one), number_of(other)
    return one.strip() == other.strip() if first is None or second is None else first == second


def number_of(answer: str) -> Decimal | None:
    """The number that an answer begins with, after a currency sign; None where it begins with none."""
    found = re.match(r"\s*[$€£]?\s*([-+]?)\s*[$€£]?((?:\d[\d,]*)?\.?\d+|\d[\d,]*\.?)", answer)
    with contextlib.suppress(InvalidOperation):
        return Decimal(found[1] + found[2].replace(",", "").rstrip(".")) if found else None
    return None


def _plain(answer: str) -> str:
    text = answer.strip().replace("$", "")
    return text.replace(",", "") if text.replace(",", "").isdigit() else text


def program_of(prompt: str, completion: str, entry_point: str) -> str:
    """The function that a completion writes, with what its prompt brings along.

    A plain completion goes on where the prompt ends, as lm-eval takes it. A chat model answers in a code fence, often
    with the whole function again: then the fence that defines the function is taken (else the first one), behind the
    lines of the prompt before that function (its imports and helpers). A completion that begins inside the function,
    indented, ends at its first fence.

    Args:
        prompt: of the question: imports, helpers, the function's head and docstring.
        completion: what the model wrote.
        entry_point: name of the function.
    """
    first = re.search(r"^```(.*)$", completion, re.MULTILINE)
    if first is None:
        return prompt + completion
    if completion.lstrip("\n")[:1] in (" ", "\t") and not first[1].strip():
        return prompt + completion[: first.start()]
    fenced = [code for code in _FENCE.findall(completion) if code.strip()] or [completion[: first.start()]]
    head = re.compile(rf"^def {re.escape(entry_point)}\b", re.MULTILINE)
    whole = next((code for code in fenced if head.search(code)), None)
    if whole is None:
        return prompt + fenced[0]
    before = head.split(prompt, maxsplit=1)[0]
    return f"{before.rstrip()}\n\n{whole}" if before.strip() else whole


DRIVER = Path(__file__).with_name("code_driver.py")


@dataclass(frozen=True)
class CodeLimits(Checked):
    """What one program may use. Raises ValueError for limits that let nothing run."""

    seconds: float = limited(10.0, above=0)
    """Time by the clock; processor time is limited to as much, rounded up."""
    memory: int = limited(1 << 30, at_least=256 << 20)
    """Bytes of address space; Python itself needs some 200 MB of it."""
    file_size: int = limited(1 << 20, at_least=1 << 12)
    """Bytes in any file it writes; the report of a run takes up to 4096."""


@dataclass(frozen=True)
class CodeResult:
    """How a program ended."""

    status: str
    """``passed``; ``failed``: it raised; ``timeout``: stopped by the clock; ``error``: it ended its process, or was
    ended, before its last line."""
    reason: str = ""
    """The exception, the limit or the way the process ended."""

    @property
    def passed(self) -> bool:
        """Whether it ran to its last line."""
        return self.status == "passed"

    def __str__(self) -> str:
        return f"{self.status}: {self.reason}" if self.reason else self.status


def run_program(program: str, limits: CodeLimits | None = None) -> CodeResult:
    """Run a program in a fresh ``python -I`` and wait for it.

    It has an empty environment, an empty working folder of its own, limits on time, memory, file size, open files and
    processes, no input and no output; writing elsewhere, other processes and the network are refused. When its time is
    over it is killed with its process group. It passes only by running to its last line: leaving early is an error.
    Run as the superuser it steps down to nobody first. All of that contains mistakes; against malice use a container.

    Raises:
        ValueError: where the system has no such limits (Windows).
    """
    if importlib.util.find_spec("resource") is None:
        raise ValueError("programs are run under limits that this system does not have; use Linux or macOS")
    limits = limits or CodeLimits()
    token = secrets.token_hex(16)
    with tempfile.TemporaryDirectory(prefix="sinklab-run-", ignore_cleanup_errors=True) as folder:
        home, report = Path(folder) / "home", Path(folder) / "report"
        home.mkdir()
        report.touch()
        given = {"program": program, "token": token, "report": str(report), "size": limits.file_size}
        given |= {"seconds": max(1, math.ceil(limits.seconds)), "memory": limits.memory}
        ended = _waited(json.dumps(given).encode() + b"\n", home, limits.seconds)
        return _result(ended, report.read_bytes(), token, limits)


def _waited(given: bytes, home: Path, seconds: float) -> int | None:
    """The exit status of the driver; None when its time was over."""
    how: dict[str, Any] = {"cwd": home, "env": {}, "start_new_session": True, "stdin": subprocess.PIPE}
    how |= {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen([sys.executable, "-I", "-B", str(DRIVER)], **how)
    try:
        process.communicate(given, timeout=seconds)
        return process.returncode
    except subprocess.TimeoutExpired:
        return None
    finally:
        # also when it ended by itself: what it may have started goes with it
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _result(ended: int | None, report: bytes, token: str, limits: CodeLimits) -> CodeResult:
    if ended is None:
        return CodeResult("timeout", f"{limits.seconds:g} s by the clock")
    try:
        told = json.loads(report or b"{}")
    except ValueError:
        told = {}
    if not isinstance(told, dict) or told.get("token") != token:
        if ended == -getattr(signal, "SIGXCPU", 0):
            return CodeResult("timeout", f"{limits.seconds:g} s of processor time")
        how = f"was ended by {signal.Signals(-ended).name}" if ended < 0 else f"left with status {ended}"
        return CodeResult("error", f"the process {how} before its last line")
    raised = str(told["raised"])
    return CodeResult("failed", raised) if raised else CodeResult("passed")


def run_programs(
    programs: Sequence[str], limits: CodeLimits | None = None, *, workers: int | None = None
) -> list[CodeResult]:
    """Run programs side by side; results in their order.

    Args:
        programs: each as for :func:`run_program`.
        limits: of each.
        workers: programs at a time; half of the processors, at most 8, when left out.
    """
    most = workers or max(1, min(8, (os.cpu_count() or 2) // 2))
    with ThreadPoolExecutor(most) as pool:
        return list(pool.map(lambda program: run_program(program, limits), programs))


def run_completions(resps: Sequence[Sequence[str]], docs: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A filter: each completion becomes the fate of its program under the question's tests, such as "passed".

    Args:
        resps: completions of each question.
        docs: the questions: ``prompt``, ``test``, ``entry_point``.
    """
    pairs = [(doc, text) for texts, doc in zip(resps, docs, strict=True) for text in texts]
    fates = iter(run_programs([tested(doc, text) for doc, text in pairs]))
    return [[str(next(fates)) for _ in texts] for texts in resps]


def tested(doc: Mapping[str, Any], completion: str) -> str:
    """The program that passes where the completion does: the function, the question's tests, and their call."""
    name = doc["entry_point"]
    return f"{program_of(doc['prompt'], completion, name)}\n{doc['test']}\ncheck({name})\n"


def pass_at_k(references: Sequence[str], predictions: Sequence[Sequence[str]], k: Sequence[int]) -> dict[str, float]:
    """The chance that one of k completions passes, from all n of a question: 1 − C(n − c, k) / C(n, k).

    Args:
        references: the tests, which have been run already.
        predictions: what :func:`run_completions` gave for one question.
        k: the numbers of tries; each at most n.

    Raises:
        ValueError: for a k beyond the completions there are.

    Source: Chen et al. 2021 (2107.03374), Eq. 1.
    """
    (fates,) = predictions
    tries, passed = len(fates), sum(fate == "passed" for fate in fates)
    if wrong := [number for number in k if not 1 <= number <= tries]:
        raise ValueError(f"pass@k needs 1 to {tries} tries, as many as completions, but k is {wrong[0]}")
    return {f"pass@{number}": 1 - math.comb(tries - passed, number) / math.comb(tries, number) for number in k}
