"""Engines: what can score or run a model file, ours and others'."""
