"""What the long trials came to: a JSON file of each in docs/, and its table in docs/reliability.md, made from that."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"
PAGE = DOCS / "reliability.md"


def write(name: str, record: dict) -> None:
    """Write the record of a trial, and the part of the page that shows it."""
    (DOCS / f"{name}.json").write_text(json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    PAGE.write_text(with_part(PAGE.read_text(), name, record))


def with_part(page: str, name: str, record: dict) -> str:
    """The page with this record between the two marks of its name."""
    begin, end = f"<!-- {name}.json -->\n", f"<!-- end of {name}.json -->"
    pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    assert pattern.search(page), f"{PAGE.name} has no place for {name}.json"
    return pattern.sub(lambda _: f"{begin}{TABLES[name](record)}{end}", page)


def table(*rows: tuple[object, ...]) -> str:
    """A table in Markdown, whose first row is the header."""
    lines = [f"| {' | '.join(map(str, row))} |" for row in rows]
    return "\n".join([lines[0], f"|{'---|' * len(rows[0])}", *lines[1:]]) + "\n"


def faults(record: dict) -> str:
    rows = [
        (each["scenario"], each["kills"], each["runs"], ", ".join(each["differences"]) or "none")
        for each in record["scenarios"]
    ]
    kills = sum(each["kills"] for each in record["scenarios"])
    header = ("scenario", "kills", "programs that came to an end", "differences")
    return f"{table(header, *rows)}\n{kills} kills in all.\n"


def mistakes(record: dict) -> str:
    families: dict[str, list[int]] = {}
    for name, counts in record["families"].items():
        cases = families.setdefault(name.split(",")[0].split(" pipe")[0].split(" full")[0].split(" closed")[0], [0, 0])
        cases[0] += counts["cases"]
        cases[1] += counts["fall_short"]
    rows = [(name, *counts) for name, counts in families.items()]
    skipped = f"; {len(record['skipped'])} could not be tried, as root" if record["skipped"] else ""
    total = f"{record['cases']} cases, {record['fall_short']} of them fall short{skipped}.\n"
    return f"{table(('what', 'cases', 'fall short'), *rows)}\n{total}"


def fuzz(record: dict) -> str:
    kinds: dict[str, int] = {}
    for name, count in record["targets"].items():
        kind = name.split()[0] if name.split()[0] in ("image", "archive", "cache", "JSON", "YAML", "CSV") else name
        kinds[kind] = kinds.get(kind, 0) + count
    total = f"{record['mutations']} mutations, {record['fall_short']} of them fall short.\n"
    return f"{table(('file', 'mutations'), *kinds.items())}\n{total}"


TABLES: dict[str, Callable[[dict], str]] = {"reliability": faults, "mistakes": mistakes, "fuzz": fuzz}
