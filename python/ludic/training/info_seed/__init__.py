"""InfoSeed: completions whose prompt names a seed, and what makes them differ by it.

`SeedPrompts` asks for them, `SeedTaggedEnv` tags their prompts, `without_tags` takes the tags out
before training, and the losses of `loss.info_seed` reward that the seed can be told. A name is
imported on first access.
"""

from ludic.importing import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__)
