"""The commands as a user meets them: standard output, standard error, exit codes."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import fanfold
from fanfold.cli import demo, output
from fanfold.cli.app import app

ROOT = Path(__file__).parents[2]
TINY = ROOT / "examples" / "tiny-moe"
GPTQ = str(TINY / "gptq-int4")
SHOUT = f"shout={TINY / 'adapter-shout'}"
GOLDEN = ROOT / "tests" / "golden"


@pytest.fixture(autouse=True)
def plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    set_columns(monkeypatch, 100)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")


def set_columns(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    for console in (output.out, output.err):
        monkeypatch.setattr(console, "width", columns)
        monkeypatch.setattr(console, "no_color", True)


def call(*arguments: str, stdin: str | None = None) -> Any:
    return CliRunner().invoke(app, arguments, input=stdin, catch_exceptions=False)


def test_version() -> None:
    result = call("--version")
    assert (result.exit_code, result.stdout) == (0, f"fanfold {fanfold.__version__}\n")


def test_help_names_every_command() -> None:
    text = call("--help").stdout
    for command in ("demo", "generate", "inspect", "verify", "explain", "bench", "doctor", "routing"):
        assert command in text
    assert call().exit_code == 2


# generate


def test_generate_json() -> None:
    arguments = ["--prompt", "base=The king", "--prompt", "shout=The king", "--max-new-tokens", "5", "--json"]
    result = call("generate", GPTQ, "--adapter", SHOUT, *arguments)
    assert result.exit_code == 0
    report = json.loads(result.stdout)
    assert report["checkpoint"] == GPTQ
    assert [row["adapter"] for row in report["rows"]] == [None, "shout"]
    assert [row["tokens"] for row in report["rows"]] == [5, 5]
    plain, loud = (row["continuation"] for row in report["rows"])
    assert loud == loud.upper() != loud.lower()
    assert plain != plain.upper()
    assert report["tokens_per_second"] > 0


def test_generate_text_with_prompts_from_standard_input() -> None:
    arguments = ["--adapter", SHOUT, "--prompt", "-", "--max-new-tokens", "3"]
    result = call("generate", GPTQ, *arguments, stdin="shout=The sea\n\nbase=The king\n")
    assert result.exit_code == 0
    heads = [line for line in result.stdout.splitlines() if line.startswith("[")]
    assert [head.split()[1] for head in heads] == ["shout", "base"]
    assert "3 tokens, " in heads[0]
    assert "\nThe king" in result.stdout


def test_generate_prints_text_as_it_is() -> None:
    """Brackets are no markup, and long lines are left to the terminal."""
    prompt = "[bold]" + "a " * 80
    result = call("generate", GPTQ, "--prompt", f"base={prompt}", "--max-new-tokens", "1")
    assert prompt.rstrip() in result.stdout


@pytest.mark.parametrize(
    ("arguments", "error", "what"),
    [
        ([], "ArgumentError", "prompts"),
        (["--prompt", "-"], "ArgumentError", "prompts"),
        (["--prompt", "hello"], "ArgumentError", "--prompt"),
        (["--prompt", "shout=hello"], "UnknownAdapterError", "--prompt 'shout=hello'"),
        (["--adapter", "shout"], "ArgumentError", "--adapter"),
        (["--adapter", SHOUT, "--adapter", SHOUT], "AdapterExistsError", "--adapter"),
        (["--prompt", "base=hello", "--max-new-tokens", "0"], "ArgumentError", "max_new_tokens"),
        (["--prompt", "base=hello", "--temperature", "-1"], "ArgumentError", "temperature"),
        (["--prompt", "base=hello", "--chat"], "UnsupportedError", f"tokenizer {GPTQ}"),
        (["--prompt", "base=hello", "--adapter", "x=nowhere"], "MissingFileError", "nowhere"),
    ],
)
def test_generate_wrong_use(arguments: list[str], error: str, what: str) -> None:
    """Exit code 2; the parts of the message on standard error, and as JSON on standard output."""
    result = call("generate", GPTQ, *arguments, "--json", stdin="")
    assert result.exit_code == 2
    report = json.loads(result.stdout)
    assert report["error"] == error
    assert what in report["what"]
    assert report["next_step"]
    for part in ("error: ", "found ", "expected ", "next "):
        assert part in result.stderr


def test_generate_without_a_model() -> None:
    result = call("generate", "nowhere", "--prompt", "base=hello")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "nowhere" in result.stderr


# inspect


def test_inspect_checkpoint() -> None:
    result = call("inspect", GPTQ)
    assert result.exit_code == 0
    lines = [line.rstrip() for line in result.stdout.splitlines()]
    assert lines[0].endswith("gptq-int4  checkpoint")
    assert "    experts   4 layers of 16, hidden 256, intermediate 128, gated silu" in lines
    assert "    gate_up   gptq4-g128-v1  W [128, 256] of 16 experts, layers 0-3" in lines
    assert "              4 bits, groups of 128, symmetric, no act-order" in lines
    assert "    packed    model.layers.*.mlp.experts  (4)" in lines
    assert lines[-1] == "    can run   yes"


@pytest.mark.parametrize("folder", sorted(path.name for path in GOLDEN.iterdir() if (path / "config.json").exists()))
def test_inspect_every_checkpoint(folder: str) -> None:
    result = call("inspect", str(GOLDEN / folder))
    assert result.exit_code == 0
    assert result.stdout.rstrip().endswith("yes")
    assert max(len(line.rstrip()) for line in result.stdout.splitlines()) <= 110


def test_inspect_says_how_zero_points_are_stored() -> None:
    asymmetric = call("inspect", str(GOLDEN / "gptqmodel_qwen3moe_w4_g32_v2_asym")).stdout
    assert "4 bits, groups of 32, asymmetric, zero points as stored, no act-order" in asymmetric
    ordered = call("inspect", str(GOLDEN / "tiny-moe" / "gptq-int4-actorder")).stdout
    assert "groups of 64, asymmetric, stored zero points are 1 less, act-order" in " ".join(ordered.split())


def test_inspect_says_what_the_config_says_of_activations() -> None:
    for folder, words in (
        ("ct_qwen3moe_nvfp4", "4 bits, groups of 16, activations nvfp4"),
        ("modelopt_qwen3moe_fp8", "a scale for all x all, activations fp8-static"),
    ):
        assert words in call("inspect", str(GOLDEN / folder)).stdout
    assert "activations" not in call("inspect", str(GOLDEN / "ct_qwen3moe_nvfp4a16")).stdout


def test_inspect_adapter() -> None:
    result = call("inspect", str(TINY / "adapter-scripture"))
    assert result.exit_code == 0
    assert "ranks       16" in result.stdout
    assert "experts.down (fused) (4), experts.gate_up (fused) (4)" in result.stdout
    assert "PEFT 0.21.2" in result.stdout


def test_inspect_says_why_an_adapter_cannot_run() -> None:
    result = call("inspect", str(GOLDEN / "peft_v4_qwen3moe_per_expert_dora"))
    assert result.exit_code == 0
    assert "can run  no: " in result.stdout
    assert "use_dora" in result.stdout


def test_inspect_json_is_what_the_library_says() -> None:
    result = call("inspect", GPTQ, "--json")
    assert json.loads(result.stdout) == fanfold.inspect(GPTQ)


def test_inspect_a_folder_that_is_neither() -> None:
    result = call("inspect", str(ROOT / "tests"), "--json")
    assert result.exit_code == 2
    assert json.loads(result.stdout)["error"] == "MissingFileError"


# verify


def test_verify() -> None:
    result = call("verify", GPTQ, "--adapter", SHOUT)
    assert result.exit_code == 0
    assert [line.split()[:2] for line in result.stdout.splitlines() if "gptq4" in line] == [
        [str(layer), "gptq4-g128-v1"] for layer in range(4)
    ]
    assert "bit-equal" in result.stdout


def test_verify_fails_with_1(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over the tolerance the report is printed all the same; what is not finite becomes null in JSON."""
    report: dict[str, Any] = {
        "tolerance": 1e-4,
        "layers": [{"layer": 0, "format": "nvfp4", "relative_error": 0.5}],
        "logits": {"relative_error": float("inf"), "max_abs_difference": 2.0},
        "base_rows_bit_equal": False,
        "ok": False,
    }
    monkeypatch.setattr("fanfold.verification.verify", lambda *_, **__: report)
    shown = call("verify", GPTQ)
    assert shown.exit_code == 1
    assert "5.0e-01" in shown.stdout
    assert "DIFFER" in shown.stdout
    assert "FAILED" in shown.stdout
    printed = call("verify", GPTQ, "--json")
    assert printed.exit_code == 1
    assert json.loads(printed.stdout)["logits"]["relative_error"] is None


# demo


Shown = list[tuple[Callable[..., None], tuple[Any, ...]]]


@pytest.fixture(scope="module")
def gptq_demo() -> tuple[Any, Shown]:
    """The demo's result, and what it showed by which function."""
    shown: Shown = []

    def noted(show: Callable[..., None]) -> Callable[..., None]:
        def note(*arguments: Any) -> None:
            shown.append((show, arguments))
            show(*arguments)

        return note

    with pytest.MonkeyPatch.context() as patch:
        set_columns(patch, 100)
        for name in ("print_batch", "print_loaded", "print_check"):
            patch.setattr(demo, name, noted(getattr(demo, name)))
        return call("demo", str(TINY)), shown


@pytest.mark.parametrize("version", ["gptq-int4", "nvfp4"])
def test_demo(version: str, gptq_demo: tuple[Any, Shown]) -> None:
    result = gptq_demo[0] if version == "gptq-int4" else call("demo", str(TINY), "--format", version)
    assert result.exit_code == 0
    text = result.stdout
    rows = [line.split()[:2] for line in text.splitlines() if line.strip()[:1].isdigit()]
    same, unlike = rows[:4], rows[4:]
    assert same == [["0", "base"], ["1", "python"], ["2", "scripture"], ["3", "shout"]]
    assert [name for _, name in unlike] == ["shout", "scripture", "python", "base", "shout", "scripture"]
    assert "rank 16, " in text
    assert "Check passed" in text
    assert "bit-equal to a run without adapters" in text


def test_demo_at_80_columns_keeps_its_columns(
    gptq_demo: tuple[Any, Shown], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    set_columns(monkeypatch, 80)
    for show, arguments in gptq_demo[1]:
        show(*arguments)
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    heads = [line for line in lines if line.split()[:1] == ["row"]]
    assert [head.split() for head in heads] == 2 * [["row", "adapter", "prompt", "continuation", "tokens/s"]]


def test_demo_elsewhere() -> None:
    result = call("demo", "nowhere")
    assert result.exit_code == 2
    assert "fanfold demo DIR" in result.stderr


# As a process of its own


def process(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [Path(sys.executable).with_name("fanfold"), *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, **options)


def test_process_prints_json_and_nothing_else() -> None:
    """No bar and no log of the libraries below on either stream."""
    done = process("generate", GPTQ, "--prompt", "base=The king", "--max-new-tokens", "2", "--json")
    assert done.returncode == 0
    assert json.loads(done.stdout)["rows"][0]["tokens"] == 2
    assert done.stderr == ""


def test_process_wrong_use() -> None:
    assert process("generate").returncode == 2
    assert process("nonsense").returncode == 2
    done = process("inspect", "nowhere")
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "no such directory" in done.stderr


def test_process_shows_warnings_without_source_lines() -> None:
    code = "import warnings, fanfold.cli.app as a; a.app = lambda: warnings.warn('look here'); a.main()"
    environment = {**os.environ, "NO_COLOR": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=60)
    assert done.stderr == "warning: look here\n"
