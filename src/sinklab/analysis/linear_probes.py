"""Linear probes: what a ridge regression reads in states, scored on texts it has not seen."""

# N rows, D state size, C target columns, F folds, G texts, A penalties, R resamples
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional

Name = TypeVar("Name")
PENALTIES = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1e3, 1e4)

MIXED = 32


def folds_of(text_N: Tensor, folds: int, seed: int = 0) -> Tensor:
    """The fold of every row, int64 (N,): all rows of a text are in one fold, texts are assigned evenly at random.

    Raises:
        ValueError: for fewer than three folds (one to test, one to choose the penalty on) or fewer texts than folds.
    """
    texts, place_N = text_N.unique(return_inverse=True)
    if not 3 <= folds <= len(texts):
        raise ValueError(
            f"probes are tested on held-out texts, which takes 3 folds and a text in each, but there are "
            f"{folds} folds and {len(texts)} texts; write more texts, or choose 3 to {max(3, len(texts))} folds"
        )
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))
    return (order.argsort() % folds)[place_N]


def standardised(states_ND: Tensor, components: int | None = None) -> Tensor:
    """Columns of mean 0 and deviation 1, float64; columns that do not vary become 0.

    With `components` fewer than D and N, they are then turned onto as many leading principal directions. Neither step
    sees a target.
    """
    x_ND = states_ND.double()
    mean_D, scale_D = x_ND.mean(0), x_ND.std(0, correction=0)
    # rounding leaves a deviation near 1e-8 of the mean where all numbers are equal
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
        """(N, C); one penalty for all columns, or one a column (C,). It is relative to columns of deviation 1."""
        weight_DC = self.turned_DC / (self.value_D[:, None] + torch.as_tensor(penalty, dtype=turned_ND.dtype))
        return self.mean_C + turned_ND @ weight_DC


@dataclass(frozen=True, eq=False)
class Held:
    """Predictions for rows whose text the regression did not see."""

    predicted_NC: Tensor
    mean_NC: Tensor
    """The mean of the training rows: the prediction if the states carried no information."""


def ridge(
    x_ND: Tensor, targets: Mapping[Name, Tensor], fold_N: Tensor, *, penalties: tuple[float, ...] = PENALTIES
) -> dict[Name, Held]:
    """Ridge regressions of several targets (N, C) on the same rows, each fold predicted from the others.

    The penalty of each target is the one that predicts best, in squares, when each of the other folds is left out of
    them in turn: no fold takes part in a choice about itself. For a target wider than `MIXED` columns the choice is
    made on as many random mixtures of them, whose squared errors estimate the whole one's. O(N D² + F² D³).

    Raises:
        ValueError: for fewer than three folds, and NaN.
    """
    y_NC = torch.cat([target.double() for target in targets.values()], 1)
    numbers = fold_N.unique().tolist()
    if len(numbers) < 3 or not bool(x_ND.isfinite().all() & y_NC.isfinite().all()):
        raise ValueError(
            f"a probe needs finite states and targets and three folds that have rows, but got {len(numbers)} folds, "
            f"{int((~x_ND.isfinite()).sum())} states and {int((~y_NC.isfinite()).sum())} targets that are not finite"
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
    for fold in numbers:
        left = total - grams[fold]
        error_AM = y_NC.new_zeros(len(penalties), narrow_NM.shape[1])
        for inner in numbers:
            if inner != fold:
                fit, part_N = _Fit((left - grams[inner]) @ mixing), rows[inner]
                turned_ND, wanted_NM = fit.turned(x_ND[part_N]), narrow_NM[part_N]
                for error_M, penalty in zip(error_AM, penalties, strict=True):
                    error_M += (fit.predicted(turned_ND, penalty) - wanted_NM).square().sum(0)
        best = torch.stack([part_AM.sum(1).argmin() for part_AM in error_AM.split(narrow_sizes, 1)])
        penalty_C = torch.tensor(penalties, dtype=y_NC.dtype)[best].repeat_interleave(torch.tensor(sizes))
        fit = _Fit(left)
        mean_NC[rows[fold]] = fit.mean_C
        predicted_NC[rows[fold]] = fit.predicted(fit.turned(x_ND[rows[fold]]), penalty_C)
    parts = zip(predicted_NC.split(sizes, 1), mean_NC.split(sizes, 1), strict=True)
    return {name: Held(*part) for name, part in zip(targets, parts, strict=True)}


def _mixing(size: int) -> Tensor:
    """(size, MIXED) random numbers that keep squared lengths on average, or no mixing at all."""
    if size <= MIXED:
        return torch.eye(size, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    return torch.randn(size, MIXED, generator=generator, dtype=torch.float64) / MIXED**0.5


@dataclass(frozen=True, eq=False)
class Score:
    """A ratio of sums over texts, so that texts can be resampled."""

    top_G: Tensor
    bottom_G: Tensor
    is_error: bool
    """True: 1 − Σ top / Σ bottom (R², skill); False: Σ top / Σ bottom (a mean)."""

    def value(self, count_RG: Tensor | None = None) -> Tensor:
        """The score, (), or of texts taken so many times, (R,); NaN where nothing was counted."""
        count_RG = torch.ones_like(self.top_G) if count_RG is None else count_RG
        ratio = (count_RG @ self.top_G) / (count_RG @ self.bottom_G)
        return 1 - ratio if self.is_error else ratio


def explained(held: Held, target_NC: Tensor, text_N: Tensor, texts: int) -> Score:
    """R² over all columns together: 1 − squared error / squared error of the mean of the texts that were seen."""
    errors = ((said_NC - target_NC.double()).square().sum(1) for said_NC in (held.predicted_NC, held.mean_NC))
    top_G, bottom_G = (_by_text(error_N, text_N, texts) for error_N in errors)
    return Score(top_G, bottom_G, True)


def skill(held: Held, target_NC: Tensor, text_N: Tensor, texts: int) -> Score:
    """1 − mistakes / mistakes of the most frequent answer among the texts that were seen (a least-squares classifier).

    Accuracies of two populations cannot be compared where one has a more frequent answer; skills can.
    """
    wrong = (said_NC.argmax(1) != target_NC.argmax(1) for said_NC in (held.predicted_NC, held.mean_NC))
    top_G, bottom_G = (_by_text(wrong_N.double(), text_N, texts) for wrong_N in wrong)
    return Score(top_G, bottom_G, True)


def accuracy(held: Held, target_NC: Tensor) -> float:
    """How often the greatest predicted column is the one that is 1 in the target."""
    return (held.predicted_NC.argmax(1) == target_NC.argmax(1)).double().mean().item()


def mean_score(value_N: Tensor, text_N: Tensor, texts: int) -> Score:
    """The mean of numbers; NaN is left out."""
    known_N = ~value_N.isnan()
    top_G = _by_text(value_N.double().nan_to_num(), text_N, texts)
    return Score(top_G, _by_text(known_N.double(), text_N, texts), False)


def _by_text(value_N: Tensor, text_N: Tensor, texts: int) -> Tensor:
    return value_N.new_zeros(texts).index_add_(0, text_N, value_N)


def resamples(texts: int, draws: int, seed: int = 0) -> Tensor:
    """How often each text is taken in each resample with replacement, float64 (R, G); shared by all scores."""
    drawn_RG = torch.randint(texts, (draws, texts), generator=torch.Generator().manual_seed(seed))
    return torch.zeros(draws, texts, dtype=torch.float64).scatter_add_(1, drawn_RG, torch.ones_like(drawn_RG).double())


def shuffled(target_NC: Tensor, seed: int = 0) -> Tensor:
    """The target with its rows exchanged among all rows, of all texts: what a probe finds where there is nothing."""
    return target_NC[torch.randperm(len(target_NC), generator=torch.Generator().manual_seed(seed))]
