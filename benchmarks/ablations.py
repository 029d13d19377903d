"""Put what the two races over Table 2 of Ho et al. 2020 have measured so far into docs/ablations.md.

python -m benchmarks.ablations
"""

from __future__ import annotations

from pathlib import Path

from benchmarks.race.plan import ROOT, Measurement, Race, read_race
from benchmarks.race.report import Table, as_table
from common.files import write_atomically

PAGE = ROOT / "docs" / "ablations.md"
BEGIN, END = "<!-- benchmarks/ablations.py -->\n", "<!-- end of benchmarks/ablations.py -->"
RACES = {"digits": "ablations_digits", "CIFAR-10, 16x16": "ablations_16"}
# What each method of the races is, and the FID of the paper's CIFAR-10; a dash where its training was unstable.
ROWS = {
    "mean_L_learned": ("mean", "L, learned variance", "23.69"),
    "mean_L": ("mean", "L, fixed variance", "13.22"),
    "mean_simple": ("mean", "squared error", "-"),
    "epsilon_L_learned": ("epsilon", "L, learned variance", "-"),
    "epsilon_L": ("epsilon", "L, fixed variance", "13.51"),
    "epsilon_simple": ("epsilon", "squared error (L_simple)", "3.17"),
    "epsilon_hybrid": ("epsilon", "L_hybrid, learned range", ""),
    "epsilon_L_resampled": ("epsilon", "L, learned range, resampled", ""),
}


def measured(race: Race, measurement: Measurement) -> Table:
    results = [result for entry in race.entries if (result := race.result_of(entry))]
    return Table.read(race, measurement, results)


def cell_of(table: Table, method: str) -> str:
    """Return the FID at the end of the budget, the mean of the seeds; nothing if that is not measured yet."""
    end = table.race.time(1.0)
    return f"{table.mean(method, end):.1f}" if table.values(method, end) else ""


def with_table(page: str) -> str:
    """Return the page with the table between its marks."""
    races = {data: read_race(ROOT / "benchmarks" / "races" / f"{name}.yaml") for data, name in RACES.items()}
    tables = {
        f"{data}, {measurement.name}": measured(race, measurement)
        for data, race in races.items()
        for measurement in race.measurements
    }
    head = ["predicted", "objective", "Ho et al., CIFAR-10", *tables]
    rows = [[*known, *(cell_of(table, method) for table in tables.values())] for method, known in ROWS.items()]
    before, _, rest = page.partition(BEGIN)
    return f"{before}{BEGIN}" + "\n".join(as_table(head, rows)) + f"\n{END}{rest.partition(END)[2]}"


def main(page: Path = PAGE) -> None:
    write_atomically(page, with_table(page.read_text(encoding="utf-8")))


if __name__ == "__main__":
    main()
