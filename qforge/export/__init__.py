"""Writing models for other programs, and reading back what was written with readers that are not ours."""
