"""Where weights come from: sources, names, adapters, and models as chains of decoder blocks."""
