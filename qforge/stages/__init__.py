"""The stages of a run: each takes what the one before gave, keeps finished work in the journal, and knows nothing of the command line."""
