"""`sinklab validate`: a folder with another program's numbers, compared case by case with what the
same checkpoint gives here; docs/first_hour.md says the format, and what wrote such folders.
"""

# R rows, S positions, V vocabulary, T canvases, P positions that are compared
from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sinklab.core.errors import check_tensor, known_fields, one_of
from sinklab.core.subject.settings import DecodingSettings
from sinklab.lab.cli.command import Reading
from sinklab.lab.cli.options import MARK, REQUIRED, Command
from sinklab.lab.cli.progress import say
from sinklab.lab.files import ordinary, read_json, refused
from sinklab.lab.registry import commands

if TYPE_CHECKING:
    from torch import Tensor

CASES, TENSORS = "cases.json", "expected.safetensors"
TOLERANCES = {"float32": 5e-4, "float16": 2e-2, "bfloat16": 0.15}
"""Largest accepted relative difference, by the type that the other program computes in."""
BARRED = -1e5
"""No logit is as low, except that of a token which the model may never write."""


@dataclass(frozen=True)
class Compared:
    """One case of the other program beside ours."""

    case: str
    what: str
    """logits or canvas"""
    holds: bool
    found: str
    """The difference in numbers, or the first place at which a canvas differs."""

    def __str__(self) -> str:
        verdict = "holds"
        if not self.holds:
            verdict = "DIFFERS"
        return f"{verdict:8}{self.case:16} {self.what:7} {self.found}"


class Saved:
    """The folder of another program: its inputs, and the numbers that it computed from them."""

    def __init__(self, folder: Path) -> None:
        """Raises ValueError for a folder that holds no cases."""
        from safetensors.torch import load_file

        self.folder = folder
        with refused(f"{folder} must hold {CASES} and {TENSORS}, see docs/first_hour.md"):
            self.told = read_json(folder / CASES, dict)
            self.tensors = load_file(ordinary(folder / TENSORS))
            kinds = ("logits", "generate")
            self.cases = [
                (kind, one["name"], one.get("settings", {}))
                for kind in kinds
                for one in self.told.get(kind, [])
            ]
        if not self.cases:
            raise ValueError(f"{folder / CASES} must list a case under one of {', '.join(kinds)}")

    def tensor(self, name: str, axes: int) -> Tensor:
        """A tensor that must be there, with so many axes."""
        if name not in self.tensors:
            raise ValueError(f"{self.folder / TENSORS} must hold {name!r}; see docs/first_hour.md")
        check_tensor(f"{name} of {self.folder}", self.tensors[name], [None] * axes)
        return self.tensors[name]

    def tolerance(self) -> float:
        """The tolerance of the type that the folder names."""
        dtype = self.told.get("dtype", "float32")
        one_of("dtype of saved numbers", dtype, TOLERANCES, "give --tolerance")
        return TOLERANCES[dtype]

    def compare(self, model: Any, tolerance: float) -> Iterator[Compared]:
        """Run every case with a model of ours.

        Raises:
            ValueError: for a case that lacks something, or does not fit the model.
        """
        for kind, name, settings in self.cases:
            if kind == "logits":
                yield self._logits(model, name, tolerance)
            else:
                yield self._canvases(model, name, settings)

    def _logits(self, model: Any, case: str, tolerance: float) -> Compared:
        import torch

        prefix = f"logits.{case}."
        ids_RS = self.tensor(f"{prefix}input_ids", 2).long()
        real_RS = self.tensors.get(f"{prefix}attention_mask", torch.ones_like(ids_RS))
        check_tensor(f"{prefix}attention_mask", real_RS, ids_RS.shape)
        logits_RSV = model(ids_RS.to(model.device), real_RS.to(model.device)).logits
        ours_RSV, real_RS = logits_RSV.float().cpu(), real_RS.bool()
        # where a model predicts the next token: moved to the position of the token
        name = f"{prefix}shifted"
        if name not in self.tensors:
            name = f"{prefix}logits"
        theirs_RSV = self.tensor(name, 3).float()
        # one of the two may have rows for tokens that nobody uses
        width = min(ours_RSV.shape[2], theirs_RSV.shape[2])
        check_tensor(name, theirs_RSV[..., :width], (*real_RS.shape, width))
        for valid in ("valid", "valid_shifted"):
            real_RS = real_RS & self.tensors.get(prefix + valid, real_RS).bool()
        if not real_RS.any():
            raise ValueError(f"{prefix}valid leaves no position to compare; mark some")
        ours_PV, theirs_PV = ours_RSV[real_RS][:, :width], theirs_RSV[real_RS][:, :width]
        apart_PV = (theirs_PV - ours_PV).abs()
        spread = ours_PV[ours_PV > BARRED].std()
        relative = float((apart_PV / (ours_PV.abs() + spread)).max())
        same = (ours_PV.argmax(-1) == theirs_PV.argmax(-1)).float().mean()
        found = f"difference {apart_PV.max():.3g}, relative {relative:.2g}"
        # not where one of them is no number
        return Compared(
            case, "logits", relative <= tolerance, f"{found}; most likely token: {same:.1%} equal"
        )

    def _canvases(self, model: Any, case: str, settings: dict[str, Any]) -> Compared:
        from torch.nn.functional import pad

        from sinklab.core.subject.canvas import Canvas

        canvas_TRS = self.tensor(f"gen.{case}.canvas", 3).long()
        with refused(f"settings of {case!r} must be those of DecodingSettings"):
            known_fields("DecodingSettings", settings, DecodingSettings.__dataclass_fields__)
            decoding = DecodingSettings(**settings)
        real_RS = self.tensors.get(f"gen.{case}.attention_mask")
        if real_RS is not None:
            real_RS = pad(real_RS.long(), (0, canvas_TRS.shape[2] - real_RS.shape[1]), value=1)
        mask_id = model.config.mask_token_id
        # a column that another program has not made yet (-1) is a mask here
        start_RS = canvas_TRS[0].where(canvas_TRS[0] >= 0, mask_id)
        canvas = Canvas.infill(start_RS, mask_id=mask_id, attention_BS=real_RS)
        steps = list(model.denoise(canvas.to(model.device), decoding))
        for step, theirs_RS in zip(steps, canvas_TRS[1:], strict=False):
            apart = ((step.ids_BS.cpu() != theirs_RS) & (theirs_RS >= 0)).nonzero()
            if len(apart):
                row, place = apart[0].tolist()
                # two scores that are nearly the same are decided by rounding
                found = (
                    f"evaluation {step.index + 1}, row {row}, position {place}: "
                    f"{theirs_RS[row, place]}, ours {step.ids_BS[row, place]} "
                    f"(our score {step.confidence_BS[row, place]:.4f}); {len(apart)} differ"
                )
                return Compared(case, "canvas", False, found)
        found = f"{len(canvas_TRS) - 1} evaluations, ours {len(steps)}"
        return Compared(case, "canvas", len(steps) == len(canvas_TRS) - 1, found)


@commands.register("validate")
@dataclass(frozen=True)
class Validate(Command):
    """Does a checkpoint give the numbers here that another program saved?

    Logits and canvases of the folder are compared with ours: the authors' code, an engine
    or a port wrote it, as docs/first_hour.md describes. Exit status 1 says that something differs
    by more than rounding may.

    Try
        sinklab validate theirs --model /models/LLaDA-8B-Instruct --device cuda --dtype bfloat16
    """

    folder: MARK.Positional[Path] = REQUIRED
    """With cases.json and expected.safetensors."""
    model: str | None = None
    """Folder or name; the one that the cases name when left out."""
    tolerance: float | None = None
    """The greatest difference, relative to our number and the spread of ours; that of the type in
    which the other program computed when left out.
    """
    reading: Reading = Reading()
    group = "check"

    def run(self) -> None:
        """Print the cases, one by one."""
        import torch

        saved = Saved(self.folder)
        limit = saved.tolerance() if self.tolerance is None else self.tolerance
        name = self.model or str(saved.told.get("model") or self.folder)
        loaded = self.reading.load(name, fills_masks=False)
        if loaded.family != "diffusion" and any(kind == "generate" for kind, *_ in saved.cases):
            raise ValueError(f"canvases are of diffusion models, but {loaded.name} is not one")
        compared = []
        with torch.inference_mode():
            for one in saved.compare(loaded.model, limit):
                say(str(one))
                compared.append(one)
        wrong = sum(not one.holds for one in compared)
        if wrong:
            say(f"it does not hold: {wrong} of {len(compared)} differ by more than {limit:g}")
            raise SystemExit(1)
        say(f"it holds: {len(compared)} of {len(compared)}, numbers within {limit:g}")
