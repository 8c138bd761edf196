"""Tests that call a function: the calls run in a sandbox, their values are compared outside."""
