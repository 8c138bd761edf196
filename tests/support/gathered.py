"""Weights that come one by one, as those of a sharded model do."""

import torch


class Gathered:
    """A source of weights that counts how often each of them is gathered."""

    def __init__(self, weights):
        self.weights, self.gathered = weights, []

    def __iter__(self):
        for name, tensor in self.weights.items():
            self.gathered.append(name)
            yield name, tensor.clone()

    def describe(self):
        return {name: torch.empty_like(tensor, device="meta") for name, tensor in self.weights.items()}
