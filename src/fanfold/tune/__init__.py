"""Searches for configs of layers on this machine's GPU, for tables that layers read."""

from fanfold.tune.run import tune as tune
