"""Reads machine code as text: instructions, their classes, and the hottest loop.

Pure functions on NVIDIA's SASS, as cuobjdump prints it, and AMD's amdgcn assembly, as LLVM writes it.
An instruction's class follows from its opcode by the first pattern that matches.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

CLASSES = ("matrix", "memory", "float", "integer", "special", "control", "other")


@dataclass(frozen=True)
class Instruction:
    """One machine instruction. `branch_target`: index of the instruction it jumps to, else None."""

    opcode: str
    operands: str
    kind: str
    asynchronous_copy: bool
    ends_program: bool
    branch_target: int | None = None


# Opcode patterns are tried in order against the part of the opcode before the first dot.
_SASS_CLASSES = (
    ("matrix", r"[A-Z]*MMA"),  # HMMA, HGMMA, UTCHMMA, IMMA, QGMMA, ...
    ("special", r"MUFU"),
    ("control", r"BRA|BRX|JMP|JMX|CALL|RET|EXIT|BSSY|BSYNC|BREAK|BMOV|BPT|NOP|WARP\w*|BAR|UCGABAR\w*|YIELD"),
    (
        "control",
        r"DEPBAR|LDGDEPBAR|LDTM?DEPBAR|ARRIVES|SYNCS|MEMBAR|FENCE|ERRBAR|CCTL\w*|ELECT|NANOSLEEP|ACQBULK",
    ),
    ("control", r"UTCBAR|UTMACMDFLUSH|UTMACCTL|UTMAPF|USETMAXREG|PREEXIT|ENDCOLLECTIVE"),
    ("memory", r"LD\w*|ULD\w*|ST\w*|ATOM\w*|REDG?|UTMA\w*|UBLK\w*|UTCCP|SHFL"),
    ("float", r"F(?!LO|ENCE)\w+|[HD](ADD|MUL|FMA|SET|SETP|MNMX)\w*|I2FP?|F2\w+|UF(ADD|MUL|FMA|SET)\w*"),
    (
        "integer",
        r"U?V?I(ADD|MAD|MUL|SETP|ABS|MNMX|DP|SCADD)\w*|U?(LOP|SHF|SHL|SHR|LEA|PRMT|BREV|POPC|FLO|BMSK|SGXT)\w*",
    ),
    ("integer", r"U?P(LOP3|RMT)|U?SEL|VABSDIFF\w*|REDUX|CREDUX|VOTEU?|R2P|P2R|UP2UR|VHMNMX"),
)
_AMDGCN_CLASSES = (
    ("matrix", r"v_s?mfmac?_\w+"),
    ("special", r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_\w+"),
    (
        "control",
        r"s_(branch|cbranch|barrier|waitcnt|nop|sleep|endpgm|setprio|setpc|swappc|sethalt|icache|dcache)\w*",
    ),
    ("control", r"sched_barrier|buffer_(wbl2|inv)\w*"),
    ("memory", r"(global|buffer|flat|scratch|ds|s_load|s_buffer|s_store|s_atomic)_\w+"),
    ("other", r"[vs]_(mov|accvgpr|readlane|readfirstlane|writelane|swap|getreg|setreg)\w*"),
    ("float", r"v_\w*(_f16|_f32|_f64|_bf16)(_\w+)?"),
    ("integer", r"[vs]_\w+"),
)
_SASS_ASYNCHRONOUS = re.compile(r"LDGSTS|UBLKCP|UTMALDG|UTMASTG")


def _classify(opcode: str, patterns: Sequence[tuple[str, str]]) -> str:
    return next((kind for kind, pattern in patterns if re.fullmatch(pattern, opcode)), "other")


# ---------------------------------------------------------------- parsing

_SASS_LINE = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)\s*([^;]*);")
_SASS_FUNCTION = re.compile(r"^\s*Function\s*:\s*(\S+)")


def parse_sass(text: str) -> dict[str, list[Instruction]]:
    """Read what `cuobjdump -sass` prints. Returns each function's instructions, without the padding."""
    functions: dict[str, list[tuple[int, str, str, str]]] = {}
    lines: list[tuple[int, str, str, str]] = []
    for line in text.splitlines():
        if header := _SASS_FUNCTION.match(line):
            lines = functions.setdefault(header[1], [])
        elif match := _SASS_LINE.match(line):
            lines.append((int(match[1], 16), match[2] or "", match[3], match[4].strip()))
    return {name: _sass_instructions(lines) for name, lines in functions.items()}


def _sass_instructions(lines: list[tuple[int, str, str, str]]) -> list[Instruction]:
    index_of = {address: index for index, (address, _, _, _) in enumerate(lines)}
    instructions = []
    for index, (_, predicate, opcode, operands) in enumerate(lines):
        base = opcode.partition(".")[0]
        target = re.search(r"0x[0-9a-f]+$", operands) if base in ("BRA", "JMP") else None
        branch_target = index_of.get(int(target[0], 16)) if target else None
        if branch_target == index:  # a branch to itself fences off the padding behind the code
            break
        instructions.append(
            Instruction(
                opcode=opcode,
                operands=operands,
                kind=_classify(base, _SASS_CLASSES),
                asynchronous_copy=_SASS_ASYNCHRONOUS.fullmatch(base) is not None,
                ends_program=base in ("EXIT", "RET") and not predicate,
                branch_target=branch_target,
            )
        )
    return instructions


_AMDGCN_LINE = re.compile(r"^\s+((?:[vs]|ds|global|buffer|flat|scratch)_\w+)\b\s*([^;]*)")
_AMDGCN_LABEL = re.compile(r"^(\.\w+):")


def parse_amdgcn(text: str) -> list[Instruction]:
    """Read the assembly of one kernel as LLVM writes it."""
    lines: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _AMDGCN_LABEL.match(line):
            labels[label[1]] = len(lines)
        elif match := _AMDGCN_LINE.match(line):
            lines.append((match[1], match[2].strip()))
    return [
        Instruction(
            opcode=opcode,
            operands=operands,
            kind=_classify(opcode, _AMDGCN_CLASSES),
            asynchronous_copy="_load_lds_" in opcode or ("_load_" in opcode and operands.endswith(" lds")),
            ends_program=opcode == "s_endpgm",
            branch_target=labels.get(operands) if opcode.startswith(("s_branch", "s_cbranch")) else None,
        )
        for opcode, operands in lines
    ]


# ---------------------------------------------------------------- loops


def find_loops(instructions: Sequence[Instruction]) -> list[range]:
    """Index ranges of the loops: from a backward branch's target to that branch, as the code lies in memory.

    Branches to the same target are one loop. A range with the program's unconditional end inside is no
    loop: there, code moved out of the way behind the end jumps back to where it came from.
    """
    last_branch: dict[int, int] = {}
    for index, instruction in enumerate(instructions):
        target = instruction.branch_target
        if target is None or target > index:
            continue
        if not any(inner.ends_program for inner in instructions[target:index]):
            last_branch[target] = index
    return [range(first, last + 1) for first, last in sorted(last_branch.items())]


def hottest_loop(instructions: Sequence[Instruction]) -> list[Instruction]:
    """Return the instructions of the loop that presumably takes the time.

    Each instruction belongs to the innermost loop around it. The hottest loop is the one to which most
    matrix instructions belong; among equals the one with the fewest other instructions, for loops that do
    the same work on the edges of a mask compute the mask besides, and are walked less often. Where no loop
    has matrix instructions, it is the one to which most instructions belong. So a short loop that waits
    for a barrier inside the main loop does not displace it. What is returned is the whole loop, loops
    inside it included. Code without a loop is taken as a whole.
    """
    loops = find_loops(instructions)
    if not loops:
        return list(instructions)
    own: dict[range, Counter[str]] = {loop: Counter() for loop in loops}
    for index, instruction in enumerate(instructions):
        around = [loop for loop in loops if index in loop]
        if around:
            own[min(around, key=len)][instruction.kind] += 1

    def heat(loop: range) -> tuple[int, int]:
        matrix, total = own[loop]["matrix"], own[loop].total()
        return matrix, -total if matrix else total

    hottest = max(loops, key=heat)
    return [instructions[index] for index in hottest]


def count_classes(instructions: Sequence[Instruction]) -> dict[str, int]:
    """Count the instructions of each class, and all of them as `total`."""
    counts = Counter(instruction.kind for instruction in instructions)
    return {kind: counts[kind] for kind in CLASSES} | {"total": len(instructions)}
