"""Writing by renoising: what transformers' own generate writes, seen and edited step by step."""

from dataclasses import replace

import pytest
import torch
from torch.testing import assert_close

import sinklab
from commands import cli, error_of, out_of
from refusals import refused
from sinklab.core.instrument import intervene, trace
from sinklab.extras.zoo import ANNOUNCED, Renoising, renoise
from sinklab.extras.zoo.gemma import DiffusionGemma
from sinklab.lab.checkpoints import from_causal, save_sink
from sinklab.lab.measures import MaskSinks
from tiny_diffusion import tiny_model
from tiny_gemma import CANVAS, IMAGE, ROWS, WINDOW, save_gemma, tiny_gemma

PROMPT = torch.tensor([[2, 9, 14, 30, 7, 21, 11, 5]])
BOTH = torch.cat([PROMPT, PROMPT.flip(1)])
SHORT = Renoising(max_new_tokens=2 * CANVAS, max_denoising_steps=4, entropy_bound=0.5)
# rows whose canvases are done at different steps
UNEVEN = Renoising(
    max_new_tokens=3 * CANVAS,
    max_denoising_steps=6,
    entropy_bound=0.4,
    t_min=0.2,
    t_max=1.5,
    stability_threshold=0,
    confidence_threshold=0.6,
    seed=3,
)
DECODER = [f"model.decoder.layers.{layer}.self_attn" for layer in range(3)]


def steps_of(model, settings=SHORT, ids=PROMPT, recording=None):
    """The steps of writing, of which a recording is told."""
    steps = []
    for step in renoise(model, ids, settings):
        steps.append(step)
        if recording is not None:
            recording.mark(step)
    return steps


def written(*given):
    return steps_of(*given)[-1].ids_BS


def generation_config(model, settings):
    given = dict(vars(settings), eos_token_id=list(settings.eos_token_id) or None)
    bound = given.pop("entropy_bound")
    torch.manual_seed(given.pop("seed"))
    sampler = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": bound}
    return type(model.generation_config)(**given, sampler_config=sampler)


# transformers' generate imports torch's compiler, which torch warns of
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_it_writes_behind_padding_what_generate_of_transformers_writes():
    model, mask = tiny_gemma(), torch.ones_like(BOTH, dtype=torch.bool)
    mask[1, :3] = False
    given = {"generation_config": generation_config(model, UNEVEN), "attention_mask": mask}
    theirs = model.generate(BOTH, **given).sequences
    *_, last = renoise(model, BOTH, UNEVEN, mask)
    assert torch.equal(last.ids_BS, theirs)
    other = written(model, replace(UNEVEN, max_new_tokens=CANVAS, seed=4), BOTH)
    assert not torch.equal(other, theirs[:, : 8 + CANVAS])


@pytest.mark.slow
def test_a_trace_sees_every_step_of_the_decoder_and_its_columns():
    model, plain = tiny_gemma(), written(tiny_gemma())
    with (
        trace(model, ("received", "value_norm")) as recording,
        trace(model.model.encoder) as encoder,
    ):
        steps = steps_of(model, recording=recording)
    # its own kernel, its own numbers
    assert torch.equal(steps[-1].ids_BS, plain)
    assert recording.layers == DECODER and recording.prefix == 0
    assert recording.forwards_per_step == [1] * 8
    keys = [PROMPT.shape[1] + CANVAS * (number + 1) for number in (0,) * 4 + (1,) * 4]
    assert [part.shape for part in recording.received] == [(1, 3, 4, number) for number in keys]
    for received_BLHK, columns_Q, number in zip(
        recording.received, recording.columns, keys, strict=True
    ):
        assert columns_Q.tolist() == list(range(number - CANVAS, number))
        assert_close(received_BLHK.sum(-1), torch.full((1, 3, 4), float(CANVAS)), rtol=0, atol=1e-4)
        # a sliding layer sees the last window − 1 of what stands already, and the whole canvas
        outside = number - CANVAS - (WINDOW - 1)
        assert (received_BLHK[:, :2, :, :outside] == 0).all() and (
            received_BLHK[:, :2, :, outside:] > 0
        ).all()
        assert (received_BLHK[:, 2] > 0).all()
    assert [part.shape[-1] for part in encoder.received] == [
        PROMPT.shape[1],
        PROMPT.shape[1] + CANVAS,
    ]
    assert encoder.columns[1].tolist() == list(range(8, 8 + CANVAS))
    # causal: of the second canvas's queries none sees behind itself
    assert encoder.visible_by_layer[1][0, 2].tolist() == [CANVAS] * 9 + [5, 4, 3, 2, 1]


def test_a_place_with_noise_is_a_masked_query():
    model = tiny_gemma()
    with trace(model, ("received", "received_by_state"), canvas=ANNOUNCED) as recording:
        steps = steps_of(model, recording=recording)
    for step, query, key, by_state, received in zip(
        steps,
        recording.query_state,
        recording.key_state,
        recording.received_by_state,
        recording.received,
        strict=True,
    ):
        past = step.ids_BS.shape[1] - CANVAS
        assert torch.equal(query == 0, step.masked_BS[:, past:]) and torch.equal(
            query == 1, ~step.masked_BS[:, past:]
        )
        assert key[0, :past].tolist() == [2] * 8 + [1] * (past - 8)
        assert_close(by_state.sum(1), received)
        assert bool((by_state[:, 1] > 0).any()) == (not step.masked_BS[:, past:].all())


@pytest.mark.slow
@pytest.mark.parametrize("side", ["decoder", "encoder"])
def test_sinks_are_masked_in_the_part_that_is_edited(side):
    model = tiny_gemma()
    part, when = (model, "previous") if side == "decoder" else (model.model.encoder, "now")
    plain = steps_of(model)
    with (
        trace(model.model.encoder) as encoder,
        intervene(part, MaskSinks(k=1, when=when)) as log,
    ):
        edited = steps_of(model)
    with trace(model.model.encoder) as untouched:
        steps_of(model)
    # the prompt is read anew, and alike, unless the encoder is edited
    assert torch.equal(encoder.received[0], untouched.received[0]) == (side == "decoder")
    assert not torch.equal(edited[-1].confidence_BS, plain[-1].confidence_BS)
    assert {record.layers[0] for record in log.removals} == {
        DECODER[0] if side == "decoder" else ENCODER
    }
    # in a closed loop the first step chooses
    assert [record.forward for record in log.removals] == (
        list(range(1, 8)) if side == "decoder" else [0, 1]
    )
    for record in log.removals:
        assert (record["keys"] == 1).all() and (record["removed"] > 0).any()
    if side == "decoder":
        assert torch.equal(edited[0].score_M, plain[0].score_M)
        last = max(int(record.columns_BLHM.max()) for record in log.removals)
        assert 8 + CANVAS <= last < 8 + 2 * CANVAS


ENCODER = "language_model.layers.0.self_attn"


def test_the_settings_are_those_of_the_generation_config(tmp_path):
    model = tiny_gemma()
    assert Renoising.of(model) == Renoising()
    model.generation_config.t_max, model.generation_config.eos_token_id = 0.9, 5
    model.save_pretrained(tmp_path)
    chosen = Renoising.of(sinklab.load(tmp_path).model, max_new_tokens=7)
    assert (chosen.t_max, chosen.eos_token_id, chosen.max_new_tokens, chosen.entropy_bound) == (
        0.9,
        (5,),
        7,
        0.1,
    )
    refused("max_denoising_steps must be", Renoising, max_denoising_steps=0)


@pytest.mark.slow
def test_a_loaded_one_is_the_saved_one_to_the_bit(tmp_path):
    model, lm = tiny_gemma(), sinklab.load(save_gemma(tmp_path))
    tensors = lm.model.state_dict()
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in model.state_dict().items())
    for (name, ours), (_, theirs) in zip(
        lm.model.named_buffers(), model.named_buffers(), strict=True
    ):
        assert torch.equal(ours, theirs), name
    assert torch.equal(written(lm.model), written(model))
    halved = sinklab.load(tmp_path, dtype="bfloat16").model
    assert {parameter.dtype for parameter in halved.parameters()} == {torch.bfloat16}
    assert written(halved).shape == (1, 8 + 2 * CANVAS)


@pytest.mark.slow
def test_a_loaded_model_writes_in_one_line(tmp_path):
    lm = sinklab.load(save_gemma(tmp_path))
    lm.model.generation_config.max_denoising_steps = 6
    *_, last = renoise(
        lm.model, torch.tensor([[5, 6, 7]]), Renoising.of(lm.model, max_new_tokens=7, seed=2)
    )
    assert last.ids_BS.shape[1] == 3 + 2 * CANVAS
    expected = " ".join(map(str, last.ids_BS[0].tolist()))
    assert (
        lm.generate([5, 6, 7], 7, seed=2)
        == lm.generate([5, 6, 7], max_new_tokens=7, seed=2)
        == expected
    )
    lm.model.generation_config.max_new_tokens = 4
    assert len(lm.generate([5, 6, 7], max_denoising_steps=3).split()) == 3 + CANVAS


def test_what_it_is_can_be_read_without_weights(tmp_path, capsys):
    said = out_of(f"info {save_gemma(tmp_path)}", capsys)
    for line in (
        "diffusion, diffusion_gemma (DiffusionGemmaForBlockDiffusion)",
        "4 a layer, 2 for each token",
    ):
        assert line in said
    assert "in a window in 2 of" in said


def test_what_is_not_for_it_is_refused_by_name(tmp_path, monkeypatch):
    folder = save_gemma(tmp_path / "gemma")
    lm = sinklab.load(folder)
    save_sink(tiny_model(1), tmp_path / "sink.safetensors")
    for call, words in (
        (
            lambda: sinklab.load(folder, sink_kind="token", sink_count=1),
            "own DiffusionGemmaForBlockDiffusion.*sink_kin",
        ),
        (
            lambda: sinklab.load(folder, gate="elementwise"),
            "has no added sink or gate.*so gate cannot be set",
        ),
        (
            lambda: sinklab.load(folder, sink=tmp_path / "sink.safetensors"),
            "own DiffusionGemmaForBlockDiffusion.*sink_kin",
        ),
        (lambda: from_causal(folder), "is a diffusion model of the family"),
        (
            lambda: sinklab.load(folder, device_map="auto"),
            "one device must hold",
        ),
        (
            lambda: lm.loss([5, 6, 7]),
            "a text to be read needs a model with a mask token.*lm.generate",
        ),
        (
            lambda: renoise(lm.model, torch.tensor([[3, IMAGE]])),
            f"must be text, but holds {IMAGE}.*image \\(vision",
        ),
        (
            lambda: renoise(lm.model, PROMPT[0]),
            "the prompts to write behind must be int64 of shape",
        ),
    ):
        refused(words, call)
    with monkeypatch.context() as older:
        older.setattr("sinklab.extras.zoo.gemma.transformers.__version__", "5.17.0")
        refused(r"5\.17\.0 goes on otherwise", sinklab.load, folder)
    monkeypatch.setattr(DiffusionGemma, "own_class", "DiffusionGemmaThatIsNotThereYet")
    refused(r"lacks DiffusionGemmaThat.*pip", sinklab.load, folder)


@pytest.mark.slow
def test_a_trace_refuses_it_and_generate_writes(tmp_path, capsys):
    folder, model = tmp_path / "gemma", tiny_gemma()
    model.generation_config.max_denoising_steps = 6
    model.save_pretrained(folder)
    asked = f"generate '5 6' --model {folder} --new-tokens {CANVAS} --seed 2"
    assert out_of(asked, capsys) == sinklab.load(folder).generate([5, 6], CANVAS, seed=2) + "\n"
    assert "--temperature can be set for models that fill masks, but" in error_of(
        f"{asked} --temperature 0", capsys
    )
    assert cli(f"trace '5 6' --model {folder} --out {tmp_path / 'run'}") == 2
    assert "this command needs a model with a mask token" in capsys.readouterr().err
    assert ROWS > IMAGE and not (tmp_path / "run" / "run.json").exists()
