"""A policy on disk and in memory: loading and saving, tokenizer, adapters, heads, the names of
its weights."""
