import os
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def places(monkeypatch):
    """Where workspaces are made: a folder that the user of sandboxes can enter. Its path is short,
    as that of a socket has to be."""
    with tempfile.TemporaryDirectory(dir="/tmp") as folder:
        os.chmod(folder, 0o711)
        monkeypatch.setattr(tempfile, "tempdir", folder)
        yield Path(folder)
