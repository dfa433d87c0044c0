"""Code that runs on the GPU (or in Triton's interpreter). Needs the package triton to be imported."""
