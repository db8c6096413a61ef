"""Two results of benchmarks beside each other: every number of both, their ratio, and what differs in what they ran on.

slipstream bench compare A.json B.json [--all]
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..engine.errors import ConfigError

NOTABLE: Final = 0.03
# What a number's name says of its direction. Counts and sizes have none.
_MORE_IS_BETTER = re.compile(r"per_s$|tok_s|tokens_s$|gb_s$|ratio|speedup|goodput|hidden", re.IGNORECASE)
# Moments, and sums that grow with what was recorded. Host time that is hidden costs nothing, and is no gain either.
_NO_DIRECTION = re.compile(r"(start|end|window|busy|limit|idle|between|within|exposed|hidden)_ns$|per_step_ns\.hidden$")
_LESS_IS_BETTER = re.compile(
    r"(^|[_ ,])(ms|us|ns|s|seconds)(_p?\d+)?$|(_|, )(ms|us|ns)[_ .]|idle|exposed|\bstep\.(median|mean|p99|least|most)$"
)


class Row(NamedTuple):
    """One number of both. `verdict` is empty if the two are alike or the name tells no direction."""

    name: str
    before: float
    after: float
    verdict: str

    @property
    def ratio(self) -> float:
        return self.after / self.before if self.before else float("inf") if self.after else 1.0


def compare(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[Row]:
    """The numbers that both results have, in the order of the first."""
    first, second = before["results"], after["results"]
    if _are_one_thing_each(first, second):
        first, second = (next(iter(each.values())) for each in (first, second))
    numbers, later = dict(_numbers(first)), dict(_numbers(second))
    return [_row(name, value, later[name]) for name, value in numbers.items() if name in later]


def _are_one_thing_each(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether each has one result, by a name of its own: such as the reports on two traces."""
    return len(before) == len(after) == 1 and before.keys() != after.keys()


def load(path: str | Path) -> dict[str, Any]:
    """A result as `results.write_json` writes it. Raises: ConfigError."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {error}") from error
    if isinstance(content, dict) and "results" not in content and "benchmark" in content:  # they are at the top
        results = {key: value for key, value in content.items() if isinstance(value, dict) and key != "environment"}
        content = {**content, "results": results}
    if not isinstance(content, dict) or not isinstance(content.get("results"), dict):
        raise ConfigError(f"{path} is not the result of a benchmark")
    return content


def comparison(before: Mapping[str, Any], after: Mapping[str, Any], *, shows_all: bool) -> str:
    """The table, and above it what differs between the machines and versions."""
    lines = [f"{before.get('benchmark')}: A against B"]
    if before.get("benchmark") != after.get("benchmark"):
        lines.append(f"  benchmark: {before.get('benchmark')} | {after.get('benchmark')}")
    if _are_one_thing_each(before["results"], after["results"]):
        lines.append("  of: " + " | ".join(next(iter(each["results"])) for each in (before, after)))
    lines += _differences(before.get("environment", {}), after.get("environment", {}))
    rows = compare(before, after)
    shown = [row for row in rows if shows_all or abs(row.ratio - 1) >= NOTABLE]
    width = max([len(row.name) for row in shown], default=4)
    lines.append(f"{'':{width}}{'A':>14}{'B':>14}{'B / A':>9}")
    lines += [
        f"{row.name:{width}}{row.before:>14.6g}{row.after:>14.6g} {row.ratio:>8.3f}  {row.verdict}".rstrip()
        for row in shown
    ]
    num_alike = sum(abs(row.ratio - 1) < NOTABLE for row in rows)
    lines.append(f"{len(rows)} numbers in both, {num_alike} of them alike within {NOTABLE:.0%}")
    return "\n".join(lines)


def _numbers(value: object, name: str = "") -> Iterator[tuple[str, float]]:
    if isinstance(value, bool):
        return
    if isinstance(value, int | float):
        yield name, float(value)
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield from _numbers(inner, f"{name}.{key}" if name else str(key))


def _row(name: str, before: float, after: float) -> Row:
    row = Row(name, before, after, "")
    if abs(row.ratio - 1) < NOTABLE or _NO_DIRECTION.search(name):
        return row
    grows = row.ratio > 1
    if _MORE_IS_BETTER.search(name):
        return row._replace(verdict="better" if grows else "worse")
    if _LESS_IS_BETTER.search(name):
        return row._replace(verdict="worse" if grows else "better")
    return row


def _differences(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """Of commit, hardware and versions; the date always differs."""
    flat = [{**each, **each.get("packages", {})} for each in (before, after)]
    names = [name for name in dict.fromkeys([*flat[0], *flat[1]]) if name not in ("date", "packages")]
    return [
        f"  {name}: {flat[0].get(name)} | {flat[1].get(name)}"
        for name in names
        if flat[0].get(name) != flat[1].get(name)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Command line of this comparison."""
    parser = argparse.ArgumentParser(prog="bench compare", description=__doc__.splitlines()[0])
    parser.add_argument("before", metavar="A")
    parser.add_argument("after", metavar="B")
    parser.add_argument("--all", action="store_true", help="also what is alike")
    options = parser.parse_args(arguments)
    print(comparison(load(options.before), load(options.after), shows_all=options.all))


if __name__ == "__main__":
    main()
