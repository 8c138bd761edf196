"""Settings of `ludic train-rm`, and the objects that are made from them."""
