"""Three toy benchmarks of lm-eval, as dicts of their configuration, and questions for GSM8K."""

import json
from pathlib import Path

VOWEL = {"function": "regex", "regex_pattern": "([aeiou])"}
PATTERN = [{"name": "vowel", "filter": [VOWEL, {"function": "take_first"}]}]


def toy_tasks(documents=6):
    """One that asks for texts, one that offers choices, one that scores the one right end."""
    from datasets import Dataset

    rows = [
        {
            "q": f"The old man sat by the sea {number * 'and the boy '}",
            "a": str(number),
            "end": " boats",
            "gold": number % 2,
        }
        for number in range(documents)
    ]
    data = {"test": Dataset.from_list(rows)}
    base = {
        "custom_dataset": lambda **_: data,
        "test_split": "test",
        "num_fewshot": 0,
    }

    def metric(name):
        return [{"metric": name, "aggregation": "mean", "higher_is_better": True}]

    texts = {
        "task": "toy_texts",
        "output_type": "generate_until",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{a}}",
        "generation_kwargs": {"until": ["zzz"], "max_gen_toks": 6},
        "filter_list": PATTERN,
        "metric_list": metric("exact_match"),
    }
    choices = {
        "task": "toy_choices",
        "output_type": "multiple_choice",
        "doc_to_text": "{{q}}",
        "doc_to_choice": ["rain", "wind"],
        "doc_to_target": "{{gold}}",
        "metric_list": metric("acc"),
    }
    ends = {
        "task": "toy_ends",
        "output_type": "loglikelihood",
        "doc_to_text": "{{q}}",
        "doc_to_target": "{{end}}",
        "metric_list": metric("acc"),
    }
    return [{**base, **task} for task in (texts, choices, ends)]


def write_gsm8k(count, data="data"):
    """Questions of GSM8K's form, where its task looks for them."""
    rows = [
        {"question": f"What is {n} and {n}?", "answer": f"It is {2 * n}.\n#### {2 * n}"}
        for n in range(count)
    ]
    file = Path(data, "gsm8k", "test.jsonl")
    file.parent.mkdir(parents=True)
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
