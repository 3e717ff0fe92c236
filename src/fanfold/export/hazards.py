"""Finds machine code for Hopper that overwrites the register operand of a matrix instruction still in flight.

HGMMA and QGMMA read a left operand from four registers while later instructions run; until a WARPGROUP.DEPBAR has
waited for its group, nothing may write to them. Neither Triton 3.6 nor ptxas sees to that. The check follows every path
through a kernel, so every loop in all of its turns, and needs no GPU.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NamedTuple

INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?);")
PREDICATE = re.compile(r"@!?(U?P\w+)\s+")
# Instructions whose first register is read.
READS_FIRST = re.compile(r"(ST|RED|BAR|RET|CALL|BR|R2UR|R2P|WARPSYNC|NANOSLEEP|SYNCS|[IFHD]SETP|PLOP3|ISETP)")
MOST_GROUPS = 8  # kept in flight; older ones must have been found by then


class Operand(NamedTuple):
    """The left operand of one instruction."""

    address: int
    first: int


@dataclass(frozen=True)
class Hazard:
    """An instruction that writes to an operand in flight."""

    address: int
    text: str
    product: int


State = tuple[tuple[frozenset[Operand], ...], frozenset[Operand]]  # groups in flight, the group being made


def instructions(sass: str) -> list[tuple[int, str]]:
    """(address, text) of every instruction that `cuobjdump -sass` prints."""
    found = (INSTRUCTION.match(line) for line in sass.splitlines())
    return [(int(m[1], 16), m[2].strip()) for m in found if m]


def operand_of(address: int, text: str) -> Operand | None:
    """The left operand in registers, of an HGMMA or QGMMA that has one."""
    m = re.search(r"[HQ]GMMA\S*\s+R\d+, R(\d+),", text)
    return Operand(address, int(m[1])) if m else None


def operands(sass: str) -> list[Operand]:
    """Every left operand in registers."""
    found = (operand_of(address, text) for address, text in instructions(sass))
    return [operand for operand in found if operand]


def written(text: str) -> range:
    """Registers that an instruction writes."""
    text = PREDICATE.sub("", text)
    name, _, rest = text.partition(" ")
    if READS_FIRST.match(name):
        return range(0)
    operands = [o.strip() for o in rest.split(",")]
    while operands and re.fullmatch(r"!?U?P(\d|T)", operands[0]):
        operands.pop(0)
    m = re.match(r"R(\d+)\b", operands[0]) if operands else None
    if m is None:
        return range(0)
    wide = ".64" in name or "WIDE" in name or re.match(r"(CS2R|D(ADD|MUL|FMA|MNMX))", name)
    width = 4 if ".128" in name or (name.startswith("LDSM") and name.endswith(".4")) else 2 if wide else 1
    return range(int(m[1]), int(m[1]) + width)


def hazards(sass: str) -> list[Hazard]:
    """Every write to an operand in flight, over all paths from the entry."""
    code = instructions(sass)
    index = {address: n for n, (address, _) in enumerate(code)}
    found: set[Hazard] = set()
    empty: State = ((), frozenset())
    todo: list[tuple[int, State]] = [(0, empty)]
    seen = set(todo)
    while todo:
        at, state = todo.pop()
        address, text = code[at]
        state = _step(address, text, state, found)
        for following in _successors(code, index, at):
            if (following, state) not in seen:
                seen.add((following, state))
                todo.append((following, state))
    return sorted(found, key=lambda h: (h.address, h.product))


def _step(address: int, text: str, state: State, found: set[Hazard]) -> State:
    groups, making = state
    if "HGMMA" in text or "QGMMA" in text:
        operand = operand_of(address, text)
        making = making | {operand} if operand else making
        return ((*groups, making)[-MOST_GROUPS:], frozenset()) if "gsb0" in text else (groups, making)
    wait = re.search(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x([0-9a-f]+)", text)
    if wait:
        keep = int(wait[1], 16)
        return (groups[max(0, len(groups) - keep) :], making)
    registers = written(text)
    for group in (*groups, making) if registers else ():
        for operand in group:
            if registers.start < operand.first + 4 and operand.first < registers.stop:
                found.add(Hazard(address, text, operand.address))
    return state


def _successors(code: list[tuple[int, str]], index: dict[int, int], at: int) -> list[int]:
    text = code[at][1]
    always = PREDICATE.match(text) is None
    name = PREDICATE.sub("", text).split()[0]
    after = [at + 1] if at + 1 < len(code) else []
    if name.startswith("EXIT"):
        return [] if always else after
    if name.startswith("BRA"):
        target = re.search(r"0x([0-9a-f]+)$", text)
        assert target, text
        there = [index[int(target[1], 16)]]
        return there if always and "," not in text else there + after
    assert not re.match(r"(BRX|JMP|JMX|CALL|RET)", name), f"{text}: the check follows plain branches alone"
    return after
