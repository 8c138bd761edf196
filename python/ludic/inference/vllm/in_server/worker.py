"""The weight transfer engines of a vLLM server that receives weights from a trainer, and the worker
methods that the trainer calls.

    python -m vllm.entrypoints.openai.api_server ... \\
        --worker-extension-cls ludic.inference.vllm.in_server.worker.WeightWorker
        --weight-transfer-config '{"backend": "gloo"}'

The backends are `gloo` (host memory, any machine), `ludic_nccl` (GPUs) and `disk` (folders that
both see). They use vLLM's own endpoints: /init_weight_transfer_engine, /start_weight_update,
/update_weights, /finish_weight_update. Updating stages the push; finishing loads it, or drops it
after /collective_rpc `ludic_discard`. vLLM's own `nccl` engine loads tensors as they arrive, so a
push that fails leaves a mix of weights; `ludic_nccl` does not.

The server's environment needs vLLM and the files of ludic, but not ludic's dependencies. The
trainer does not import this module.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from ludic.inference.vllm.in_server.weight_fingerprint import SleepCheck, tensor_fingerprint
from ludic.inference.vllm.in_server.weight_receiver import Checkpoint, DeltaHeader, WeightReceiver, WeightTransferError

BOOT = uuid.uuid4().hex
"""Id of this run of the server; a restart changes it."""


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How a worker joins the trainer's group. `disk` needs none of it."""

    master_address: str = "127.0.0.1"
    master_port: int = 0
    rank_offset: int = 1
    world_size: int = 2
    timeout_s: float = 60.0
    group_id: str = ""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """The content of a push: tensors in the order of their broadcasts, or a folder, or a delta by
    either way."""

    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)
    path: str | None = None
    push_id: str | None = None
    """The id under which the tensors are kept, so that a delta can follow."""
    delta: DeltaHeader | None = None


class StagedEngine(WeightTransferEngine[InitInfo, UpdateInfo]):
    """Stages a push, and loads it once it is complete."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False
    kind: ClassVar[str]

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self.receiver = WeightReceiver(_own_checkpoint(self.model_config), device="cpu" if self.kind == "gloo" else device)
        self.broken: str | None = None
        """The error of a failed load, after which the weights are a mix of old and new ones."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        rank = self.parallel_config.data_parallel_index * self.parallel_config.world_size + self.parallel_config.rank
        self.receiver.connect(
            master_address=init_info.master_address,
            master_port=init_info.master_port,
            rank=init_info.rank_offset + rank,
            world_size=init_info.world_size,
            timeout_s=init_info.timeout_s,
            group_id=init_info.group_id,
            kind=self.kind,
        )

    def start_weight_update(self) -> None:
        if self.broken is not None:
            raise WeightTransferError(f"an earlier push could not be loaded ({self.broken}); restart the server")
        self.receiver.start()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        path, push_id = update_info.path, update_info.push_id
        if update_info.delta is not None:
            self.receiver.receive_delta(update_info.delta, push_id or "", path)
        elif path is not None:
            self.receiver.read(path, push_id)
        else:
            self.receiver.receive(update_info.names, update_info.dtype_names, update_info.shapes, push_id)

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.mtp_validation import disable_mtp_completeness_check
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        weights = self.receiver.take()
        if not weights:
            return
        try:
            initialize_layerwise_reload(self.model)
            with disable_mtp_completeness_check():
                self.model.load_weights(iter(weights))
            finalize_layerwise_reload(self.model, self.model_config)
            _repack_tied(self.model)
        except BaseException as error:
            self.broken = f"{type(error).__name__}: {error}"
            raise

    def shutdown(self) -> None:
        self.receiver.discard()
        self.receiver.close()


class GlooEngine(StagedEngine):
    """Receives broadcasts over TCP into host memory."""

    kind = "gloo"


class NcclEngine(StagedEngine):
    """Receives broadcasts between GPUs. Each tensor is moved to host memory immediately, so that
    the GPU never holds a second model."""

    kind = "nccl"


class DiskEngine(StagedEngine):
    """Reads folders of safetensors that the trainer wrote, as all backends can, and opens no
    connection."""

    kind = "disk"

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        pass


def _repack_tied(model: Any) -> None:
    """Pack tied heads again. On a CPU, a head that is tied to the embedding uses a packed copy,
    which is not updated when the embedding is loaded."""
    owners: dict[int, Any] = {}
    for module in model.modules():
        weight = module._parameters.get("weight")
        if weight is None or not weight.numel():
            continue
        first = owners.setdefault(id(weight), module)
        if first is not module and hasattr(module, "cpu_linear"):
            module.quant_method.process_weights_after_loading(module)


def _own_checkpoint(model_config: Any) -> Checkpoint | None:
    """The checkpoint that the server loaded. None if there are no files, as with dummy weights."""
    folder = Path(model_config.model)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(model_config.model, revision=model_config.revision, local_files_only=True))
        except Exception:  # whatever the error, there is nothing to check against
            return None
    try:
        return Checkpoint(folder)
    except WeightTransferError:
        return None


class WeightWorker:
    """Methods that vLLM adds to its worker, called with /collective_rpc. They return JSON."""

    weight_transfer_engine: Any
    model_runner: Any
    vllm_config: Any
    device: Any
    rank: int
    _ludic_sleep: SleepCheck | None = None

    def ludic_state(self) -> dict[str, Any]:
        """The id of this run of the server, and the state of the current push."""
        engine = self._ludic_engine()
        receiver = engine.receiver
        return {
            "boot": BOOT,
            "backend": self.vllm_config.weight_transfer_config.backend,
            "group_id": receiver.group_id,
            "open": receiver.open,
            "broken": engine.broken,
            "base": receiver.base_id,
            # On a CPU, vLLM answers the calls and frees nothing.
            "sleeps": self.device.type == "cpu" or bool(self.vllm_config.model_config.enable_sleep_mode),
        }

    def ludic_manifest(self) -> dict[str, Any]:
        """Shape and dtype of every weight that can be pushed, and the model's config.json. Without
        `weights` the server's checkpoint was not found."""
        engine = self._ludic_engine()
        checkpoint = engine.receiver.checkpoint
        served = self._ludic_served()
        dtype = str(engine.model_config.dtype).removeprefix("torch.")
        weights = None
        if checkpoint is not None:
            weights = {
                name: {**weight, "dtype": _wire_dtype(name, weight, served, dtype)} for name, weight in checkpoint.weights.items()
            }
        config = getattr(engine.model_config, "hf_text_config", None) or engine.model_config.hf_config
        tied = bool(getattr(config, "tie_word_embeddings", False))
        file = None if checkpoint is None else checkpoint.folder / "config.json"
        own = json.loads(file.read_bytes()) if file is not None and file.is_file() else None
        return {"dtype": dtype, "tied": tied, "weights": weights, "config": own}

    def ludic_discard(self) -> None:
        """Drop the staged weights, so that the next /finish_weight_update loads nothing. Until then
        the push is open: vLLM starts no other one before it."""
        self._ludic_engine().receiver.empty()

    def ludic_fingerprint(self) -> dict[str, Any]:
        """Fingerprints of the weights that were loaded last, and of the model's weights of the same
        names."""
        engine = self._ludic_engine()
        served = self._ludic_served()
        fingerprints = {}
        for name, shape in engine.receiver.loaded_shapes.items():
            if name in served and (whole := _without_padding(served[name], shape)) is not None:
                fingerprints[name] = tensor_fingerprint(whole)
        lost = [] if self._ludic_sleep is None else self._ludic_sleep.find_lost(served)
        if not lost:  # all is there again
            self._ludic_sleep = None
        return {"loaded": engine.receiver.fingerprints, "served": fingerprints, "broken": engine.broken, "lost": lost}

    def ludic_memory(self) -> dict[str, Any]:
        """Bytes in use on the device, by all processes (None on a CPU), and bytes of the weights of
        this worker."""
        used = None
        if self.device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self.device)
            used = total - free
        return {"used": used, "weights": sum(weight.nbytes for weight in self._ludic_served().values())}

    def ludic_before_sleep(self, level: int) -> dict[str, Any]:
        """Take the fingerprints of what a sleep of this level keeps. Returns `ludic_memory`; for a
        server that sleeps already, whose weights must not be read, without the memory in use."""
        if self._ludic_sleep is not None:
            return {**self.ludic_memory(), "used": None}
        self._ludic_sleep = SleepCheck(level, self._ludic_served(), dict(self.model_runner.get_model().named_buffers()))
        return self.ludic_memory()

    def ludic_after_wake(self) -> dict[str, Any]:
        """The names of tensors that have other values than before the sleep."""
        if self._ludic_sleep is None:  # it was put to sleep by others
            return {"changed": []}
        buffers = dict(self.model_runner.get_model().named_buffers())
        return {"changed": self._ludic_sleep.find_changed(self._ludic_served(), buffers)}

    def _ludic_engine(self) -> Any:
        engine = self.weight_transfer_engine
        if not isinstance(engine, StagedEngine):
            raise WeightTransferError(
                f"the server's weight transfer backend is not one of {sorted(ENGINES)}; start it with `ludic serve`"
            )
        return engine

    def _ludic_served(self) -> dict[str, Any]:
        return dict(self.model_runner.get_model().named_parameters())


def _without_padding(served: Any, shape: list[int]) -> Any:
    """The weight as it was sent, or None if this worker does not hold all of it.

    The vocabulary may have padding rows: for a served shape [4, 2] and a sent shape [3, 2], the
    first 3 rows are returned. On a CPU the weights of linear layers are repacked and therefore
    empty here.
    """
    own = list(served.shape)
    if not served.numel() or len(own) != len(shape) or own[1:] != shape[1:] or own[0] < shape[0]:
        return None
    return served[: shape[0]]


def _wire_dtype(name: str, weight: dict[str, Any], served: dict[str, Any], model_dtype: str) -> str:
    """The dtype in which a tensor is sent, which is the dtype of the model's weight."""
    if name in served and served[name].is_floating_point():
        return str(served[name].dtype).removeprefix("torch.")
    return model_dtype if weight["dtype"] in ("float64", "float32", "float16", "bfloat16") else str(weight["dtype"])


ENGINES: dict[str, type[StagedEngine]] = {"gloo": GlooEngine, "ludic_nccl": NcclEngine, "disk": DiskEngine}
for _name, _engine in ENGINES.items():
    if _name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(_name, _engine)
