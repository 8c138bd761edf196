"""Hypothesis profiles: `quick` by default, many more examples with `LUDIC_HYPOTHESIS=thorough`. Threads that wait sleep."""

import os

from hypothesis import settings

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is loaded: spinning threads make busy machines crawl

settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("LUDIC_HYPOTHESIS", "quick"))
