"""`import fanfold` needs torch alone, and imports nothing heavy beside it, in fresh interpreters."""

import subprocess
import sys
from pathlib import Path

SRC = Path(__file__).parents[2] / "src"
OPTIONAL = ["triton", "transformers", "peft", "rich", "typer", "safetensors", "compressed_tensors"]

# A finder in front of all others that says of these packages that they are not installed.
BLOCK = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
"""


def without(*packages: str) -> str:
    return BLOCK.format(packages=packages)


def fresh(code: str) -> str:
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    return run.stdout.strip()


def test_import_needs_torch_alone() -> None:
    printed = fresh(without(*OPTIONAL) + "import fanfold; print(fanfold.__version__)")
    assert printed.count(".") == 2


def test_import_brings_nothing_that_torch_does_not() -> None:
    code = """
import sys, torch
before = {name.split(".")[0] for name in sys.modules}
import fanfold
print(*{name.split(".")[0] for name in sys.modules} - before)
"""
    assert fresh(code) == "fanfold"


def rooms_below_integrations() -> list[str]:
    names = [".".join(path.relative_to(SRC).with_suffix("").parts) for path in SRC.rglob("*.py")]
    names = [name.removesuffix(".__init__") for name in names]
    above = {"cli", "verification", "expert_usage", "throughput", "integrations"}
    return sorted(name for name in names if not above & set(name.split(".")[1:2]))


def test_rooms_below_integrations_know_no_model_library() -> None:
    """Every module but those of `integrations` and above is imported with these packages missing."""
    names = rooms_below_integrations()
    assert "fanfold.spec.route" in names
    imports = f"import importlib\nfor name in {names!r}: importlib.import_module(name)"
    fresh(without("transformers", "peft", "rich", "typer", "compressed_tensors") + imports)


def test_public_names_are_found_lazily() -> None:
    fresh("import fanfold\nfor name in fanfold.__all__: getattr(fanfold, name)")


def test_without_transformers_and_triton_a_model_is_refused_and_experts_still_load() -> None:
    checkpoint = str(SRC.parent / "tests" / "golden" / "gptqmodel_mixtral_w4_g32")
    code = f"""
import torch, fanfold
try:
    fanfold.load_model({checkpoint!r})
except fanfold.errors.UnavailableError as error:
    assert "fanfold[hf]" in error.next_step
else:
    raise SystemExit("load_model did not refuse")
experts = fanfold.load_experts({checkpoint!r}, layer=0, dtype=torch.float32)
hidden = torch.ones(1, experts.shape.hidden)
print(*experts(hidden, torch.tensor([[0, 1]]), torch.tensor([[0.5, 0.5]])).shape)
"""
    assert fresh(without("transformers", "triton") + code) == "1 64"


def test_explain_needs_no_triton() -> None:
    checkpoint = str(SRC.parent / "examples" / "tiny-moe" / "gptq-int4")
    code = f"""
from fanfold.explanation import explain, explain_checkpoint
answers = [explain((128, 2048, 768), "gptq4-g128", arch, 128, 8, adapters=2) for arch in (90, 80)]
answers += explain_checkpoint({checkpoint!r}, 90, 1)["answers"]
print(*[answer["chosen"] for answer in answers])
"""
    printed = fresh(without("triton", "transformers", "rich", "typer") + code)
    assert printed == "grouped_int4_sm90 grouped grouped_int4_sm90"


def test_inspect_needs_no_optional_package() -> None:
    golden = SRC.parent / "tests" / "golden"
    folders = [str(golden / name) for name in ("ct_qwen3moe_nvfp4", "peft_qwen3moe_target_parameters")]
    code = f"import fanfold\nprint(*[fanfold.inspect(folder)['can_run'] for folder in {folders!r}])"
    assert fresh(without("triton", "transformers", "compressed_tensors", "peft") + code) == "True True"
