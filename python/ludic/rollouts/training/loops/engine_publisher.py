"""`EnginePublisher`: new weights for inference engines, by a folder that they load."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from ludic.distributed.engines import sync_returned_engines, sync_weights_to_engines
from ludic.errors import PublishError
from ludic.event_loop import await_if_needed
from ludic.files.folders import delete_folder
from ludic.files.manifest import write_manifest
from ludic.inference.publishing import PolicyPublisher, Publisher, Version
from ludic.rollouts.training.backends.foreign import ForeignBackend
from ludic.rollouts.training.backends.pytorch import PyTorchTrainingBackend
from ludic.training import ranks
from ludic.training.backend.protocol import with_defaults
from ludic.training.backend.saving import replace_folder_on_ranks

logger = logging.getLogger(__name__)

FOLDER = "published"
KEPT = 2
"""Acknowledged versions that stay on disk: an engine goes back to the one before."""


class EnginePublisher(Publisher):
    """Writes the weights to `checkpoint_dir/published/step_NNNNNN` and has all engines load it, all
    or none; then tells the manager the version. The servers must see the folder under this path.

    An engine that is a `PolicyPublisher` gets the tensors instead, after the folder was loaded. A
    backend of the user's (`ForeignBackend`) writes a checkpoint, and engines load that.
    """

    needs_weights = False

    def __init__(self, backend: Any, engines: Sequence[Any], manager: Any) -> None:
        self._backend, self._manager = backend, manager
        own = isinstance(backend, PyTorchTrainingBackend)
        self._publishers = [engine for engine in engines if own and _gets_tensors(engine)]
        self._engines = [engine for engine in engines if engine not in self._publishers]
        self._acknowledged: list[Path] = []

    async def publish(self, state_dict: Mapping[str, Tensor], version: Version = None) -> None:
        """Have every engine serve the weights of the backend as `version`. Raises PublishError if
        one does not, on all ranks; engines then serve what they served before."""
        step = int(version or 0)
        if self._engines:
            folder = await self._write(step)
            await _do_on_rank_0(
                f"syncing the weights of step {step}", lambda: sync_weights_to_engines(self._engines, str(folder))
            )
            if folder.parent.name == FOLDER:  # it is of ours: delete others that no engine can need any more
                self._acknowledged = [*(path for path in self._acknowledged if path != folder), folder][-KEPT:]
                older = [path for path in sorted(folder.parent.glob("step_*")) if path not in self._acknowledged]
                for path in older if ranks.rank() == 0 else ():
                    delete_folder(path)
        if self._publishers:
            weights = await self._backend.export_weights()

            async def publish_tensors() -> None:
                for publisher in self._publishers:
                    await await_if_needed(publisher.publish(weights, version=version))

            await _do_on_rank_0(f"publishing the weights of step {step}", publish_tensors)
        self._manager.weights_changed(step)

    async def sync_returned(self) -> None:
        """Give engines that were restarted since the last sync its weights: the version of each
        server is queried. One that cannot be reached is queried again before the next batch."""
        for answer in await sync_returned_engines(self._engines):
            if answer is None:
                continue
            if answer["success"]:
                logger.warning("an engine came back with other weights, and has version %s again", answer["version"])
            else:
                logger.warning(
                    "an engine lacks the weights of the last sync: %s; it is asked before the next batch", answer["error"]
                )

    async def _write(self, step: int) -> Path:
        if isinstance(self._backend, ForeignBackend):
            return await self._backend.save_checkpoint(step, {})
        target = self._backend.checkpoint_dir / FOLDER / f"step_{step:06d}"
        if ranks.is_distributed():  # its collectives stay in the thread of all others
            self._write_folder(target, step)
        else:
            await asyncio.to_thread(self._write_folder, target, step)
        return target

    def _write_folder(self, target: Path, step: int) -> None:
        backend = self._backend

        def write(folder: Path | None) -> None:
            backend.save(folder, optimizer=False).wait()

        with (
            ranks.agree(f"writing the weights of step {step}"),
            replace_folder_on_ranks(target, write, shared=with_defaults(backend).is_sharded) as written,
        ):
            if written is not None:
                folder, described = written
                write_manifest(folder, {"step": step}, described=described)


def _gets_tensors(engine: Any) -> bool:
    return isinstance(engine, PolicyPublisher) and not callable(getattr(engine, "update_weights_from_checkpoint", None))


async def _do_on_rank_0(doing: str, work: Callable[[], Awaitable[Any]]) -> None:
    """Await `work()` on rank 0 while the others wait. Its PublishError is one on all ranks, so that
    all of them save the step."""
    failure: PublishError | None = None
    with ranks.rank_0_alone(doing) as shared:
        if ranks.rank() == 0:
            try:
                await work()
            except PublishError as error:
                failure = error
                shared.append(str(error))
    if shared:
        raise failure or PublishError(f"{doing} failed on rank 0: {shared[0]}")
