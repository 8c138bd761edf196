"""Rewards from programs that run: problems with tests, sandboxes, and the environment that judges.

A sandbox runs programs; a pool lends sandboxes; a runner judges a program by its tests; adapters
read data sets of problems; verifiers compare outputs.
"""

from importlib.util import find_spec

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)

if (_docker := find_spec("docker")) is None or _docker.origin is None:  # documented: without the package, the names are None
    DockerSandbox = DockerSandboxConfig = DockerSandboxPool = None
