"""Byte layouts: how other people's files hold a `QuantizedLinear`. Layouts transcribe; they never compute."""
