"""The quantized linear as an operation: the reference, the native kernels, and the choice among them."""
