"""Counters on the hot path, and the windows that are made of them."""
