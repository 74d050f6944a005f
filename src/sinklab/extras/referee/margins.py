"""Distance of a greedy decoder from another text: the margins of its choices, the noise of each,
and the text that results when the runner-up is written.

A choice is flipped by rounding if the rounding error of its margin exceeds the margin. How large
that error is for this model at this place is asked by Monte Carlo arithmetic (Parker 1997): every
module's output is moved by a random relative error of known size, and the margins are read again.
"""

# B batch rows, S canvas positions, C places in a block, M candidates in row-major order, V
# vocabulary, P probes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from sinklab.core.sampling import Canvas, DecodingSettings, Step, UnmaskingRule, WritingSchedule
from sinklab.lab.checkpoints.loading import Loaded
from sinklab.lab.scoring.writing import sample_seed

KINDS = ("token", "order", "threshold")
"""Kinds of margins. token: logit of the committed token less that of the runner-up. order: score of
the last position chosen less that of the best not chosen. threshold: distance of a confidence to
the threshold of the schedule.
"""
JITTER = 2.0**-9
"""Relative error of a probe, or the type's own if that is coarser: far above rounding in float32,
and still small enough that margins move in proportion.
"""
PROBES = 4


@dataclass(eq=False)
class Watch(UnmaskingRule):
    """A rule that lets its candidates be read, and writes the runner-up on request."""

    rule: Any
    swaps: pd.DataFrame | None = None
    """Choices to be made otherwise: row, step, kind, column and other, as `margins` names them."""
    seen: Any = None
    """The candidates of the last evaluation."""
    read: Any = field(default=0, init=False)
    """Evaluations of each row so far (B,): one that waits for others of its batch has none."""

    def __post_init__(self) -> None:
        # those of the rule, on which schedules and sampling depend
        self.measure = self.rule.measure  # type: ignore[misc]
        self.reads_shaped = self.rule.reads_shaped

    def __call__(self, candidates: Any) -> Tensor:
        """The scores of the rule."""
        here_B = candidates.candidates_BS.any(1)
        self.seen, self.read = candidates, self.read + here_B.long()
        score_M = self.rule(candidates)
        if self.swaps is None:
            return score_M
        score_M = score_M.clone()
        # the loop writes the tokens that stand here; inference mode, as the model's numbers were
        # made in it
        with torch.inference_mode():
            now = self.read.where(here_B, 0)[self.swaps["row"].tolist()].tolist()
            for one in self.swaps[self.swaps["step"] + 1 == now].itertuples():
                row_M = candidates.rows_M == one.row
                own = int((row_M & (candidates.columns_M == one.column)).nonzero()[0, 0])
                if one.kind == "token":
                    candidates.tokens_M[own] = one.other
                else:
                    pair = [own, int((row_M & (candidates.columns_M == one.other)).nonzero()[0, 0])]
                    score_M[pair] = score_M[pair[::-1]]
        return score_M


def _order(score: np.ndarray, taken: np.ndarray, left: np.ndarray) -> float:
    return score[taken].min() - score[left].max()


def _threshold(score: np.ndarray, rest: np.ndarray, sides: np.ndarray, bound: float) -> float:
    return (sides * (score[rest] - bound)).min()


def check_greedy(settings: DecodingSettings) -> Any:
    """The rule of a decoder with choices that have margins. Raises ValueError for others."""
    values = settings.values()
    rule, schedule = values["rule"], values["schedule"]
    draws = settings.temperature or rule.draws
    is_plain = not isinstance(schedule, WritingSchedule)
    # pooled, a position gives way to one of another text, which no margin of its own text says
    if draws or settings.cfg_scale or schedule.pooled or not is_plain:
        raise ValueError(
            "margins are of a decoder that takes the best, unguided, ranks each text by itself and "
            f"writes each position once, but this one has {rule}, {schedule}, temperature "
            f"{settings.temperature:g} and cfg_scale {settings.cfg_scale:g}; where something is "
            "drawn, another seed says how far scores move"
        )
    return rule


def watched_steps(
    loaded: Loaded,
    canvas: Canvas,
    settings: DecodingSettings,
    swaps: pd.DataFrame | None = None,
    plain: bool = False,
) -> Iterator[tuple[Step, Any]]:
    """The steps of a greedy decoder, each with the `Candidates` that it chose from.

    Args:
        swaps: choices to be made otherwise, as in `Watch`.
        plain: never by a fast decoder.
    """
    model: Any = loaded.model
    watch = Watch(check_greedy(settings), swaps)
    denoiser = model.denoiser(canvas.attention_mask, plain=plain)
    settings = replace(settings, defer_ids=(), alg_temp=None)
    for step in settings.decode(denoiser, canvas, rule=watch, **model.config.decoding):
        yield step, watch.seen


@contextmanager
def jittered(model: nn.Module, size: float, seed: int) -> Iterator[None]:
    """Every leaf module's output times 1 + size × u within the block, u uniform in −1 … 1 and new
    at every call.
    """
    device = next(model.parameters()).device
    source = torch.Generator(device).manual_seed(seed)

    def move(module: nn.Module, given: Any, out: Any) -> Any:
        if not isinstance(out, Tensor) or not out.is_floating_point():
            return out
        noise = torch.rand(out.shape, generator=source, device=device, dtype=torch.float32)
        return out * (1 + size * (2 * noise - 1)).to(out.dtype)

    with ExitStack() as hooks:
        for module in model.modules():
            if not any(True for _ in module.children()) and any(True for _ in module.parameters()):
                hooks.callback(module.register_forward_hook(move).remove)
        yield


class Choices:
    """Choices of one step, a line for each token and then for each row; their margins under any
    logits.
    """

    def __init__(self, step: Step, seen: Any, threshold: float | None) -> None:
        self.mask_id, self.seen = seen.mask_id, seen
        self.chosen_M = step.committed_BS[step.candidates_BS]
        self.token_N1 = seen.tokens_M[self.chosen_M][:, None].clone()
        tensors = (seen.rows_M, self.chosen_M, step.score_M.double(), seen.columns_M)
        rows, chosen, score, columns = (one.cpu().numpy() for one in tensors)
        written = (
            rows[chosen],
            columns[chosen],
            self.token_N1[:, 0].tolist(),
            self._tokens(seen.logits_MV)[1],
        )
        lines: list[Any] = [(row, "token", *more) for row, *more in zip(*written, strict=True)]
        self._ranked: list[Callable[[np.ndarray], float]] = []
        bound = np.inf if threshold in (None, 1) else threshold
        for row in {*rows[chosen].tolist()}:
            here = np.flatnonzero(rows == row)
            taken, left = here[chosen[here]], here[~chosen[here]]
            # the best is written whatever the threshold says of it
            rest = here[here != here[score[here].argmax()]]
            sides = np.where(score[rest] >= bound, 1, -1)
            sure = int((sides > 0).sum())
            if not sure or len(taken) > sure + 1:
                # one, or a quota, is filled in order; what is left may pass the threshold as well
                rest, sides = left, np.full(len(left), -1)
            if len(left) and rest is left:
                self._ranked.append(partial(_order, taken=taken, left=left))
                last, next_ = taken[score[taken].argmin()], left[score[left].argmax()]
                lines.append((row, "order", columns[last], -1, columns[next_]))
            if len(rest) and bound < np.inf:
                self._ranked.append(partial(_threshold, rest=rest, sides=sides, bound=bound))
                nearest = columns[rest[np.abs(score[rest] - bound).argmin()]]
                lines.append((row, "threshold", nearest, -1, nearest))
        self.lines = pd.DataFrame(lines, columns=["row", "kind", "column", "token", "other"])

    def margins(self, logits_MV: Tensor, score_M: Tensor) -> np.ndarray:
        """Margin of each line; below 0 if such logits choose otherwise."""
        score = score_M.double().cpu().numpy()
        return np.concatenate(
            [self._tokens(logits_MV)[0], [margin(score) for margin in self._ranked]]
        )

    def again(self, rule: Any, logits_MV: Tensor) -> np.ndarray:
        """The margins under other logits of the same canvas, in which the same tokens are
        barred.
        """
        never_MV = self.seen.logits_MV == -torch.inf
        other = replace(
            self.seen, logits_MV=logits_MV[:, : never_MV.shape[1]].masked_fill(never_MV, -torch.inf)
        )
        return self.margins(other.logits_MV, rule(other))

    def _tokens(self, logits_MV: Tensor) -> tuple[np.ndarray, np.ndarray]:
        """Margins of the committed tokens, and their runners-up."""
        rest_NV = logits_MV[self.chosen_M].double()
        own_N = rest_NV.gather(1, self.token_N1)[:, 0]
        rest_NV.scatter_(1, self.token_N1, -torch.inf)
        rest_NV[:, self.mask_id : self.mask_id + 1] = -torch.inf
        best_N, other_N = rest_NV.max(1)
        return (own_N - best_N).cpu().numpy(), other_N.cpu().numpy()


def measure_margins(
    loaded: Loaded,
    canvas: Canvas,
    settings: DecodingSettings,
    *,
    seed: int = 0,
    probes: int = PROBES,
    plain: bool = False,
) -> tuple[Tensor, pd.DataFrame]:
    """The decoded ids (B, S) and the margin of every choice, a line each.

    Columns: row, step (of this row, which may wait for others), kind (`KINDS`), column (of the
    canvas; of the last position chosen), token (committed), other (the runner-up: its id, or the
    column of the best position not chosen), margin, and noise: how far a jitter of `JITTER` moves
    the margin, root mean square over the probes, NaN without.

    Args:
        loaded: a diffusion model.
        canvas: to be written, in one batch.
        settings: how; greedy, see `check_greedy`.
        probes: copies of the batch that are read under jitter at each step.
        seed: of the jitter.
        plain: never by a fast decoder.

    Raises:
        ValueError: for a decoder that draws, and anything `denoise` refuses.
    """
    model: Any = loaded.model
    rule, threshold = (
        check_greedy(settings),
        getattr(settings.values()["schedule"], "threshold", None),
    )
    size = max(JITTER, torch.finfo(model.dtype).eps)
    still = model.denoiser(canvas.attention_BS.repeat(probes, 1) if probes else None, plain=True)
    uncached = None if settings.cache == "none" else model.denoiser(canvas.attention_BS, plain=True)
    tables, ids_BS, own_B = list[pd.DataFrame](), canvas.ids_BS, torch.tensor(-1)
    for step, seen in watched_steps(loaded, canvas, settings, plain=plain):
        here, noise = Choices(step, seen, threshold), np.nan
        margin = here.margins(seen.logits_MV, step.score_M)
        if probes:
            wanted_BS = step.candidates_BS
            # keys that a cache has kept are no rounding: beside them the jitter is that of a canvas
            # read whole
            base = (
                margin
                if uncached is None
                else here.again(rule, uncached(step.before_BS, wanted_BS))
            )
            with jittered(model, size, sample_seed(seed, step.index)):
                logits_NV = still(step.before_BS.repeat(probes, 1), wanted_BS.repeat(probes, 1))
            shifts = [here.again(rule, logits_MV) - base for logits_MV in logits_NV.chunk(probes)]
            noise = np.sqrt(np.mean(np.square(shifts), 0)) * JITTER / size
        own_B = own_B + step.candidates_BS.any(1).cpu()
        numbers = own_B[here.lines["row"].tolist()].tolist()
        tables.append(here.lines.assign(step=numbers, margin=margin, noise=noise))
        ids_BS = step.ids_BS
    return ids_BS, pd.concat(tables, ignore_index=True)


def first_difference(one: pd.DataFrame, other: pd.DataFrame) -> pd.Series:
    """First step, by row, at which two tables of `margins` chose differently; NaN if they never
    did.
    """
    tokens = (
        table.loc[table["kind"] == "token", ["row", "step", "column", "token"]]
        for table in (one, other)
    )
    pair = pd.merge(*tokens, how="outer", indicator="where")
    apart = pair[pair["where"] != "both"].groupby("row")["step"].min()
    return apart.reindex(sorted({*one["row"]}))


def near_ties(found: pd.DataFrame, count: int, seed: int | None) -> pd.DataFrame:
    """Draw choices, half in token and half in order, from the tenth with the smallest margin by its
    noise.
    """
    lines = found[(found["noise"] > 0) & (found["kind"] != "threshold")]
    ratio = lines["margin"] / lines["noise"]
    near = lines[ratio <= ratio.groupby(lines["kind"]).transform("quantile", 0.1)].sample(
        frac=1, random_state=seed
    )
    return near.groupby("kind").head(-(-count // 2)).head(count).sort_index()


def rewritten(
    loaded: Loaded, canvas: Canvas, settings: DecodingSettings, choices: pd.DataFrame
) -> list[Tensor]:
    """The ids (S,) of a text when one choice is made otherwise and decoding goes on, for each line
    of `margins`.

    A token gives way to its runner-up, the last position chosen to the best that was not; nothing
    else is touched.
    """
    found: list[Tensor] = []
    batch = len(canvas.ids_BS)
    for start in range(0, len(choices), batch):
        some = choices.iloc[start : start + batch]
        rows = torch.tensor(some["row"].tolist())
        block_BS = None if canvas.block_BS is None else canvas.block_BS[rows]
        copies = Canvas(
            canvas.ids_BS[rows],
            canvas.attention_BS[rows],
            canvas.open_BS[rows],
            canvas.mask_id,
            block_BS,
        )
        for step, _ in watched_steps(loaded, copies, settings, some.assign(row=range(len(some)))):
            ids_BS = step.ids_BS
        found += [*ids_BS]
    return found
