"""Figures of expert layers: random weights in any format, verified, then timed."""
