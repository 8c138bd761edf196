"""Folders that ranks write together: rank 0 alone if each has the whole model, all of them if it is
sharded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ludic.errors import CheckpointError
from ludic.files.atomic import replace_folder, unfinished_path, write_json
from ludic.files.manifest import describe_file, write_manifest
from ludic.models.sharded_files import check_all_have_a_folder, write_sharded
from ludic.models.sharding import is_sharded
from ludic.models.state_files import write_model_and_optimizer
from ludic.training import ranks
from ludic.training.backend.protocol import TrainingBackend, with_defaults


def write_weights(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, folder: Path | None, *, as_held: bool = False
) -> None:
    """Write the model, and the optimizer if there is one. A rank without a folder writes nothing;
    of a sharded model every rank needs the folder. `as_held`: see `write_sharded`."""
    if not is_sharded(model):
        write_model_and_optimizer(model, optimizer, folder)
        return
    with ranks.agree("saving a sharded model"):
        shared = check_all_have_a_folder(folder)
    write_sharded(model, optimizer, shared, agree=ranks.agree, as_held=as_held)


def save_weights_alone(backend: TrainingBackend, target: Path, step: int, *, doing: str, facts: str | None = None) -> None:
    """Save the weights of step `step`, without the optimizer, as the folder `target`, with a
    manifest, and with the step in the file `facts`, if there is to be one. All ranks call it."""

    def write(folder: Path | None) -> None:
        backend.save(folder, optimizer=False).wait()

    shared = with_defaults(backend).is_sharded
    with ranks.agree(doing), replace_folder_on_ranks(target, write, shared=shared) as written:
        if written is not None:
            folder, described = written
            if facts is not None:
                write_json(folder / facts, {"step": step})
            write_manifest(folder, {"step": step}, described=described)


Written = tuple[Path, dict[str, dict[str, Any]]]
"""A folder, and `describe_file` of the files that other ranks wrote and hashed."""


@contextmanager
def replace_folder_on_ranks(target: Path, write: Callable[[Path | None], None], *, shared: bool) -> Iterator[Written | None]:
    """Call `write` on all ranks, and yield the folder on rank 0, with what other ranks said of the
    files that they wrote; the folder becomes `target` at the end. With `shared`, all ranks write,
    else rank 0."""
    if shared:
        with replace_folder_together(target, write) as written:
            yield written
    elif ranks.rank() != 0:
        write(None)  # takes part in collectives
        yield None
    else:
        has_written = False
        try:
            with replace_folder(target) as aside:
                has_written = True
                write(aside)
                yield aside, {}
        except OSError:
            if not has_written:
                write(None)
            raise


@contextmanager
def replace_folder_together(target: Path, write: Callable[[Path], None]) -> Iterator[Written | None]:
    """Call `write` on all ranks with one unfinished folder. Yields it on rank 0, None on others; it
    becomes `target` at the end.

    Each rank hashes its own files. An error on one rank is raised on all and leaves `target` as it
    was. All ranks call it, inside `ranks.agree`, which tells them whether the end went well.
    """
    with ExitStack() as stack:
        with ranks.agree(f"making a folder for {target.name}"):
            folder = stack.enter_context(replace_folder(target)) if ranks.rank() == 0 else unfinished_path(target)
        # Not in the next agreement: `write` has others inside, which a rank that raised would miss.
        with ranks.agree(f"looking for {folder.name}"):
            if not folder.is_dir():
                raise CheckpointError(f"rank {ranks.rank()} does not see {folder}; save on a file system that all ranks see")
        with ranks.agree(f"writing {target.name}"):
            write(folder)
            named_after_this_rank = sorted(folder.glob(f"*-{ranks.rank() + 1:05d}-of-*.safetensors"))
            own = {path.name: describe_file(path) for path in named_after_this_rank}
        everywhere = ranks.gather_json(own)
        described = {name: entry for each in everywhere for name, entry in each.items()}
        yield (folder, described) if ranks.rank() == 0 else None
