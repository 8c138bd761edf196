"""What is shown and written at the end of a run."""
