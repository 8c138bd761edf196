"""Hypothesis profiles: `quick` by default, the same examples in every run; `LUDIC_HYPOTHESIS=thorough` searches among many more.

Threads that wait sleep.
"""

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: spinning threads make busy machines crawl

settings.register_profile("quick", max_examples=50, deadline=None, derandomize=True)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("LUDIC_HYPOTHESIS", "quick"))
