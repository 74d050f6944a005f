import dataclasses

import pytest
import torch
from transformers import TextDiffusionStreamer

from sinklab.core.sampling import Canvas, DecodingSettings, Entropy, EntropyBound, Factor
from sinklab.lab.caching import DualCache
from tiny_diffusion import TEXT, tiny_model, tiny_tokenizer

MASK = 2


def ids_of(text: str) -> torch.Tensor:
    return tiny_tokenizer()(text, return_tensors="pt")["input_ids"]


@pytest.mark.parametrize("sink", [0, 1])
def test_it_continues_ids(sink: int) -> None:
    model = tiny_model(sink)
    ids = torch.tensor([[40, 41, 42], [50, 51, 52]])
    out = model.generate(ids, max_new_tokens=8)
    assert out.shape == (2, 11)
    assert out.dtype == torch.int64
    assert torch.equal(out[:, :3], ids)
    assert MASK not in out
    assert torch.equal(
        out, model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    )


def test_the_result_is_the_most_probable_token_at_each_step() -> None:
    """The loop written out: the surest proposal first."""
    model = tiny_model(1)
    canvas = torch.cat([torch.tensor([[40, 41]]), torch.full((1, 5), MASK)], 1)
    out = model.generate(canvas[:, :2], max_new_tokens=5)
    with torch.no_grad():
        while (canvas == MASK).any():
            p = model(canvas).logits[0].index_fill(-1, torch.tensor([MASK]), -torch.inf)
            best, token = (
                model(canvas).logits[0].softmax(-1).gather(-1, p.argmax(-1, True))[:, 0],
                p.argmax(-1),
            )
            place = best.masked_fill(canvas[0] != MASK, -1).argmax()
            canvas[0, place] = token[place]
    assert torch.equal(out, canvas)


@pytest.mark.parametrize(
    "sink", [{"sink": 0}, {"sink": 2}, {"sink": 2, "sink_side": "end"}], ids=str
)
def test_a_left_padded_batch_equals_its_rows(sink: dict) -> None:
    model = tiny_model(**sink).double()
    prompts = [[40, 41, 42, 43, 44], [50, 51], [60]]
    ids = torch.zeros(3, 5, dtype=torch.long)
    real = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :] = torch.tensor(prompt)
        real[row, -len(prompt) :] = 1
    for options in ({}, {"steps": 4, "block_length": 3}, {"cfg_scale": 1.5}):
        out = model.generate(ids, real, max_new_tokens=6, **options)
        for row, prompt in enumerate(prompts):
            alone = model.generate(torch.tensor([prompt]), max_new_tokens=6, **options)
            assert torch.equal(out[row, -6 - len(prompt) :], alone[0]), (options, row)


GREEDY = [
    *(
        (rule, schedule)
        for rule in ("low_confidence", "maskgit_plus")
        for schedule in ("threshold", "factor")
    ),
    *(
        (rule, schedule)
        for rule in ("entropy", "topk_margin", "left_to_right")
        for schedule in ("even", "timed")
    ),
    *(("low_confidence", schedule) for schedule in ("even", "timed")),
    *(("maskgit_plus", schedule) for schedule in ("even", "timed")),
    *(("topk_margin", "threshold"), ("entropy", "entropy_bound")),
]
NUMBERS = {
    "threshold": {"threshold": 0.1},
    "factor": {"factor": 1.4},
    "entropy_bound": {"gamma": 5.0},
}


@pytest.mark.parametrize("cache", ["none", "prefix", "dual"])
@pytest.mark.parametrize(("rule", "schedule"), GREEDY, ids=str)
def test_a_batch_equals_its_rows_under_every_rule_schedule_and_cache(
    rule: str, schedule: str, cache: str
) -> None:
    model = tiny_model(1).double()
    prompts = [[40, 41, 42, 43, 44], [50, 51], [60]]
    ids, real = torch.zeros(3, 5, dtype=torch.long), torch.zeros(3, 5, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, -len(prompt) :] = torch.tensor(prompt)
        real[row, -len(prompt) :] = 1
    options = {
        "rule": rule,
        "schedule": schedule,
        "cache": cache,
        "block_length": 4,
        "max_new_tokens": 10,
    }
    options |= NUMBERS.get(schedule, {})
    for more in ({}, {"stop_ids": tuple(range(0, 280, 7))}):
        out = model.generate(ids, real, **options, **more)
        assert MASK not in out[:, 5:]
        for row, prompt in enumerate(prompts):
            alone = model.generate(torch.tensor([prompt]), **options, **more)
            assert torch.equal(out[row, 5 - len(prompt) :], alone[0]), (row, more)


def test_infilling_fills_the_masks_and_nothing_else() -> None:
    model = tiny_model(1)
    ids = torch.tensor([[40, MASK, 42, MASK, MASK, 45], [50, 51, MASK, 53, 54, 55]])
    out = model.generate(ids)
    assert out.shape == ids.shape
    assert MASK not in out
    given = ids != MASK
    assert torch.equal(out[given], ids[given])
    assert not torch.equal(model.generate(ids[:, :5])[0], out[0, :5]), (
        "what stands to the right is read"
    )


def calls_of(model) -> list[int]:
    calls: list[int] = []
    model.lm_head.register_forward_pre_hook(lambda module, args: calls.append(args[0].shape[0]))
    return calls


def test_steps_and_blocks_decide_how_often_the_model_runs_and_where() -> None:
    model = tiny_model()
    calls = calls_of(model)
    ids = torch.tensor([[40, 41]])
    model.generate(ids, max_new_tokens=8)
    assert calls == [8, 7, 6, 5, 4, 3, 2, 1]
    calls.clear()
    model.generate(ids, max_new_tokens=8, steps=3)
    assert calls == [8, 5, 2]
    calls.clear()
    model.generate(ids, max_new_tokens=8, steps=4, block_length=4)
    assert calls == [4, 2, 4, 2]


def test_the_seed_decides_the_sample() -> None:
    model = tiny_model()
    ids = torch.tensor([[40, 41]])
    options = {"max_new_tokens": 12, "temperature": 1.0}
    first = model.generate(ids, seed=1, **options)
    assert torch.equal(first, model.generate(ids, seed=1, **options))
    assert not torch.equal(first, model.generate(ids, seed=2, **options))
    torch.manual_seed(5)
    free = model.generate(ids, **options)
    torch.manual_seed(5)
    assert torch.equal(free, model.generate(ids, **options)), (
        "without a seed the global generator decides"
    )
    assert not torch.equal(free, model.generate(ids, **options))


def test_the_order_can_be_random() -> None:
    model = tiny_model()
    ids = torch.tensor([[40, 41]])
    texts = {
        tuple(model.generate(ids, max_new_tokens=12, rule="random", seed=seed)[0].tolist())
        for seed in range(4)
    }
    assert len(texts) > 1
    assert tuple(model.generate(ids, max_new_tokens=12, rule="random", seed=0)[0].tolist()) in texts


def test_temperature_spreads_the_samples() -> None:
    model = tiny_model()
    ids = torch.tensor([[40, 41]])

    def first_tokens(temperature: float) -> int:
        outs = [
            model.generate(ids, max_new_tokens=1, temperature=temperature, seed=seed)[0, -1].item()
            for seed in range(20)
        ]
        return len(set(outs))

    assert first_tokens(0.0) == 1
    assert 1 <= first_tokens(0.2) < first_tokens(5.0)


def test_guidance_asks_twice_and_changes_the_text() -> None:
    model = tiny_model()
    calls = calls_of(model)
    ids = torch.tensor([[40, 41, 42]])
    plain = model.generate(ids, max_new_tokens=10)
    assert len(calls) == 10
    guided = model.generate(ids, max_new_tokens=10, cfg_scale=3.0)
    assert len(calls) == 30
    assert not torch.equal(plain, guided)


def test_dynamic_schedules_run_the_model_less_often() -> None:
    model = tiny_model()
    calls = calls_of(model)
    ids = torch.tensor([[40, 41]])
    model.generate(ids, max_new_tokens=8, schedule="threshold", threshold=0.0)
    assert calls == [8]
    calls.clear()
    model.generate(ids, max_new_tokens=8, schedule="threshold", threshold=1.0)
    assert calls == [8, 7, 6, 5, 4, 3, 2, 1]
    calls.clear()
    model.generate(ids, max_new_tokens=8, schedule=Factor(50.0), block_length=4)
    assert calls == [4, 4]
    calls.clear()
    model.generate(ids, max_new_tokens=4, schedule="timed")
    assert calls == [4, 4, 3, 2], "Dream's first step commits nothing"


def test_it_ends_early_at_end_of_text() -> None:
    model = tiny_model()
    ids = torch.tensor([[40, 41], [50, 51]])
    full = model.generate(ids, max_new_tokens=10, rule="left_to_right")
    eos = full[0, 4].item()
    assert full[0, 2:].tolist().index(eos) == 2
    calls = calls_of(model)
    first = full[:1].clone()
    first[:, 5:] = eos
    options = {"max_new_tokens": 10, "rule": "left_to_right"}
    assert torch.equal(model.generate(ids[:1], stop_ids=(eos,), **options), first)
    assert len(calls) == 3
    calls.clear()
    for named in (eos, [eos, 7]):
        model.config.eos_token_id = named
        assert torch.equal(model.generate(ids[:1], stop_at_eos=True, **options), first)
        assert torch.equal(model.generate(ids[:1], **options), full[:1]), "only where asked for"
    model.config.eos_token_id = None
    with pytest.raises(ValueError, match="stop_at_eos needs the id"):
        model.generate(ids, stop_at_eos=True, **options)


def test_settings_in_one_record_and_by_keyword_are_the_same() -> None:
    model = tiny_model(1)
    ids = torch.tensor([[40, 41]])
    record = DecodingSettings(
        rule="entropy", schedule="entropy_bound", gamma=4.0, temperature=0.8, top_k=9, seed=5
    )
    out = model.generate(ids, max_new_tokens=12, settings=record)
    options = {name: value for name, value in dataclasses.asdict(record).items() if value != ()}
    assert torch.equal(out, model.generate(ids, max_new_tokens=12, **options))
    plan = EntropyBound(4.0)
    plain = DecodingSettings(temperature=0.8, top_k=9, seed=5)
    assert torch.equal(
        out, model.generate(ids, max_new_tokens=12, settings=plain, rule=Entropy(), schedule=plan)
    )
    assert not torch.equal(out, model.generate(ids, max_new_tokens=12, settings=record, seed=6))


class FakeStreamer:
    def __init__(self) -> None:
        self.events: list[tuple[str, list[int]]] = []

    def put(self, value: torch.Tensor) -> None:
        self.events.append(("put", value.flatten().tolist()))

    def put_draft(self, value: torch.Tensor) -> None:
        self.events.append(("draft", value.flatten().tolist()))

    def end(self) -> None:
        self.events.append(("end", []))


def test_a_streamer_sees_the_prompt_the_drafts_and_the_text() -> None:
    model, streamer = tiny_model(1), FakeStreamer()
    ids = torch.tensor([[40, 41]])
    out = model.generate(ids, max_new_tokens=3, streamer=streamer)
    names, values = zip(*streamer.events, strict=True)
    assert names == ("put", "draft", "draft", "draft", "put", "end")
    assert values[0] == [40, 41]
    assert [draft.count(MASK) for draft in values[1:4]] == [2, 1, 0]
    assert values[4] == values[3] == out[0, 2:].tolist()


def test_a_streamer_of_an_infilling_sees_the_whole_text_once() -> None:
    model, streamer = tiny_model(), FakeStreamer()
    out = model.generate(torch.tensor([[40, MASK, 42]]), streamer=streamer)
    assert streamer.events == [
        ("put", []),
        ("draft", out[0].tolist()),
        ("put", out[0].tolist()),
        ("end", []),
    ]


def test_the_streamer_of_transformers_prints_it(capsys: pytest.CaptureFixture) -> None:
    model, tokenizer = tiny_model(), tiny_tokenizer()
    ids = ids_of("The old man")
    out = model.generate(ids, max_new_tokens=4, streamer=TextDiffusionStreamer(tokenizer))
    printed = capsys.readouterr().out
    assert printed.count("\033[33m") == 4, "one draft a step"
    confirmed = "".join(part.partition("\033[J")[2] or part for part in printed.split("\0337")[-1:])
    assert confirmed.endswith(tokenizer.decode(out[0, ids.shape[1] :]) + "\n")
    assert printed.startswith("The old")
    with pytest.raises(ValueError, match="batch size"):
        model.generate(
            ids.repeat(2, 1), max_new_tokens=2, streamer=TextDiffusionStreamer(tokenizer)
        )


def test_the_model_is_left_as_it_was() -> None:
    model = tiny_model(1)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    ids = torch.tensor([[40, 41]])
    model.generate(ids, max_new_tokens=4)
    assert torch.equal(ids, torch.tensor([[40, 41]]))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    model.train()
    logits = model(ids).logits
    logits.sum().backward()
    assert model.sink_embeddings.grad is not None, "nothing of inference mode stays behind"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_new_tokens": 0}, "new_tokens must be at least 1, got 0; leave it out"),
        ({"max_new_tokens": 62}, r"context of 63 positions, got a prompt of 2 and 62 new tokens"),
        ({}, "at least one open position"),
        (
            {"input_ids": torch.tensor([[40, MASK]]), "max_new_tokens": 4},
            "must not contain the mask id 2",
        ),
        ({"input_ids": torch.full((1, 64), MASK)}, r"context of 63 positions, got 64"),
        (
            {"attention_mask": torch.tensor([[1, 0]]), "max_new_tokens": 4},
            "must be padded on the left",
        ),
        (
            {"attention_mask": torch.ones(1, 3), "max_new_tokens": 4},
            "must be of shape .* one flag per token",
        ),
        ({"max_new_tokens": 4, "steps": 5}, "steps must not exceed the open positions"),
        ({"max_new_tokens": 4, "steps": 1, "block_length": 2}, "each block needs at least 1 step"),
        ({"max_new_tokens": 4, "rule": "confidence"}, "unknown unmasking rule 'confidence'"),
        (
            {"max_new_tokens": 4, "schedule": "threshold", "steps": 4},
            "'threshold' runs until each block is done",
        ),
        (
            {"max_new_tokens": 4, "schedule": "threshold", "rule": "random"},
            "does not go with the rule RandomOrder",
        ),
        ({"max_new_tokens": 4, "factor": 1.5}, "factor does not go with the schedule 'even'"),
        ({"max_new_tokens": 4, "top_p": 0.9}, "top_p and top_k do nothing at temperature 0"),
        ({"max_new_tokens": 4, "temperature": -1}, "temperature must be at least 0 and finite"),
        (
            {"max_new_tokens": 4, "cfg_scale": float("inf")},
            "guidance scale must be a finite number",
        ),
    ],
    ids=lambda value: value[:20] if isinstance(value, str) else "",
)
def test_it_refuses_before_any_work(arguments: dict, message: str) -> None:
    model = tiny_model(1)
    runs: list[object] = []
    model.model.register_forward_pre_hook(lambda *_: runs.append(1))
    streamer = FakeStreamer()
    with pytest.raises(ValueError, match=message):
        model.generate(**{"input_ids": torch.tensor([[40, 41]]), "streamer": streamer, **arguments})
    assert not runs
    assert not streamer.events


def test_unknown_arguments_and_models_without_a_mask_are_refused() -> None:
    ids = ids_of(TEXT[:10])
    with pytest.raises(TypeError, match="no option 'zzzz'"):
        tiny_model().generate(ids, max_new_tokens=2, zzzz=4)
    with pytest.raises(TypeError, match="'treshold'; did you mean"):
        tiny_model().generate(ids, max_new_tokens=2, treshold=0.9)
    maskless = tiny_model(mask_token_id=None)
    with pytest.raises(ValueError, match=r"set config.mask_token_id"):
        maskless.generate(ids, max_new_tokens=2)


@pytest.mark.parametrize(
    ("option", "instead"),
    [
        ({"max_length": 20}, "give max_new_tokens, the length of the completion alone"),
        ({"do_sample": True}, "give a temperature: above 0 tokens are drawn"),
        ({"num_beams": 4}, "denoising has no beam search"),
        ({"generation_config": None}, "give settings=DecodingSettings"),
        ({"eos_token_id": 1}, "give stop_ids, or stop_at_eos=True"),
        ({"num_return_sequences": 2}, "repeat the rows of input_ids"),
        ({"use_cache": True}, "give cache='prefix' or cache='dual'"),
    ],
    ids=str,
)
def test_options_of_transformers_are_led_to_ours(option: dict, instead: str) -> None:
    with pytest.raises(
        TypeError, match=f"generate has no option '{next(iter(option))}'; {instead}"
    ):
        tiny_model().generate(torch.tensor([[40, 41]]), **option)


def test_lists_and_single_rows_are_taken_as_rows() -> None:
    model, options = tiny_model(1), {"max_new_tokens": 4}
    out = model.generate(torch.tensor([[40, 41, 42]]), **options)
    for given in (
        torch.tensor([40, 41, 42]),
        [40, 41, 42],
        [[40, 41, 42]],
        torch.tensor([[40, 41, 42]]).numpy(),
    ):
        assert torch.equal(model.generate(given, **options), out)
    assert torch.equal(model.generate([0, 40, 41, 42], [0, 1, 1, 1], **options)[:, 1:], out)
    holes = model.generate(torch.tensor([[0, 40, MASK]]), torch.tensor([[0, 1, 1]]))
    assert torch.equal(model.generate(torch.tensor([0, 40, MASK]), torch.tensor([0, 1, 1])), holes)
    assert model.generate([], **options).shape == (1, 4)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            [[40, 41], [42]],
            r"tensor or a list of rows of equal length, got a list .*padding_side='left'",
        ),
        ("text", "tensor or a list of rows of equal length, got a str .*tokenize text"),
        (["text"], "got a list .*tokenize text"),
        ({"input_ids": torch.tensor([[40]])}, r"got a dict; pass \*\*inputs"),
        ([[40.5]], "token ids must be integers.*torch.float32"),
        (
            torch.tensor([[[40]]]),
            r"of shape \(rows, positions\), got torch.int64 of shape \(1, 1, 1\)",
        ),
        (torch.tensor(40), r"got torch.int64 of shape \(\)"),
        (
            [[40, 41], [42, -100]],
            "vocabulary, 0 to 279, but row 1 position 1 holds -100; check the tokenizer",
        ),
        ([[40, 280]], "vocabulary, 0 to 279, but row 0 position 1 holds 280"),
    ],
    ids=str,
)
def test_what_is_no_batch_of_token_ids_is_refused(given: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny_model().generate(given, max_new_tokens=3)


def test_ids_outside_the_vocabulary_are_refused_when_infilling_too() -> None:
    with pytest.raises(ValueError, match="row 0 position 2 holds -100"):
        tiny_model().generate(torch.tensor([[40, MASK, -100]]))
    out = tiny_model().generate(torch.tensor([[0, 279, MASK]]))
    assert MASK not in out, "the first and the last id are in the vocabulary"


def test_classes_and_ids_that_cannot_be_are_refused() -> None:
    model, ids = tiny_model(), torch.tensor([[40, 41]])
    for option, name in (("cache", DualCache), ("rule", Entropy), ("schedule", Factor)):
        with pytest.raises(TypeError, match=rf"a {option} is .*{name.__name__}\(\)"):
            model.generate(ids, max_new_tokens=2, **{option: name})
    for stop in (280, -1):
        with pytest.raises(ValueError, match=rf"stop_ids must .*\[{stop}\]"):
            model.generate(ids, max_new_tokens=2, stop_ids=stop)
    assert torch.equal(
        model.generate(ids, max_new_tokens=4, defer_ids=7),
        model.generate(ids, max_new_tokens=4, defer_ids=(7,)),
    )


def test_options_of_denoise_are_named_or_refused() -> None:
    model = tiny_model()
    canvas = Canvas.from_prompts([[40, 41]], new_tokens=4, mask_id=MASK)
    for option in ("steps", "temperature", "rul"):
        with pytest.raises(TypeError, match=f"'{option}'"):
            model.denoise(canvas, **{option: 2})
    *_, last = model.denoise(canvas, rule="entropy", schedule="timed", cache="none")
    assert last.index == 3


@pytest.mark.parametrize(
    "options", [{}, {"cache": "dual", "block_length": 2}, {"cfg_scale": 1.0}], ids=str
)
def test_what_it_writes_can_be_trained_on(options: dict) -> None:
    model = tiny_model(1)
    out = model.generate(torch.tensor([[40, 41]]), max_new_tokens=4, **options)
    assert not out.is_inference()
    assert not out.requires_grad
    model(out).logits.sum().backward()
    assert model.sink_embeddings.grad.abs().sum() > 0
    canvas = Canvas.from_prompts([[40, 41]], new_tokens=4, mask_id=MASK)
    for step in model.denoise(canvas, DecodingSettings(**options)):
        tensors = [
            step.before_BS,
            step.ids_BS,
            step.filled_BS,
            step.masked_BS,
            step.committed_BS,
            step.confidence_BS,
        ]
        assert not any(tensor.is_inference() for tensor in tensors)
        model(step.ids_BS).logits.sum().backward()


def test_unequal_holes_with_steps_and_blocks_are_refused_and_one_by_one_they_are_not() -> None:
    model = tiny_model()
    ids = torch.tensor([[40, MASK, MASK, MASK, 44], [50, MASK, 52, 53, 54]])
    with pytest.raises(ValueError, match="splits steps=2 over 2 block"):
        model.generate(ids, steps=2, block_length=2)
    for options in ({"steps": 2}, {"block_length": 2}):
        out = model.generate(ids, **options)
        alone = [model.generate(ids[:1], **options), model.generate(ids[1:], block_length=2)]
        assert torch.equal(out, torch.cat(alone))


def test_logits_that_are_no_numbers_are_refused() -> None:
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="numbers, but at step 0"):
        model.generate(torch.tensor([[40, 41]]), max_new_tokens=2)
