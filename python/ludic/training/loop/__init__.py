"""The parts of `Trainer`'s loop: fetching, schedule, early stopping, statistics, the state of a
run."""
