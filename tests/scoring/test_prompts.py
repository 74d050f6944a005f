import copy
from dataclasses import replace

import pytest

from refusals import refused
from sinklab.lab.scoring import encode, read_prompts
from tiny_diffusion import tiny_loaded, tiny_tokenizer

CHAT = "{% for m in messages %}old: {{ m['content'] | trim }}; said{% endfor %}"
CHAT += "{% if add_generation_prompt %} he {% endif %}"


def chatty(template=CHAT):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.chat_template = template
    return replace(tiny_loaded(), tokenizer=tokenizer)


def test_a_plain_prompt_is_its_tokens_and_no_template():
    loaded = tiny_loaded()
    prompt = encode(loaded, "The old man")
    assert prompt.text == "The old man"
    assert list(prompt.ids) == loaded.tokenizer("The old man")["input_ids"]
    assert prompt.template == (False,) * len(prompt.ids)
    assert encode(loaded, "").ids == ()


@pytest.mark.parametrize("text", ["The sea", "  the boats ", "old: old"])
def test_in_a_chat_the_tokens_around_the_text_are_template(text):
    loaded = chatty()
    prompt = encode(loaded, text, chat=True)
    assert loaded.tokenizer.decode(prompt.ids) == f"old: {text.strip()}; said he "
    own = [
        token for token, template in zip(prompt.ids, prompt.template, strict=True) if not template
    ]
    # a token that reaches over the border belongs to the text
    decoded = loaded.tokenizer.decode(own)
    assert text.strip() in decoded
    assert len(decoded) <= len(text.strip()) + 3
    assert prompt.template[0]
    assert prompt.template[-1]


def test_a_text_that_the_template_does_not_show_is_all_template():
    prompt = encode(chatty("{{ 'the sea' }}"), "The old man", chat=True)
    assert prompt.template
    assert all(prompt.template)


def test_without_tokenizer_files_a_prompt_is_ids():
    loaded = replace(tiny_loaded(), tokenizer=None)
    assert encode(loaded, "5 17, 3").ids == (5, 17, 3)
    for text, message in (("the sea", "'5 17 3', but is 'the sea'"), ("280", "0 to 279")):
        refused(message, encode, loaded, text)
    refused("has no tokenizer files", encode, loaded, "5", chat=True)


def test_a_model_without_a_chat_format_is_asked_without_one():
    refused("leave out --chat", encode, chatty(None), "The sea", chat=True)


@pytest.mark.parametrize(
    "name, content",
    [
        ("p.txt", "\ufeffOne “two”\n\n  three\n"),
        ("p.jsonl", '{"question": "One “two”", "text": "x"}\n\n"  three"\n'),
    ],
)
def test_files_of_prompts(tmp_path, name, content):
    (tmp_path / name).write_text(content, "utf-8")
    assert read_prompts(tmp_path / name) == ("One “two”", "  three")
    assert read_prompts(tmp_path / name, samples=1) == ("One “two”",)
    refused(f"{name} holds 2 prompts, but 3", read_prompts, tmp_path / name, samples=3)
    refused("samples counts prompts", read_prompts, tmp_path / name, samples=0)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("p.txt", "\n\n", "holds 0 prompts, but at least 1 are needed"),
        ("p.md", "One", r"read from a .txt or .jsonl file, but .*p.md is none"),
        ("p.jsonl", '"One"\n\n{', "p.jsonl, line 3 is no JSON: Expecting"),
        ("p.jsonl", "1", "line 1: a prompt is text, but this one is a int"),
        ("p.jsonl", '{"answer": "x"}', r"line 1: no field prompt, .* \(it has answer\)"),
    ],
)
def test_files_that_hold_no_prompts(tmp_path, name, content, message):
    (tmp_path / name).write_text(content, "utf-8")
    refused(message, read_prompts, tmp_path / name)
    refused(r"absent\.txt is none or does not exist", read_prompts, tmp_path / "absent.txt")


@pytest.mark.parametrize("separator", ["\u2028", "\x85"])
@pytest.mark.parametrize("name, form", [("p.txt", "{}\n"), ("p.jsonl", '"{}"\n')])
def test_separators_inside_a_prompt_do_not_end_it(tmp_path, name, form, separator):
    (tmp_path / name).write_text(form.format(f"a{separator}b"), "utf-8")
    assert read_prompts(tmp_path / name) == (f"a{separator}b",)


def test_bytes_that_are_no_text_are_named(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"\xff\xfe\x00z")
    refused("cannot be read as UTF-8", read_prompts, tmp_path / "p.txt")
