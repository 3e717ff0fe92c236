"""Whole models on a clock: prefill and decode, with fanfold's experts and with transformers' own."""

from fanfold.throughput.run import throughput as throughput
