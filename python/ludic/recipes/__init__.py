"""Recipes: names and files turned into the objects of the public API. No loop of its own:
`Trainer` has it."""
