"""What the code says on the pages of docs/: output of commands, tables. `make docs-blocks` writes them anew.

A fence of language `console` is a shell session: lines behind `$ ` are run, what they print stands below them. Tables
stand between `<!-- table: NAME ARGUMENTS -->` and `<!-- end -->` (see docs_tables.py).
"""

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from docs_tables import table
from typer.testing import CliRunner

from fanfold.cli import output
from fanfold.cli.app import app

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
CONSOLE = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.MULTILINE | re.DOTALL)
TABLE = re.compile(r"(?<=<!-- table: )(.+?) -->\n(.*?)(?=^<!-- end -->$)", re.MULTILINE | re.DOTALL)
COLUMNS = 80

# What differs from machine to machine or from run to run, by command. A page keeps what stands on it where nothing else
# differs.
MASKS = {
    command: [(re.compile(pattern, re.MULTILINE | re.DOTALL), to) for pattern, to in masks]
    for command, masks in {
        # The text that a model writes: a near tie of two tokens may fall otherwise with another library.
        "generate": [(r"^(\[\d+\] \w+).*?\n(.{4}).*?(?=\n\n|\Z)", r"\1 \2")],
        "demo": [
            (r"^ +(\d+)   (\w+) +(\S+(?: \S+)*) {2,}[^\n]* [\d.]+$", r"\1 \2 \3"),  # row, adapter, prompt
            (r"\n {24,}[^\n]*\S(?=\n)", ""),  # the rest of a continuation
        ],
        "bench": [
            (r"^.*?, \d+ CPUs?  ", "machine "),
            (r"^ +(\w\S* +)?(\d+) +[\d,.]+ +\d+% [^\n]*", r"\1 \2"),  # format or implementation, tokens
            (r"^ *([a-z_]+) +(\S+) +(\d+x\d+)(?: +[\d,.e+]+){3} *$", r"\1 \2 \3"),  # whose experts, weights, batch
        ],
        "routing": [(r"[\u00b7\u2581-\u2588]{2,}( +\d+(\.\d+)?%?)+", "bars")],  # a near tie of two experts
        "doctor": [
            (r"^ +(python|torch|triton|transformers|peft|safetensors|machine|CUDA|C compiler) {2,}[^\n]*", r"\1"),
            (r"^ +commit [^\n]*\n", ""),
            (r"^ +tuned .*?(?=^ +\d+ rows)", "tuned "),
            (r"^ +triton cache .*?(?=^Check)", "triton cache\n"),
        ],
        "export": [(r"(?<=made by ).*", ""), (r"(?<=machine code ).*", "")],
        "all": [
            (r"\d\.\de-\d\d\b", "an error"),
            (r"[ \u2500]+", " "),  # widths of columns
            (r" $|^ ", ""),
        ],
    }.items()
}


def same(command: str, shown: str, printed: str) -> bool:
    """Whether two outputs of a command differ in nothing but what a mask hides."""
    return masked(command, shown) == masked(command, printed)


def masked(command: str, text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, to in [*MASKS.get(command, []), *MASKS["all"]]:
        text = pattern.sub(to, text)
    return text


def renewed(page: str) -> str:
    """The page with what its commands print now, and the tables of now."""
    page = TABLE.sub(lambda found: f"{found[1]} -->\n{table(*shlex.split(found[1]))}\n", page)
    return CONSOLE.sub(lambda found: session(found[1]), page)


def session(shown: str) -> str:
    """The block with what its commands print; with what it shows, where that is the same."""
    code = 0
    text = ""
    for part in re.split(r"^\$ ", shown, flags=re.MULTILINE)[1:]:
        end = re.search(r"(?<!\\)\n", part)
        assert end, f"no end of line: {part!r}"
        command, before = part[: end.end()], part[end.end() :]
        words = shlex.split(command.replace("\\\n", " "))
        if words == ["echo", "$?"]:
            now = f"{code}\n"
        else:
            assert words[0] == "fanfold", f"{command!r}: a session runs fanfold and `echo $?`"
            code, now = run(words[1:])
        blank = "\n" if before.endswith("\n\n") else ""  # between two commands
        text += f"$ {command}{before if same(words[1], before.rstrip(), now.rstrip()) else now + blank}"
    return text


def run(arguments: list[str]) -> tuple[int, str]:
    """Exit code, and the results without colours (of bad input, errors too), ends of lines trimmed.

    The folder it runs in holds `examples`, `tests` and `LICENSE`, and takes what is written.
    """
    widths = [(console, console.width, console.no_color) for console in (output.out, output.err)]
    with tempfile.TemporaryDirectory() as folder:
        for name in ("examples", "tests", "LICENSE"):
            (Path(folder) / name).symlink_to(ROOT / name)
        before = Path.cwd()
        os.chdir(folder)
        try:
            for console, _, _ in widths:
                console.width, console.no_color = COLUMNS, True
            result = CliRunner().invoke(app, arguments, catch_exceptions=False)
        finally:
            os.chdir(before)
            for console, width, no_color in widths:
                console.width, console.no_color = width, no_color
    text = result.output if result.exit_code == 2 else result.stdout
    return result.exit_code, public("".join(line.rstrip() + "\n" for line in text.splitlines()))


def public(text: str) -> str:
    """Places on this machine as a reader's could be."""
    return text.replace(str(ROOT), "~/fanfold").replace(str(Path.home()), "~")


def rewrite(say: Callable[[str], object]) -> None:
    """Writes every page that has changed."""
    for path in PAGES:
        page = path.read_text()
        new = renewed(page)
        if new != page:
            path.write_text(new)
            say(f"{path.relative_to(ROOT)}\n")


if __name__ == "__main__":
    quiet = {"HF_HUB_OFFLINE": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "FANFOLD_TUNED": os.devnull, **quiet}
    rewrite(sys.stdout.write)
