"""Pushes checkpoints to a repository of the Hugging Face hub, or of a server with its interface."""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any, Protocol, cast

from ludic.errors import MissingExtraError
from ludic.training.callbacks.protocol import Callback, TrainingEvent

logger = logging.getLogger(__name__)

OF_THE_RUN = ["optimizer*", "trainer_state.json", "controller_state.json", "manifest.json"]
"""Files of a checkpoint from which only its run resumes."""
END_PATIENCE_S = 600.0


class HubInterface(Protocol):
    """The methods of `huggingface_hub.HfApi` that are called."""

    def create_repo(self, repo_id: str, *, private: bool | None, exist_ok: bool) -> Any: ...

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str, ignore_patterns: list[str]) -> Any: ...


class PushToHub(Callback):
    """Pushes each checkpoint to `repo_id`: model and tokenizer, and nothing that only the run
    needs. The repository is made if it is missing.

    A push runs in a thread. A checkpoint that is saved meanwhile is left out, unless it is the
    last one. A push that fails is logged, and the run goes on. The end of the run waits for the
    last push for at most `end_patience_s` seconds.
    """

    needs_checkpoints = True
    needs_full_checkpoints = True

    def __init__(
        self,
        repo_id: str,
        *,
        private: bool | None = True,
        token: str | None = None,
        api: HubInterface | None = None,
        end_patience_s: float = END_PATIENCE_S,
    ) -> None:
        """`private`: of a repository that is made; None: as the hub's settings say. `token`: None
        for that of `hf auth login` or `HF_TOKEN`. Raises MissingExtraError without
        huggingface_hub."""
        self.repo_id, self.private, self.end_patience_s = repo_id, private, end_patience_s
        self._api = _open_hub(token) if api is None else api
        self._thread: threading.Thread | None = None
        self._pushing: int | None = None
        self._is_made = False
        self._last: tuple[int, Path] | None = None
        """The newest checkpoint that was not pushed."""
        self._has_ended = False
        self.pushed_steps: list[int] = []
        """Steps whose checkpoints this process has pushed."""

    @property
    def kept_steps(self) -> Collection[int]:
        """The checkpoint that is being pushed, and the one that is pushed last."""
        waiting = () if self._last is None else (self._last[0],)
        return (*waiting, *(() if self._pushing is None else (self._pushing,)))

    def on_step(self, event: TrainingEvent) -> None:
        self._has_ended = False

    def on_checkpoint(self, event: TrainingEvent) -> None:
        if event.checkpoint is None:
            return
        self._last = event.step, event.checkpoint
        self._begin()
        if self._has_ended:  # it is the last one: nothing else waits for it
            self._finish()

    def on_end(self, event: TrainingEvent) -> None:
        self._has_ended = True
        self._finish()

    def _finish(self) -> None:
        """Push the newest checkpoint, if it was left out, and wait."""
        self._wait()
        self._begin()
        self._wait()

    def _begin(self) -> None:
        if self._last is None or (self._thread is not None and self._thread.is_alive()):
            return
        (step, folder), self._last = self._last, None
        self._pushing = step
        self._thread = threading.Thread(target=self._push, args=(step, folder), name="push to hub", daemon=True)
        self._thread.start()

    def _wait(self) -> None:
        if self._thread is None:
            return
        self._thread.join(self.end_patience_s)
        if self._thread.is_alive():
            logger.error(
                "the checkpoint of step %s was not pushed to %s within %g s", self._pushing, self.repo_id, self.end_patience_s
            )

    def _push(self, step: int, folder: Path) -> None:
        try:
            if not self._is_made:
                self._api.create_repo(self.repo_id, private=self.private, exist_ok=True)
                self._is_made = True
            push_folder(self._api, self.repo_id, folder, f"step {step}")
            self.pushed_steps.append(step)
        except Exception:
            logger.exception("the checkpoint of step %d could not be pushed to %s; training goes on", step, self.repo_id)
        finally:
            self._pushing = None


def push_folder(api: HubInterface, repo_id: str, folder: Path, message: str) -> None:
    """Push a folder in Hugging Face layout as one commit."""
    api.upload_folder(repo_id=repo_id, folder_path=str(folder), commit_message=message, ignore_patterns=OF_THE_RUN)


def _open_hub(token: str | None) -> HubInterface:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise MissingExtraError.for_extra("huggingface_hub", "datasets") from error
    return cast(HubInterface, HfApi(token=token))
