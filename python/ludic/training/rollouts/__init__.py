"""Requests to samples: what is to be played, the engine that plays it, and its log."""
