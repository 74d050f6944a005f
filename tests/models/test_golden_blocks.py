"""BD3LM, SDAR, Fast-dLLM v2 and LLaDA2 against the numbers of their authors' code: every canvas of
generation, the evaluations that denoise, and how often the network is called.

An evaluation of ours is one call of the network (two with guidance): a block that is finished runs
with the first evaluation of the next one, and a prompt with the first of all. The originals'
further calls, which store keys and values or encode a prefix again, decide nothing and are no
evaluations.
"""

# B batch rows, S canvas positions, M wanted positions, V vocabulary, T evaluations, N positions of
# a draw
from contextlib import contextmanager

import pytest
import torch

from golden import check_canvases, golden_case, golden_cases, golden_model, tensors_of
from sinklab.core.subject import Canvas, DecodingSettings, Denoiser, TokenSampling
from sinklab.core.subject.denoisers import guided
from sinklab.core.subject.tokens import shaped

pytestmark = pytest.mark.ring("extras")

DLLM = ("bd3lm_qwen3", "bd3lm_llama")
LLADA2 = ("llada2_moe", "llada21_moe")
UNEQUAL = {
    "pad_generated": "dLLM takes a written token for padding where it has the pad token's id; "
    "here padding is where it was given",
    "block_cache": "Fast-dLLM v2's cache inside a block: keys and values of other sub-blocks are "
    "stale, and logits "
    "are shifted inside the sub-block; here the cache of a model in blocks is exact",
    "block_cache_quarter": "the same",
    "short_prompt_cache": "the same",
}
"""Cases that are not compared, and why."""
CUT = {
    "tail_quota": "SDAR's generate.py then overwrites a given token, which one is undefined: up "
    "to evaluation 1"
}
"""Cases of which a part is compared."""


def cases_of(family):
    return [case for case in golden_cases(family)["generate"] if case["name"] not in UNEQUAL]


def stored(family, case):
    """The tensors of a run."""
    return tensors_of(family, f"gen.{case['name']}.")


def noises(family, case, count):
    """The draws of a run, in their order."""
    return [stored(family, case)[f"noise.{number}"] for number in range(count)]


@contextmanager
def calls_of(model):
    """How often the network runs: its head does so once in each call, whatever stands for the
    decoder.
    """
    calls = []
    handle = model.lm_head.register_forward_hook(lambda *_: calls.append(1))
    try:
        yield calls
    finally:
        handle.remove()


class Drawn(Denoiser):
    """Tokens drawn by the noise that the original drew, at the columns that its draw was for; all
    else is ours.
    """

    def __init__(self, denoiser, draws, key_of, score_of):
        self.denoiser, self.draws = denoiser, iter(draws)
        self.key_of, self.score_of = key_of, score_of

    def in_blocks(self, canvas, block_length=None):
        return self.denoiser.in_blocks(canvas, block_length)

    def logits(self, ids_BS, at):
        wanted_BS = at.wanted_BS
        self.logits_MV = self.denoiser(ids_BS, wanted_BS)
        noise = next(self.draws)
        start = int(wanted_BS.any(0).nonzero()[0]) // noise.shape[-2] * noise.shape[-2]
        place_BS = wanted_BS[:, start : start + noise.shape[-2]]
        assert int(place_BS.sum()) == len(self.logits_MV)
        self.noise_MV = noise.view(len(ids_BS), *noise.shape[-2:])[place_BS]
        return self.key_of(self.logits_MV, self.noise_MV)

    def rule(self, candidates):
        return self.score_of(self.logits_MV).gather(-1, candidates.tokens_M[:, None])[:, 0]


def by_noise(denoiser, noise, theirs):
    """A denoiser of dLLM whose tokens, or whose order, this noise draws; and its rule."""
    if theirs.get("remasking") == "random":
        # the scores themselves
        drawn = Drawn(denoiser, [one[..., None] for one in noise], lambda l_MV, n_MV: l_MV, None)
        return drawn, lambda candidates: drawn.noise_MV[:, 0]
    drawn = Drawn(
        denoiser,
        noise,
        lambda l_MV, n_MV: l_MV.double() - theirs["temperature"] * (-n_MV.double().log()).log(),
        lambda l_MV: l_MV.softmax(-1),
    )
    return drawn, drawn.rule


def cut_in_turn(theirs):
    """Probabilities of logits where top-k comes before top-p: ours are the other way round."""
    top_k = TokenSampling(theirs["temperature"], None, theirs.get("top_k"))
    top_p = TokenSampling(1.0, theirs["top_p"])
    return lambda logits_MV: shaped(shaped(logits_MV, top_k), top_p).softmax(-1)


def by_division(probabilities):
    """Key of the original draw: torch.multinomial divides probabilities by exponential noise."""
    return lambda logits_MV, noise_MV: probabilities(logits_MV).log() - noise_MV.log()


def whole_blocks(prompt, theirs, mask_id):
    """A prompt, and masks up to the end of a block."""
    length = theirs["block_length"]
    total = -(-(len(prompt) + theirs["gen_length"]) // length) * length
    return Canvas.from_prompts([prompt], new_tokens=total - len(prompt), mask_id=mask_id)


def through_stop(steps, prompt, stops):
    """Steps up to the end of the block in which a stop id is written, where originals stop."""
    stops = torch.tensor(stops)
    ended = {step.block for step in steps if torch.isin(step.ids_BS[:, prompt:], stops).any()}
    return [step for step in steps if step.block <= min(ended)]


def first_stop(ids, stops):
    """Up to the first of these ids, itself included."""
    ids = ids.tolist()
    ends = [place for place, one in enumerate(ids) if one in stops]
    return ids[: ends[0] + 1] if ends else ids


# dLLM's BD3LM


def bd3lm_canvas(family, case):
    """Prompts as the original pads them, on the left to whole blocks, and the masks of all
    blocks.
    """
    given_BP, ids = stored(family, case)["canvas"][0], case["special_ids"]
    prompt_BP = given_BP[:, (given_BP >= 0).all(0)]
    assert prompt_BP.shape[1] % case["settings"]["block_size"] == 0
    masks_BN = torch.full((len(prompt_BP), case["settings"]["max_new_tokens"]), ids["mask"])
    ids_BS = torch.cat([prompt_BP, masks_BN], 1)
    # what equals pad is padding, inside a prompt as well
    return Canvas(ids_BS, ids_BS != ids["pad"], ids_BS == ids["mask"], ids["mask"])


def bd3lm(family, case, **settings):
    theirs, canvas = case["settings"], bd3lm_canvas(family, case)
    model = golden_model(
        family,
        block_length=theirs["block_size"],
        logit_shift=theirs.get("right_shift_logits", False),
    ).model
    new = theirs["max_new_tokens"]
    steps = theirs.get("steps", 128)
    if "steps_per_block" in theirs:
        steps = theirs["steps_per_block"] * -(-new // theirs["block_size"])
    denoiser, given = model.denoiser(canvas.attention_BS), {}
    if scale := theirs.get("cfg_scale"):
        denoiser = guided(denoiser, scale, canvas.prompt_BS, canvas.mask_id)
    if case["noise_draws"]:
        noise = noises(family, case, case["noise_draws"])
        denoiser, given["rule"] = by_noise(denoiser, noise, theirs)
    options = DecodingSettings(schedule="alpha", steps=steps, **settings)
    with calls_of(model) as calls:
        decoded = list(options.decode(denoiser, canvas, **given))
    return decoded, len(calls)


@pytest.mark.slow
@pytest.mark.parametrize("family", DLLM)
def test_every_canvas_of_bd3lm(family):
    for case in cases_of(family):
        name, canvas_TBS = case["name"], stored(family, case)["canvas"][1:]
        steps, calls = bd3lm(family, case)
        if name == "eos_stop":
            # theirs ends with the block, for all rows at once: the caller's loop is where to do so
            steps = steps[: len(canvas_TBS)]
            assert steps[-1].block < 1 + max(step.block for step in steps)
            calls = len(steps)
        check_canvases(name, steps, canvas_TBS)
        assert len(steps) == case["denoising_evaluations"], name
        evaluation = 2 if "cfg_scale" in case["settings"] else 1
        assert calls == evaluation * len(steps) < case["model_calls"], name
        written_BS = steps[-1].ids_BS[:, : canvas_TBS.shape[-1]]
        assert torch.equal(written_BS, stored(family, case)["sequences"])


# SDAR


def sdar(case):
    theirs, family = case["settings"], "sdar"
    length, prompt = theirs["block_length"], stored(family, case)["prompt"].tolist()
    model = golden_model(family, block_length=length).model
    canvas = whole_blocks(prompt, theirs, golden_cases(family)["special_ids"]["mask"])
    is_copy = case["function"] == "huggingface_bd3.py"
    kind = theirs.get("remasking", theirs.get("remasking_strategy"))
    threshold = theirs.get("threshold", 1)
    if kind == "low_confidence_dynamic":
        threshold = theirs["confidence_threshold"]
    schedule = (
        f"dynamic:threshold={threshold},steps={theirs['denoising_steps']},block_length={length}"
    )
    rule = (
        "left_to_right" if kind == "sequential" else "low_confidence" if is_copy else "maskgit_plus"
    )
    given, denoiser, options = {}, model.denoiser(), {}
    if "noise" in case["sampling"]:
        noise = noises(family, case, case["denoising_evaluations"])
        probabilities = confidences = cut_in_turn(theirs)
        if is_copy:
            confidences = cut_in_turn({**theirs, "top_k": None, "top_p": None})
        denoiser = Drawn(denoiser, noise, by_division(probabilities), confidences)
        given["rule"] = denoiser.rule
    elif not is_copy and kind != "sequential" and theirs["top_k"]:
        options["top_k"] = theirs["top_k"]
    with calls_of(model) as calls:
        steps = list(
            DecodingSettings(rule=rule, schedule=schedule, **options).decode(
                denoiser, canvas, **given
            )
        )
    return steps, len(calls), len(prompt)


@pytest.mark.slow
def test_every_canvas_of_sdar():
    for case in cases_of("sdar"):
        name, canvas_TBS = case["name"], stored("sdar", case)["canvas"]
        steps, calls, prompt = sdar(case)
        assert torch.equal(steps[0].before_BS, canvas_TBS[0])
        if name in CUT:
            steps, canvas_TBS = steps[:1], canvas_TBS[:2]
        elif case["stopping_criteria_idx"]:
            steps = through_stop(steps, prompt, case["stopping_criteria_idx"])
        else:
            assert calls == len(steps) == case["denoising_evaluations"] < case["model_calls"], name
            assert [int(step.committed_BS.sum()) for step in steps] == case["committed"], name
            assert torch.equal(steps[-1].ids_BS, stored("sdar", case)["sequences"])
        check_canvases(name, steps, canvas_TBS[1:])


# Fast-dLLM v2


def fast_dllm(case, prompts, total):
    """The steps, and which of them write the first token of a block: what the original's commit
    calls decide.
    """
    theirs, family = case["settings"], "fast_dllm_v2"
    length, mask_id = theirs["block_size"], case["mask_id"]
    model = golden_model(family, block_length=length).model
    assert model.config.first_alone and model.config.logit_shift
    # the original's rows end in the same column; of a longer prompt ours writes on
    canvas = Canvas.from_prompts(
        prompts, new_tokens=total - min(map(len, prompts)), mask_id=mask_id, pad_id=0
    )
    denoiser, given = model.denoiser(canvas.attention_BS), {}
    if "temperature" in theirs:
        noise = noises(family, case, case["denoising_evaluations"])
        plain, probabilities = denoiser, cut_in_turn(theirs)

        class FirstIsBest(Drawn):
            def logits(self, ids_BS, at):
                if int(at.wanted_BS.nonzero()[0, 1]) % length:
                    return super().logits(ids_BS, at)
                self.logits_MV = plain(ids_BS, at.wanted_BS)
                return self.logits_MV

        denoiser = FirstIsBest(plain, noise, by_division(probabilities), probabilities)
        given["rule"] = denoiser.rule
    settings = DecodingSettings(
        schedule=f"dynamic:threshold={theirs['threshold']}",
        block_length=theirs["small_block_size"],
        stop_ids=(case["stop_token"],),
    )
    with calls_of(model) as calls:
        steps = list(settings.decode(denoiser, canvas, **given))
    assert len(calls) == len(steps)
    first = (
        [int(step.committed_BS.nonzero()[0, 1]) % length == 0 for step in steps]
        if len(prompts) == 1
        else None
    )
    return steps, first


@pytest.mark.slow
def test_every_canvas_of_fast_dllm_v2():
    for case in cases_of("fast_dllm_v2"):
        name, theirs, tensors = case["name"], case["settings"], stored("fast_dllm_v2", case)
        prompt, length = tensors["prompt"].tolist(), theirs["block_size"]
        total = (len(prompt) // length + theirs["max_new_tokens"] // length) * length + 1
        steps, first = fast_dllm(case, [prompt], total)
        written = tensors["sequences"][0].tolist()
        assert first_stop(steps[-1].ids_BS[0], [case["stop_token"]]) == written, name
        kinds = [call[2] for call in case["calls"]]
        assert first.count(False) == case["denoising_evaluations"] == kinds.count("block"), name
        assert len(steps) <= case["model_calls"], name
        shown_TBS = tensors["shown"][[place for place, kind in enumerate(kinds) if kind == "block"]]
        for step, shown_BS in zip(
            (step for step, alone in zip(steps, first, strict=True) if not alone),
            shown_TBS,
            strict=True,
        ):
            before_BS = step.before_BS[:, : shown_BS.shape[1]]
            assert torch.equal(before_BS[shown_BS >= 0], shown_BS[shown_BS >= 0]), (
                name,
                step.index,
            )


@pytest.mark.parametrize("name", ["same_block", "other_blocks"])
def test_a_batch_of_fast_dllm_v2_is_written_as_its_rows(name):
    case = golden_case("fast_dllm_v2", "batch", name)
    tensors = tensors_of("fast_dllm_v2", f"batch.{name}.")
    lengths = case["lengths"]
    if name == "other_blocks":
        # the 17th token of this prompt is the first of a block, and the original writes its own
        # prediction over it
        lengths = [10, 16]
    prompts = [tensors["prompt"][row, :n].tolist() for row, n in enumerate(lengths)]
    texts = [tensors[f"sequences.{row}"] for row in range(2)]
    total, stops = len(texts[0]), [case["stop_token"]]
    together = fast_dllm(case, prompts, total)[0][-1].ids_BS
    for row, text in enumerate(texts):
        alone = fast_dllm(case, [prompts[row]], total)[0][-1].ids_BS
        padding = max(map(len, prompts)) - len(prompts[row])
        assert first_stop(alone[0, :total], stops) == first_stop(text, stops)
        assert first_stop(together[row, padding : padding + total], stops) == first_stop(
            text, stops
        )


# LLaDA2.0 and 2.1


def llada2(family, case):
    theirs, tensors = case["settings"], stored(family, case)
    length, prompt = theirs["block_length"], tensors["prompt"][0].tolist()
    model = golden_model(family, block_length=length).model
    canvas = whole_blocks(prompt, theirs, theirs["mask_id"])
    stop_ids = (theirs["eos_id"],) if theirs.get("eos_early_stop") else ()
    schedule = f"dynamic:threshold={theirs['threshold']}"
    if family == "llada21_moe":
        given = ("editing_threshold", "max_post_steps", "num_to_transfer")
        fields = [
            f"{name}={min(theirs[name], 1) if name == given[0] else theirs[name]}"
            for name in given
            if name in theirs
        ]
        schedule = ",".join([f"editing:threshold={theirs['threshold']}", *fields])
    else:
        schedule += f",steps={theirs['steps']},block_length={length}"
    denoiser, options = model.denoiser(), {}
    if "temperature" in theirs:
        # its draws are stored
        draws_TC, confidence_TC = tensors["proposed"], tensors["confidence"]
        probabilities = cut_in_turn(theirs)

        def key_of(logits_MV, drawn_M1):
            return torch.zeros_like(logits_MV).scatter_(-1, drawn_M1, 1.0)

        denoiser = Drawn(denoiser, draws_TC[..., None], key_of, probabilities)
        options["rule"] = denoiser.rule
    with calls_of(model) as calls:
        steps = list(
            DecodingSettings(schedule=schedule, stop_ids=stop_ids).decode(
                denoiser, canvas, **options
            )
        )
    assert len(calls) == len(steps)
    if "temperature" in theirs:
        for step, draw_C, confidence_C in zip(steps, draws_TC, confidence_TC, strict=True):
            columns = step.confidence_BS[0].isfinite().nonzero()[:, 0]
            torch.testing.assert_close(
                step.confidence_BS[0, columns], confidence_C[columns % length], atol=3e-4, rtol=0
            )
            assert set(step.ids_BS[step.committed_BS].tolist()) <= set(draw_C.tolist())
    return steps, len(prompt)


@pytest.mark.slow
@pytest.mark.parametrize("family", LLADA2)
def test_every_canvas_of_llada2(family):
    for case in cases_of(family):
        name, theirs, tensors = case["name"], case["settings"], stored(family, case)
        steps, prompt = llada2(family, case)
        canvas_TS = tensors["canvas"]
        if name == "eos_stop":
            steps = through_stop(steps, prompt, [theirs["eos_id"]])
        assert len(steps) == case["nfe"], name
        for step, shown_S in zip(steps, canvas_TS, strict=True):
            assert torch.equal(step.before_BS[0], shown_S), (
                f"{name}: the canvas of evaluation {step.index}"
            )
        text = steps[-1].ids_BS[0, prompt : prompt + theirs["gen_length"]]
        assert first_stop(text, [theirs["eos_id"]]) == tensors["output"][0].tolist(), name
        if family == "llada21_moe":
            edits = sum(int((step.committed_BS & ~step.masked_BS).sum()) for step in steps)
            assert (edits > 0) == (case["tokens_changed_after_commit"] > 0), name


def test_what_is_not_compared_is_named():
    known = {
        case["name"]
        for family in (*DLLM, *LLADA2, "sdar", "fast_dllm_v2")
        for case in golden_cases(family)["generate"]
    }
    assert set(UNEQUAL) | set(CUT) <= known
    assert {case["name"] for case in golden_cases("fast_dllm_v2")["batch"]} == {
        "same_block",
        "other_blocks",
        "cache",
    }
