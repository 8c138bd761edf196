"""A trainer process whose last statement leaves the process group that it shares with a server.

Run as `python closing_trainer.py`. It starts the server as `python closing_trainer.py PORT`.
"""

import subprocess
import sys
from datetime import timedelta

from ludic.inference.vllm.in_server.weight_receiver import WeightReceiver, close_group, open_process_group, open_store

TIMEOUT_S = 60.0


def serve(port):
    receiver = WeightReceiver()
    receiver.connect(
        master_address="127.0.0.1", master_port=port, rank=1, world_size=2, timeout_s=TIMEOUT_S, group_id="g", kind="gloo"
    )
    print("connected", flush=True)
    sys.stdin.read()


def connect():
    timeout = timedelta(seconds=TIMEOUT_S)
    store, port = open_store("127.0.0.1", 2, timeout)
    server = subprocess.Popen([sys.executable, __file__, str(port)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    group = open_process_group(store, 0, 2, timeout=timeout, kind="gloo", loopback=True)
    assert server.stdout.readline() == b"connected\n"
    return [group]


if len(sys.argv) > 1:
    serve(int(sys.argv[1]))
else:
    close_group(connect())
