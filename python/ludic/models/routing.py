"""The routers of a mixture of experts: which experts they choose for each token, and the same
choice again in another pass (routing replay, R3: Ma et al. 2025, arXiv:2510.11370).

A router of transformers computes scores [N, E], takes the K largest by `torch.topk`, and makes the
gates from the scores of these. A replayed pass changes what `topk` returns: the recorded experts,
and its own scores of them. All else stays the class's: which scores become gates, how they are
normalised and scaled. The gradient flows through the gates.

    scores   .5 .3 .2   K = 2   own choice 0 1   recorded 2 0   gates from .2 .5

Shapes: N tokens of a pass, L routers in the order in which they run, E experts, K chosen ones.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ludic.errors import ConfigError, DataError
from ludic.models.prefix_trees import PREFIX_TREES
from ludic.models.wrappers import evaluation_mode, find_text_config, unwrap_transformer

ROUTES = "routes"
"""Name of the experts of a batch, [B, T, L, K]."""
OWN = -1
"""In place of an expert: the router chooses itself."""


class _TopK(TorchFunctionMode):
    """Inside, `topk` returns what `change` makes of its input and its result."""

    def __init__(self, change: Callable[[Tensor, Any], Any]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        is_topk = func in (torch.topk, Tensor.topk)
        return self._change(args[0] if args else kwargs["input"], result) if is_topk else result


class RoutedPass:
    """What each router did last: the experts [N, K] that it chose, and what it returned."""

    def __init__(self) -> None:
        self.chosen: dict[int, Tensor] = {}
        self.outputs: dict[int, Any] = {}

    def indices(self) -> Tensor:
        """[N, L, K] int64"""
        return torch.stack([self.chosen[number] for number in sorted(self.chosen)], dim=1)

    def load(self, weights: Tensor, num_experts: int) -> Tensor:
        """[E + 1] float32: how often each expert was chosen in all layers, and the number of tokens
        times L. `weights` [N]: how often a token counts, 0 for padding."""
        chosen = self.indices().flatten(1)
        counts = weights.new_zeros(num_experts).index_add_(0, chosen.flatten(), weights.repeat_interleave(chosen.shape[1]))
        return torch.cat([counts, weights.sum()[None] * len(self.chosen)])

    def balance_loss(self, weights: Tensor, load: Tensor) -> Tensor:
        """[] the share of these tokens in E sum_e f_e P_e (Fedus et al. 2022, equations 4 to 6,
        over all layers together, as transformers' classes): f_e, how often e was chosen, and P_e,
        its mean probability, over the batch of which `load` is the sum. f_e has no gradient, so
        shares add up to the loss of the batch, and their gradients to its gradient."""
        sums = sum((weights @ output[0].float().softmax(dim=-1) for output in self.outputs.values()), torch.zeros_like(load[1:]))
        total = load[-1].clamp(min=1.0)  # 0 if no sample goes through the model
        return (len(load) - 1) * (load[:-1] / total) @ (sums / total)


class Routers:
    """The routers of `model`, found by two passes over some tokens: the modules whose last `topk`
    is over as many numbers in both. Raises ConfigError for a model without, for routers that choose
    among different numbers of experts, or run twice in a pass; with `balanced` for one whose class
    has no load-balancing loss."""

    def __init__(self, model: nn.Module, *, balanced: bool = False) -> None:
        self.model = unwrap_transformer(model)
        kind, remedy = type(self.model).__name__, "leave trainer.replay_routing off and trainer.router_aux_coef at 0"
        first, second = _probe(self.model, 5), _probe(self.model, 7)
        calls = [call for call in first if call in second]
        self.modules, shapes = [module for module, _ in calls], {shape for _, shape in calls}
        if not calls:
            raise ConfigError(f"{kind} has no router that chooses experts by topk; {remedy}")
        if len(shapes) > 1 or len(set(self.modules)) < len(calls):
            raise ConfigError(
                f"{kind} has routers of several kinds ((experts, chosen) {sorted(shapes)}), or runs one twice; {remedy}"
            )
        classes = type(self.model).__mro__  # FSDP2 makes a class of its own
        if balanced and not any(hasattr(sys.modules[each.__module__], "load_balancing_loss_func") for each in classes):
            raise ConfigError(f"{kind} has no load-balancing loss; leave trainer.router_aux_coef at 0")
        [(self.num_experts, self.top_k)] = shapes
        self.dtype = torch.uint8 if self.num_experts <= 256 else torch.uint16
        """Of experts on the host."""

    @contextmanager
    def running(self, routes: Tensor | None = None) -> Iterator[RoutedPass]:
        """Forward passes inside, and what a backward pass inside computes again, take the experts
        of `routes` [N, L, K], `OWN` where the router chooses itself. Yields what the routers do.
        Raises DataError for a pass over another number of tokens, and for another model's."""
        seen, routes = RoutedPass(), None if routes is None else self._fit(routes)
        with ExitStack() as hooks:
            for number, module in enumerate(self.modules):
                recorded = None if routes is None else routes[:, number].long()
                self._hook(hooks, module, number, recorded, seen)
            yield seen

    def _hook(self, hooks: ExitStack, module: nn.Module, number: int, recorded: Tensor | None, seen: RoutedPass) -> None:
        def choose(scores: Tensor, result: Any) -> Any:
            if (scores.shape[-1], result.indices.shape[-1]) != (self.num_experts, self.top_k):
                return result if recorded is None else self._choose_groups(scores, result, recorded)
            if recorded is not None:
                if result.indices.numel() != recorded.numel():
                    raise DataError(f"a pass has {result.indices.numel() // self.top_k} tokens, and routes of {len(recorded)}")
                own = recorded.view_as(result.indices)
                indices = torch.where(own == OWN, result.indices, own)
                result = torch.return_types.topk((scores.gather(-1, indices), indices))
            seen.chosen[number] = result.indices.reshape(-1, self.top_k)
            return result

        def leave(module: Any, args: Any, output: Any) -> None:
            mode.__exit__(None, None, None)
            seen.outputs[number] = output

        mode = _TopK(choose)
        hooks.callback(module.register_forward_pre_hook(lambda *_: mode.__enter__() and None).remove)
        hooks.callback(module.register_forward_hook(leave, always_call=True).remove)

    def _choose_groups(self, scores: Tensor, result: Any, recorded: Tensor) -> Any:
        """Of a router that first chooses among [N, G] groups of E / G experts: the
        groups of recorded experts are among the chosen, since others get the score 0."""
        if scores.ndim != 2 or len(scores) != len(recorded) or self.num_experts % scores.shape[-1]:
            return result
        is_recorded = torch.zeros_like(scores, dtype=torch.bool)
        is_recorded.scatter_(1, recorded.clamp(min=0) // (self.num_experts // scores.shape[-1]), recorded != OWN)
        return scores.masked_fill(is_recorded, torch.inf).topk(result.indices.shape[-1], dim=-1)

    def _fit(self, routes: Tensor) -> Tensor:
        """[N, L, K] of routes that may be of all blocks, with experts or not: vLLM's."""
        names = {module: name for name, module in self.model.named_modules()}
        blocks = [int(found[1]) for module in self.modules if (found := re.search(r"\.(\d+)\.", names[module]))]
        if len(blocks) == len(self.modules) < routes.shape[1] == getattr(find_text_config(self.model), "num_hidden_layers", None):
            routes = routes[:, blocks]
        if routes.shape[1:] != (len(self.modules), self.top_k) or int(routes.amax()) >= self.num_experts:
            raise DataError(
                f"routes have {routes.shape[1]} layers of {routes.shape[2]} experts up to {int(routes.amax())}; the model has "
                f"{len(self.modules)} of {self.top_k} among {self.num_experts}; sample from the model that is trained"
            )
        return routes


def routes_of_pass(tensors: Mapping[str, Any]) -> Tensor | None:
    """[N, L, K] the experts of the tokens that a pass over a micro-batch computes: of prefix trees,
    whose samples have the same experts for the tokens that they share, of the row."""
    routes, trees = tensors.get(ROUTES), tensors.get(PREFIX_TREES)
    if routes is None or trees is None:
        return None if routes is None else routes.flatten(0, 1)
    of_row: Tensor = routes.new_full((trees.input_ids.numel(), *routes.shape[2:]), OWN)
    of_row[trees.places] = routes[0]
    return of_row


def count_samples(tensors: Mapping[str, Any]) -> Tensor:
    """[N] float32: in how many samples of a micro-batch each token of its pass is, which is 0 for
    padding. Prefix trees and turns in one row compute a token once that several samples have."""
    if (trees := tensors.get(PREFIX_TREES)) is not None:
        return torch.bincount(trees.places, minlength=trees.input_ids.numel()).float()
    ids, bounds = tensors["input_ids"], tensors.get("cu_seqlens")
    if "turns" not in tensors:
        return (tensors["attention_mask"] if bounds is None else torch.ones_like(ids)).flatten().float()
    bounds = torch.arange(0, ids.numel() + 1, ids.shape[1], device=ids.device) if bounds is None else bounds.long()
    row = torch.arange(len(bounds) - 1, device=ids.device).repeat_interleave(bounds.diff())
    place = torch.arange(ids.numel(), device=ids.device) - bounds[row]
    return ((tensors["turns"][:, :1] == row) & (place < tensors["turns"][:, 2:])).sum(dim=0).float()


def _probe(model: Any, tokens: int) -> list[tuple[nn.Module, tuple[int, int]]]:
    """(module, (E, K)) of the last `topk` over E numbers a token, for each run of a module."""
    running: list[tuple[nn.Module, int]] = []
    found: dict[tuple[nn.Module, int], tuple[int, int]] = {}
    runs = iter(range(sys.maxsize))

    def note(scores: Tensor, result: Any) -> Any:
        if scores.shape[:-1].numel() == tokens and scores.shape[-1] > 1 and running:
            found[running[-1]] = scores.shape[-1], result.indices.shape[-1]
        return result

    with ExitStack() as stack:
        for module in model.modules():
            stack.callback(module.register_forward_pre_hook(lambda module, _: running.append((module, next(runs)))).remove)
            stack.callback(module.register_forward_hook(lambda *_: running.pop() and None, always_call=True).remove)
        for context in (evaluation_mode(model), torch.no_grad(), _TopK(note)):
            stack.enter_context(context)
        config, device = find_text_config(model), next(model.parameters()).device
        ids = torch.arange(tokens, device=device)[None] % getattr(config, "vocab_size", tokens)
        model(input_ids=ids, **({"use_cache": False} if hasattr(config, "use_cache") else {}))
    return [(module, shape) for (module, _), shape in found.items()]
