"""Calibration: replay the model block by block on token windows, gather statistics, let each block be quantized, go on from the quantized block."""
