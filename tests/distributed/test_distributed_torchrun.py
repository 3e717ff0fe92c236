"""The script of docs/distributed.md under the command of that page."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fanfold
from samples import ROOT

PAGE = ROOT / "docs" / "distributed.md"
COMMAND = "torchrun --standalone --nproc-per-node 8 serve.py"


def test_the_script_of_the_page_generates_what_one_process_does(tmp_path: Path) -> None:
    page = PAGE.read_text()
    assert COMMAND in page
    script = re.search(r"^```python\n(.+?)^```$", page, re.MULTILINE | re.DOTALL)
    assert script
    (tmp_path / "serve.py").write_text(script[1])
    command = COMMAND.replace("8 serve.py", f"2 {tmp_path / 'serve.py'}").removeprefix("torchrun ").split()
    done = subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", *command],
        cwd=ROOT,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    model = fanfold.load_model(ROOT / "examples/tiny-moe/gptq-int4")
    model.adapters.load("shout", ROOT / "examples/tiny-moe/adapter-shout")
    with model.adapters.using(["shout", None]):
        tokens = model.generate(torch.arange(40, 52).view(2, 6), max_new_tokens=8, do_sample=False)
    assert ast.literal_eval(done.stdout.strip().splitlines()[-1]) == tokens[:, 6:].tolist()


@pytest.mark.parametrize("block", re.findall(r"^```\n(.+?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL))
def test_names_on_the_page_exist(block: str) -> None:
    for name in re.findall(r"fanfold\.distributed\.(\w+)", block):
        assert hasattr(fanfold.distributed, name)
