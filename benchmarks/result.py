"""Writes a result file: the machine, what it did meanwhile, the settings, the figures and the lines of pictures, as
JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from benchmarks import machine
from benchmarks.figure import Figure, Series, table


class Result:
    """Collects what one run measures. Make it before the first measurement: it notes the machine's load."""

    def __init__(self, settings: Mapping[str, object]) -> None:
        self.figures: list[Figure] = []
        self.series: list[Series] = []
        self.settings = dict(settings)
        self._machine = machine.describe()
        self._watch = machine.Watch()
        about = self._machine
        sets = ", ".join(map(str, about["instruction_sets"]))  # type: ignore[call-overload]
        print(
            f"{about['cpu']} ({sets}), {about['usable_cores']} cores; Linux {about['kernel']}; torch {about['torch']}"
        )

    def add(self, found: Iterable[Figure | Series]) -> None:
        for each in found:
            if isinstance(each, Figure):
                self.figures.append(each)
            else:
                self.series.append(each)

    def show(self, found: Iterable[Figure | Series]) -> None:
        """Adds the findings and prints the figures, for runs that take long."""
        found = list(found)
        for each in found:
            if isinstance(each, Figure):
                print("  ".join(each.row()), flush=True)
        self.add(found)

    def plain(self) -> dict[str, object]:
        return {
            "machine": self._machine,
            "meanwhile": self._watch.note(),
            "settings": self.settings,
            "figures": [figure.plain() for figure in self.figures],
            "series": [series.plain() for series in self.series],
        }

    def write(self, path: Path) -> None:
        """Prints the table, and writes the file."""
        plain = self.plain()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(plain, indent=1, default=str) + "\n")
        print("\n" + table(self.figures))
        meanwhile = ", ".join(f"{name} {value}" for name, value in dict(plain["meanwhile"]).items())  # type: ignore[call-overload]
        print(f"\n{meanwhile}\nwritten to {path}")


def read_series(path: Path) -> list[Series]:
    """Returns the lines of pictures in a result file. Older files have none."""
    found = json.loads(path.read_text()).get("series", [])
    return [Series(each["chart"], each["name"], tuple((x, y) for x, y in each["points"])) for each in found]
