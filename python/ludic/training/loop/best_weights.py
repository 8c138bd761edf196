"""The weights of the best evaluation so far, for a run that early stopping watches."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ludic.files.atomic import read_json, write_json
from ludic.files.folders import written_aside
from ludic.models.state_files import read_model, write_model
from ludic.training import ranks

BEST = "best"
"""Folder beside the checkpoints: the model as `write_model` writes it, and best.json with its
`step`."""


class BestWeights:
    """Keeps one set of weights and puts it back: in a folder beside the checkpoints, or in memory
    where there are none.

    With several ranks, all call both methods; rank 0 writes the folder.
    """

    def __init__(self, model: nn.Module, checkpoints: Path | None) -> None:
        self.model = model
        self.folder = None if checkpoints is None else checkpoints / BEST
        self._in_memory: tuple[int, dict[str, Tensor]] | None = None

    def keep(self, step: int) -> None:
        """Keep the weights as they are now, those of `step`, in the place of what was kept
        before."""
        if self.folder is None:
            trained = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
            self._in_memory = step, {name: p.detach().to("cpu", copy=True) for name, p in trained.items()}
        elif ranks.rank() == 0:
            with written_aside(self.folder) as aside:
                write_model(self.model, aside)
                write_json(aside / "best.json", {"step": step})
        else:
            write_model(self.model, None)
        ranks.barrier()

    def restore(self, step: int) -> bool:
        """Put the weights of `step` back into the model; False, and nothing changed, where
        others or none were kept."""
        if self._in_memory is not None and self._in_memory[0] == step:
            _copy(self.model, self._in_memory[1])
            return True
        if (
            self.folder is None
            or not (self.folder / "best.json").is_file()
            or read_json(self.folder / "best.json")["step"] != step
        ):
            return False
        read_model(self.model, self.folder)
        return True


@torch.no_grad()
def _copy(model: nn.Module, kept: dict[str, Tensor]) -> None:
    parameters = dict(model.named_parameters())
    for name, value in kept.items():
        parameters[name].copy_(value)
