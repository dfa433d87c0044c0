"""Reports for people and CI systems, made from results.json and from nothing else."""

from __future__ import annotations

from qforge.report.write import FORMATS, write, write_comparison, write_sweep

__all__ = ["FORMATS", "write", "write_comparison", "write_sweep"]
