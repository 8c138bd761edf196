"""How long a sync of engines takes, on loopback sockets: `python -m benches.python.engine_sync`.

Eight stub servers, four of vLLM and four of SGLang, that need different times to read a folder:
each alone, then all at once. Engines load at the same time, so all take about as long as the
slowest. Then one of three engines hangs inside its load, by kind: the sync fails after its timeout.
Then a vLLM stub changes one element of one tensor after it has loaded the folder, drawn anew each
time: how often the sync finds it. An SGLang server does not tell what weights it has, only their
version.

The stubs (tests/support) speak the protocols of vLLM 0.32 and SGLang 0.5.23.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "support"))

from safetensors.torch import save_file
from stub_sglang import StubSGLang
from stub_weight_server import StubWeightServer, weights

from ludic.distributed.engines import SGLangEngine, VLLMEngine, sync_weights_to_engines
from ludic.distributed.push.manifest import VersionFolders
from ludic.errors import PublishError

BULK = {StubWeightServer: "/update_weights", StubSGLang: "/update_weights_from_disk"}
"""The call that reads the folder."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slowest", type=float, default=2.0, help="seconds that the slowest of eight engines needs to load")
    parser.add_argument("--timeout", type=float, default=2.0, help="timeout of the engine that hangs")
    parser.add_argument("--changes", type=int, default=200, help="changed elements")
    args = parser.parse_args()
    logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        fleet = Fleet(Path(folder), stack)
        report_eight(fleet, args.slowest, args.rounds)
        report_hangs(fleet, args.timeout, args.rounds)
        report_changes(fleet, args.changes)


class Fleet:
    """Starts stubs, and writes versions for them."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.stack = folder, stack
        self.model = folder / "model"
        self.model.mkdir()
        save_file(weights(0), self.model / "model.safetensors")
        (self.model / "config.json").write_text(json.dumps({"dtype": "float32", "tie_word_embeddings": False}))
        self.versions = VersionFolders(folder / "checkpoints", model=self.model, keep=4)
        self.written = self.started = 0

    def vllm(self) -> Any:
        self.started += 1
        return self.stack.enter_context(StubWeightServer(self.folder / f"server{self.started}"))

    def sglang(self) -> Any:
        return self.stack.enter_context(StubSGLang(self.model))

    def next_version(self) -> str:
        self.written += 1
        return str(self.versions.write(weights(self.written), self.written))


def engine_of(server: Any, timeout: float = 60.0) -> Any:
    return (SGLangEngine if isinstance(server, StubSGLang) else VLLMEngine)(server.url, timeout)


def seconds_of(run: Callable[[], Any]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def sync(engines: list[Any], folder: str, **options: Any) -> list[Any]:
    return asyncio.run(sync_weights_to_engines(engines, folder, **options))


def report_eight(fleet: Fleet, slowest_s: float, rounds: int) -> None:
    servers = [start() for _ in range(4) for start in (fleet.vllm, fleet.sglang)]
    for number, server in enumerate(servers, 1):
        delay_s = slowest_s * number / len(servers)
        server.faults[BULK[type(server)]] = lambda _, delay_s=delay_s: time.sleep(delay_s)
    engines = [engine_of(server) for server in servers]
    ratios = []
    print("| engine | seconds alone |\n|---|---|")
    for number in range(rounds):
        alone = [seconds_of(lambda e=engine: sync([e], fleet.next_version())) for engine in engines]
        together = seconds_of(lambda: sync(engines, fleet.next_version()))
        ratios.append(together / max(alone))
        if number == 0:
            for server, seconds in zip(servers, alone, strict=True):
                print(f"| {type(server).__name__} | {seconds:.2f} |")
            print(f"| all eight at once | {together:.2f} |")
    print(f"\nall eight / the slowest alone, {rounds} rounds: median {median(ratios):.3f}, largest {max(ratios):.3f}\n")


def report_hangs(fleet: Fleet, timeout_s: float, rounds: int) -> None:
    print("| hangs | timeout, s | longest sync, s |\n|---|---|---|")
    for start in (fleet.vllm, fleet.sglang):
        times = []
        for _ in range(rounds):
            server, others, held = start(), [fleet.vllm(), fleet.sglang()], threading.Event()
            engines = [engine_of(server, timeout_s), *map(engine_of, others)]
            sync(engines, fleet.next_version())
            server.faults[BULK[type(server)]] = lambda _, held=held: held.wait(60) and None
            times.append(seconds_of(lambda e=engines: fail(e, fleet.next_version())))
            held.set()
        print(f"| {type(server).__name__} | {timeout_s:g} | {max(times):.2f} |")
    engines = [HangingEngine(timeout_s), *map(engine_of, (fleet.vllm(), fleet.sglang()))]
    print(f"| an engine of the user | {timeout_s:g} | {seconds_of(lambda: fail(engines, fleet.next_version())):.2f} |\n")


class HangingEngine:
    def __init__(self, timeout: float) -> None:
        self.timeout = timeout

    async def update_weights_from_checkpoint(self, checkpoint_path: str) -> dict[str, Any]:
        await asyncio.Event().wait()
        raise AssertionError


def fail(engines: list[Any], folder: str) -> PublishError:
    """The error of a sync that must fail."""
    try:
        sync(engines, folder)
    except PublishError as error:
        return error
    raise AssertionError("the sync succeeded")


def report_changes(fleet: Fleet, changes: int) -> None:
    server, draw = fleet.vllm(), random.Random(0)
    engines = [engine_of(server)]
    sync(engines, fleet.next_version())
    found = 0
    for _ in range(changes):
        name = draw.choice(sorted(server.served))
        element = draw.randrange(server.served[name].numel())

        def change(_: object, name: str = name, element: int = element) -> None:
            server.faults.clear()
            server.served[name] = changed = server.served[name].clone()
            changed.view(-1)[element] += 1e-6

        server.faults["/reset_prefix_cache"] = change
        try:
            sync(engines, fleet.next_version(), retries=0)
        except PublishError as error:
            found += f"'{name}'" in str(error)
    print(f"one changed element of one tensor: found {found} of {changes}")


if __name__ == "__main__":
    main()
