"""Recipes: settings from YAML files and the command line, checked and turned into the objects of
the public API. The loops are in `runs` and `training`."""
