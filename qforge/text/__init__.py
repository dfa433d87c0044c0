"""Text -> documents -> token windows: what calibration and evaluation read."""
