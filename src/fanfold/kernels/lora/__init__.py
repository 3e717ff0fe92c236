"""The LoRA fold: scale * B (A x) added onto a base product."""
