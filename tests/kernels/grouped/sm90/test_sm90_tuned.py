"""The table of measured configs, and what its reader refuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fanfold.errors import ConfigError
from fanfold.kernels.grouped.sm90.config import misfits
from fanfold.kernels.grouped.sm90.tuned import TABLE, read_table
from fanfold.spec import WeightFormat


def test_the_table() -> None:
    table = read_table()
    shapes = {(row.experts, row.top_k, row.hidden, row.intermediate) for row in table}
    known = {(128, 8, 2048, 768), (8, 2, 4096, 14336), (32, 8, 7168, 2048)}
    assert shapes == known | {(128, 4, 2880, 2880), (512, 10, 2048, 512)}
    assert len({(row.format, row.experts, row.hidden, row.tokens) for row in table}) == len(table) == 43
    for row in table:
        assert row.us["floor"] < row.us["layer"]
        assert sum(row.us[step] for step in ("plan", "gate_up", "down", "sum")) < 1.3 * row.us["layer"]
        for rows, k, config, gate_up in (
            (2 * row.intermediate, row.hidden, row.gate_up, True),
            (row.hidden, row.intermediate, row.down, False),
        ):
            fmt = WeightFormat.parse("gptq4-g128" if row.format == "int4" else row.format)
            assert misfits(config, fmt, -(-rows // 128) * 128, -(-k // 128) * 128, gate_up) == ()
    few, many = table[0], table[6]
    assert (few.gate_up.name, few.down.name) == ("t8-w1x1-k512-s2-sum", "t8-w1x2-k128-s3-sum-p3")
    assert (many.gate_up.name, many.chained) == ("t128-32-w2x2-k128-s3-g8", True)


def first(table: dict[str, Any]) -> dict[str, Any]:
    return table["layers"][0]


WRONG: dict[str, tuple[Callable[[dict[str, Any]], object], str]] = {
    "no layers": (lambda t: t.pop("layers"), r"table: found fields"),
    "a field too many": (lambda t: t.update(note=""), r"table: found fields"),
    "layers no list": (lambda t: t.update(layers={}), r"table.layers: found \{\}; expected list"),
    "a row no object": (lambda t: t["layers"].append(3), r"layers\[43\]: found int"),
    "another format": (lambda t: first(t).update(format="int8"), r"layers\[0\].format: found 'int8'"),
    "tokens a string": (lambda t: first(t).update(tokens="1"), r"layers\[0\].tokens: found '1'; expected int"),
    "tokens 0": (lambda t: first(t).update(tokens=0), r"layers\[0\].tokens: found 0"),
    "chained a number": (lambda t: first(t).update(chained=1), r"chained: found 1; expected bool"),
    "a time a string": (lambda t: first(t)["us"].update(sum="3"), r"layers\[0\].us.sum: found '3'; expected float"),
    "a config short": (lambda t: first(t)["down"].pop("parts"), r"layers\[0\].down: found fields"),
    "a config of bools": (lambda t: first(t)["down"].update(slabs=True), r"down.slabs: found True; expected int"),
    "a config that no kernel has": (lambda t: first(t)["down"].update(slabs=3), r"down: Sm90Config.slabs: found 3"),
    "two tiles": (lambda t: first(t)["down"].update(block_t=16), r"down.block_t: found 16; expected 8"),
}


@pytest.mark.parametrize("case", WRONG)
def test_another_table(case: str, tmp_path: Path) -> None:
    change, message = WRONG[case]
    table = json.loads(TABLE.read_text())
    change(table)
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    with pytest.raises(ConfigError, match=message):
        read_table(path)


def test_a_users_table_needs_no_steps(tmp_path: Path) -> None:
    table = json.loads(TABLE.read_text())
    first(table)["us"] = {"layer": 10.5, "floor": 4.4}
    path = tmp_path / "table.json"
    path.write_text(json.dumps(table))
    row = read_table(path)[0]
    assert row.us == {"layer": 10.5, "floor": 4.4}
    assert (row.header.path, row.header.gpu, row.header.arch) == (path, "NVIDIA H200", "sm_90")


def test_no_table(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none.json: file: found"):
        read_table(tmp_path / "none.json")
    (tmp_path / "bad.json").write_text("{")
    with pytest.raises(ConfigError, match=r"expected JSON"):
        read_table(tmp_path / "bad.json")
