"""The worker process that compares two answers: JSON lines in, JSON lines out. It runs as a file
and imports nothing from ludic.

A request `{"target": "\\\\frac{1}{2}", "answer": "so it is \\\\boxed{0.5}", "limit_s": 10}` is
answered by `{"correct": true}` or by `{"error": "..."}`. Before the first request it says
`{"ready": true}`.

Symbolic algebra can take unlimited time and memory (`\\\\boxed{9^{9^{9^9}}}`). The parent kills
this process at its deadline; `limit_s` and the memory limit end it if the parent is gone.
"""

import json
import os
import resource
import signal
import sys
from typing import Any


def main(memory_mb: int) -> None:
    limit = memory_mb * 2**20
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not look like a reply
    compare = _comparison()
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request["limit_s"])  # SIGALRM ends the process
        print(json.dumps(_reply(compare, request)), file=replies, flush=True)
        signal.setitimer(signal.ITIMER_REAL, 0)


def _reply(compare: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"correct": compare(request["target"], request["answer"])}
    except MemoryError:
        return {"error": "MemoryError: the comparison took more memory than it may have"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


def _comparison() -> Any:
    """`compare(target, answer)` by math-verify, warmed up. An answer without an expression is
    wrong; a target without one is an error."""
    import logging

    from math_verify import parse, verify

    logging.disable(logging.CRITICAL)

    def read(text: str) -> list[Any]:
        return parse(text, parsing_timeout=None, raise_on_error=True)

    def compare(target: str, answer: str) -> bool:
        expected = read(f"\\boxed{{{target}}}")
        if not expected:
            raise ValueError(f"there is nothing to compare with in the target {target!r}")
        return bool(verify(expected, read(answer), timeout_seconds=None, raise_on_error=True))

    compare("1", "\\boxed{\\frac{2}{2}}")
    return compare


if __name__ == "__main__":
    main(int(sys.argv[1]))
