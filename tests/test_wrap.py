"""Any module that maps ids to logits becomes a model of ours, and computes what it computed."""

from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    ModernBertConfig,
    ModernBertForMaskedLM,
    T5Config,
    T5ForConditionalGeneration,
)

import sinklab
from pictures import no_pictures as no_pictures
from refusals import refused
from sinklab.core.subject import Canvas
from sinklab.lab.scoring import LikelihoodSettings, heldout_rows, score
from sinklab.lab.scoring.prompts import in_chat
from sinklab.lab.studies.curve.study import Curve, CurveSettings
from tiny_masked import (
    CLS,
    FAMILIES,
    LENGTH,
    MASK,
    PAD,
    ROWS,
    SEP,
    SIZES,
    save_masked,
    tiny_masked,
    word_tokenizer,
)

pytestmark = pytest.mark.ring("extras")

TEXT = "the house stood at the end of a lane"


class Plain(nn.Module):
    """Attention without a config, a mask or a list of layers."""

    def __init__(self, *, causal):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.first, self.second = (
            nn.Embedding(ROWS, 16),
            nn.Linear(16, 48),
            nn.Linear(16, 48),
        )
        self.head, self.causal = nn.Linear(16, ROWS), causal

    def forward(self, ids):
        states_BSD = self.embed(ids)
        for layer in (self.first, self.second):
            q, k, v = (
                one.unflatten(-1, (2, 8)).transpose(1, 2) for one in layer(states_BSD).chunk(3, -1)
            )
            states_BSD = states_BSD + scaled_dot_product_attention(
                q, k, v, is_causal=self.causal
            ).transpose(1, 2).flatten(2)
        return self.head(states_BSD)


def logits_of(lm, ids_BS, real_BS=None):
    """Logits of every position, through the denoiser."""
    everywhere_BS = torch.ones_like(ids_BS, dtype=torch.bool)
    return lm.model.denoiser(real_BS)(ids_BS, everywhere_BS).view(*ids_BS.shape, -1)


@pytest.mark.parametrize("kind", FAMILIES)
def test_logits_are_those_of_transformers_own_class(kind, tmp_path):
    """Read from a folder or wrapped; with masks, with padding on either side, in a batch and
    alone.
    """
    lm = sinklab.load(save_masked(kind, tmp_path / kind))
    theirs = tiny_masked(kind)
    torch.manual_seed(0)
    ids_BS = torch.randint(5, ROWS, (2, 12))
    ids_BS[:, 0], ids_BS[:, -1], ids_BS[0, 3:6], ids_BS[1, 4] = CLS, SEP, MASK, MASK
    with torch.no_grad():
        plain_BSV = theirs(ids_BS, attention_mask=torch.ones_like(ids_BS)).logits
        assert torch.allclose(logits_of(lm, ids_BS), plain_BSV, atol=1e-5)
        assert torch.allclose(
            logits_of(sinklab.wrap(theirs, mask_id=MASK), ids_BS), plain_BSV, atol=1e-5
        )
        # ids under padding are those of whoever made the canvas, here [CLS]; they are not read
        for padding in ((3, 0), (0, 3)):
            wide_BS = nn.functional.pad(ids_BS, padding, value=CLS)
            real_BS = nn.functional.pad(torch.ones_like(ids_BS), padding)
            found_BSV = logits_of(lm, wide_BS, real_BS)[real_BS.bool()].view_as(plain_BSV)
            assert torch.allclose(found_BSV, plain_BSV, atol=1e-5)
    assert (lm.family, lm.published_family, lm.special.mask) == ("diffusion", kind, MASK)
    assert f"{SIZES['num_hidden_layers']} layers × 4" in repr(lm)


@pytest.mark.parametrize("kind", FAMILIES)
def test_a_masked_model_writes_between_its_fixed_ends(kind):
    lm = sinklab.wrap(tiny_masked(kind), word_tokenizer())
    run = lm.watch([TEXT], 6)
    tokens = run.table("tokens")
    at = tokens[tokens["step"] == 0].sort_values("position")
    length = len(TEXT.split())
    assert at["token_id"].tolist()[::15] == [CLS, MASK] and at["token_id"].iloc[-1] == SEP
    assert at["state"].tolist() == ["prompt"] * (1 + length) + ["masked"] * 6 + ["prompt"]
    last = tokens[tokens["step"] == 5].sort_values("position")["token_id"]
    assert last.iloc[0] == CLS and last.iloc[-1] == SEP
    assert run.texts[0].startswith(TEXT)
    whole = lm.generate(TEXT, 6, block_length=6)
    assert whole == run.texts[0]
    ids = lm.model.generate([CLS, 7, 8], max_new_tokens=4)[0].tolist()
    assert (ids[:3], len(ids), ids[-1]) == ([CLS, 7, 8], 8, SEP)


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
def test_masks_in_a_prompt_are_filled_step_by_step_and_the_page_is_written(tmp_path):
    lm = sinklab.wrap(tiny_masked("bert"), word_tokenizer())
    holes = "the [MASK] stood at [MASK] end of a [MASK]"
    words_alone = {"suppress_ids": (CLS, PAD, SEP, 3)}
    run = lm.watch([holes], 0, **words_alone)
    words, filled = holes.split(), run.texts[0].split()
    assert len(filled) == len(words) and "[MASK]" not in filled
    assert all(
        theirs == ours for theirs, ours in zip(words, filled, strict=True) if theirs != "[MASK]"
    )
    assert run.table("steps")["masked"].tolist() == [3, 2, 1]
    assert lm.generate(holes, 0, **words_alone) == run.texts[0]
    page = run.explore(tmp_path / "page").path.read_text("utf-8")
    assert "[CLS]" in page and "[SEP]" in page
    # no command loads what was wrapped
    assert (
        "<code>from sinklab.lab.studies.curve.study import masking_curve; masking_curve(lm, "
        in page
    )
    assert "sinklab curve --model" not in page and run.info.model["wrapped"]
    refused("at least one open position", lm.watch, [TEXT], 0)


def test_a_trace_of_a_local_layer_knows_that_it_sees_a_window():
    lm = sinklab.wrap(tiny_masked("modernbert"), word_tokenizer())
    canvas = Canvas.infill([[CLS, *[MASK] * 10, SEP]], mask_id=MASK)
    with sinklab.trace(lm) as recording:
        next(sinklab.denoise(lm, canvas))
    visible_LK = recording.visible_by_layer[0][0]
    # the first layer sees everything, the others two tokens on either side
    assert visible_LK[0].tolist() == [12.0] * 12
    assert visible_LK[1].tolist() == visible_LK[2].tolist() == [3.0, 4.0, *[5.0] * 8, 4.0, 3.0]
    run = lm.watch([TEXT], 4)
    assert run.read.layers == [0] and run.to_pandas()["layer"].unique().tolist() == [0]
    assert "(0)" in lm.notes[-1]


def ride_in_one_batch(lm, texts):
    """Texts of unequal length have the likelihoods that each has alone."""
    how = LikelihoodSettings(samples=4)
    both = [one.logprob for one in score(lm, texts, how)]
    alone = [score(lm, [one], how)[0].logprob for one in texts]
    assert both == pytest.approx(alone, rel=1e-4)


def test_its_likelihoods_are_those_of_the_text_between_its_ends():
    """One token has one mask: the score is the log-probability that transformers' class gives."""
    theirs = tiny_masked("esm")
    lm = sinklab.wrap(theirs, word_tokenizer())
    (scored,) = score(lm, [((CLS, 7, 8), (9,))], LikelihoodSettings(samples=4))
    with torch.no_grad():
        logits_V = theirs(
            torch.tensor([[CLS, 7, 8, MASK, SEP]]), attention_mask=torch.ones(1, 5)
        ).logits[0, 3]
    assert scored.logprob == pytest.approx(
        -cross_entropy(logits_V, torch.tensor(9)).item(), rel=1e-4
    )
    ride_in_one_batch(lm, [((CLS, 7, 8), (9,)), ((CLS,), (9, 10, 11, 12))])
    ids = word_tokenizer()(TEXT)["input_ids"]
    assert lm.loss(TEXT) == pytest.approx(lm.loss(ids)) == pytest.approx(lm.loss(ids[:-1]))
    assert lm.loss(TEXT).scored.tokens == len(TEXT.split())
    assert lm.loss(TEXT, edits=["block_keys:keys=top:k=2"]) != pytest.approx(
        lm.loss(TEXT), rel=1e-6
    )


def test_rows_of_held_out_text_begin_with_cls_and_a_curve_is_measured(tmp_path):
    tokenizer = word_tokenizer()
    lm = sinklab.wrap(tiny_masked("bert"), tokenizer)
    corpus = tmp_path / "text.txt"
    corpus.write_text("\n\n".join([TEXT] * 40), "utf-8")
    rows = heldout_rows(lm, corpus, rows=4, length=16)
    assert rows.ids_RS[:, 0].tolist() == [CLS] * 4
    settings = CurveSettings(heldout=str(corpus), rows=4, length=16, ks=(0, 1), twin=False)
    table = sinklab.open_run(Curve()(lm, tmp_path / "curve", settings)).table("curve")
    assert set(table["k"]) == {0, 1} and np.isfinite(table["loss"]).all()
    assert tokenizer.eos_token is None, "the tokenizer that was given stays as it is"


def test_the_chats_of_dllm_have_its_format_and_its_end(tmp_path):
    folder = tmp_path / "ModernBERT-base-chat-v0.1"
    config = ModernBertConfig(
        **{**SIZES, "vocab_size": 50368, "num_hidden_layers": 1, "pad_token_id": 50283}
    )
    ModernBertForMaskedLM(config).save_pretrained(folder)
    word_tokenizer().save_pretrained(folder)
    lm = sinklab.load(folder)
    assert (lm.special.mask, lm.special.eos, lm.special.bos) == (
        50284,
        50283,
        CLS,
    )
    messages = [{"role": "system", "content": " s "}, {"role": "user", "content": "q"}]
    said = in_chat(lm, [*messages, {"role": "assistant", "content": "a"}, messages[1]])
    asked, answered = "[Question]\nq\n[/Question]\n\n", "[Answer]\na\n[/Answer]\n\n"
    assert said == f"[SYS]\ns\n[/SYS]\n\n{asked}{answered}{asked}[Answer]\n"
    assert "taken for dllm-hub/ModernBERT-base-chat-v0.1" in lm.notes[-1]


def test_a_causal_model_of_transformers_writes_through_its_own_cache():
    config = GPT2Config(
        vocab_size=ROWS, n_embd=32, n_layer=2, n_head=4, n_positions=LENGTH, bos_token_id=CLS
    )
    torch.manual_seed(2)
    model = GPT2LMHeadModel(config).eval()
    lm = sinklab.wrap(model)
    assert lm.model is model and lm.family == "autoregressive" and lm.context == LENGTH
    ids_1S = torch.tensor([[CLS, 7, 8, 9, 10]])
    with torch.no_grad():
        loss = cross_entropy(model(ids_1S).logits[0, :-1], ids_1S[0, 1:]).item()
    assert lm.loss([7, 8, 9, 10]) == pytest.approx(loss, rel=1e-5)
    assert lm.watch(["7 8 9"], 4).texts == [lm.generate("7 8 9", 4)]


@pytest.mark.slow
@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize("causal", [False, True])
def test_a_module_without_a_config_is_looked_at(causal, tmp_path):
    module, kind = Plain(causal=causal), "autoregressive" if causal else "diffusion"
    lm = sinklab.wrap(module, mask_id=None if causal else MASK, kind=cast(Any, kind))
    assert "2 layers × 2 heads" in repr(lm) and lm.model.config.vocab_size == ROWS
    run = lm.watch(["7 8 9 10"], 5)
    assert run.texts == [lm.generate("7 8 9 10", 5)]
    assert run.to_pandas().groupby(["layer", "head"]).ngroups == 4
    assert run.explore(tmp_path / "page").path.stat().st_size > 10_000
    ids_1S = torch.tensor([[7, 8, 9, 10]])
    if causal:
        with torch.no_grad():
            loss = cross_entropy(module(ids_1S)[0, :-1], ids_1S[0, 1:]).item()
        assert lm.loss([7, 8, 9, 10]) == pytest.approx(loss, rel=1e-5)
        refused("full_forward=True", lm.watch, ["7 8"], 2, full_forward=False)
    assert lm.loss([7, 8, 9, 10], edits=["block_keys:keys=top:k=1"]) != pytest.approx(
        lm.loss([7, 8, 9, 10]), rel=1e-7
    )


def test_a_decoder_that_fills_masks_sees_both_sides_beside_padding_too():
    """Without a mask transformers asks the layers whether they are causal, beside padding the
    config.
    """
    model = GPT2LMHeadModel(GPT2Config(vocab_size=ROWS, n_embd=32, n_layer=2, n_head=4))
    for layer in model.transformer.h:
        layer.attn.is_causal = False
    refused(r"is_causal = False", sinklab.wrap, model, mask_id=MASK, kind="diffusion")
    refused("kind=", sinklab.wrap, model)
    model.config.is_causal = False
    lm = sinklab.wrap(model, mask_id=MASK, kind="diffusion")
    texts = ["7 8 9 10", "11 12"]
    ids = [[*map(int, text.split())] for text in texts]
    ride_in_one_batch(lm, [((), tuple(one)) for one in ids])
    # without a tokenizer a text is ids, wherever one is asked for
    assert [lm.loss(text) for text in texts] == [lm.loss(one) for one in ids]
    arms = {"one": "block_keys:keys=top:k=1"}
    costs = [lm.compare(arms, given, samples=2).to_pandas() for given in (texts, ids)]
    assert costs[0].equals(costs[1])
    refused("sinklab.wrap", lm.compare, arms)


def test_attention_that_nobody_can_listen_to_is_refused_at_once():
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    own = nn.Sequential(nn.Embedding(ROWS, 16), layer, nn.Linear(16, ROWS))
    refused("set_fastpath_enabled", sinklab.wrap, own, mask_id=MASK, kind="diffusion")


def test_what_cannot_be_told_is_asked_for():
    refused(r'class Plain .*kind="masked"', sinklab.wrap, Plain(causal=False))
    refused(r"pass mask_id=", sinklab.wrap, Plain(causal=False), kind="diffusion")
    refused(f"0 to {ROWS - 1}, but is {ROWS}", sinklab.wrap, tiny_masked("bert"), mask_id=ROWS)
    refused("bidirectional", sinklab.wrap, tiny_masked("bert"), kind="bidirectional")
    headless = tiny_masked("bert").bert
    refused("must map token ids", sinklab.wrap, headless, mask_id=MASK, kind="masked")
    with pytest.raises(TypeError, match=r"wrap\(model, tokenizer\)"):
        sinklab.load(tiny_masked("bert"))
    with pytest.raises(TypeError, match="already"):
        sinklab.wrap(sinklab.load("tiny"))  # type: ignore[arg-type]


def test_a_kind_that_one_forward_disproves_is_refused():
    for reads_both in (tiny_masked("bert"), Plain(causal=False)):
        refused(r'kind="diffusion"', sinklab.wrap, reads_both, kind="autoregressive")
    for kind in ("diffusion", "masked"):
        refused(r'kind="autoregressive"', sinklab.wrap, Plain(causal=True), mask_id=MASK, kind=kind)


def test_an_encoder_decoder_is_refused_by_its_name():
    sizes = {"vocab_size": ROWS, "d_model": 16, "pad_token_id": PAD, "decoder_start_token_id": CLS}
    t5 = T5ForConditionalGeneration(
        T5Config(**sizes, d_kv=8, d_ff=16, num_layers=1, num_heads=2, eos_token_id=SEP)
    )
    for kind in ("autoregressive", "masked", None):
        refused("T5ForConditionalGeneration .*trace", sinklab.wrap, t5, mask_id=MASK, kind=kind)


class Named(Plain):
    def forward(self, *, ids):
        return super().forward(ids)


class Two(Plain):
    def forward(self, ids, times):
        return super().forward(ids)


def test_what_does_not_take_ids_alone_is_refused_by_name():
    for kind in ("diffusion", None):
        refused("got a function", sinklab.wrap, lambda ids: ids, mask_id=MASK, kind=kind)
        for module in (Named(causal=False), Two(causal=False)):
            refused(f"{type(module).__name__}.forward", sinklab.wrap, module, mask_id=MASK)
    refused("'times'", sinklab.wrap, Two(causal=False), mask_id=MASK, kind="diffusion")


def test_a_checkpoint_of_no_family_is_pointed_to_wrap(tmp_path):
    tmp_path.joinpath("config.json").write_text('{"hidden_size": 8}', "utf-8")
    refused(r"wrap\(model, tokenizer\)", sinklab.load, tmp_path)
