"""Settings of `ludic sft`, and the objects that are made from them."""
