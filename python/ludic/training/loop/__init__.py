"""The parts of `Trainer`'s loop, one concept per module."""
