"""Another implementation's logits, hidden states and canvases, held against ours; docs/validate.md
says the format.
"""

# B batch rows, S positions, V vocabulary, D hidden size, T canvases
from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from sinklab.core.errors import check_tensor, known_fields, unknown
from sinklab.core.probing.call import Listener
from sinklab.core.probing.tap import tapped
from sinklab.core.sampling import Canvas, DecodingSettings
from sinklab.lab.files import ordinary, read_json, refused
from sinklab.lab.records.storage import write_beside, write_text
from sinklab.lab.scoring.requests import needs_mask

if TYPE_CHECKING:
    from sinklab.core.sampling.loop import Step
    from sinklab.lab.checkpoints.loading import Loaded

CASES, TENSORS = "cases.json", "expected.safetensors"
TOLERANCES = {"float32": 5e-4, "float16": 2e-2, "bfloat16": 0.15}
"""Largest accepted difference of two implementations, by the type that the other one computes in;
in units of `Held.relative`.
"""

BARRED = -1e5
"""No logit or state of a model is as low, except for a barred token."""


@dataclass(frozen=True)
class Held:
    """Comparison of one thing of another implementation with ours."""

    case: str
    what: str
    """"layer 3", "logits" or "canvas"."""
    difference: float
    """The greatest absolute difference; of a canvas, the number of differing positions at its first
    difference.
    """
    relative: float
    """The greatest |theirs - ours| / (|ours| + standard deviation of ours)."""
    same_best: float
    """Share of positions at which the most probable token is the same; of canvases, share of those
    that are equal.
    """
    holds: bool
    found: str = ""
    """First difference of a canvas."""

    def line(self) -> str:
        """This comparison as a line of a table."""
        numbers = f"{self.same_best:.1%} equal{self.found and f'; first {self.found}'}"
        if self.what != "canvas":
            best = (
                ""
                if math.isnan(self.same_best)
                else f", most probable token the same at {self.same_best:.1%}"
            )
            numbers = f"difference {self.difference:8.3g}, relative {self.relative:8.2e}{best}"
        return f"{'holds' if self.holds else 'DIFFERS':8} {self.case:12} {self.what:9} {numbers}"


class _States(Listener):
    """Keeps the outputs of each decoder layer."""

    of_states = "holding layers against others"

    def __init__(self) -> None:
        self.layers: list[Tensor] = []

    def observe_states(self, calls: list[str], states_BQD: Tensor) -> None:
        self.layers.append(states_BQD)


@torch.inference_mode()
def _passed(loaded: Loaded, ids_BS: Tensor, real_BS: Tensor | None) -> dict[str, Tensor]:
    """Logits, and hidden states by layer, of one pass over the whole text."""
    listener, model = _States(), loaded.model
    with tapped(model, listener):
        logits_BSV = model(
            ids_BS.to(model.device), None if real_BS is None else real_BS.to(model.device)
        ).logits
    layers = {f"hidden.{layer}": states_BSD for layer, states_BSD in enumerate(listener.layers)}
    return {
        name: one.float().cpu().contiguous()
        for name, one in {**layers, "logits": logits_BSV}.items()
    }


class Reference:
    """A folder of cases: the inputs of runs, and their results."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError for a folder that holds no such cases."""
        from safetensors.torch import load_file

        self.folder = folder
        self.left_out: list[str] = []
        """Tensors that `hold` found in our model and not in the folder, such as "layer 3 of
        'start'".
        """
        with refused(f"{folder} must hold {CASES} and {TENSORS}, as docs/validate.md says"):
            self.told = read_json(folder / CASES, dict)
            self.tensors = load_file(ordinary(folder / TENSORS))
            kinds = ("logits", "generate")
            self.cases = {
                kind: {one["name"]: one for one in self.told.get(kind, [])} for kind in kinds
            }

    @property
    def model(self) -> str:
        """The model that was run; the folder itself if it holds one."""
        return str(self.told.get("model") or self.folder)

    def tensor(self, name: str, axes: int) -> Tensor:
        """A tensor of the folder. Raises ValueError if it is not there, or has another number of
        axes.
        """
        if name not in self.tensors:
            raise ValueError(
                f"{self.folder / TENSORS} must hold {name!r} for a case; see docs/validate.md"
            )
        check_tensor(f"{name} of {self.folder}", self.tensors[name], [None] * axes)
        return self.tensors[name]

    def tolerance(self) -> float:
        """Tolerance of the type that the cases say they computed in. Raises ValueError for one that
        has none.
        """
        kind = self.told.get("dtype", "float32")
        if kind not in TOLERANCES:
            raise unknown("dtype of a reference", kind, TOLERANCES, "give a tolerance")
        return TOLERANCES[kind]

    def hold(self, loaded: Loaded, tolerance: float | None = None) -> list[Held]:
        """Run every case with our model.

        Args:
            loaded: the model, in a type that is at least as fine as theirs.
            tolerance: the greatest `Held.relative`; that of their type when left out.

        Raises:
            ValueError: for cases that lack something, do not fit the model, or are none at all.
        """
        if not any(self.cases.values()):
            raise ValueError(
                f"{self.folder / CASES} lists no cases under 'logits' or 'generate'; see "
                "docs/validate.md"
            )
        limit = self.tolerance() if tolerance is None else tolerance
        self.left_out = []
        held = [one for case in self.cases["logits"] for one in self._pass(loaded, case, limit)]
        return held + [self._canvases(loaded, *case) for case in self.cases["generate"].items()]

    def _pass(self, loaded: Loaded, case: str, limit: float) -> Iterator[Held]:
        prefix = f"logits.{case}."
        ids_BS, mask_BS = (
            self.tensor(f"{prefix}input_ids", 2).long(),
            self.tensors.get(f"{prefix}attention_mask"),
        )
        theirs: dict[str, Any] = {
            name.removeprefix(prefix): one
            for name, one in self.tensors.items()
            if name.startswith(prefix)
        }
        # of models whose logits are those of the next token, moved to the token that they predict
        theirs["logits"] = theirs.get("shifted", theirs.get("logits"))
        if theirs["logits"] is None and not any(name.startswith("hidden.") for name in theirs):
            raise ValueError(
                f"the case {case!r} of {self.folder} has neither logits nor hidden states; give one"
            )
        valid = theirs.get("valid_shifted", theirs.get("valid", mask_BS))
        valid_BS = torch.ones_like(ids_BS, dtype=torch.bool) if valid is None else valid.bool()
        if not valid_BS.any():
            raise ValueError(
                f"{prefix}valid leaves no position to compare; mark those that are to hold"
            )
        for name, ours in _passed(loaded, ids_BS, mask_BS).items():
            other = theirs.pop(name, None)
            if other is None:
                self.left_out.append(f"{_in_words(name)} of {case!r}")
                continue
            width = min(ours.shape[-1], other.shape[-1]) if name == "logits" else ours.shape[-1]
            check_tensor(f"{prefix}{name}", other[..., :width], (*ids_BS.shape, width), "float")
            yield _held(
                case, name, ours[valid_BS][:, :width], other[valid_BS][:, :width].float(), limit
            )
        surplus = [name for name in theirs if name.startswith("hidden.")]
        if surplus:
            raise ValueError(
                f"{prefix}{surplus[0]} is of a layer that {loaded.name} does not have; leave it out"
            )

    def _canvases(self, loaded: Loaded, case: str, about: dict[str, Any]) -> Held:
        model = _writer(loaded)
        canvas_TBS = self.tensor(f"gen.{case}.canvas", 3).long()
        with refused(f"settings of {case!r} must be those of DecodingSettings"):
            settings = about.get("settings", {})
            known_fields("DecodingSettings", settings, DecodingSettings.__dataclass_fields__)
            settings = DecodingSettings(**settings)
        real_BS = self.tensors.get(f"gen.{case}.attention_mask")
        if real_BS is not None:
            # padding is in front of the prompt
            real_BS = pad(real_BS.long(), (0, canvas_TBS.shape[2] - real_BS.shape[1]), value=1)
        # -1: a column that is not there yet; ours begins as masks
        mask_id, ids_BS = model.config.mask_token_id, canvas_TBS[0]
        canvas = Canvas.infill(
            ids_BS.where(ids_BS >= 0, mask_id), mask_id=mask_id, attention_BS=real_BS
        )
        steps = list(model.denoise(canvas.to(model.device), settings))
        asked, found, equal, differ = int(about.get("evaluations", len(canvas_TBS) - 1)), "", 0, 0
        for step, theirs_BS in zip(steps, canvas_TBS[1:], strict=False):
            apart = ((step.ids_BS.cpu() != theirs_BS) & (theirs_BS >= 0)).nonzero()
            equal += not len(apart)
            if len(apart) and not found:
                differ, found = (
                    len(apart),
                    f"evaluation {step.index + 1}: {_apart(step, theirs_BS, apart)}",
                )
        if asked != len(steps):
            found += f"{'; ' if found else ''}{asked} evaluations, ours {len(steps)}"
        elif len(canvas_TBS) - 1 != len(steps):
            found += (
                f"{'; ' if found else ''}{len(canvas_TBS) - 1} canvases behind the first, "
                f"ours {len(steps)}"
            )
        share = equal / max(1, len(canvas_TBS) - 1)
        return Held(case, "canvas", float(differ), float("nan"), share, not found, found)


def _apart(step: Step, theirs_BS: Tensor, apart: Tensor) -> str:
    """The first positions at which a canvas differs; scores near each other are a near tie, which
    rounding may decide.
    """
    words = dict[int, str]({step.canvas.mask_id: "[MASK]"})
    told = []
    for row, place in apart[:3].tolist():
        tokens = [int(ids[row, place]) for ids in (theirs_BS, step.ids_BS)]
        theirs, ours = (words.get(token, str(token)) for token in tokens)
        score = float(step.confidence_BS[row, place])
        told.append(f"row {row}, position {place}: {theirs}, ours {ours} (our score {score:.4f})")
    return "; ".join(told)


def _in_words(name: str) -> str:
    """An array by its name in `Held.what`: "logits", or "layer 3" for hidden.3."""
    return f"layer {name.removeprefix('hidden.')}" if name.startswith("hidden.") else name


def _held(case: str, name: str, ours_PV: Tensor, theirs_PV: Tensor, limit: float) -> Held:
    apart_PV = (theirs_PV - ours_PV).abs()
    # if a token is barred (SMDM's [MASK] has no logit) it says nothing of how far others are spread
    relative = float((apart_PV / (ours_PV.abs() + ours_PV[ours_PV > BARRED].std())).max())
    is_logits = name == "logits"
    same = (
        float((ours_PV.argmax(-1) == theirs_PV.argmax(-1)).float().mean())
        if is_logits
        else float("nan")
    )
    # not of a comparison with what is no number
    return Held(case, _in_words(name), float(apart_PV.max()), relative, same, relative <= limit)


def verdict(held: Sequence[Held], tolerance: float, left_out: Sequence[str] = ()) -> str:
    """Whether all of it holds, in one line, and the tensors that were not given:
    `Reference.left_out`.
    """
    more = f" and {len(left_out) - 3} more" if len(left_out) > 3 else ""
    absent = f"; not given, so not compared: {', '.join(left_out[:3])}{more}" if left_out else ""
    wrong = [one for one in held if not one.holds]
    if not wrong:
        return (
            f"it holds: {len(held)} comparisons, numbers within {tolerance:g}, canvases "
            f"equal{absent}"
        )
    fact = (
        f"{len(wrong)} of {len(held)} comparisons differ, the first in {wrong[0].what} of "
        f"{wrong[0].case!r}"
    )
    return f"it does not hold: {fact}; numbers may by {tolerance:g}, canvases not at all{absent}"


def _writer(loaded: Loaded) -> Any:
    """The model, if it denoises masks."""
    needs_mask(loaded, "a canvas")
    if loaded.family != "diffusion":
        raise ValueError(
            f"canvases are of diffusion models, but {loaded.name} is {loaded.family}; give logits "
            "alone"
        )
    return loaded.model


def write_reference(
    loaded: Loaded,
    folder: Path,
    prompts: Sequence[Sequence[int]],
    settings: DecodingSettings,
    new_tokens: int,
) -> Path:
    """Write our own numbers in the format that `Reference` reads, which another implementation is
    to give.

    Logits and hidden states of the first canvas and of one half written, and the canvas after every
    evaluation.

    Args:
        loaded: the model.
        folder: to write.
        prompts: token ids, padded on the left if lengths differ.
        settings: how the canvas is decoded.
        new_tokens: masks behind each prompt.
    """
    from safetensors.torch import save_file

    model = _writer(loaded)
    mask_id, multiple = model.config.mask_token_id, model.config.block_columns
    given: dict[str, Any] = {"new_tokens": new_tokens, "mask_id": mask_id, "multiple": multiple}
    canvas = Canvas.from_prompts(
        prompts, pad_id=loaded.special.pad or 0, context=model.config.text_positions, **given
    )
    steps = list(model.denoise(canvas.to(model.device), settings))
    canvases = [canvas.ids_BS, *(step.ids_BS.cpu() for step in steps)]
    # without padding, no mask: an engine may have none
    real_BS = None if canvas.attention_BS.all() else canvas.attention_BS.int()
    tensors = {"gen.written.canvas": torch.stack(canvases).int()}
    shown = {"start": canvases[0], "half": canvases[len(steps) // 2]}
    for case, ids_BS in shown.items():
        tensors[f"logits.{case}.input_ids"] = ids_BS.int()
        tensors |= {
            f"logits.{case}.{name}": one for name, one in _passed(loaded, ids_BS, real_BS).items()
        }
    if real_BS is not None:
        tensors |= {
            f"{case}.attention_mask": real_BS.clone()
            for case in ("gen.written", *map("logits.{}".format, shown))
        }
    told = {
        "format": 1,
        "model": loaded.name,
        "revision": loaded.revision,
        "special_ids": asdict(loaded.special),
    }
    told |= {
        "dtype": str(model.dtype).removeprefix("torch."),
        "logits": [{"name": case} for case in shown],
    }
    told["generate"] = [
        {"name": "written", "settings": asdict(settings), "evaluations": len(steps)}
    ]
    folder.mkdir(parents=True, exist_ok=True)
    try:
        write_beside(folder / TENSORS, lambda part: save_file(tensors, part))
        write_text(folder / CASES, json.dumps(told, indent=2) + "\n")
    except BaseException:
        # half of it would be in the way of the next attempt
        with suppress(OSError):
            (folder / TENSORS).unlink(missing_ok=True)
            folder.rmdir()
        raise
    return folder
