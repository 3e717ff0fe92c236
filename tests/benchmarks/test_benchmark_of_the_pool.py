"""benchmarks/adapter_pool.py runs on a CPU, and its row says what its page says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_small_run(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    sizes = ["--layers", "1", "--experts", "8", "--adapters", "2", "--rank", "4", "--device", "cpu"]
    command = [sys.executable, str(ROOT / "benchmarks" / "adapter_pool.py"), *sizes, "--json", "--out", str(rows)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=200)
    assert done.returncode == 0, done.stderr
    (line,) = rows.read_text().splitlines()
    row = json.loads(line)
    assert json.loads(done.stdout) == row
    padded = 8 * 3 * (2048 + 768) * 8 * 2  # experts, projections, A and B, rank 4 kept as 8, bf16
    assert row["padded_bytes"] == padded
    assert row["memory_bytes"] == [padded, padded]
    assert row["over_padded"] == 1.0
    assert row["file_bytes"] > padded / 2
    assert len(row["load_s"]) == 2
    assert row["launch_us"]["p50"] <= row["launch_us"]["p99"]
    for name in ("load_gigabytes_per_second", "read_gigabytes_per_second", "load_s_beside_launches"):
        assert row[name] > 0
    assert row["copy_gigabytes_per_second"] is None
    page = (ROOT / "benchmarks" / "README.md").read_text()
    for name in row:
        assert f"`{name}`" in page, name
