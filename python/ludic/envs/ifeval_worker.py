"""The worker process that checks answers by the IFEval of lm-evaluation-harness: JSON lines in,
JSON lines out. It runs as a file and imports nothing from ludic.

A request `{"doc": {"key": 1, "prompt": "...", "instruction_id_list": ["punctuation:no_comma"],
"kwargs": [{}]}, "answer": "Yes."}` is answered by `{"followed": [true]}`, one verdict for each
instruction, or by `{"error": "..."}`. Before the first request it says `{"ready": true}`.

The harness draws what a row leaves out at random, and guesses the language of a text at random, so
both are seeded for each answer. Its first import downloads the sentence model `punkt_tab` of nltk;
the parent kills a process that is not ready at its deadline.
"""

import json
import os
import random
import sys
from typing import Any


def main() -> None:
    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="ascii", buffering=1)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # output of libraries must not look like a reply
    from langdetect import DetectorFactory
    from lm_eval.tasks.ifeval.utils import process_results

    DetectorFactory.seed = 0
    print(json.dumps({"ready": True}), file=replies, flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        random.seed(0)
        print(json.dumps(_reply(process_results, request)), file=replies, flush=True)


def _reply(process_results: Any, request: dict[str, Any]) -> dict[str, Any]:
    try:
        results = process_results(request["doc"], [request["answer"]])
        return {"followed": [bool(verdict) for verdict in results["inst_level_strict_acc"]]}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500]}


if __name__ == "__main__":
    main()
