"""Measurements that the trainer takes while it trains, on data that it does not train on."""
