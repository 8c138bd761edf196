"""`TorchBackend`: a torch model in this process, on one device or as one rank of torch.distributed.

The step is the same for a plain, a replicated (DDP) and a sharded (FSDP2) model. The gradients of
all ranks add up to the gradient of the whole mini-batch: a factor undoes the mean that wrappers
take, and without a wrapper gradients are summed before clipping.

The samples that made a loss or a gradient infinite or NaN are looked for only after that happened,
because it is slow.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import record_function

from ludic.errors import ConfigError, NonFiniteError, check_value
from ludic.event_loop import TrainFuture
from ludic.models.adapters import check_frozen
from ludic.models.flops import FlopCounter
from ludic.models.heads import find_head_parts, is_in_module
from ludic.models.names import HEAD_NAMES
from ludic.models.packed_attention import pin_rope
from ludic.models.published import ParamFilter, published_weights, shared_weights
from ludic.models.regions import split_in_buckets
from ludic.models.routing import RoutedPass, count_samples
from ludic.models.sharding import (
    enable_checkpointing as enable_checkpointing,
    gather_tensor,
    is_sharded,
    reshard,
    set_gradient_sync,
)
from ludic.models.state_files import read_model, read_optimizer_if_stored
from ludic.models.wrappers import is_classifier, unwrap_model, unwrap_transformer
from ludic.training import ranks
from ludic.training.algorithm import RLAlgorithm, forward_for_loss
from ludic.training.backend.forward import ModelPasses, trains_without_logits
from ludic.training.backend.image_pass import ImagePass
from ludic.training.backend.memory import MemoryProfile
from ludic.training.backend.offload import Offload
from ludic.training.backend.precision import LossScale, MasterWeights, autocast, check_precision
from ludic.training.backend.protocol import BackendBase, BackwardResult, MicroBatches, WeightStream
from ludic.training.backend.saving import write_weights
from ludic.training.backend.serial_worker import SerialWorker
from ludic.training.batching.packing import MicroBatch
from ludic.training.config import TrainerConfig
from ludic.training.freed_memory import FreedMemory
from ludic.training.loss import BatchTotals
from ludic.training.loss.base import adapted_loss, loss_name, with_reported_loss
from ludic.training.preflight.layouts import explain_rows, require_slices
from ludic.training.rng import preserved_rng

T = TypeVar("T")
ROUTER_LOAD = "router_load"
"""In `BatchTotals.measured`: [E + 1] `RoutedPass.load` of all samples of a mini-batch."""


def build_optimizer(
    model: nn.Module, cfg: TrainerConfig, *, backbone_lr_mult: float | None = None, head_only_weight_decay: bool = False
) -> torch.optim.Optimizer:
    """The optimizer that `cfg` names (`backend.optimizers`) over the trained parameters, in groups
    if learning rates or weight decays differ (`parameter_groups`)."""
    groups = parameter_groups(
        model,
        lr=cfg.lr,
        weight_decay=cfg.weight_decay,
        backbone_lr_mult=backbone_lr_mult,
        head_only_weight_decay=head_only_weight_decay,
        decay_biases_and_norms=cfg.decay_biases_and_norms,
    )
    if cfg.optimizer != "adamw":
        from ludic.training.backend.optimizers import make_optimizer

        return make_optimizer(model, cfg, groups)
    return torch.optim.AdamW(groups, lr=cfg.lr, betas=cfg.betas, eps=cfg.eps, weight_decay=cfg.weight_decay)


class TorchBackend(ModelPasses, BackendBase):
    """Trains a torch model in this process, with the methods of `TrainingBackend`.

    >>> backend = TorchBackend(model, cfg, algo=make_grpo(group_size=8))
    >>> result = await backend.forward_backward(mini_batch, totals=mini_batch.totals).result()
    >>> await backend.optim_step().result()
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    flops: FlopCounter

    def __init__(
        self,
        model: nn.Module,
        cfg: TrainerConfig,
        *,
        algo: RLAlgorithm,
        optimizer_factory: Callable[[], torch.optim.Optimizer] | None = None,
        enable_gradient_checkpointing: bool = False,
        worker: SerialWorker | None = None,
    ) -> None:
        """`optimizer_factory` is called after the model is on its device. None: as `cfg` says. With
        `worker` operations run in its thread, in the order of the calls, and calls return without
        waiting; with None each is computed when it is called."""
        super().__init__(model if is_sharded(model) else model.to(cfg.model_device), cfg)
        self.algo, self._worker = algo, worker
        pin_rope(model, cfg.max_seq_len, again=True)
        if enable_gradient_checkpointing:
            enable_checkpointing(self.model)
        check_precision(self.model, master_weights=cfg.master_weights)
        check_frozen(unwrap_model(self.model))
        _ = self.routers  # refuses a model without
        if ranks.context() is not None:
            if type(algo).compute_loss is not RLAlgorithm.compute_loss:
                raise ConfigError(
                    f"{algo.name} has its own compute_loss, which sees no slices of rows; set sharding.context to 1"
                )
            if self.routers is not None:
                raise ConfigError("trainer.replay_routing and trainer.router_aux_coef need whole rows; set sharding.context to 1")
        reshard(self.model)  # a pass without gradient has left whole weights, which are other parameters
        self.optimizer = build_optimizer(self.model, cfg) if optimizer_factory is None else optimizer_factory()
        self._masters = MasterWeights(self.optimizer, enabled=cfg.master_weights)
        self._scale = LossScale(self.model, self.optimizer, cfg)
        for group in self.optimizer.param_groups:
            group.setdefault("initial_lr", group["lr"])
        self._averages = is_sharded(model) or isinstance(model, DistributedDataParallel)
        self._gradient_scale = float(ranks.world_size()) if self._averages else 1.0
        self._held = Offload([self.model, nn.ParameterList(self._masters.masters)], self.optimizer)
        self._freed = FreedMemory()
        self._pending: list[tuple[MicroBatches, BatchTotals | None]] = []
        self._loss: Tensor | None = None
        self._chunked_logits = False
        """Whether the losses of a mini-batch are computed without logits."""
        require_slices(self.model, cfg)

    @property
    def shares_prefixes(self) -> bool:
        """It follows the loss, which may be replaced between steps. If the loss does not allow rows
        of prefix trees, one line says why."""
        if self.cfg.prefix_sharing == "off":
            return False
        loss, reason = adapted_loss(self.algo), None
        if type(self.algo).compute_loss is not RLAlgorithm.compute_loss:
            reason = f"{self.algo.name} has its own compute_loss"
        elif is_classifier(unwrap_transformer(self.model)):
            reason = None if loss.reads_scores_only else f"{loss_name(loss)} does not say that it reads_scores_only"
        elif not (loss.reads_shared_only and loss.reads_actions_only):
            reason = f"{loss_name(loss)} reads logits, or log-probabilities of tokens that are no actions"
        if reason is not None:
            explain_rows(reason, self.model, self.cfg)
        return reason is None and self.computes_trees

    @property
    def has_worker(self) -> bool:
        return self._worker is not None

    @property
    def is_sharded(self) -> bool:
        return is_sharded(self.model)

    def _run(self, operation: str, compute: Callable[[], T]) -> TrainFuture[T]:
        if self._worker is None:
            return TrainFuture.of(operation, compute)
        # After a NonFiniteError of optim_step the gradient is cleared: the next step starts anew.
        return self._worker.submit(operation, compute, harmless=NonFiniteError if operation == "optim_step" else ())

    def reset(self) -> TrainFuture[None]:
        """Drop the gradient that has accumulated. A worker that stopped after a failure works
        again."""
        return self._run("reset", self._clear) if self._worker is None else self._worker.reset(self._clear)

    def _clear(self) -> None:
        self._pending, self._loss = [], None
        reshard(self.model)  # after a pass without gradient, parameters are not those with the gradients
        self._clear_gradients()

    def forward_backward(
        self, batch: MicroBatch | MicroBatches, *, totals: BatchTotals | None = None
    ) -> TrainFuture[BackwardResult]:
        micro_batches = [batch] if isinstance(batch, MicroBatch) else batch
        return self._run("forward_backward", lambda: self._forward_backward(micro_batches, totals))

    def _forward_backward(self, batch: MicroBatches, totals: BatchTotals | None) -> BackwardResult:
        if not self.model.training:  # a submodule may stay in evaluation mode
            self.model.train()
        self._freed.return_to_system()  # what sampling used
        self._chunked_logits = self.skips_logits and trains_without_logits(self.algo, self.cfg)
        images = ImagePass(self.images, batch)
        totals = self._with_first_pass(batch, totals, images)
        result = BackwardResult(torch.zeros((), device=self.cfg.model_device))
        for index, micro_batch in enumerate(batch):
            with self._gradient_sync(last=index == len(batch) - 1), self.routed(micro_batch) as seen:
                loss, stats = self._backward(images.bind(micro_batch), totals, seen)
            images.move_gradients()
            if not self._averages:  # a wrapper sums the gradients of ranks in the parameters' own
                self._masters.move_gradients()
            result.loss = result.loss + loss
            result.micro_stats.append(stats)
            result.micro_sizes.append(micro_batch.num_items)
        images.backward()
        result.images = images.counts()
        self._pending.append((batch, totals))
        self._loss = result.loss if self._loss is None else self._loss + result.loss
        return result

    @torch.no_grad()
    def _with_first_pass(self, batch: MicroBatches, totals: BatchTotals | None, images: ImagePass) -> BatchTotals | None:
        """`totals` with the sums that the loss needs from all samples before it is computed on any.
        Dropout draws the same masks as in the pass with gradient."""
        loss = adapted_loss(self.algo)
        needs_load = self.cfg.router_aux_coef > 0
        needed = loss.needs_first_pass or needs_load
        if totals is None or not needed or (len(batch) == 1 and not ranks.is_distributed()):
            return totals
        load: Any = 0.0
        sums: dict[str, Tensor] = {}
        rows: dict[str, Tensor] = {}
        with preserved_rng(), autocast(self.cfg):
            for micro_batch in map(images.bind, batch):
                chunked, temperature = self._chunked_logits, self.cfg.temperature
                with self.counting(micro_batch, "first", chunked), self.routed(micro_batch) as seen:
                    logits, tensors = forward_for_loss(
                        self.model, micro_batch.tensors, loss, chunked_logits=chunked, temperature=temperature
                    )
                if needs_load:
                    load = load + self._router_load(micro_batch, seen)[1]
                if not loss.needs_first_pass:
                    continue
                if loss.reads_shared_only and temperature != 1.0:
                    logits = logits / temperature  # the policy's; `token_scores`, if there are any, have it already
                parts = loss.first_pass(logits, tensors)
                for name in loss.gathers:
                    values = parts.pop(name)  # [[a], [b]] at the positions [2, 0] of 3 are [[b], [0], [a]]
                    whole = rows.setdefault(name, values.new_zeros(int(totals.num_samples), *values.shape[1:]))
                    whole.index_add_(0, tensors["position"], values)
                sums = {name: sums.get(name, 0.0) + value for name, value in parts.items()}
        everywhere = ranks.sum_over_ranks([float(value) for value in sums.values()], self.cfg.model_device)
        measured = {name: value.new_tensor(total) for (name, value), total in zip(sums.items(), everywhere, strict=True)}
        for gathered in [*rows.values(), *([load] if needs_load else [])]:
            ranks.add_over_ranks(gathered)
        rows |= {ROUTER_LOAD: load} if needs_load else {}
        return replace(totals, measured={**totals.measured, **measured, **rows})

    def _backward(
        self, micro_batch: MicroBatch, totals: BatchTotals | None, seen: RoutedPass | None
    ) -> tuple[Tensor, dict[str, Any]]:
        # Empty at temperature 1 with logits, for algorithms without such arguments.
        policy: dict[str, Any] = {} if self.cfg.temperature == 1.0 else {"temperature": self.cfg.temperature}
        if self._chunked_logits:
            policy["chunked_logits"] = True
        profile = MemoryProfile.start(self.cfg)
        counting = self.counting(micro_batch, "loss", self._chunked_logits, backward=True)
        with autocast(self.cfg), counting, record_function("ludic.forward"):
            loss, stats = self.algo.compute_loss(
                self.model, micro_batch.tensors, cast_logits_to_fp32=self.cfg.cast_logits_to_fp32, totals=totals, **policy
            )
        if type(self.algo).compute_loss is not RLAlgorithm.compute_loss:
            stats = with_reported_loss(loss, stats)
        if seen is not None and self.cfg.router_aux_coef:
            weights, own = self._router_load(micro_batch, seen)
            load = own if totals is None else totals.measured.get(ROUTER_LOAD, own)
            balance = seen.balance_loss(weights, load)
            loss = loss + self.cfg.router_aux_coef * balance
            mean = balance.detach() * load[-1] / own[-1].clamp(min=1)
            stats = {**stats, "router_aux_loss": mean, "num_router_aux_loss": own[-1]}
        profile.after_forward()
        with record_function("ludic.backward"):
            (loss * (self._gradient_scale * self._scale.value)).backward()
        return loss.detach().float(), {**stats, **profile.after_backward()}

    def _router_load(self, micro_batch: MicroBatch, seen: Any) -> tuple[Tensor, Tensor]:
        """[N] how often each token counts, and the load of the experts."""
        weights = count_samples(micro_batch.tensors) * float(micro_batch.num_items > 0)
        return weights, seen.load(weights, self.routers.num_experts)  # type: ignore[union-attr]

    def _gradient_sync(self, *, last: bool) -> AbstractContextManager[Any]:
        """A context in which ranks exchange gradients only for the last micro-batch."""
        if is_sharded(self.model):
            set_gradient_sync(self.model, last)
        elif isinstance(self.model, DistributedDataParallel) and not last:
            return self.model.no_sync()
        return nullcontext()

    def optim_step(self, *, lr_factor: float | None = 1.0) -> TrainFuture[dict[str, float]]:
        return self._run("optim_step", lambda: self._optim_step(lr_factor))

    def _optim_step(self, lr_factor: float | None) -> dict[str, float]:
        pending, self._pending = self._pending, []
        loss, self._loss = self._loss, None
        self._masters.move_gradients()
        stepped = [self._masters.stepped_tensor(parameter) for parameter in self.model.parameters() if parameter.requires_grad]
        if ranks.is_distributed() and not self._averages:
            sum_gradients(stepped)
        self._scale.unscale(stepped)
        limit = float("inf") if self.cfg.max_grad_norm is None else self.cfg.max_grad_norm
        clipped = nn.utils.clip_grad_norm_([parameter for parameter in stepped if parameter.grad is not None], limit)
        norm = float(gather_tensor(clipped))  # of all ranks, before clipping; waits for the device
        is_taken = self._check_finite(norm, loss, pending)
        if lr_factor is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = group["initial_lr"] * lr_factor
        if is_taken:
            self._masters.copy_changed_weights()
            self.optimizer.step()
            self._masters.write_back()
            self.images.drop_changed()
        self._clear_gradients()
        self._freed.return_to_system()  # activations and gradients, around the optimizer's state
        scaling = {"loss_scale": self._scale.value, "skipped_steps": float(not is_taken)} if self._scale.is_on else {}
        return {"grad_norm": norm if is_taken else 0.0, "lr": self.optimizer.param_groups[0]["lr"], **scaling}

    def drop_gradient(self) -> TrainFuture[None]:
        return self._run("drop_gradient", self._drop_gradient)

    def _drop_gradient(self) -> None:
        self._pending, self._loss = [], None
        self._clear_gradients()

    def gradient_norm(self) -> float:
        """L2 norm of the gradient that this rank has accumulated; of a sharded model, of all ranks.
        Waits for the device."""
        tensors = [each for each in self.model.parameters() if each.requires_grad]
        gradients = [
            part.grad for each in tensors for part in {each, self._masters.stepped_tensor(each)} if part.grad is not None
        ]
        return float(gather_tensor(nn.utils.get_total_norm(gradients))) / self._scale.value if gradients else 0.0

    def _clear_gradients(self) -> None:
        """Clear all gradients, also of parameters that the optimizer does not step: these would
        accumulate."""
        self.model.zero_grad(set_to_none=True)
        self._masters.zero_grad()

    def _check_finite(self, norm: float, loss: Tensor | None, pending: list[tuple[MicroBatches, BatchTotals | None]]) -> bool:
        """Whether the step is taken: not if the scale of a float16 loss was too large."""
        value = 0.0 if loss is None else float(loss)
        lost, infinite = (float(not math.isfinite(each)) for each in (value, norm))
        lost_anywhere, infinite_anywhere = ranks.max_over_ranks([lost, infinite], self.cfg.model_device)
        if not lost_anywhere and self._scale.update(is_finite=not infinite_anywhere):
            return not infinite_anywhere
        self._clear_gradients()
        broken = lost or infinite
        reports = (self._report(batch, totals) for batch, totals in pending) if broken else iter(["they are on another rank"])
        raise NonFiniteError(f"loss {value} with gradient norm {norm} is not finite; {'; '.join(reports)}. No weight was changed")

    def _report(self, batch: MicroBatches, totals: BatchTotals | None) -> str:
        if ranks.is_distributed():  # a pass of one rank alone would hang in the others' collectives
            return f"samples (rollout/step): {', '.join(name for micro in batch for name in micro.sample_names)}"

        def backward(micro_batch: MicroBatch) -> Tensor:
            images = ImagePass(self.images, [micro_batch])
            with self.routed(micro_batch) as seen:
                loss, _ = self._backward(images.bind(micro_batch), totals, seen)
            images.backward()
            return loss

        return describe_nonfinite(self.model, batch, backward)

    def export_weights(self, *, param_filter: ParamFilter | None = None) -> TrainFuture[dict[str, Tensor]]:
        device = self.cfg.runtime_device
        return self._run("export_weights", lambda: published_weights(self.model, param_filter=param_filter, device=device))

    def stream_weights(self, *, param_filter: ParamFilter | None = None) -> WeightStream:
        return WeightStream(shared_weights(self.model, param_filter=param_filter), self.cfg.runtime_device)

    def save(self, path: str | Path | None, *, optimizer: bool = True) -> TrainFuture[None]:
        return self._run("save", lambda: self._save(None if path is None else Path(path), optimizer))

    def save_as_held(self, path: str | Path | None, *, optimizer: bool = True) -> TrainFuture[None]:
        return self._run("save", lambda: self._save(None if path is None else Path(path), optimizer, as_held=True))

    def _save(self, folder: Path | None, optimizer: bool, as_held: bool = False) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        write_weights(self.model, self.optimizer if optimizer else None, folder, as_held=as_held)

    def load(self, path: str | Path, *, optimizer: bool = True) -> TrainFuture[None]:
        return self._run("load", lambda: self._load(Path(path), optimizer))

    def _load(self, folder: Path, optimizer: bool) -> None:
        read_model(self.model, folder)
        if optimizer:
            read_optimizer_if_stored(self.optimizer, self.model, folder)

    def offload(self) -> TrainFuture[None]:
        return self._run("offload", self._held.to_host)

    def reload(self) -> TrainFuture[None]:
        return self._run("reload", lambda: self._held.to_device(self.cfg.model_device))

    def snapshot_weights(self) -> TrainFuture[dict[str, Tensor]]:
        def copy() -> dict[str, Tensor]:
            reshard(self.model)
            trained = {name: parameter for name, parameter in self.model.named_parameters() if parameter.requires_grad}
            return {name: parameter.detach().to("cpu", copy=True) for name, parameter in trained.items()}

        return self._run("snapshot_weights", copy)

    def restore_weights(self, snapshot: Mapping[str, Tensor]) -> TrainFuture[None]:
        @torch.no_grad()
        def restore() -> None:
            reshard(self.model)
            parameters = dict(self.model.named_parameters())
            for name, value in snapshot.items():
                parameters[name].copy_(value)

        return self._run("restore_weights", restore)


BUCKET_BYTES = 64 << 20
"""Gradients that are summed by one message between ranks."""


@torch.no_grad()
def sum_gradients(parameters: Iterable[Tensor]) -> None:
    """Replace each gradient by its sum over all ranks. A rank without a gradient adds 0. All ranks
    call it with the same parameters.

    Gradients of one dtype travel together. Example: 3, 3 and 1 numbers as one message of 7.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        groups.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter.grad)
    for gradients in groups.values():
        sizes = {str(number): gradient.nbytes for number, gradient in enumerate(gradients)}
        for bucket in split_in_buckets(sizes, BUCKET_BYTES):
            together = [gradients[int(number)] for number in bucket]
            if len(together) == 1:
                dist.all_reduce(together[0])
                continue
            flat = torch.cat([gradient.reshape(-1) for gradient in together])
            dist.all_reduce(flat)
            for gradient, summed in zip(together, flat.split([each.numel() for each in together]), strict=True):
                gradient.copy_(summed.view_as(gradient))


MAX_NAMED = 16


def describe_nonfinite(model: nn.Module, micro_batches: Iterable[MicroBatch], backward: Callable[[MicroBatch], Tensor]) -> str:
    """One sentence on the cause. `backward` adds the gradient of a micro-batch and returns its
    loss. Clears all gradients."""
    if not all(bool(torch.isfinite(parameter).all()) for parameter in model.parameters()):
        return "weights were not finite before this step; resume from an earlier checkpoint"
    names = list(islice(_find_offenders(model, micro_batches, backward), MAX_NAMED))
    if len(names) == MAX_NAMED:
        names.append("and possibly more")
    if not names:
        return "every sample alone gives finite values, but their sum overflows; lower lr or max_grad_norm"
    return f"offending samples (rollout/step): {', '.join(names)}"


def _find_offenders(
    model: nn.Module, micro_batches: Iterable[MicroBatch], backward: Callable[[MicroBatch], Tensor]
) -> Iterator[str]:
    for micro_batch in micro_batches:
        if _is_finite(model, micro_batch, backward):
            continue
        for number, part in enumerate(micro_batch.parts()):
            if not _is_finite(model, part, backward):
                yield part.sample_names[0] if part.sample_names else f"row {number}"


def _is_finite(model: nn.Module, micro_batch: MicroBatch, backward: Callable[[MicroBatch], Tensor]) -> bool:
    model.zero_grad(set_to_none=True)
    loss = backward(micro_batch)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    finite = bool(torch.isfinite(loss)) and all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    model.zero_grad(set_to_none=True)
    return finite


def parameter_groups(
    model: nn.Module,
    *,
    lr: float,
    weight_decay: float,
    backbone_lr_mult: float | None = None,
    head_only_weight_decay: bool = False,
    decay_biases_and_norms: bool = True,
) -> list[dict[str, Any]]:
    """The trainable parameters in groups, as an optimizer takes them. Groups of the head
    (`find_head_parts`) come first.

    `backbone_lr_mult`: all parameters but the head have the rate `lr * backbone_lr_mult`. With None
    all have `lr`. `head_only_weight_decay`: only the head has weight decay.
    `decay_biases_and_norms=False`: parameters of fewer than two dimensions (biases and weights of
    norms) have no weight decay.

    Parameters with the same settings share a group. With the defaults there is one group.
    """
    heads = find_head_parts(model) if backbone_lr_mult is not None or head_only_weight_decay else []
    if not heads and (backbone_lr_mult is not None or head_only_weight_decay):
        names = " or ".join(HEAD_NAMES)
        raise ConfigError(f"use_differential_lr and head_only_weight_decay need a head; {type(model).__name__} has no {names}")
    check_value("backbone_lr_mult", backbone_lr_mult, "1.0 is the head's rate", optional=True, least=0, below=math.inf)
    groups: dict[tuple[bool, float, float], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        backbone = bool(heads) and not any(is_in_module(name, head) for head in heads)
        rate = lr * backbone_lr_mult if backbone and backbone_lr_mult is not None else lr
        has_no_decay = (backbone and head_only_weight_decay) or (parameter.ndim < 2 and not decay_biases_and_norms)
        groups.setdefault((backbone, rate, 0.0 if has_no_decay else weight_decay), []).append(parameter)
    if not groups:
        raise ConfigError("the model has no parameter with requires_grad=True; there is nothing to train")
    in_order = sorted(groups.items(), key=lambda group: group[0][0])  # head first: the first group's rate is logged
    return [{"params": parameters, "lr": rate, "weight_decay": decay} for (_, rate, decay), parameters in in_order]
