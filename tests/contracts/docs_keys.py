"""Keys of --json that a page lists, and those that the command prints.

A table of keys stands between `<!-- keys: COMMAND ARGUMENTS -->` and `<!-- end -->`. Its first column has the keys;
those of an object, or of a list's objects, stand behind a dot; `*` is any key that is a name, of a package for one.
"""

import json
import re
from typing import Any

KEYS = re.compile(r"<!-- keys: (.+?) -->\n(.*?)^<!-- end -->$", re.MULTILINE | re.DOTALL)


def listed(rows: str) -> set[str]:
    """The keys in the first column of a table."""
    return {key for row in rows.splitlines() for key in re.findall(r"`([^`]+)`", row.split("|")[1])}


def printed(text: str) -> set[str]:
    """The keys of a report, down to the second level."""
    report = json.loads(text)
    rows: list[dict[str, Any]] = report if isinstance(report, list) else [report]
    found: set[str] = set()
    for key, value in (item for row in rows for item in row.items()):
        inner = [one for one in (value if isinstance(value, list) else [value]) if isinstance(one, dict)]
        found |= {f"{key}.{name}" for one in inner for name in one} or {key}
    return found


def differences(rows: str, text: str) -> tuple[set[str], set[str]]:
    """Keys that the table lacks, and those that the command does not print."""
    wanted, found = listed(rows), printed(text)
    any_name = {key.removesuffix(".*") for key in wanted if key.endswith(".*")}
    found = {key if (parent := key.partition(".")[0]) not in any_name else f"{parent}.*" for key in found}
    return found - wanted, wanted - found
