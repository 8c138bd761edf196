"""Hypothesis profiles: `quick` by default, many more examples with `LUDIC_HYPOTHESIS=thorough`."""

import os

from hypothesis import settings

settings.register_profile("quick", max_examples=50, deadline=None)
settings.register_profile("thorough", max_examples=2000, deadline=None)
settings.load_profile(os.environ.get("LUDIC_HYPOTHESIS", "quick"))
