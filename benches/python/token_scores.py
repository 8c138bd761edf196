"""Time and peak memory of log-probabilities from hidden states, forward and backward: with the
logits of all tokens, without logits at the action tokens, and as TRL computes them.

    python -m benches.python.token_scores --trl-python .venv-trl/bin/python

TRL is not a dependency: `pip install trl==1.16.0 -c constraints.txt` in an environment of its own.
Each way runs in a process of its own, on one thread, on the same tensors: hidden states [16, 1024,
1024], a head of 151,936 rows, float32; the last quarter of each row are actions. Bytes are counted
(`peak_bytes`): all that is created beside hidden states and head, their gradients included. Time is
processor time.

On a GPU TRL scores only the tokens with a label; elsewhere it scores all. Both are measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

ROWS, TOKENS, WIDTH, VOCABULARY = 16, 1024, 1024, 151_936
ONE_IN = 4
"""One token in so many is an action."""
Way = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]


def with_logits(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """The sum over action tokens, from the logits of all tokens."""
    from ludic.training.loss.logprobs import LogitsUse, compute_token_logp

    logits = torch.nn.functional.linear(hidden, weight)
    return (compute_token_logp(logits, ids, use=LogitsUse(consume=True)) * mask[:, 1:]).sum()


def without_logits(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """The same from hidden states at the action tokens."""
    from ludic.models.output_layer import OutputLayer
    from ludic.training.loss.token_scores import TokenScores

    head = torch.nn.Linear(1, 1, bias=False)
    head.weight = torch.nn.Parameter(weight) if not isinstance(weight, torch.nn.Parameter) else weight
    return TokenScores(hidden, OutputLayer(head), ids, mask=mask).logp.sum()


def trl_all_tokens(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """TRL's function on all tokens, as it calls it without Triton."""
    logps = _trl_scores(hidden[:, :-1].reshape(-1, hidden.shape[-1]), weight, ids[:, 1:].reshape(-1))
    return (logps * mask[:, 1:].reshape(-1)).sum()


def trl_actions(hidden: Tensor, weight: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
    """TRL's function on the action tokens, as it calls it with Triton."""
    scored = mask[:, 1:] > 0
    return _trl_scores(hidden[:, :-1][scored], weight, ids[:, 1:][scored]).sum()


def _trl_scores(hidden: Tensor, weight: Tensor, ids: Tensor) -> Tensor:
    from trl.kernels.chunked_logprob import ChunkedLogProbFunction  # type: ignore[import-not-found, unused-ignore]
    from trl.trainer.utils import _CHUNKED_LOGPROB_CHUNK_SIZE  # type: ignore[import-not-found, unused-ignore]

    logps: Tensor = ChunkedLogProbFunction.apply(hidden, weight, None, ids, 1.0, _CHUNKED_LOGPROB_CHUNK_SIZE, None, 1.0, ())[0]
    return logps


WAYS: dict[str, Way] = {
    "all logits, gradient written over them (`full`)": with_logits,
    "**no logits, action tokens** (`chunked`)": without_logits,
    "TRL 1.16 `ChunkedLogProbFunction`, all tokens, as without Triton": trl_all_tokens,
    "TRL 1.16 `ChunkedLogProbFunction`, action tokens, as with Triton": trl_actions,
}


def measure(way: Way, shape: Sequence[int], one_in: int = ONE_IN) -> dict[str, float]:
    """Seconds and peak bytes of one forward and backward pass, and the sum of both gradients'
    squares, by which ways are compared."""
    from benches.python.peak_bytes import PeakBytes

    rows, tokens, width, vocabulary = shape
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(rows, tokens, width, generator=generator).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(vocabulary, width, generator=generator) / width**0.5)
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=generator)
    mask = (torch.arange(tokens) >= tokens - tokens // one_in).float().expand(rows, -1).contiguous()
    begin = time.process_time()
    with PeakBytes() as in_use:
        total = way(hidden, weight, ids, mask)
        total.backward()
    seconds = time.process_time() - begin
    assert hidden.grad is not None
    assert weight.grad is not None
    squares = hidden.grad.double().square().sum() + weight.grad.double().square().sum()
    return {"seconds": seconds, "bytes": in_use.peak, "value": total.item(), "squares": squares.item()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, help="interpreter of an environment with TRL; without it TRL is left out")
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of 1024 tokens")
    parser.add_argument("--vocabulary", type=int, default=VOCABULARY)
    parser.add_argument("--one-in", type=int, default=ONE_IN, help="one token in so many is an action")
    parser.add_argument("--way", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    shape = args.rows, TOKENS, WIDTH, args.vocabulary
    if args.way is not None:
        torch.set_num_threads(1)
        print(json.dumps(measure(list(WAYS.values())[args.way], shape, args.one_in)))
        return
    results = {}
    for index, name in enumerate(WAYS):
        python = args.trl_python if name.startswith("TRL") else sys.executable
        if python is not None:
            options = {"rows": args.rows, "vocabulary": args.vocabulary, "one-in": args.one_in, "way": index}
            words = [word for option, value in options.items() for word in (f"--{option}", str(value))]
            command = [python, "-m", "benches.python.token_scores", *words]
            done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            results[name] = json.loads(done.stdout.splitlines()[-1])
    print(format_table(results, shape, args.one_in))


def format_table(results: dict[str, dict[str, float]], shape: Sequence[int], one_in: int) -> str:
    """Raises AssertionError if the ways differ by more than rounding."""
    rows, tokens, _, vocabulary = shape
    first = next(iter(results.values()))
    half = rows * tokens * vocabulary * 2
    lines = [
        f"### Log-probabilities of {rows * tokens} tokens, one in {one_in} an action, vocabulary {vocabulary}",
        "",
        "| way | seconds | of the first | peak GB | of the logits in bfloat16 |",
        "|---|---|---|---|---|",
    ]
    for name, result in results.items():
        for key in ("value", "squares"):
            assert abs(result[key] - first[key]) <= 1e-5 * abs(first[key]), (name, key, result[key], first[key])
        ratio = result["seconds"] / first["seconds"]
        lines.append(
            f"| {name} | {result['seconds']:.1f} | {ratio:.2f}x | {result['bytes'] / 1e9:.2f} | {result['bytes'] / half:.2f}x |"
        )
    return "\n".join([*lines, ""])


if __name__ == "__main__":
    main()
