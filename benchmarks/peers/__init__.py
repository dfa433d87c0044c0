"""The parts of `vs_quantizers.py`: texts, who runs, one judge, one table."""
