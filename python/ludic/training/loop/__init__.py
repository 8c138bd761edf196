"""What `Trainer` is made of: one concept of its loop in each module."""
