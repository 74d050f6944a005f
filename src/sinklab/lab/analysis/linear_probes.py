"""Linear probes: a ridge regression on states, scored on texts it has not seen."""

# N rows, D state size, C target columns, F folds, G texts, A penalties, R resamples
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import scipy  # its modules load where they are first used
import torch
from torch import Tensor
from torch.nn import functional

from sinklab.lab.analysis.estimates import FEWEST, LEVEL

Name = TypeVar("Name")
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e3, 1e4)

MIXED = 32

FITTED = 1.25
"""how much wider the coefficients' own error makes an interval (measured: docs/statistics.md)"""


def folds_of(text_N: Tensor, folds: int, seed: int = 0) -> Tensor:
    """The fold of every row, int64 (N,): all rows of a text are in one fold, texts are assigned
    evenly at random.

    Raises:
        ValueError: for fewer than three folds (one to test, one to choose the penalty on) or fewer
            texts than folds.
    """
    texts, place_N = text_N.unique(return_inverse=True)
    if not 3 <= folds <= len(texts):
        raise ValueError(
            "probes are tested on held-out texts, which takes 3 folds and a text in each, but "
            f"there are {folds} folds and {len(texts)} texts; write more texts, or choose 3 to "
            f"{max(3, len(texts))} folds"
        )
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return (order.argsort() % folds)[place_N]


def standardised(states_ND: Tensor, components: int | None = None) -> Tensor:
    """Columns of mean 0 and deviation 1, float64; columns that do not vary become 0.

    With `components` fewer than D and N, they are then turned onto as many leading principal
    directions. Neither step sees a target.
    """
    x_ND = states_ND.double()
    mean_D, scale_D = x_ND.mean(0), x_ND.std(0, correction=0)
    # rounding leaves a deviation near 1e-8 of the mean if all numbers are equal
    varies_D = scale_D > 1e-6 * mean_D.abs()
    x_ND = (x_ND - mean_D) * torch.where(varies_D, 1 / scale_D.clamp(min=1e-300), 0.0)
    if components is None or components >= min(x_ND.shape):
        return x_ND
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        _, _, direction_DC = torch.svd_lowrank(x_ND, q=components, niter=4)
    return x_ND @ direction_DC


def _gram(x_ND: Tensor, y_NC: Tensor) -> Tensor:
    """[1 x]ᵀ[1 x y], all that a fit needs to know of some rows; that of more rows is the sum."""
    one_x = functional.pad(x_ND, (1, 0), value=1.0)
    return one_x.T @ torch.cat([one_x, y_NC], 1)


class _Fit:
    """A ridge regression for every penalty at once, by the eigenvectors of the covariance."""

    def __init__(self, gram: Tensor) -> None:
        size, mean = len(gram), gram[0] / gram[0, 0]
        covariance = (gram / gram[0, 0] - torch.outer(mean[:size], mean))[1:, 1:]
        value_D, self.vector_DD = torch.linalg.eigh(covariance[:, : size - 1])
        self.mean_D, self.mean_C, self.value_D = mean[1:size], mean[size:], value_D.clamp(min=0)
        self.turned_DC = self.vector_DD.T @ covariance[:, size - 1 :]

    def turned(self, x_ND: Tensor) -> Tensor:
        """Rows as `predicted` takes them, once for all penalties."""
        return (x_ND - self.mean_D) @ self.vector_DD

    def predicted(self, turned_ND: Tensor, penalty: float | Tensor) -> Tensor:
        """(N, C); one penalty for all columns, or one a column (C,). It is relative to columns of
        deviation 1.
        """
        weight_DC = self.turned_DC / (
            self.value_D[:, None] + torch.as_tensor(penalty, dtype=turned_ND.dtype)
        )
        return self.mean_C + turned_ND @ weight_DC


@dataclass(frozen=True, eq=False)
class Held:
    """Predictions for rows of texts that the regression did not see."""

    predicted_NC: Tensor
    mean_NC: Tensor
    """The mean of the training rows: the prediction if the states carried no information."""
    square_AN: Tensor
    """Squared error of a row by penalty."""
    wrong_AN: Tensor
    """Whether another column than the target's greatest is predicted to be the greatest."""
    choice_FAN: Tensor
    """The squared errors that the penalty for a fold is chosen by: of rows of the other folds, each
    predicted without its own fold and this one."""
    fold_N: Tensor
    """Number of the fold in `choice_FAN`."""


def ridge(
    x_ND: Tensor,
    targets: Mapping[Name, Tensor],
    fold_N: Tensor,
    *,
    penalties: tuple[float, ...] = PENALTIES,
) -> dict[Name, Held]:
    """Ridge regressions of several targets (N, C) on the same rows, each fold predicted from the
    others.

    The penalty of each target is the one that predicts best, in squares, when each of the other
    folds is left out of them in turn: no fold takes part in a choice about itself. For a target
    wider than `MIXED` columns the choice is made on as many random mixtures of them, whose squared
    errors estimate the whole one's. O(N D² + F² D³).

    Raises:
        ValueError: for fewer than three folds, and NaN.
    """
    y_NC = torch.cat([target.double() for target in targets.values()], 1)
    numbers = fold_N.unique().tolist()
    if len(numbers) < 3 or not bool(x_ND.isfinite().all() & y_NC.isfinite().all()):
        raise ValueError(
            "a probe needs finite states and targets and three folds that have rows, but got "
            f"{len(numbers)} folds, {int((~x_ND.isfinite()).sum())} states and "
            f"{int((~y_NC.isfinite()).sum())} targets that are not finite"
        )
    x_ND = x_ND.double()
    rows = {fold: fold_N == fold for fold in numbers}
    grams = {fold: _gram(x_ND[rows[fold]], y_NC[rows[fold]]) for fold in numbers}
    total = torch.stack([*grams.values()]).sum(0)
    sizes = [target.shape[1] for target in targets.values()]
    mixing_CM = torch.block_diag(*map(_mixing, sizes))
    narrow_NM, narrow_sizes = y_NC @ mixing_CM, [min(size, MIXED) for size in sizes]
    mixing = torch.block_diag(torch.eye(len(total), dtype=torch.float64), mixing_CM)
    predicted_NC, mean_NC = torch.empty_like(y_NC), torch.empty_like(y_NC)
    square_TAN, wrong_TAN = y_NC.new_zeros(2, len(sizes), len(penalties), len(y_NC))
    choice_TFAN = y_NC.new_zeros(len(sizes), len(numbers), len(penalties), len(y_NC))
    for place, fold in enumerate(numbers):
        left = total - grams[fold]
        for inner in numbers:
            if inner != fold:
                fit, part_N = _Fit((left - grams[inner]) @ mixing), rows[inner]
                turned_ND, wanted_NM = fit.turned(x_ND[part_N]), narrow_NM[part_N]
                for number, penalty in enumerate(penalties):
                    error_NM = (fit.predicted(turned_ND, penalty) - wanted_NM).square()
                    sums_TN = torch.stack(
                        [part_NM.sum(1) for part_NM in error_NM.split(narrow_sizes, 1)]
                    )
                    choice_TFAN[:, place, number, part_N] = sums_TN
        best_T = choice_TFAN[:, place].sum(-1).argmin(1)
        fit, part_N = _Fit(left), rows[fold]
        turned_ND, mean_NC[part_N] = fit.turned(x_ND[part_N]), fit.mean_C
        for number, penalty in enumerate(penalties):
            said = fit.predicted(turned_ND, penalty).split(sizes, 1)
            for target, (said_NC, wanted_NC) in enumerate(
                zip(said, y_NC[part_N].split(sizes, 1), strict=True)
            ):
                square_TAN[target, number, part_N] = (said_NC - wanted_NC).square().sum(1)
                wrong_TAN[target, number, part_N] = (
                    said_NC.argmax(1) != wanted_NC.argmax(1)
                ).double()
        penalty_C = torch.tensor(penalties, dtype=y_NC.dtype)[best_T].repeat_interleave(
            torch.tensor(sizes)
        )
        predicted_NC[part_N] = fit.predicted(turned_ND, penalty_C)
    place_N = torch.searchsorted(torch.tensor(numbers), fold_N)
    parts = zip(
        predicted_NC.split(sizes, 1),
        mean_NC.split(sizes, 1),
        square_TAN,
        wrong_TAN,
        choice_TFAN,
        strict=True,
    )
    return {name: Held(*part, place_N) for name, part in zip(targets, parts, strict=True)}


def _mixing(size: int) -> Tensor:
    """(size, MIXED) random numbers that keep squared lengths on average, or no mixing at all."""
    if size <= MIXED:
        return torch.eye(size, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, MIXED, generator=generator, dtype=torch.float64) / MIXED**0.5


@dataclass(frozen=True, eq=False)
class Score:
    """A ratio of sums over texts, so that texts can be resampled; a probe's penalty is chosen anew
    for a resample.
    """

    top_AG: Tensor
    """By penalty; a single row if there is none to choose."""
    bottom_G: Tensor
    choice_FAG: Tensor
    """The penalty for the texts of a fold is the one with the least sum over texts."""
    fold_G: Tensor
    is_error: bool
    """True: 1 − Σ top / Σ bottom (R², skill); False: Σ top / Σ bottom (a mean)."""

    def value(self, count_RG: Tensor | None = None) -> Tensor:
        """The score, (), or of texts taken so many times, (R,); NaN if nothing was counted."""
        counts_RG = torch.ones_like(self.bottom_G)[None] if count_RG is None else count_RG
        best_RF = torch.einsum("rg,fag->rfa", counts_RG, self.choice_FAG).argmin(-1)
        top_RG = self.top_AG.gather(0, best_RF[:, self.fold_G])
        # added in the same order: equal sums are equal to the last bit
        ratio_R = (counts_RG * top_RG).sum(1) / (counts_RG * self.bottom_G).sum(1)
        score_R = 1 - ratio_R if self.is_error else ratio_R
        return score_R[0] if count_RG is None else score_R


def interval(value: float, value_R: Tensor, texts: int, *, fitted: bool) -> tuple[float, float]:
    """95 % interval of a score, or of a difference of scores, from its values in resamples of
    texts.

    The percentiles' distances are stretched: for few texts, as Student's t is wider than the normal
    distribution, and for ``fitted`` scores by `FITTED`. A resample includes the choice of texts and
    of the penalty; the coefficients are those of all texts. NaN with fewer than 8 texts, and
    without a value.
    """
    apart_R = value_R[value_R.isfinite()] - value
    if texts < FEWEST or not len(apart_R) or not math.isfinite(value):
        return math.nan, math.nan
    wider = scipy.stats.t.ppf((1 + LEVEL) / 2, texts - 1) / scipy.stats.norm.ppf((1 + LEVEL) / 2)
    wider *= math.sqrt(texts / (texts - 1)) * (FITTED if fitted else 1)
    ends = torch.quantile(
        apart_R, torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=apart_R.dtype)
    )
    low, high = (value + wider * ends).tolist()
    return low, high


def explained(held: Held, target_NC: Tensor, text_N: Tensor, texts: int) -> Score:
    """R² over all columns together: 1 − squared error / squared error of the mean of the texts that
    were seen.
    """
    return _score(
        held, held.square_AN, (held.mean_NC - target_NC.double()).square().sum(1), text_N, texts
    )


def skill(held: Held, target_NC: Tensor, text_N: Tensor, texts: int) -> Score:
    """1 − mistakes / mistakes of the most frequent answer among the texts that were seen (a
    least-squares classifier).

    Accuracies of two populations cannot be compared if one has a more frequent answer; skills can.
    """
    usual_N = (held.mean_NC.argmax(1) != target_NC.argmax(1)).double()
    return _score(held, held.wrong_AN, usual_N, text_N, texts)


def _score(held: Held, error_AN: Tensor, usual_N: Tensor, text_N: Tensor, texts: int) -> Score:
    choice_FAG = _by_text(held.choice_FAN.flatten(0, 1), text_N, texts).unflatten(
        0, held.choice_FAN.shape[:2]
    )
    fold_G = torch.zeros(texts, dtype=torch.int64).scatter_(0, text_N, held.fold_N)
    return Score(
        _by_text(error_AN, text_N, texts),
        _by_text(usual_N, text_N, texts),
        choice_FAG,
        fold_G,
        True,
    )


def accuracy(held: Held, target_NC: Tensor) -> float:
    """How often the greatest predicted column is the one that is 1 in the target."""
    return (held.predicted_NC.argmax(1) == target_NC.argmax(1)).double().mean().item()


def mean_score(value_N: Tensor, text_N: Tensor, texts: int) -> Score:
    """The mean of numbers; NaN is left out."""
    counted_2N = torch.stack([value_N.double().nan_to_num(), (~value_N.isnan()).double()])
    top_G, bottom_G = _by_text(counted_2N, text_N, texts)
    nothing = torch.zeros(1, 1, texts, dtype=torch.float64)
    return Score(top_G[None], bottom_G, nothing, torch.zeros(texts, dtype=torch.int64), False)


def _by_text(values: Tensor, text_N: Tensor, texts: int) -> Tensor:
    """Sums (..., G) of (..., N)."""
    return values.new_zeros(*values.shape[:-1], texts).index_add_(-1, text_N, values)


def resamples(texts: int, draws: int, seed: int = 0) -> Tensor:
    """How often each text is taken in each resample with replacement, float64 (R, G); shared by all
    scores.
    """
    drawn_RG = torch.randint(texts, (draws, texts), generator=torch.Generator().manual_seed(seed))
    return torch.zeros(draws, texts, dtype=torch.float64).scatter_add_(
        1, drawn_RG, torch.ones_like(drawn_RG).double()
    )


def shuffled(target_NC: Tensor, text_N: Tensor, seed: int = 0) -> Tensor:
    """The target with whole texts exchanged: the baseline of a probe without information.

    Every text has the rows of another one, in their order from a random one on and round again.
    Rows of a text are alike, so rows exchanged one by one would be another world: one with as many
    texts as rows.

    Raises:
        ValueError: for a single text.
    """
    draw = torch.Generator().manual_seed(seed)
    texts = [torch.nonzero(text_N == text)[:, 0] for text in text_N.unique().tolist()]
    if len(texts) < 2:
        raise ValueError("texts are exchanged with one another, but there is only one")
    order = torch.randperm(len(texts), generator=draw).tolist()
    mixed_NC = torch.empty_like(target_NC)
    for own, other in zip(order, [*order[1:], order[0]], strict=True):
        first = int(torch.randint(len(texts[other]), (), generator=draw))
        place_N = (first + torch.arange(len(texts[own]))) % len(texts[other])
        mixed_NC[texts[own]] = target_NC[texts[other][place_N]]
    return mixed_NC
