"""Products in CUDA C++, compiled where they run: what Triton's compiler does not make fast enough."""
