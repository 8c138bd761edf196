"""Log-probabilities and entropy from logits, computed in float32 in chunks, without a copy of the
logits [B, T, V].

Only the `compute_token_...` functions shift by one token, as a causal model needs:
`logits[:, t]` predicts `input_ids[:, t + 1]`, so results have T - 1 columns. Example: for ids
[a b c], logits[0] predicts b and logits[1] predicts c; logits[2] is not used.

Shapes: B rows, T tokens, V vocabulary, N rows of flattened logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from ludic.errors import DataError

CHUNK_ELEMENTS = 1 << 20
"""Number of logits in a chunk: 4 MiB in float32."""


class LogitsUse:
    """How a tensor of logits is read, and whether its gradient may overwrite it.

    `consume` says that nothing else reads the logits after the forward pass. If exactly one
    function of this module reads them, its backward pass writes the gradient over them and
    allocates no second tensor of their size. It never overwrites parameters, nor logits that their
    operation saved for its own backward pass, as tanh does. If another operation saved them,
    autograd detects the in-place change and raises, so no gradient is wrong.
    """

    def __init__(self, *, consume: bool = False, wide: bool = True, temperature: float = 1.0) -> None:
        """`wide`: compute in float32 for logits of any dtype. `temperature`: divide the logits by
        it first."""
        self.consume = consume
        self.wide = wide
        self.temperature = temperature
        self.readers = 0

    def read(self, logits: Tensor) -> None:
        """Count one more reader of `logits`. They may be overwritten if they share no memory with a
        leaf tensor, such as a parameter, or with a tensor that their operation saved for its
        backward pass."""
        sources = [logits] if logits._base is None else [logits, logits._base]
        self.readers += 1
        self.consume = self.consume and not any(source.is_leaf or _is_saved_for_backward(source) for source in sources)

    def dtype(self, logits: Tensor) -> torch.dtype:
        """Return the dtype to compute in: float64 for float64 logits, else float32; with
        `wide=False` the dtype of the logits."""
        return logits.dtype if logits.dtype == torch.float64 or not self.wide else torch.float32

    def apply_temperature(self, logits: Tensor, dtype: torch.dtype) -> Tensor:
        """Return logits / temperature in `dtype`; at temperature 1 the logits unchanged."""
        return logits if self.temperature == 1.0 else logits.to(dtype) / self.temperature

    def gradient_buffer(self, logits_NV: Tensor) -> Tensor:
        """Return the tensor to write the gradient to: the logits themselves, or a new tensor. Each
        chunk of logits is read before its gradient is written."""
        return logits_NV if self.consume and self.readers == 1 else torch.empty_like(logits_NV)


def selective_log_softmax(logits: Tensor, index: Tensor, *, use: LogitsUse | None = None) -> Tensor:
    """Return `log_softmax(logits)` at `index` only. logits [..., V], index [...] int64, result
    [...] float32.

    The gradient is exact; the backward pass recomputes the softmax in chunks. Raises DataError if
    the shapes do not match.
    """
    if logits.shape[:-1] != index.shape:
        raise DataError(f"index {tuple(index.shape)} must have the shape of logits {tuple(logits.shape)} without its last axis")
    use = use or LogitsUse()
    use.read(logits)
    flat: Tensor = _LogpAndEntropy.apply(logits.reshape(-1, logits.shape[-1]), index.reshape(-1), use, False)[0]
    return flat.view(index.shape)


def compute_token_logp(logits: Tensor, input_ids: Tensor, *, use: LogitsUse | None = None) -> Tensor:
    """Log-probability of each next token. logits [B, T, V], input_ids [B, T] int64; result
    [B, T - 1] float32."""
    _check_shapes(logits, input_ids)
    # The last position predicts nothing. It is dropped from the result, not from the logits:
    # slicing the logits would copy them.
    return selective_log_softmax(logits, pad(input_ids[:, 1:], (0, 1)), use=use)[:, :-1]


def compute_among_candidates(
    logits: Tensor, input_ids: Tensor, candidates: Tensor, *, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    """Log-probability of each next token in softmax(logits / temperature) over its candidates, and
    the entropy of that distribution: as it was sampled with top-p, top-k or min-p ("keep sampling
    mask", DeepSeek-V3.2, arXiv:2512.02556).

    logits [B, T, V], input_ids [B, T]; candidates [B, T, K] token ids plus 1, of each token itself;
    0 where there is none, and a row of zeros means the whole vocabulary. Results [B, T - 1]
    float32. The token itself is always a candidate. Raises DataError for ids outside V.

    Example: logits [0, 0, 5] and candidates [0, 1] give a token 0 the log-probability log(1/2).
    """
    _check_shapes(logits, input_ids)
    own, vocabulary = candidates[:, 1:], logits.shape[-1]
    if int(own.max()) > vocabulary:
        raise DataError(
            f"a candidate is token {int(own.max()) - 1}, which must be in the model's vocabulary, 0..{vocabulary - 1}"
        )
    # These do not overwrite the logits, which are read again below.
    whole, entropy = compute_token_logp_and_entropy(logits, input_ids, use=LogitsUse(temperature=temperature))
    picked = torch.cat([input_ids[:, 1:, None], (own - 1).clamp(min=0)], dim=-1)
    chosen, among = logits[:, :-1].gather(2, picked).to(whole.dtype).div(temperature).split([1, own.shape[-1]], dim=-1)
    has_candidates = (own > 0).any(dim=-1)
    # Without candidates nothing is filled, so that no gradient is NaN.
    among = among.masked_fill((own == 0) & has_candidates[..., None], -math.inf)
    logp = torch.where(has_candidates, chosen.squeeze(2) - among.logsumexp(dim=-1), whole)
    among_logp = among.log_softmax(dim=-1).masked_fill(own == 0, 0.0)
    cut = -(among_logp.exp().masked_fill(own == 0, 0.0) * among_logp).sum(dim=-1)
    return logp, torch.where(has_candidates, cut, entropy)


def compute_logp_action(logits: Tensor, input_ids: Tensor, action_mask: Tensor, *, length_normalize: bool = False) -> Tensor:
    """Log-probability of each row's action: the sum over its tokens, or with `length_normalize` the
    mean.

    logits [B, T, V], input_ids and action_mask [B, T]; result [B] float32. Log-probabilities
    outside the mask may be -inf.
    """
    if action_mask.shape != input_ids.shape:
        raise DataError(f"action_mask {tuple(action_mask.shape)} must have the shape of input_ids {tuple(input_ids.shape)}")
    logp, mask = compute_token_logp(logits, input_ids), action_mask[:, 1:].float()
    summed = mask_values(logp, mask).sum(dim=1)
    return summed / mask.sum(dim=1).clamp(min=1.0) if length_normalize else summed


def compute_token_entropy(logits: Tensor, *, use: LogitsUse | None = None) -> Tensor:
    """Entropy, in nats, of the distribution of each next token. logits [B, T, V]; result [B, T - 1]
    float32."""
    if logits.ndim != 3:
        raise DataError(f"logits must be [B, T, V], got {tuple(logits.shape)}")
    use = use or LogitsUse()
    use.read(logits)
    flat: Tensor = _LogpAndEntropy.apply(logits.reshape(-1, logits.shape[-1]), None, use, True)[1]
    return flat.view(logits.shape[:-1])[:, :-1]


def compute_token_logp_and_entropy(logits: Tensor, input_ids: Tensor, *, use: LogitsUse | None = None) -> tuple[Tensor, Tensor]:
    """Compute `compute_token_logp` and `compute_token_entropy` together: with one reader of the
    logits their gradient takes one tensor instead of three."""
    _check_shapes(logits, input_ids)
    index = pad(input_ids[:, 1:], (0, 1)).reshape(-1)
    both = select_logp_and_entropy(logits.reshape(-1, logits.shape[-1]), index, use=use)
    logp, entropy = (flat.view(input_ids.shape)[:, :-1] for flat in both)
    return logp, entropy


def select_logp_and_entropy(logits_NV: Tensor, index_N: Tensor, *, use: LogitsUse | None = None) -> tuple[Tensor, Tensor]:
    """[N] `selective_log_softmax`, and [N] the entropy of each distribution, with one reader of the
    logits."""
    use = use or LogitsUse()
    use.read(logits_NV)
    both: tuple[Tensor, Tensor] = _LogpAndEntropy.apply(logits_NV, index_N, use, True)
    return both


def mask_values(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values` with zeros where the mask is 0, even where the value is inf or nan (`values *
    mask` would be nan there)."""
    return values.masked_fill(mask == 0, 0.0)


def weigh_values(values: Tensor, mask: Tensor) -> Tensor:
    """Return `values * mask`, with zeros where the mask is 0 even if the value is inf or nan."""
    return mask_values(values, mask) * mask


def capped_exp(log_ratio: Tensor, ratio_clip: float | None) -> Tensor:
    """Return exp(log_ratio), capped at `ratio_clip` if it is not None. There is no gradient at the
    cap.

    With a cap, nothing overflows. Without a cap, an overflow gives inf and the trainer stops: the
    log-probabilities are wrong then.
    """
    if ratio_clip is None:
        return log_ratio.exp()
    return log_ratio.clamp(max=math.log(ratio_clip) + 1.0).exp().clamp(max=ratio_clip)


def scale_gradient(values: Tensor, weight: Tensor) -> Tensor:
    """Return `values` unchanged, with a gradient that is multiplied by `weight`, a tensor of the
    same shape."""
    scaled: Tensor = _ScaledGradient.apply(values, weight)
    return scaled


class _ScaledGradient(torch.autograd.Function):
    """f(x) = x, df/dx = weight."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (weight,) = ctx.saved_tensors
        return grads[0] * weight, None


def _is_saved_for_backward(tensor: Tensor) -> bool:
    node, address = tensor.grad_fn, tensor.untyped_storage().data_ptr()
    saved_tensors = (getattr(node, name) for name in dir(node) if name.startswith("_saved_"))
    return any(isinstance(saved, Tensor) and saved.untyped_storage().data_ptr() == address for saved in saved_tensors)


def _check_shapes(logits: Tensor, input_ids: Tensor) -> None:
    if logits.ndim != 3:
        raise DataError(f"logits must be [B, T, V], got {tuple(logits.shape)}")
    if logits.shape[:2] != input_ids.shape:
        raise DataError(f"input_ids {tuple(input_ids.shape)} must have the first two axes of logits {tuple(logits.shape)}")
    if input_ids.shape[1] < 2:
        raise DataError(f"a sequence needs at least 2 tokens to have a next one, got {input_ids.shape[1]}")


def _chunks(logits_NV: Tensor) -> list[slice]:
    size = max(1, CHUNK_ELEMENTS // max(1, logits_NV.shape[1]))
    return [slice(start, start + size) for start in range(0, logits_NV.shape[0], size)]


class _LogpAndEntropy(torch.autograd.Function):
    """log softmax(x)[i] = x_i - logsumexp(x), and H = -sum p log p. Without `index_N` the first is
    None, and unless `with_entropy` the second. Their gradients are added chunk by chunk."""

    @staticmethod
    def forward(
        ctx: Any, logits_NV: Tensor, index_N: Tensor | None, use: LogitsUse, with_entropy: bool
    ) -> tuple[Tensor | None, Tensor | None]:
        ctx.use, wide = use, use.dtype(logits_NV)
        logp_N = logsumexp_N = entropy_N = None
        if index_N is not None:
            logsumexp_N = logits_NV.new_empty(logits_NV.shape[0], dtype=wide)
            for part in _chunks(logits_NV):
                logsumexp_N[part] = torch.logsumexp(use.apply_temperature(logits_NV[part], wide).to(wide), dim=-1)
            selected_N = logits_NV.gather(1, index_N[:, None]).squeeze(1)
            logp_N = use.apply_temperature(selected_N, wide).to(wide) - logsumexp_N
        if with_entropy:
            entropy_N = logits_NV.new_empty(logits_NV.shape[0], dtype=wide)
            for part in _chunks(logits_NV):
                entropy_N[part] = _entropy(use.apply_temperature(logits_NV[part], wide), wide)
        ctx.save_for_backward(logits_NV, index_N, logsumexp_N, entropy_N)
        return logp_N, entropy_N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor, None, None, None]:
        logits_NV, *columns = ctx.saved_tensors
        scale = ctx.use.temperature  # `grads` are with respect to logits / temperature
        columns += [grad if grad is None or scale == 1.0 else grad / scale for grad in grads]
        wide, out_NV = ctx.use.dtype(logits_NV), ctx.use.gradient_buffer(logits_NV)
        for part in _chunks(logits_NV):
            rows = [None if column is None else column[part, None] for column in columns]
            out_NV[part] = _gradient(ctx.use.apply_temperature(logits_NV[part], wide), wide, *rows)
        return out_NV, None, None, None


def _entropy(logits_NV: Tensor, wide: torch.dtype) -> Tensor:
    logp = _finite_log_softmax(logits_NV, wide)
    return logp.exp().mul_(logp).sum(dim=-1).neg_()


def _gradient(logits_NV: Tensor, wide: torch.dtype, index: Any, logsumexp: Any, entropy: Any, g: Any, h: Any) -> Tensor:
    """(onehot - p) g - p (log p + H) h, where g and h are the gradients of the log-probability and
    of the entropy, [N, 1]. In `wide`: in half precision, 1 - p of a likely token would round to 0.
    """
    if index is None:
        logp = _finite_log_softmax(logits_NV, wide)
        return logp.exp().mul_(logp.add_(entropy)).mul_(-h)
    logp = torch.sub(logits_NV, logsumexp)
    if entropy is None:
        return logp.exp_().mul_(-g).scatter_add_(1, index, g)
    p = logp.clamp_(min=torch.finfo(wide).min).exp()
    negative = logp.add_(entropy).mul_(p).mul_(h).addcmul_(p, g)
    return negative.neg_().scatter_add_(1, index, g)


def _finite_log_softmax(logits_NV: Tensor, wide: torch.dtype) -> Tensor:
    """Log-probabilities clamped to finite values, so that p log p is 0 where p is 0."""
    return torch.log_softmax(logits_NV, dim=-1, dtype=wide).clamp_(min=torch.finfo(wide).min)
