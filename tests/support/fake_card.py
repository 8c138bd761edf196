"""An accelerator that is a ledger: tensors are on it until they were copied to host memory, and
again after they were copied back. A copy is another storage, as between real devices."""

from torch.multiprocessing.reductions import StorageWeakRef

from ludic.models.sharding import get_local
from ludic.training.backend import offload


def storage_of(tensor):
    return StorageWeakRef(get_local(tensor).untyped_storage())


class FakeCard:
    """`with FakeCard() as card:` makes `offload` use it. AdamW's `step`, a number, is on no
    accelerator, as with a real one."""

    def __init__(self):
        self.host = set()
        self.copies = {"to host": 0, "to device": 0}
        self._real = {}

    def __enter__(self):
        for name, fake in {
            "is_on_accelerator": self.holds,
            "copy_to_host": self.copy_to_host,
            "copy_to_device": self.copy_to_device,
        }.items():
            self._real[name] = getattr(offload, name)
            setattr(offload, name, fake)
        return self

    def __exit__(self, *_):
        for name, real in self._real.items():
            setattr(offload, name, real)

    def holds(self, tensor):
        return tensor.dim() > 0 and storage_of(tensor) not in self.host

    def copy_to_host(self, tensor):
        if not self.holds(tensor):
            return tensor
        self.copies["to host"] += 1
        copied = tensor.detach().clone()
        self.host = {each for each in self.host if not each.expired()} | {storage_of(copied)}
        return copied

    def copy_to_device(self, tensor, device):
        if self.holds(tensor):
            return tensor
        self.copies["to device"] += 1
        return tensor.detach().clone()


def held_tensors(*objects):
    """All tensors of modules (with parts that bitsandbytes keeps beside the weights), and of the
    state of optimizers and what they step."""
    found = []
    for each in objects:
        if hasattr(each, "parameters"):
            parameters = list(each.parameters())
            found += [*parameters, *each.buffers()]
            states = [parameter.quant_state for parameter in parameters if hasattr(parameter, "quant_state")]
            found += [scales for state in states for scales in (state.absmax, state.code)]
        elif each is not None:
            found += [tensor for group in each.param_groups for tensor in group["params"]]
            found += [value for state in each.state.values() for value in state.values() if getattr(value, "ndim", 0)]
    return found
