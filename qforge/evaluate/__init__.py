"""How good the small model is: divergence from the original, intervals, gates, comparison of two results."""
