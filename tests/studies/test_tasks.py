"""lm-eval's tasks on local files ask exactly what lm-eval's own tasks ask about the same
documents.
"""

import json
from pathlib import Path

import pytest

from shared_data import shared

pytest.importorskip("lm_eval")

from refusals import refused, refusing
from sinklab.lab.studies.benchmarks import offline
from sinklab.lab.studies.benchmarks.offline import SOURCES, rows_of
from sinklab.lab.studies.benchmarks.study import EvalSettings

GSM8K = [
    {
        "question": f"Ann has {n} pens and buys 2. How many?",
        "answer": f"{n}+2=<<{n}+2={n + 2}>>{n + 2}\n#### {n + 2}",
    }
    for n in range(8)
]
HUMANEVAL = [
    {
        "task_id": "HumanEval/0",
        "prompt": 'def one() -> int:\n    """One."""\n',
        "canonical_solution": "    return 1\n",
        "test": "def check(candidate):\n    assert candidate() == 1\n",
        "entry_point": "one",
    }
]
HELLASWAG = [
    {
        "activity_label": "Rowing",
        "ctx_a": "A man sits in a boat.",
        "ctx_b": "the man",
        "endings": ["rows [title] off.", "sinks.", "eats  it.", "is a boat."],
        "label": "2",
    }
]
ARC = [
    {
        "question": "What falls?",
        "choices": {"text": ["Rain", "Fire", "Light", "Air"], "label": ["1", "2", "3", "4"]},
        "answerKey": "1",
    }
]
PIQA = [{"goal": "Dry a cup", "sol1": "Use a towel.", "sol2": "Use a cup.", "label": 1}]
SIQA = [
    {
        "context": "Al ran.",
        "question": "Why?",
        "answerA": "late",
        "answerB": "old",
        "answerC": "tall",
        "label": "3",
    }
]
PROBLEMS = [
    {"question": "He had  _  .", "answer": "B", "options": ["a cat", "a dog", "a cow", "a hen"]},
    {"question": "Who sang?", "answer": "A", "options": ["She", "He", "They", "We"]},
    {"question": "It ends", "answer": "D", "options": ["well", "badly", "soon", "late"]},
]
RACE = [{"article": "He had a dog. She sang.", "problems": repr(PROBLEMS)}]
LAMBADA = [{"text": "The sea was rough and so she did not row to the island"}]
DOCUMENTS = {
    "gsm8k": GSM8K,
    "humaneval": HUMANEVAL,
    "humaneval_instruct": HUMANEVAL,
    "hellaswag": HELLASWAG,
    "arc_easy": ARC,
    "arc_challenge": ARC,
    "piqa": PIQA,
    "social_iqa": SIQA,
    "race": RACE,
    "lambada_openai": LAMBADA,
    "lambada_standard": LAMBADA,
}


def write(name, rows=None, split=None):
    """The documents under the first name that is looked for."""
    source = SOURCES[name]
    path = Path(source.folders[0]) / source.files[split or source.graded][0]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows or DOCUMENTS[name]))
    return path


def tasks(*names, **how):
    return [offline.task(name, EvalSettings(data=".", **how)) for name in names]


def asked(task, **how):
    """Every request of a task: its kind and its arguments."""
    if task.get_config("num_fewshot") is None:
        task.set_config("num_fewshot", 0)
    task.set_fewshot_seed(1234)
    task.build_all_requests(**how)
    return [(request.request_type, request.doc_id, request.args) for request in task.instances]


def own_task(name, rows):
    """lm-eval's own task of that name, its documents handed to it."""
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    source = SOURCES[name]
    config = load_yaml(
        Path(lm_eval.__file__).parent / "tasks" / source.include, resolve_func=not source.runs_code
    )
    if source.runs_code:
        # its functions ask the network when they are imported
        config |= {"metric_list": None, "filter_list": None}
    config.pop("tag", None)
    whole = datasets.Dataset.from_list(rows)
    splits = ("train", "validation", "test")
    return ConfigurableTask(
        config=config | {"custom_dataset": lambda **_: dict.fromkeys(splits, whole)}
    )


@pytest.mark.ring("extras")
@pytest.mark.parametrize("name", offline.OFFLINE)
def test_requests_are_those_of_lm_evals_own_task(name):
    write(name)
    if name == "gsm8k":
        write(name, split="train")
    (task,) = tasks(name, run_code=True)
    own = own_task(name, DOCUMENTS[name])
    assert asked(task) == asked(own)
    assert task.eval_docs[0] == own.eval_docs[0]
    assert task.eval_docs is task.eval_docs, "documents are processed once"
    for field in (
        "output_type",
        "generation_kwargs",
        "num_fewshot",
        "target_delimiter",
        "fewshot_delimiter",
    ):
        assert task.get_config(field) == own.get_config(field)
    if not name.startswith("humaneval"):
        assert task.get_config("metric_list") == own.get_config("metric_list")
        assert task.get_config("filter_list") == own.get_config("filter_list")


def test_few_shot_examples_come_from_the_training_file():
    write("gsm8k", GSM8K[:1])
    write("gsm8k", GSM8K[1:], split="train")
    (task,) = tasks("gsm8k")
    ((_, _, (context, _)),) = asked(task)
    assert context.count("Answer:") == 6
    assert context.count(GSM8K[0]["question"]) == 1


def test_a_missing_training_file_is_no_matter_without_examples():
    write("gsm8k")
    refused(
        r"gsm8k needs .* for 5 examples",
        tasks,
        "gsm8k",
    )
    (task,) = tasks("gsm8k", num_fewshot=0)
    assert not task.has_training_docs()
    with refusing(r"piqa needs .* for 3 examples"):
        write("piqa")
        tasks("piqa", num_fewshot=3)


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (
            ["hellaswga"],
            r"unknown task 'hellaswga'; did you mean 'hellaswag'\? known are gsm8k",
        ),
        (["humaneval"], r"humaneval runs programs that the model wrote.*--run-code"),
        (
            ["race"],
            r"race needs its test split, but looked for test.jsonl, .*race or .*RACE.*hf download",
        ),
    ],
)
def test_what_cannot_be_had_is_refused(names, message):
    refused(message, tasks, *names)


def test_programs_are_refused_without_the_extra_that_holds_them(monkeypatch):
    monkeypatch.setattr(offline, "sandboxes", {})
    refused(r"sinklab\.extras\.sandbox", tasks, "humaneval", run_code=True)


@pytest.mark.ring("extras")
def test_without_the_hub_the_message_says_what_to_get(monkeypatch):
    import datasets

    def unreachable(*_, **__):
        raise ConnectionError("Couldn't reach it\non the Hub")

    monkeypatch.setattr(datasets, "load_dataset", unreachable)
    settings = EvalSettings(run_code=True)
    refused("humaneval needs .*ConnectionError", offline.task, "humaneval", settings)


SIZES = {
    "gsm8k": 1319,
    "humaneval": 164,
    "hellaswag": 10042,
    "arc_easy": 2376,
    "piqa": 1838,
    "lambada_openai": 5153,
}


@pytest.fixture(scope="module")
def benchmarks():
    return shared("data")


@pytest.mark.parametrize("name", SIZES)
def test_real_files_are_read_as_they_are_handed_around(name, benchmarks):
    rows = rows_of(name, SOURCES[name].needed(benchmarks, SOURCES[name].graded))
    assert len(rows) == SIZES[name]
    assert set(rows[0]) == set(DOCUMENTS[name][0])
