"""Where tables lie, and the line about a layer that none has."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from fanfold.errors import ConfigError
from fanfold.kernels.common import tables


def test_the_users_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FANFOLD_TUNED", str(tmp_path))
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    assert tables.user_folder() == tmp_path
    monkeypatch.delenv("FANFOLD_TUNED")
    assert tables.user_folder() == Path("/data/fanfold/tuned")
    monkeypatch.delenv("XDG_DATA_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert tables.user_folder() == tmp_path / ".local/share/fanfold/tuned"


def test_a_table_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FANFOLD_TUNED", str(tmp_path))
    paths = [tables.user_table("grouped", gpu) for gpu in ("NVIDIA H200", "NVIDIA H100 80GB HBM3")]
    assert paths[0] == tmp_path / "NVIDIA-H200" / "grouped.json"
    assert tables.user_tables("grouped", "NVIDIA H200") == tables.user_tables("grouped", None) == []
    for path in (*paths, tmp_path / "NVIDIA-H200" / "other.json"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("{}")
    assert tables.user_tables("grouped", "NVIDIA H200") == paths[:1]
    assert tables.user_tables("grouped", None) == sorted(paths)
    with pytest.raises(ConfigError, match=rf"grouped.json: table: found fields .* Remove {paths[0]}, or"):
        tables.read(paths[0])


def test_a_missing_row_is_one_line_with_the_command(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "fanfold"):
        for _ in range(3):
            tables.note_missing("NVIDIA L4", "gptq4-g64", (6, 2, 640, 384), "configs are those of the nearest layer")
    (record,) = caplog.records
    assert record.getMessage() == (
        "no tuned row for gptq4-g64 experts of this shape on NVIDIA L4, so configs are those of the nearest layer; "
        "`fanfold tune --shape 6,2,640,384 --format gptq4-g64` makes some"
    )
