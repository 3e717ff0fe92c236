"""Names of the files of an export."""

from __future__ import annotations

from fanfold.export.description import Kernel

MANIFEST, SCHEMA = "manifest.json", "manifest.schema.json"
HEADER, SOURCE = "fanfold_kernels.h", "fanfold_kernels.c"


def ptx_path(kernel: Kernel) -> str:
    """Of a kernel's PTX, from the export's folder on."""
    return f"kernels/{kernel.arch}/{kernel.id}.ptx"


def cubin_path(kernel: Kernel) -> str:
    """Of its machine code."""
    return f"kernels/{kernel.arch}/{kernel.id}.cubin"
