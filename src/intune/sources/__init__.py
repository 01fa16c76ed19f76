"""Readers: each a source that the pipeline package knows by protocol only."""
