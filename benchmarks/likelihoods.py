"""What likelihoods and ragged batches cost: ours beside LLaDA's own loops written plainly, by
turns.

    python benchmarks/likelihoods.py [--repeats 7] [--quick]

The toy of `decoding.py` (4 layers, 128 wide, 4,096 tokens, float32, one thread) scores
continuations of 4 and of 64 tokens, four behind each of two contexts of 128, with 128 masks each:
ours, and LLaDA's loop, a request after the other, logits of the whole text in batches of 16 masks.
Both estimate the same number; how far apart their means are, in standard errors of the difference,
stands beside the times. Ragged: prompts of 64, 96, 128 and 160 tokens continued by 64 without a
cache in one batch, and one by one; tokens are the same. Ratios are of processor time, within a
turn.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator
from dataclasses import replace

import torch
from decoding import QUICK, Sizes, build, last
from measure import interleaved, write_result
from torch import Tensor
from torch.nn import functional as F

from sinklab.core.subject import Canvas, DiffusionLM, denoise
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.scoring import LikelihoodSettings, score

# N masks, S text, L continuation, V vocabulary
Request = tuple[list[int], list[int]]


@torch.inference_mode()
def llada_score(
    model: DiffusionLM, request: Request, masks: int, batch: int, draw: torch.Generator
) -> float:
    """Mean over random masks of the continuation, their numbers spread evenly, each token's loss
    over the rate.
    """
    context, continuation = (torch.tensor(part) for part in request)
    text_NS = torch.cat([context, continuation]).repeat(batch, 1)
    length, found = len(continuation), []
    for _ in range(masks // batch):
        first = int(torch.randint(1, length + 1, (), generator=draw))
        counts_N = (
            torch.linspace(first, first + (batch - 1) * length / batch, batch).round().long() - 1
        ) % length + 1
        order_NL = torch.rand(batch, length, generator=draw).argsort(1)
        masked_NS = F.pad(order_NL < counts_N[:, None], (len(context), 0))
        logits_NSV = model(text_NS.masked_fill(masked_NS, model.config.mask_token_id)).logits
        losses_M = F.cross_entropy(logits_NSV[masked_NS], text_NS[masked_NS], reduction="none")
        rate_M = (counts_N / length)[masked_NS.nonzero()[:, 0]]
        found.append(float((losses_M / rate_M).sum() / batch))
    return -statistics.fmean(found)


def requests_of(
    sizes: Sizes, context: int, length: int, questions: int = 2, choices: int = 4
) -> list[Request]:
    draw = torch.Generator().manual_seed(length)

    def ids(count: int) -> list[int]:
        return torch.randint(0, sizes.vocab - 1, (count,), generator=draw).tolist()

    return [
        (start, ids(length))
        for start in (ids(context) for _ in range(questions))
        for _ in range(choices)
    ]


def likelihoods(
    model: DiffusionLM, sizes: Sizes, lengths: tuple[int, ...], masks: int, repeats: int
) -> dict:
    loaded, batch, result = Loaded(model, None, "toy", None, "diffusion"), min(16, masks), {}
    for length in lengths:
        given = requests_of(sizes, sizes.prompts[0], length)
        draw = torch.Generator().manual_seed(0)
        kept: dict[str, list] = {}

        def run_ours(given: list[Request] = given, kept: dict = kept) -> None:
            kept["ours"] = score(loaded, given, LikelihoodSettings(samples=masks))

        def run_llada(
            given: list[Request] = given, kept: dict = kept, draw: torch.Generator = draw
        ) -> None:
            kept["llada"] = [llada_score(model, one, masks, batch, draw) for one in given]

        timing = interleaved({"llada": run_llada, "ours": run_ours}, repeats)
        # as if samples were independent, and alike on both sides
        apart = [
            (one.logprob - other) / (2**0.5 * max(one.stderr, 1e-6))
            for one, other in zip(kept["ours"], kept["llada"], strict=True)
        ]
        result[f"{length} tokens"] = compared(timing, "llada", "ours") | {"apart_in_stderrs": apart}
    return result


def ragged(model: DiffusionLM, sizes: Sizes, repeats: int) -> dict:
    """Four rows at once, and the same four one by one."""
    prompts = [sizes.prompts[0] // 4 * quarters for quarters in (2, 3, 4, 5)]
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(0, sizes.vocab - 1, (length,), generator=draw) for length in prompts]
    made = {"new_tokens": sizes.new_tokens, "mask_id": sizes.vocab - 1, "pad_id": 0}
    alone, together = (
        [Canvas.from_prompts([row], **made) for row in rows],
        Canvas.from_prompts(rows, **made),
    )
    written: dict[str, list[Tensor]] = {}

    def run(canvas: Canvas) -> Iterator[Tensor]:
        return (step.ids_BS for step in denoise(model, canvas, block_length=sizes.block))

    def each() -> None:
        written["one by one"] = [last(run(canvas))[0] for canvas in alone]

    def batch() -> None:
        written["together"] = [*last(run(together))]

    timing = interleaved({"one by one": each, "together": batch}, repeats)
    for one, other in zip(*written.values(), strict=True):
        assert torch.equal(one[-sizes.new_tokens :], other[-sizes.new_tokens :])
    return compared(timing, "one by one", "together")


def compared(timing: dict[str, dict], base: str, name: str) -> dict:
    """Processor time of `name` over that of `base`, turn by turn."""
    each = [
        own / plain for own, plain in zip(timing[name]["cpu_s"], timing[base]["cpu_s"], strict=True)
    ]
    ratio = {"median": statistics.median(each), "min": min(each), "max": max(each)}
    seconds = {key: statistics.median(taken["cpu_s"]) for key, taken in timing.items()}
    print(f"{name} over {base}: {ratio}  {seconds}", flush=True)
    return {"ratio_of_cpu": ratio, "median_cpu_s": seconds, "turns": len(each)}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, one repeat, nothing written: does it run?"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    sizes, masks, lengths, repeats = (
        replace(Sizes(), prompts=(128, 160)),
        128,
        (4, 64),
        options.repeats,
    )
    if options.quick:
        sizes, masks, lengths, repeats = replace(QUICK, prompts=(8, 10)), 8, (4, 6), 1
    model = build(sizes, "cpu")
    result = {
        "likelihoods": likelihoods(model, sizes, lengths, masks, repeats),
        "ragged": ragged(model, sizes, repeats),
    }
    if not options.quick:
        what = (
            "seconds of ours over those of LLaDA's loop, and of a batch over its rows one by "
            "one; processor time"
        )
        print(f"written to {write_result('likelihoods', {'what': what, 'results': result})}")


if __name__ == "__main__":
    main()
