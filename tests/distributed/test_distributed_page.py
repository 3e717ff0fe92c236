"""The script of docs/distributed.md, in processes with the environment that torchrun gives them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
import torch
from ranks import run_script

import fanfold
from samples import ROOT

PAGE = (ROOT / "docs" / "distributed.md").read_text()


def test_the_script_of_the_page_generates_what_one_process_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    script = re.search(r"^```python\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert script
    first, second = run_script(script[1], 2, Path.cwd())
    model = fanfold.load_model(ROOT / "examples/tiny-moe/gptq-int4")
    model.adapters.load("shout", ROOT / "examples/tiny-moe/adapter-shout")
    with model.adapters.using(["shout", None]):
        tokens = model.generate(torch.arange(40, 52).view(2, 6), max_new_tokens=8, do_sample=False)
    assert ast.literal_eval(first) == tokens[:, 6:].tolist()
    assert second == ""


@pytest.mark.parametrize("block", re.findall(r"^```\n(.+?)^```$", PAGE, re.MULTILINE | re.DOTALL))
def test_names_on_the_page_exist(block: str) -> None:
    for name in re.findall(r"fanfold\.distributed\.(\w+)", block):
        assert hasattr(fanfold.distributed, name)
