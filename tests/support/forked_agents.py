"""Agents for processes that are forked after this module was imported."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import suppress

IMPORTED_BY = os.getpid()
OPENED = os.open("/", os.O_RDONLY)


def ask(session, text="x"):
    body = json.dumps({"model": session.model, "messages": [{"role": "user", "content": text}]}).encode()
    headers = {"authorization": f"Bearer {session.api_key}", "content-type": "application/json"}
    asked = urllib.request.Request(f"{session.base_url}/chat/completions", body, headers)
    return json.load(urllib.request.urlopen(asked, timeout=20))["choices"][0]["message"]["content"]


def where(session):
    """Where it runs, and what it was given."""
    ask(session)
    assert os.path.samefile(os.environ["HOME"], ".")
    with open(".prompt") as file:
        assert file.read() == session.prompt == session.row["question"]
    print("noise")
    found = {"pid": os.getpid(), "imported_by": IMPORTED_BY, "files": sorted(os.listdir()), "row": session.row}
    return json.dumps({**found, "own": os.environ["OWN"], "messages": session.messages})


async def with_client(session):
    client = session.client()
    asked = await client.chat.completions.create(model=session.model, messages=session.messages)
    return asked.choices[0].message.content


def last_message(session):
    ask(session)


def ends(session):
    """Ends as the row says, after a call."""
    ask(session)
    how = session.row["kind"]
    if how == "raises":
        raise ValueError("gave up")
    if how == "exits":
        os._exit(0)
    if how == "wrong type":
        return 3
    if how == "no JSON":
        return {1, 2}
    if how == "closes its output":
        sys.stdout.close()
    if how == "returns twice":
        os.fork()
        return "yes" * 100_000
    if how == "long":
        return "\ud800\n" * 1_000_000
    if how == "floods":
        while True:
            os.write(link(), b"x" * 2**20)
    if how == "is killed":
        if os.fork() == 0:
            time.sleep(600)
        os.kill(os.getpid(), signal.SIGKILL)
    if how == "runs a program":
        os.system(f"echo '\"no\"' >&{link()}")
    if how == "leaves many":
        for _ in range(100):
            if os.fork() == 0:
                time.sleep(600)
    if how == "leaves a process":
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", session.row["mark"]], start_new_session=True)
    if how in ("leaves a fork", "hangs"):
        while os.fork() == 0 or how == "hangs":
            time.sleep(600)
    return "yes"


def link():
    """The number of the descriptor at which the answer is written."""
    return next(n for n in range(3, 99) if os.path.islink(f"/proc/self/fd/{n}") and "socket" in os.readlink(f"/proc/self/fd/{n}"))


def rights(session):
    """What it can reach and do."""
    ask(session)
    found = {"env": sorted(os.environ), "fds": []}
    for name, address in {"network": ("1.1.1.1", 53), "ssh": ("127.0.0.1", 22), "own": ("127.0.0.1", 8000)}.items():
        with socket.socket() as connection:
            connection.settimeout(1)
            found[name] = connection.connect_ex(address) == 0
    for path in ("/root", "/home", "/work", "/proc/1/root/root"):
        try:
            found[path] = bool(os.listdir(path))
        except OSError:
            found[path] = False
    for path in ("/usr/x", "/x", f"{sys.prefix}/x"):
        found[path] = os.access(os.path.dirname(path), os.W_OK)
    with open("/proc/self/status") as file:
        status = dict(line.split(":\t") for line in file.read().splitlines())
    with open("/proc/self/environ", "rb") as file:
        found["secret"] = b"hidden" in file.read()
    found["processes"] = sum(name.isdigit() for name in os.listdir("/proc"))
    for number in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # the one of the list
            found["fds"].append(os.readlink(f"/proc/self/fd/{number}")[:5])
    found["executable"] = os.readlink("/proc/self/exe")
    try:
        found["writes itself"] = os.write(os.open("/proc/self/exe", os.O_WRONLY), b"x")
    except OSError:
        found["writes itself"] = False
    found["status"] = {name: status[name] for name in ("Uid", "Groups", "CapEff", "CapPrm", "CapBnd", "NoNewPrivs", "Seccomp")}
    return json.dumps(found)
