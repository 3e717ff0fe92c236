"""Scores to Route: top-k and the plan."""
