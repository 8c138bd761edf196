"""Pushes checkpoints to a repository of the Hugging Face hub, or of a server with its interface."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ludic.errors import CheckpointError, import_optional
from ludic.event_loop import run_in_daemon_thread
from ludic.files.atomic import read_json, write_json
from ludic.files.checkpoints import parse_step
from ludic.training.callbacks.base import Callback, TrainingEvent

if TYPE_CHECKING:
    from huggingface_hub import HfApi

logger = logging.getLogger(__name__)

OF_THE_RUN = ["optimizer*", "trainer_state.json", "controller_state.json", "manifest.json"]
"""Files of a checkpoint from which only its run resumes."""
END_PATIENCE_S = 600.0
PUSHED = "pushed.json"
"""A file next to the checkpoints: the last one that was pushed, as {"repo_id": "me/mine", "step":
40}."""


class PushToHub(Callback):
    """Pushes each checkpoint to `repo_id`: model and tokenizer, and nothing that only the run
    needs. The repository is made if it is missing.

    A push runs in a thread. A checkpoint that is saved meanwhile is left out, unless it is the
    last one. A push that fails is logged, and the run goes on. At its end, the run pushes its
    newest checkpoint if that was not pushed, also by an earlier process, and waits for at most
    `end_patience_s` seconds in total. After an error or a request to stop it waits for nothing: the
    resumed run pushes at its end.
    """

    needs_checkpoints = True
    needs_full_checkpoints = True

    def __init__(
        self,
        repo_id: str,
        *,
        private: bool | None = True,
        token: str | None = None,
        api: HfApi | None = None,
        end_patience_s: float = END_PATIENCE_S,
    ) -> None:
        """`private`: of a repository that is made. None means as the hub's settings say. `token`:
        None means the token of `hf auth login` or `HF_TOKEN`. Raises MissingExtraError without
        huggingface_hub."""
        self.repo_id, self.private, self.end_patience_s = repo_id, private, end_patience_s
        if api is None:
            api = import_optional("huggingface_hub", "datasets").HfApi(token=token)
        self._api = api
        self._thread: threading.Thread | None = None
        self._pushing: int | None = None
        self._begun: int | None = None
        """The step whose push began last."""
        self._is_made = False
        self._last: tuple[int, Path] | None = None
        """The newest checkpoint that was not pushed."""
        self._wait_until: float | None = None
        """Once the run has ended: until when pushes are waited for, on the monotonic clock."""
        self.pushed_steps: list[int] = []
        """Steps whose checkpoints this process has pushed."""

    @property
    def kept_steps(self) -> Collection[int]:
        """The checkpoint that is being pushed, and the one that is pushed last."""
        waiting = () if self._last is None else (self._last[0],)
        return (*waiting, *(() if self._pushing is None else (self._pushing,)))

    def on_step(self, event: TrainingEvent) -> None:
        self._wait_until = None

    async def on_checkpoint(self, event: TrainingEvent) -> None:
        if event.checkpoint is None:
            return
        self._last = event.step, event.checkpoint
        self._begin()
        if self._wait_until is not None:  # it is the last one: nothing else waits for it
            await self._finish(event)

    async def on_end(self, event: TrainingEvent) -> None:
        self._wait_until = time.monotonic() + (0.0 if event.is_interrupted else self.end_patience_s)
        if not event.is_interrupted:
            await self._finish(event)

    async def _finish(self, event: TrainingEvent) -> None:
        """Push the newest checkpoint, if it was not, and wait."""
        if not await self._wait():
            return
        if self._last is None:
            self._last = self._find_unpushed(event)
        self._begin()
        await self._wait()

    def _find_unpushed(self, event: TrainingEvent) -> tuple[int, Path] | None:
        """The newest checkpoint, unless it is the one that was pushed last."""
        manager = event.trainer.checkpointer
        if manager is None or (self.pushed_steps and self.pushed_steps[-1] == self._begun):
            return None
        try:
            folder = manager.find()
        except (CheckpointError, FileNotFoundError):
            return None
        step = parse_step(folder)
        try:
            is_pushed = read_json(folder.parent / PUSHED) == self._describe(step)
        except (CheckpointError, OSError):
            is_pushed = False
        return None if is_pushed else (step, folder)

    def _describe(self, step: int) -> dict[str, Any]:
        return {"repo_id": self.repo_id, "step": step}

    def _begin(self) -> None:
        if self._last is None or (self._thread is not None and self._thread.is_alive()):
            return
        (step, folder), self._last = self._last, None
        self._pushing = self._begun = step
        self._thread = threading.Thread(target=self._push, args=(step, folder), name="push to hub", daemon=True)
        self._thread.start()

    async def _wait(self) -> bool:
        """Wait for the push that runs. False if it still does."""
        thread, until = self._thread, self._wait_until
        if thread is None or until is None:
            return True
        left = until - time.monotonic()
        if left > 0 and thread.is_alive():
            await join_thread(thread, left)
        if thread.is_alive():
            logger.error(
                "the checkpoint of step %s was not pushed to %s within %g s", self._begun, self.repo_id, self.end_patience_s
            )
        return not thread.is_alive()

    def _push(self, step: int, folder: Path) -> None:
        try:
            if not self._is_made:
                self._api.create_repo(self.repo_id, private=self.private, exist_ok=True)
                self._is_made = True
            self._api.upload_folder(
                repo_id=self.repo_id, folder_path=str(folder), commit_message=f"step {step}", ignore_patterns=OF_THE_RUN
            )
            write_json(folder.parent / PUSHED, self._describe(step))
            self.pushed_steps.append(step)
        except Exception:
            logger.exception("the checkpoint of step %d could not be pushed to %s; training goes on", step, self.repo_id)
        finally:
            self._pushing = None


async def join_thread(thread: threading.Thread, seconds: float) -> None:
    """Wait for the thread's end, for at most `seconds`, while the event loop goes on."""
    await run_in_daemon_thread(lambda: thread.join(seconds), name="wait for a push")
