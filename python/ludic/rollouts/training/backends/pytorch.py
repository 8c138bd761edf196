"""`PyTorchTrainingBackend`: a `TorchBackend` that also takes batches by column, answers with
numbers, and writes checkpoints."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ludic.errors import CheckpointError, ConfigError, DataError, check_value
from ludic.event_loop import TrainFuture
from ludic.files.atomic import read_json, write_json
from ludic.files.checkpoints import PICKLED
from ludic.models.regions import make_slices
from ludic.models.saving import save_tokenizer
from ludic.models.sharding import find_own_region, gather_tensor, get_local, is_sharded, reshard
from ludic.models.wrappers import find_text_config
from ludic.rollouts.training.backends.columns import (
    ColumnMiniBatch,
    ColumnRows,
    FunctionLoss,
    as_training_loss,
    whole_micro_batch,
)
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm
from ludic.training.backend.protocol import MicroBatches
from ludic.training.backend.serial_worker import SerialWorker
from ludic.training.backend.torch import TorchBackend
from ludic.training.batching.packing import MicroBatch
from ludic.training.checkpoint import CheckpointConfig, CheckpointManager
from ludic.training.config import TrainerConfig
from ludic.training.credit_assignment import ConstantCredit
from ludic.training.loss import BatchTotals
from ludic.training.loss.base import adapted_loss, loss_name
from ludic.training.stats import combine_micro_stats, copy_to_host, final_values, reduce_over_ranks

logger = logging.getLogger(__name__)

METADATA = "metadata.json"
WITHOUT_LIMIT = 2**31 - 1
"""Tokens of a micro-batch that is not split."""
LONGEST = 2**20
"""Tokens of a sample, for a model that names no limit."""


class PyTorchTrainingBackend(TorchBackend):
    """Trains a torch model in this process, in a thread of its own.

    >>> backend = PyTorchTrainingBackend(model, optimizer, grpo_loss, Path("checkpoints"))
    >>> metrics = await backend.forward_backward(batch).result()   # loss, grad_norm and others
    >>> await backend.optim_step().result()                        # lr, step, grad_norm
    >>> folder = await backend.save_checkpoint(10, metrics)        # checkpoints/step_000010

    Methods return futures without waiting and run in the order of the calls. Gradients accumulate
    until `optim_step`. After a failure the backend refuses work until `reset()` drops the gradient.
    `Trainer` and the loops train with it as it is. A batch by column is described at `DictBatch`.

    `current_step` counts optimizer steps. So does `weight_version`, but under a `Trainer`, where a
    step may be several of the optimizer, it is the trainer's step, as in samples and on servers.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        loss_fn: Any,
        checkpoint_dir: str | Path,
        device: torch.device | str | None = None,
        weight_version: int = 0,
        current_step: int = 0,
        *,
        max_grad_norm: float | None = None,
        scheduler: torch.optim.lr_scheduler.LRScheduler | None = None,
        max_seq_len: int | None = None,
        micro_token_budget: int | None = None,
        tokenizer: Any = None,
        max_to_keep: int | None = None,
        in_thread: bool = True,
    ) -> None:
        """`loss_fn`: a `Loss`, a function of `rl_losses`, or any function (`as_training_loss`).
        `device` None leaves the model where it is. `max_grad_norm`: L2 norm to which the gradient
        is clipped. None means no clipping (`FSDPConfig.clip_grad` is 1.0). `scheduler` steps with
        the optimizer. `micro_token_budget`: tokens of a forward pass. With None a batch by column
        is one pass. `tokenizer` is saved with the weights, so that a server can load the folder.
        `max_to_keep`: checkpoints to keep. None means all. `in_thread=False` computes when
        called."""
        loss = as_training_loss(loss_fn)
        device = torch.device(next(model.parameters()).device if device is None else device)
        if device.type == "cuda" and (device.index or 0) >= (count := torch.cuda.device_count()):
            raise ConfigError(f"device ({device}) must be one of the {count} visible CUDA devices; check gpu_ranks")
        cfg = _make_config(model, loss, device, max_grad_norm, max_seq_len, micro_token_budget, tokenizer)
        algo = RLAlgorithm(name=loss_name(loss), credit_assigner=ConstantCredit(1.0), loss=loss)
        worker = SerialWorker() if in_thread else None
        super().__init__(model, cfg, algo=algo, optimizer_factory=lambda: optimizer, worker=worker)
        self.loss_fn, self.scheduler, self.tokenizer = loss_fn, scheduler, tokenizer
        self.weight_version, self.current_step = weight_version, current_step
        self.checkpoint_dir = Path(checkpoint_dir)
        self.checkpoints = CheckpointManager(CheckpointConfig(self.checkpoint_dir, max_to_keep=max_to_keep))
        self._whole = micro_token_budget is None
        self._metrics: dict[str, Any] = {}

    def forward_backward(
        self, batch: Mapping[str, Any] | MicroBatch | MicroBatches, *, totals: BatchTotals | None = None
    ) -> TrainFuture[Any]:
        """Add the gradient of a batch by column; returns `loss`, `grad_norm` of what has
        accumulated, and the loss's statistics. Micro-batches are planned as by `TrainingBackend` in
        `ludic.training`."""
        if isinstance(batch, Mapping):
            return self._run("forward_backward", lambda: self._forward_backward_columns(batch))
        return super().forward_backward(batch, totals=totals)

    def _forward_backward_columns(self, batch: Mapping[str, Any]) -> dict[str, float]:
        if isinstance(adapted_loss(self.algo), FunctionLoss):
            micro_batches: MicroBatches = [whole_micro_batch(batch, self.cfg.model_device)]
            totals = None
        else:
            mini_batch = ColumnMiniBatch(ColumnRows.of(batch), self._column_config)
            micro_batches, totals = mini_batch, mini_batch.totals
        result = self._forward_backward(micro_batches, totals)
        stats = combine_micro_stats(copy_to_host(result.micro_stats), result.micro_sizes)
        reduced = final_values(reduce_over_ranks(stats, self.cfg.model_device))
        [loss] = ranks.sum_over_ranks([float(result.loss)], self.cfg.model_device)
        metrics = {**reduced, "loss": loss}
        if self._averages or not ranks.is_distributed():  # else the gradients of ranks are not summed yet
            metrics["grad_norm"] = self.gradient_norm()
        self._metrics |= metrics
        return metrics

    @property
    def _column_config(self) -> TrainerConfig:
        """Settings for batches by column, which are not truncated."""
        budget = WITHOUT_LIMIT if self._whole else self.cfg.micro_token_budget
        return replace(self.cfg, packing="greedy", max_seq_len=1, micro_token_budget=budget)

    def optim_step(self, *, lr_factor: float | None = None) -> TrainFuture[dict[str, float]]:
        """Clip, step the optimizer and the scheduler, clear the gradient. Returns `lr`, `step` and
        `grad_norm`. `lr_factor` scales the optimizer's initial rates; None, or with a scheduler:
        they stay as they are."""
        return super().optim_step(lr_factor=None if self.scheduler is not None else lr_factor)

    def _optim_step(self, lr_factor: float | None) -> dict[str, float]:
        if self._loss is not None:  # of a batch by column too, and of all that has accumulated
            [self._metrics["loss"]] = ranks.sum_over_ranks([float(self._loss)], self.cfg.model_device)
        result = super()._optim_step(lr_factor)
        self.current_step, self.weight_version = self.current_step + 1, self.weight_version + 1
        if self.scheduler is not None:
            self.scheduler.step()
        metrics = {**result, "step": float(self.current_step)}
        self._metrics |= metrics
        return metrics

    def note_step(self, step: int) -> None:
        self.weight_version = step

    def forward_logprobs(
        self,
        batch: Any,
        *,
        temperature: float | None = None,
        top_p: float = 1.0,
        adapters: bool = True,
        actions_only: bool = False,
    ) -> TrainFuture[Tensor]:
        """Of a batch by column: [B, T] float32 log-probability of each token, aligned with
        `input_ids` and 0 at the first token of a row: `old_log_probs` of later steps. Of a
        micro-batch as in `ForwardPasses`. `actions_only`: 0 for tokens outside the loss mask."""
        if not isinstance(batch, Mapping):
            return super().forward_logprobs(
                batch, temperature=temperature, top_p=top_p, adapters=adapters, actions_only=actions_only
            )

        def compute() -> Tensor:
            rows = ColumnRows.of(batch)
            mini_batch = ColumnMiniBatch(rows, self._column_config)
            logps: dict[int, Tensor] = {}
            for index, micro_batch in enumerate(mini_batch):
                values = self._logprobs(micro_batch, temperature, top_p, adapters, actions_only)
                logps.update(zip(map(int, mini_batch.micro_batch_rows(index)), values, strict=False))
            return rows.spread(logps)

        return self._run("forward_logprobs", compute)

    async def save_checkpoint(self, step: int, metrics: Mapping[str, Any] | None = None) -> Path:
        """Write weights, optimizer, scheduler, tokenizer and `metadata.json` to
        `checkpoint_dir/step_NNNNNN`, replacing an older one of that step. All ranks call it.
        Returns the folder, which vLLM and SGLang can load."""
        check_value("step", step, "the folder is named after it", whole=True, least=0)
        for name, value in (metrics or {}).items():
            try:
                json.dumps(value)
            except TypeError as error:
                raise DataError(f"metrics[{name!r}] ({type(value).__name__}) must be a number, text or a list of them") from error
        given, shared = dict(metrics or {}), self.is_sharded

        def write(folder: Path | None) -> None:
            self.save(folder, step=step, metrics=given).wait()

        if ranks.is_distributed():  # its collectives stay in the thread of all others
            self.checkpoints.write(write, step, shared=shared)
        else:
            await asyncio.to_thread(self.checkpoints.write, write, step, shared=shared)
        return self.checkpoint_dir / f"step_{step:06d}"

    def save(
        self,
        path: str | Path | None,
        *,
        optimizer: bool = True,
        step: int | None = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> TrainFuture[None]:
        """Write the weights, the tokenizer and `metadata.json`, and with `optimizer` its state,
        into the folder. `step`, in the metadata: None is `weight_version`."""

        def compute() -> None:
            folder = None if path is None else Path(path)
            self._save(folder, optimizer)
            if folder is not None and ranks.rank() == 0:
                if self.tokenizer is not None:
                    save_tokenizer(self.tokenizer, folder, self.model)
                content: dict[str, Any] = {
                    "step": self.weight_version if step is None else step,
                    "optim_step": self.current_step,
                    "weight_version": self.weight_version,
                    "timestamp": time.time(),
                    "metrics": {**self._metrics, **(metrics or {})},
                }
                if self.scheduler is not None:
                    content["scheduler"] = _plain_values(self.scheduler.state_dict())
                write_json(folder / METADATA, content)

        return self._run("save", compute)

    def load(self, path: str | Path, *, optimizer: bool = True) -> TrainFuture[None]:
        """Read what `save` wrote. With `optimizer`, also its state, the scheduler, the step and the
        version of the weights."""
        return self._run("load", lambda: self._load_all(Path(path), optimizer))

    def _load_all(self, folder: Path, optimizer: bool) -> None:
        _refuse_pickles(folder)
        self._load(folder, optimizer)
        if not (optimizer and (folder / METADATA).exists()):
            return
        content = read_json(folder / METADATA)
        self.current_step = int(content.get("optim_step", content.get("step", 0)))
        self.weight_version = int(content.get("weight_version", self.current_step))
        if self.scheduler is not None and "scheduler" in content:
            self.scheduler.load_state_dict({**self.scheduler.state_dict(), **content["scheduler"]})

    async def load_checkpoint(self, checkpoint_path: str | Path, *, optimizer: bool = True) -> dict[str, Any]:
        """Read a checkpoint folder. Returns its `metadata.json`; empty without one. With
        `optimizer=False` only the weights are read: the start of another phase. Raises
        CheckpointError for a damaged folder, and for files that are pickles."""
        folder = Path(checkpoint_path)
        _refuse_pickles(folder)
        await self.load(self.checkpoints.find(path=folder), optimizer=optimizer)
        return read_json(folder / METADATA) if (folder / METADATA).exists() else {}

    def get_weights(self) -> TrainFuture[dict[str, Tensor]]:
        """A copy of the model's state dict on the CPU. Of a sharded model all ranks call this, and
        each gets the whole."""
        return self._run("get_weights", self._copy_weights)

    @torch.no_grad()
    def _copy_weights(self) -> dict[str, Tensor]:
        reshard(self.model)
        state = self.model.state_dict()
        return {name: gather_tensor(value.detach()).to("cpu", copy=True) for name, value in state.items()}

    def load_weights(self, weights: Mapping[str, Tensor]) -> TrainFuture[None]:
        """Set the model's weights to the result of `get_weights`. Raises DataError for missing or
        unknown names and for other shapes; nothing is changed then."""
        return self._run("load_weights", lambda: self._set_weights(weights))

    @torch.no_grad()
    def _set_weights(self, weights: Mapping[str, Tensor]) -> None:
        reshard(self.model)
        state = self.model.state_dict()
        require_same_shapes(state, weights)
        for name, target in state.items():
            value = weights[name]
            if is_sharded(self.model):
                value = value[make_slices(find_own_region(target))]
            get_local(target).copy_(value)

    @property
    def poisoned(self) -> bool:
        """Whether an operation failed, so that the backend refuses work until `reset`."""
        return self._worker is not None and self._worker.has_failed

    def get_state_snapshot(self) -> dict[str, Any]:
        """Facts about model, optimizer and progress, for logs."""
        parameters = list(self.model.parameters())
        group = self.optimizer.param_groups[0]
        return {
            "parameters": sum(parameter.numel() for parameter in parameters),
            "trained_parameters": sum(parameter.numel() for parameter in parameters if parameter.requires_grad),
            "dtype": str(parameters[0].dtype).removeprefix("torch."),
            "device": str(self.cfg.model_device),
            "optimizer": type(self.optimizer).__name__,
            **{name: group[name] for name in ("lr", "betas", "weight_decay") if name in group},
            "loss": self.algo.name,
            "step": self.current_step,
            "weight_version": self.weight_version,
            "poisoned": self.poisoned,
            "is_fsdp": is_sharded(self.model),
        }

    def close(self) -> None:
        """End the thread, after what was submitted."""
        if self._worker is not None:
            self._worker.close()


def _make_config(
    model: nn.Module,
    loss: Any,
    device: torch.device,
    max_grad_norm: float | None,
    max_seq_len: int | None,
    budget: int | None,
    tokenizer: Any,
) -> TrainerConfig:
    """Settings of a `Trainer` around the backend. A loss that must see a batch whole has no limit
    on micro-batches."""
    limit = getattr(find_text_config(model), "max_position_embeddings", None)
    length = max_seq_len or (LONGEST if limit is None else int(limit))
    whole = isinstance(loss, FunctionLoss)
    if budget is not None and whole:
        raise ConfigError(f"micro_token_budget ({budget}) splits batches, which {loss_name(loss)} needs whole; leave it out")
    default = WITHOUT_LIMIT if whole else max(length, TrainerConfig.micro_token_budget)
    return TrainerConfig(
        model_device=str(device),
        max_grad_norm=max_grad_norm,
        max_seq_len=length,
        micro_token_budget=default if budget is None else budget,
        pad_token_id=0 if tokenizer is None else tokenizer,
        packing="greedy" if whole else "optimal",
    )


def require_same_shapes(state: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    """Raise DataError unless the weights have the names and shapes of the model's state dict."""
    wrong = sorted(state.keys() ^ weights.keys()) or [name for name in state if state[name].shape != weights[name].shape]
    if wrong:
        raise DataError(f"the weights do not fit the model: {', '.join(wrong[:8])} are missing, unknown or of another shape")


def _plain_values(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that JSON can express. Functions of a schedule are not among them: whoever builds
    it supplies them again."""
    plain = {}
    for name, value in state.items():
        try:
            json.dumps(value)
        except TypeError:
            logger.warning("the scheduler's %s (%s) is not saved", name, type(value).__name__)
        else:
            plain[name] = value
    return plain


def _refuse_pickles(folder: Path) -> None:
    pickles = [name for name in PICKLED if (folder / name).exists()]
    if pickles and not any(folder.glob("*.safetensors")):
        raise CheckpointError(f"{folder} has a pickle ({', '.join(pickles)}); save it as safetensors with model.save_pretrained")
