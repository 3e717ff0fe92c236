"""The four operations by name: shrink and expand, grouped and gathered.

Grouped takes the rows of a plan, gathered those of a small batch one by one; the arguments are those of `launch.shrink`
and `launch.expand`.
"""

from __future__ import annotations

from functools import partial

from fanfold.kernels.lora.launch import expand, shrink

lora_shrink_grouped = partial(shrink, "lora_shrink_grouped")
lora_expand_grouped = partial(expand, "lora_expand_grouped")
lora_shrink_gather = partial(shrink, "lora_shrink_gather")
lora_expand_gather = partial(expand, "lora_expand_gather")
