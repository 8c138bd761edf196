"""Small batches and models for the tests of losses. Shapes: B rows, T tokens, V vocabulary."""

import torch
from torch import Tensor, nn

V = 11


class Bigram(nn.Module):
    """Next-token logits that depend on the current token only: the smallest causal model. float32
    by default."""

    def __init__(self, seed: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(V, V, generator=generator, dtype=dtype))

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, position_ids: Tensor | None = None) -> Tensor:
        return self.table[input_ids]


def rows(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """`count` samples of 2 to 9 tokens with at least one action token, some of weight zero, with
    random behaviour log-probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def integer(low: int, high: int) -> int:
        return int(torch.randint(low, high, (1,), generator=generator))

    samples = []
    for _ in range(count):
        length = integer(2, 10)
        prompt = integer(0, length)
        mask = torch.zeros(length)
        mask[prompt:] = 1.0
        samples.append(
            {
                "input_ids": torch.randint(0, V, (length,), generator=generator),
                "action_mask": mask,
                "actor_logps": -torch.rand(length, generator=generator) * 3 * mask,
                "weight": torch.randn((), generator=generator) * (integer(0, 4) > 0),
            }
        )
    return samples


def padded(samples: list[dict[str, Tensor]], extra: int = 0, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Right-padded batch [B, T] with `extra` superfluous padding columns."""
    width = max(len(s["input_ids"]) for s in samples) + extra

    def stacked(key: str) -> Tensor:
        return torch.stack([torch.nn.functional.pad(s[key], (0, width - len(s[key]))) for s in samples])

    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    logps = stacked("actor_logps").to(dtype)
    return {
        "input_ids": stacked("input_ids"),
        "attention_mask": (torch.arange(width) < lengths[:, None]).long(),
        "action_mask": stacked("action_mask").to(dtype),
        "actor_logps": logps,
        "old_logp_action": logps.sum(dim=1),
        "weight": torch.stack([s["weight"] for s in samples]).to(dtype),
    }


def packed(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """The same samples concatenated: [1, S] with `cu_seqlens`."""
    lengths = torch.tensor([len(s["input_ids"]) for s in samples])
    return {
        "input_ids": torch.cat([s["input_ids"] for s in samples])[None],
        "position_ids": torch.cat([torch.arange(n) for n in lengths])[None],
        "cu_seqlens": torch.cat([torch.zeros(1, dtype=torch.int32), lengths.cumsum(0).int()]),
        "action_mask": torch.cat([s["action_mask"] for s in samples])[None],
        "actor_logps": torch.cat([s["actor_logps"] for s in samples])[None],
        "old_logp_action": torch.stack([s["actor_logps"].sum() for s in samples]),
        "weight": torch.stack([s["weight"] for s in samples]),
    }


def two_token_batch(ratios: list[float], weights: list[float], vocabulary: int = 2) -> tuple[Tensor, dict[str, Tensor]]:
    """One action token per row with uniform policy probability, and actor log-probabilities that
    give the requested ratios."""
    batch = len(ratios)
    logits = torch.zeros(batch, 2, vocabulary, requires_grad=True)
    logp = torch.full((batch,), -torch.log(torch.tensor(float(vocabulary))).item())
    old = logp - torch.log(torch.tensor(ratios))
    return logits, {
        "input_ids": torch.zeros(batch, 2, dtype=torch.long),
        "attention_mask": torch.ones(batch, 2, dtype=torch.long),
        "action_mask": torch.tensor([[0.0, 1.0]] * batch),
        "actor_logps": torch.stack([torch.zeros(batch), old], dim=1),
        "old_logp_action": old,
        "weight": torch.tensor(weights),
    }
