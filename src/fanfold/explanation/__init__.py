"""explain: what would run, why, and how fast it could be at best. It needs no GPU, and no Triton."""

from fanfold.explanation.checkpoint import explain_checkpoint as explain_checkpoint
from fanfold.explanation.layer import explain as explain
from fanfold.explanation.work import matrix_bytes as matrix_bytes
