"""What needs quantizing and evaluating both: where a divergence comes from."""
