"""The command line: one file per verb, each parses and prints, nothing else."""
