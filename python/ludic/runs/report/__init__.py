"""The report at the end of a run, and its summary.json."""
