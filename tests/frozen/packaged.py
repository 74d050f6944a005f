"""What the packaged models are found to do: losses, the cost of arms, the three kinds of curve, the
answers about a watched text, and the tables of both papers.

Models are read in float64, so that no choice hinges on rounding, and texts are as short as a number
can be told from. Cells below `shared/` are benchmarks on the first 8 documents, which a clone does
not have; HumanEval's programs are written here and never run. The other benchmarks and the papers'
tables ask questions that are made of the text below. Tables are those of run folders and of CSV
files, without what names a folder.
"""

import bz2
import gzip
import json
import os
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from functools import cache
from io import StringIO
from itertools import islice
from pathlib import Path
from typing import Any

import pandas as pd

import sinklab
from frozen import Cells
from sinklab import BlockKeys, EqualMass, Random, TopKeys

TOLERANCE = 1e-6
"""doses are kept in float32"""
LOOSER = {"curve/heads/tiny/curve": 2e-5}
"""its p differs by 1.1e-5 between processors"""
MODELS = ("tiny", "tiny-sink", "tiny-causal")
HEAD = {"layers": (0,), "heads": (1,)}
SINKS = TopKeys(1)
TEXT = (
    "The house stood at the end of a long road.",
    "Nobody had lived there since the war, and the garden was full of weeds.",
    "In the evening the old man came home and sat down by the fire.",
    "She opened the letter with a trembling hand and read it twice.",
    "The ship was lost in the storm, and all the men were drowned.",
    '"I do not know," he said, "what you mean by that."',
    "The children ran down to the river to look at the boats.",
    "It was a cold morning in the winter, and the snow lay deep.",
)
"""of which questions are made"""
LEFT_OUT = {"run", "command", "sentence", "text", "prompt", "metrics", "tokens", "told"}
"""columns with folders, with words, or with what others say too"""


def cells(group: str) -> Cells:
    """The cells of one group."""
    parts = {
        "loss": losses,
        "compare": comparisons,
        "curve": curves,
        "answers": answers,
        "tables": tables,
        "shared": benchmarks,
    }
    with tempfile.TemporaryDirectory() as folder:
        for name, value in parts[group](Path(folder)):
            yield f"{group}/{name}", value


@cache
def loaded(name: str) -> Any:
    """A packaged model."""
    return sinklab.load(name, dtype="float64")


def command(*words: Any) -> None:
    """Run a command of sinklab, whose words are dropped: the one place to adapt to another one."""
    from sinklab.lab.cli import main

    with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
        status = main([str(word) for word in words])
    assert status == 0, said.getvalue()


def columns(frame: pd.DataFrame) -> dict[str, Any]:
    """The columns of a table that are held."""
    return {str(name): frame[name].tolist() for name in frame if name not in LEFT_OUT}


def losses(_: Path) -> Cells:
    """Losses and their likelihoods, without and with edits, of each model."""
    for name in MODELS:
        lm = loaded(name)
        for label, edits in (
            ("clean", ()),
            ("top", (BlockKeys(SINKS),)),
            ("mass", (BlockKeys(EqualMass(SINKS)),)),
        ):
            found = [lm.loss(text, edits=edits, samples=8).scored for text in TEXT[:2]]
            dose = [one.dose.row() if one.dose else {} for one in found]
            yield (
                f"{name}/{label}",
                {
                    "logprob": [one.logprob for one in found],
                    "stderr": [one.stderr for one in found],
                    "tokens": [one.tokens for one in found],
                    "dose": dose,
                },
            )


def comparisons(_: Path) -> Cells:
    """Costs of arms, with models that learned nothing too, and whether they hold; doses."""
    # Of one head, as the README has it. In that of tiny-causal most texts have no keys of equal
    # mass: costs of 0 exactly, where rounding decides on an interval.
    for name, where, how in (
        ("tiny", HEAD, {"samples": 4}),
        ("tiny-causal", {"layers": (0,)}, {}),
        ("tiny-sink", HEAD, {"samples": 1, "controls": True, "texts": TEXT}),
    ):
        arms = {
            "sink": BlockKeys(SINKS, **where),
            "random": BlockKeys(Random(SINKS), **where),
            "mass": BlockKeys(EqualMass(SINKS), **where),
            "in those heads": BlockKeys(EqualMass(SINKS, arm="keys"), **where),
        }
        found = loaded(name).compare(arms, **how)
        table, rows = found.summary().table, found.to_pandas()
        # as the columns were called
        verdicts = {"costs": True, "helps": False, "inconclusive": None}
        names = {"arm": "arm", "less": "against", "n": "texts", "nats": "nats", "mean": "cost"}
        names |= {"low": "cost_low", "high": "cost_high", "removed": "removed"}
        table = table[[*names, "regrown", "verdict"]].rename(columns=names)
        table["holds"] = [verdicts[word] for word in table.pop("verdict")]
        nats = [one for one in table if one.startswith(("nats", "cost"))]
        yield f"{name}/costs", columns(table[nats])
        yield f"{name}/arms", columns(table.drop(columns=nats))
        # nats of whole texts, which do not depend on how many tokens count
        texts = rows.groupby(["arm", "text"], sort=False)["nats"].sum().unstack()
        yield f"{name}/nats", texts.to_numpy()


def curves(folder: Path) -> Cells:
    """The cost by number of keys, and by head."""
    few = ("--dtype", "float64", "--figures", "--rows", 8)
    reading = (*few, "--length", 24, "--no-twin")
    for name in ("tiny", "tiny-causal"):
        models = ("--model", name)
        command("curve", *models, *reading, "--ks", 0, 1, 4, "--out", folder / "keys")
        command("curve", *models, *reading, "--by", "head", "--layers", 0, "--out", folder / "map")
        yield from of_run(f"keys/{name}", folder / "keys" / name, ("curve",))
        yield from of_run(f"heads/{name}", folder / "map" / name, ("curve",))


def of_run(name: str, folder: Path, wanted: tuple[str, ...]) -> Cells:
    """Tables of a run folder."""
    run = sinklab.open_run(folder)
    for one in wanted:
        yield f"{name}/{one}", columns(run.table(one))
        if "text" in run.table(one):
            yield f"{name}/texts", run.table(one)["text"].tolist()


def answers(folder: Path) -> Cells:
    """The three answers, with controls that learned nothing; the third from a curve."""
    from sinklab.lab.reports import answers as answered

    few = ("--dtype", "float64", "--rows", 8, "--length", 24, "--ks", 0, 1, "--no-twin")
    for name, tokens in (("tiny", 4), ("tiny-causal", 8)):
        command("curve", "--model", name, *few, "--figures", "--out", folder)
        own = {"block_length": 2} if tokens == 4 else {}
        run = loaded(name).watch(TEXT, tokens, twin=True, statistics=("received",), **own)
        (found,), _ = answered([run.read, sinklab.open_run(folder / name)])
        yield f"{name}/summary", columns(run.summary().table)
        yield f"{name}/with a curve", columns(found.table)
        yield f"{name}/mobility", run.mobility().to_numpy()
        yield f"{name}/texts", run.texts
        yield f"{name}/sinks", columns(run.sinks().groupby("layer")[["received", "position"]].sum())


def tables(folder: Path) -> Cells:
    """Table 1 of the analysis paper and scores, from questions made of the text."""
    write_questions(folder / "data")
    asked = ("--dtype", "float64", "--data", folder / "data", "--record-sinks", 1)
    short = ("--new-tokens", 4, "--block-length", 4, "--mc-samples", 2, "--num-fewshot", 0)
    for task, model, controls in (
        ("gsm8k", "tiny", ("sinks",)),
        ("piqa", "tiny-causal", ("sinks", "equal_mass")),
    ):
        out = folder / "table1" / task
        how = ("--model", model, "--controls", *controls, "--ks", 0, 4)
        command("table1", *asked, *short, *how, "--tasks", task, "--out", out)
        yield f"table 1/{task}", columns(pd.read_csv(out / "table1.csv"))
    for name, tasks in (("tiny", "social_iqa,race,arc_challenge,piqa"), ("tiny-sink", "piqa")):
        out = folder / "eval" / name
        command("eval", "--model", name, *asked, *short, "--tasks", tasks, "--out", out)
        yield from of_eval(f"eval/{name}", out)


def write_questions(folder: Path) -> None:
    """Benchmarks in which the end of a sentence is to be found among those of others."""
    pairs = [(" ".join(words[:-4]), " ".join(words[-4:])) for words in map(str.split, TEXT)]
    rows: dict[str, list[dict[str, Any]]] = {}
    for number, (start, _) in enumerate(pairs):
        right = number % 2
        few = [pairs[(number + place - right) % len(pairs)][1] for place in range(4)]
        letter, three = "AB"[right], zip(("answerA", "answerB", "answerC"), few, strict=False)
        asked = {"question": f"{start} _", "answer": letter, "options": few}
        choices = {"text": few, "label": [*"ABCD"]}
        made = {
            "gsm8k/test": {"question": f"What is 2 + {number}?", "answer": f"#### {2 + number}"},
            "piqa/validation": {"goal": start, "sol1": few[0], "sol2": few[1], "label": right},
            "socialiqa/validation": {"context": start, "question": "What?", "label": str(right + 1)}
            | dict(three),
            "arc/arc_challenge": {"question": start, "choices": choices, "answerKey": letter},
            "race/test": {"article": TEXT[number - 1], "problems": repr([asked, asked])},
        }
        for name, row in made.items():
            rows.setdefault(name, []).append(row)
    for name, some in rows.items():
        path = folder / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in some))


def benchmarks(folder: Path) -> Cells:
    """Benchmarks on the first documents of the shared data, where these are there."""
    root = os.environ.get("SINKLAB_SHARED") or Path(__file__).resolve().parents[3] / "shared"
    data = Path(root) / "data"
    if not (data / "gsm8k").is_dir():
        return
    # to read ten thousand questions took longer than to answer eight
    for path, opened, lines in (
        ("hellaswag/hellaswag_val_full.txt.bz2", bz2.open, 6 * 8),
        ("lambada/lambada_openai.jsonl", open, 8),
        ("gsm8k/test.jsonl", open, 8),
    ):
        first = folder / "data" / path.removesuffix(".bz2")
        first.parent.mkdir(parents=True)
        with opened(data / path, "rt", encoding="utf-8") as whole:
            first.write_text("".join(islice(whole, lines)), "utf-8")
    own_data = folder / "data"
    asked = ("--dtype", "float64", "--data", own_data, "--num-fewshot", 0, "--record-sinks", 0)
    few = ("--limit", 8, "--mc-samples", 1, "--new-tokens", 4, "--block-length", 4)
    choices = ("--model", "tiny", "--tasks", "hellaswag,lambada_openai")
    command("eval", *choices, *asked, *few, "--out", folder / "choices")
    yield from of_eval("tiny", folder / "choices")
    with gzip.open(data / "humaneval" / "HumanEval.jsonl.gz", "rt", encoding="utf-8") as lines:
        programs = [json.loads(line)["prompt"] for line, _ in zip(lines, range(8), strict=False)]
    for name, own in (("tiny", ("--steps", 2)), ("tiny-causal", ())):
        out = folder / name
        command("eval", "--model", name, "--tasks", "gsm8k", *asked, *few, *own, "--out", out)
        yield from of_eval(name, out)
        lm = loaded(name)
        how = {"block_length": 4, "steps": 2} if own else {"do_sample": False}
        written = [lm.generate(program, 4, **how) for program in programs]
        yield f"{name}/humaneval/texts", [text[-24:] for text in written]


def of_eval(name: str, folder: Path) -> Cells:
    """Scores and answers of a run of benchmarks, a cell a task."""
    run = sinklab.open_run(folder)
    for task, scores in run.table("scores").groupby("task"):
        yield f"{name}/{task}/scores", columns(scores)
    for task, samples in run.table("samples").groupby("task"):
        yield f"{name}/{task}/answers", columns(samples)
