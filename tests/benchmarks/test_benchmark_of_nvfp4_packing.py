"""benchmarks/nvfp4_packing.py verifies each of its jobs on a CPU, and its rows say what its page says."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_run(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    sizes = ["--tokens", "5", "--inputs", "64", "--weights", "2x32x64", "--device", "cpu"]
    command = [sys.executable, str(ROOT / "benchmarks" / "nvfp4_packing.py"), *sizes, "--out", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert Counter(row["job"] for row in rows) == {"activations": 8, "weights": 4, "swizzle": 2, "unswizzle": 1}
    plain, gathered = (
        row for row in rows if (row["job"], row.get("levels"), row.get("ties")) == ("activations", 2, "even")
    )
    moved = 5 * 64 * 2 + 5 * 4 + 5 * 64 // 2 + 5 * 64 // 16  # x, global scales, codes, scales
    assert (plain["bytes"], gathered["bytes"]) == (moved, moved + 5 * 4)
    weights = next(row for row in rows if row["job"] == "weights")
    assert weights["bytes"] == 2 * 2 * 32 * 64 * 2 + 2 * (32 * 64 // 2 + 32 * 64 // 16 + 4)
    for row in rows:
        assert row["refused"] is None
        assert row["p20_us"] <= row["median_us"] <= row["p80_us"]
        assert abs(row["of_copy"] - row["copy_us"] / row["median_us"]) < 1e-9
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for name in {name for row in rows for name in row}:
        assert f"`{name}`" in page, name
