"""Adapters that a trainer sends to a vLLM server: it gets the folder that vLLM can load them from.

    PUT /ludic/adapters/first@17   adapter_model.safetensors -> {"path": "/tmp/..", "digest": ".."}

The config is in the file's metadata. A file that did not arrive whole is dropped.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import shutil
import tempfile
import weakref
from collections import defaultdict, deque
from functools import cached_property
from pathlib import Path

from ludic.inference.vllm.in_server.asgi import Message, Receive

UPLOADS = "/ludic/adapters/"
CONFIG = "adapter_config"
KEPT = 4
"""Versions of a run whose files stay: a running request may need one that vLLM evicted."""


class AdapterStore:
    """The adapters of all runs, in folders that are deleted when the process ends. None is used
    twice: vLLM's prefix cache tells adapters apart by name and folder."""

    def __init__(self) -> None:
        self._folders: defaultdict[str, deque[Path]] = defaultdict(deque)  # of each run, oldest first

    @cached_property
    def _root(self) -> str:
        """Made for the first adapter: most servers get none."""
        root = tempfile.mkdtemp(prefix="ludic-adapters-")
        weakref.finalize(self, shutil.rmtree, root, ignore_errors=True)
        return root

    async def store(self, name: str, receive: Receive) -> tuple[int, object]:
        """(status, answer) of a request whose body is the file of the adapter `name`."""
        folder, content = Path(tempfile.mkdtemp(dir=self._root)), bytearray()
        message: Message = {"more_body": True}
        try:
            while message.get("more_body"):
                message = await receive()
                content += message["body"]  # there is none once the trainer is gone
            digest = await asyncio.to_thread(_write, folder, content)  # the server samples meanwhile
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            shutil.rmtree(folder)
            return 400, {"error": {"message": f"{name} is not the whole file of an adapter: {error!r}"}}
        folders = self._folders[name.rpartition("@")[0]]
        folders.append(folder)
        if len(folders) > KEPT:
            shutil.rmtree(folders.popleft())
        return 200, {"path": str(folder), "digest": digest}


def _write(folder: Path, content: bytearray) -> str:
    """Write the files of an adapter. Returns the digest of its safetensors."""
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    (folder / "adapter_config.json").write_text(json.dumps(json.loads(header["__metadata__"][CONFIG])))
    (folder / "adapter_model.safetensors").write_bytes(content)
    return hashlib.blake2b(content).hexdigest()
