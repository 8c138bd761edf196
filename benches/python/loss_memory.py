"""Peak memory of log-probabilities of `[B, T, V]` logits, forward and backward, compared with
log_softmax and gather.

Bytes are counted, not sampled (`peak_bytes`). The ratio is (logits + everything else) /
logits for the loss alone: from the logits to their gradient, without the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from benches.python.contest import Contest
from benches.python.peak_bytes import PeakBytes
from torch import Tensor

from ludic.training.loss.logprobs import LogitsUse, compute_token_entropy, compute_token_logp, compute_token_logp_and_entropy

SHAPE = (8, 256, 8192)
Loss = Callable[[Tensor, Tensor], Tensor]


def log_softmax_and_gather(logits: Tensor, ids: Tensor) -> Tensor:
    """The obvious way: all logits in float32, the log-probabilities of all tokens, one of which is
    selected."""
    return torch.log_softmax(logits.float(), dim=-1)[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2)


def entropy_from_log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    logp = torch.log_softmax(logits.float(), dim=-1)
    return -(logp.exp() * logp).sum(dim=-1)[:, :-1]


def logp_over_logits(logits: Tensor, ids: Tensor) -> Tensor:
    return compute_token_logp(logits, ids, use=LogitsUse(consume=True))


def entropy_in_chunks(logits: Tensor, ids: Tensor) -> Tensor:
    return compute_token_entropy(logits)


def entropy_over_logits(logits: Tensor, ids: Tensor) -> Tensor:
    return compute_token_entropy(logits, use=LogitsUse(consume=True))


def both_from_log_softmax(logits: Tensor, ids: Tensor) -> Tensor:
    logp = torch.log_softmax(logits.float(), dim=-1)
    entropy = -(logp.exp() * logp).sum(dim=-1)[:, :-1]
    return logp[:, :-1].gather(2, ids[:, 1:, None]).squeeze(2) + entropy


def both_over_logits(logits: Tensor, ids: Tensor) -> Tensor:
    logp, entropy = compute_token_logp_and_entropy(logits, ids, use=LogitsUse(consume=True))
    return logp + entropy


WAYS: dict[str, Loss] = {
    "log-probabilities: log_softmax and gather": log_softmax_and_gather,
    "log-probabilities: in chunks": compute_token_logp,
    "log-probabilities: in chunks, gradient written over the logits": logp_over_logits,
    "entropy: from log_softmax": entropy_from_log_softmax,
    "entropy: in chunks": entropy_in_chunks,
    "entropy: in chunks, gradient written over the logits": entropy_over_logits,
    "both: from log_softmax": both_from_log_softmax,
    "both: in chunks, gradient written over the logits": both_over_logits,
}


def peak_ratios(loss: Loss, dtype: torch.dtype, shape: Sequence[int] = SHAPE) -> tuple[float, float]:
    """(logits + peak of the rest) / logits, for the forward pass and for forward and backward."""
    generator = torch.Generator().manual_seed(0)
    parameter = torch.randn(*shape, generator=generator, dtype=dtype).requires_grad_()
    ids = torch.randint(0, shape[-1], tuple(shape[:2]), generator=generator)
    logits = parameter * 1  # not a leaf, like the output of a model
    size = logits.numel() * logits.element_size()
    with PeakBytes() as in_use:
        total = loss(logits, ids).sum()
        forward = in_use.peak
        (gradient,) = torch.autograd.grad(total, logits)
    assert bool(torch.isfinite(gradient).all())
    return 1 + forward / size, 1 + in_use.peak / size


def contests() -> list[Contest]:
    """None: this subject measures memory, not time."""
    return []


def report() -> str:
    batch, tokens, vocabulary = SHAPE
    lines = [
        f"### Peak memory of the loss alone, as a multiple of the logits [{batch}, {tokens}, {vocabulary}] alone",
        "",
        "| way | float32 forward | and backward | bfloat16 forward | and backward |",
        "|---|---|---|---|---|",
    ]
    for name, loss in WAYS.items():
        ratios = [*peak_ratios(loss, torch.float32), *peak_ratios(loss, torch.bfloat16)]
        lines.append(f"| {name} | {' | '.join(f'{ratio:.2f}x' for ratio in ratios)} |")
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(report())
