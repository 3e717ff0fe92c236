"""An export as a repository of the `kernels` hub: one variant, a Python module without machine code of the host.

Layout and metadata are those of kernels 0.17: `build/torch-cuda` holds `__init__.py`, `metadata.json` with a digest of
every other file, and for older versions a folder of the kernel's name that exports the same.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from fanfold.export.compile import Compiled
from fanfold.export.files import write
from fanfold.export.manifest import to_json

NAME, VERSION, LICENSE = "fanfold-kernels", 0, "Apache-2.0"
"""Version 0 is that of kernels whose interface may still change."""
VARIANT = "torch-cuda"
MODULE = NAME.replace("-", "_")
COMPATIBLE = '''"""The same names for older versions of the kernels package, which look for them here."""

from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

_spec = spec_from_file_location(__name__ + "_module", Path(__file__).parent.parent / "__init__.py")
_module = module_from_spec(_spec)
_spec.loader.exec_module(_module)
globals().update({name: value for name, value in vars(_module).items() if not name.startswith("__")})
'''
CARD = """---
library_name: kernels
license: apache-2.0
tags: [kernels]
---

# fanfold kernels

Expert layers of Mixture-of-Experts models at inference: packed weights as the quantiser wrote them, many LoRA adapters
in one batch. Exported by fanfold {fanfold} with Triton {triton}; `manifest.json` says what each function takes.

```python
from kernels import get_local_kernel

fanfold = get_local_kernel("PATH OF THIS FOLDER")
fanfold.functions()
fanfold.describe({example!r})
```

Functions: {functions}. Compiled for {archs}. `build/torch-cuda` also has a launcher in C (`fanfold_kernels.h`, `.c`).
"""


def write_hub(folder: Path, compiled: Sequence[Compiled], made: dict[str, Any]) -> None:
    """Writes the tree of a repository."""
    variant = folder / "build" / VARIANT
    write(variant, compiled, made)
    module = (files("fanfold.export") / "hub_module.py").read_text(encoding="utf-8")
    (variant / "__init__.py").write_text(module, encoding="utf-8")
    (variant / MODULE).mkdir()
    (variant / MODULE / "__init__.py").write_text(COMPATIBLE, encoding="utf-8")
    functions = [function["name"] for function in made["functions"]]
    archs = list(dict.fromkeys(kernel["arch"] for kernel in made["kernels"]))
    card = CARD.format(**made["made_by"], example=functions[0], functions=", ".join(functions), archs=", ".join(archs))
    (folder / "README.md").write_text(card, encoding="utf-8")
    metadata = json.dumps(_metadata(variant, made, archs), indent=2) + "\n"
    (variant / "metadata.json").write_text(metadata, encoding="utf-8")


def _metadata(variant: Path, made: dict[str, Any], archs: list[str]) -> dict[str, Any]:
    """Of the files that lie there; the id is another one for other kernels."""
    paths = sorted(path for path in variant.rglob("*") if path.is_file())
    digests = {
        path.relative_to(variant).as_posix(): base64.b64encode(hashlib.sha256(path.read_bytes()).digest()).decode()
        for path in paths
    }
    numbers = [int(arch.removeprefix("sm_")) for arch in archs]
    return {
        "name": NAME,
        "id": f"_{MODULE}_cuda_{hashlib.sha256(to_json(made).encode()).hexdigest()[:7]}",
        "version": VERSION,
        "license": LICENSE,
        "python-depends": [],
        "backend": {"type": "cuda", "archs": [f"{number // 10}.{number % 10}" for number in numbers]},
        "digest": {"algorithm": "sha256", "files": digests},
    }
