"""A model on disk and in memory: loading and saving, tokenizer, adapters, heads, names of
weights."""
