"""What this Python knows of characters, for the C++ tokenizers: python3 make_tables.py > unicode_tables.inc"""

from __future__ import annotations

import sys
import unicodedata
from collections.abc import Callable, Sequence

EVERY = [chr(i) for i in range(sys.maxunicode + 1) if not 0xD800 <= i < 0xE000]


def ranges(holds: Callable[[str], bool]) -> list[tuple[int, int]]:
    """First and last of each run of characters for which something holds."""
    found: list[tuple[int, int]] = []
    for i in (ord(c) for c in EVERY if holds(c)):
        if found and found[-1][1] == i - 1:
            found[-1] = found[-1][0], i
        else:
            found.append((i, i))
    return found


def is_cased(c: str) -> bool:
    """Whether a capital sigma behind it is a final one: cased, and not ignored when case is looked for."""
    return f"{c}Σ".lower().endswith("ς")


def is_ignorable(c: str) -> bool:
    """Whether a capital sigma sees the letter before it."""
    return f"A{c}Σ".lower().endswith("ς") and not is_cased(c)


def is_word(c: str) -> bool:
    r"""Whether it is `\w` as Unicode's TR 18 has it; four ranges of symbols count as alphabetic."""
    kind, symbols = (
        unicodedata.category(c),
        ((0x24B6, 0x24E9), (0x1F130, 0x1F149), (0x1F150, 0x1F169), (0x1F170, 0x1F189)),
    )
    named = kind[0] in "LM" or kind in ("Nd", "Nl", "Pc") or c in "\u200c\u200d"
    return named or any(first <= ord(c) <= last for first, last in symbols)


def lower_ranges() -> list[tuple[int, int, int, int]]:
    """First, last, step and difference of characters that have a lower case of one character."""
    pairs = [(ord(c), ord(c.lower())) for c in EVERY if len(c.lower()) == 1 and c.lower() != c]
    found: list[tuple[int, int, int, int]] = []
    for i, low in pairs:
        first, last, step, difference = found[-1] if found else (0, -9, 1, 0)
        if low - i == difference and i - last in (1, 2) and (first == last or i - last == step):
            found[-1] = first, i, i - last, difference
        else:
            found.append((i, i, 1, low - i))
    return found


def table(kind: str, name: str, rows: Sequence[tuple[int, ...]]) -> str:
    """A C++ array of some rows of numbers."""
    items = [f"{{{', '.join(map(hex, row[:2]))}{''.join(f', {n}' for n in row[2:])}}}" for row in rows]
    width = 5 if kind == "Range" else 4
    lines = "\n".join(f"    {', '.join(items[i : i + width])}," for i in range(0, len(items), width))
    return f"constexpr {kind} {name}[] = {{\n{lines}\n}};\n"


def main() -> None:
    """Print the file. Of all characters, only U+0130 has a lower case of more than one."""
    if [c for c in EVERY if len(c.lower()) > 1] != ["\u0130"]:
        raise SystemExit("another character has a lower case of several: unicode.cpp does not know it")
    parts = [
        f"// Unicode {unicodedata.unidata_version}, written by make_tables.py.\n",
        table("Range", "letters", ranges(lambda c: unicodedata.category(c)[0] == "L")),
        table("Range", "numbers", ranges(lambda c: unicodedata.category(c)[0] == "N")),
        table("Range", "words", ranges(is_word)),
        table("Range", "cased", ranges(is_cased)),
        table("Range", "ignorable", ranges(is_ignorable)),
        table("Lower", "lowers", lower_ranges()),
    ]
    sys.stdout.write("".join(parts))


if __name__ == "__main__":
    main()
