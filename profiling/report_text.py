"""An overlap report for people, and as JSON for programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

from .overlap_report import OverlapReport, Phase, Spread
from .timeline import NO_STEP

MAX_PHASES: Final = 12
MAX_STALLS: Final = 8
MAX_GAPS: Final = 5


def report_json(report: OverlapReport) -> dict[str, Any]:
    """All of it, and what follows from it. Units as in the report: nanoseconds.

    Sums grow with what was recorded. `per_step_ns` is for comparing recordings of different lengths.
    """
    num_steps = report.num_steps
    return {
        **dataclasses.asdict(report),
        "window_ns": report.window_ns,
        "idle_ns": report.idle_ns,
        "idle_share": report.idle_share,
        "exposed_ns": report.exposed_ns,
        "hidden_ns": report.hidden_ns,
        "tokens_per_s": report.tokens_per_s if report.num_tokens else None,
        "per_step_ns": {
            "idle": report.idle_ns / num_steps,
            "exposed": report.exposed_ns / num_steps,
            "hidden": report.hidden_ns / num_steps,
            "exposed by": {phase.name: phase.exposed_ns / num_steps for phase in report.phases},
        },
    }


def report_text(report: OverlapReport) -> str:
    """Some thirty lines."""
    lines = [report.source, "=" * len(report.source), *_summary(report), "", *_phases(report)]
    if report.gaps:
        lines += ["", *_gaps(report)]
    lines += ["", *_stalls(report)]
    return "\n".join(lines) + "\n"


def comparison_text(reports: Sequence[OverlapReport]) -> str:
    """One column a report, for the numbers that tell two depths or two engines apart."""
    rows = [
        ("step, median", [_ms(report.step.median) if report.step else "-" for report in reports]),
        ("step, p99", [_ms(report.step.p99) if report.step else "-" for report in reports]),
        ("device idle", [f"{report.idle_share:.1%}" for report in reports]),
        ("host, exposed a step", [_ms(report.exposed_ns / report.num_steps) for report in reports]),
        ("host, hidden a step", [_ms(report.hidden_ns / report.num_steps) for report in reports]),
        ("tokens/s", [f"{report.tokens_per_s:,.0f}" if report.num_tokens else "-" for report in reports]),
    ]
    width = max(24, *(len(report.source) + 2 for report in reports))
    head = " " * 22 + "".join(f"{report.source:>{width}}" for report in reports)
    return (
        "\n".join([head, *(f"{name:22}" + "".join(f"{cell:>{width}}" for cell in cells) for name, cells in rows)])
        + "\n"
    )


def _summary(report: OverlapReport) -> list[str]:
    window = report.window_ns
    lines = [f"{report.num_steps} {report.steps_are} in {_ms(window)}; the host is {report.host!r}"]
    if report.step is not None:
        lines.append(f"step             {_spread(report.step)}")
    lines.append(f"device busy      {report.busy_ns / window:7.2%}   " + ", ".join(_streams(report)))
    lines.append(
        f"device idle      {report.idle_share:7.2%}   between {report.steps_are} {report.idle_between_ns / window:.2%},"
        f" within {report.idle_within_ns / window:.2%}"
    )
    if report.idle_profiled_ns:
        lines.append(f"  of that {report.idle_profiled_ns / window:.2%} while the profiler itself worked")
    exposed, hidden = report.exposed_ns, report.hidden_ns
    if exposed + hidden:
        lines.append(
            f"host work        {_ms((exposed + hidden) / report.num_steps)} a step: {_ms(hidden / report.num_steps)} hidden,"
            f" {_ms(exposed / report.num_steps)} exposed"
        )
    if report.launch_to_start is not None:
        lines.append(f"launch to start  {_spread(report.launch_to_start)}")
        if report.starts_before_launch:
            early = _ms(-report.launch_to_start.least)
            lines.append(
                f"  {report.starts_before_launch} starts lie before their launch, by up to {early}: the clocks of host and"
                " device disagree by that much"
            )
    if report.num_graph_launches:
        lines.append(
            f"graphs           {report.num_graph_steps} of {report.num_steps} {report.steps_are},"
            f" {report.num_graph_launches} launches"
        )
    if report.num_tokens:
        lines.append(f"tokens           {report.num_tokens} drawn, {report.tokens_per_s:,.0f} a second")
    return lines


def _streams(report: OverlapReport) -> list[str]:
    return [f"{name} {busy / report.window_ns:.2%}" for name, busy in report.streams if busy]


def _phases(report: OverlapReport) -> list[str]:
    lines = [f"{'the host did':28}{'a step':>11}{'exposed':>11}{'between':>11}{'hidden':>11}{'of idle':>9}"]
    shown, rest = report.phases[:MAX_PHASES], report.phases[MAX_PHASES:]
    lines += [_phase(report, phase) for phase in shown]
    if rest:
        together = Phase(
            name=f"{len(rest)} more",
            is_wait=all(phase.is_wait for phase in rest),
            count=sum(phase.count for phase in rest),
            total_ns=sum(phase.total_ns for phase in rest),
            exposed_ns=sum(phase.exposed_ns for phase in rest),
            between_ns=sum(phase.between_ns for phase in rest),
            hidden_ns=sum(phase.hidden_ns for phase in rest),
        )
        lines.append(_phase(report, together))
    return lines


def _phase(report: OverlapReport, phase: Phase) -> str:
    name = f"({phase.name})" if phase.is_wait else phase.name
    times = (phase.total_ns, phase.exposed_ns, phase.between_ns, phase.hidden_ns)
    share = phase.exposed_ns / report.idle_ns if report.idle_ns else 0.0
    return f"{name[:27]:28}" + "".join(f"{_ms(each / report.num_steps):>11}" for each in times) + f"{share:>9.1%}"


def _gaps(report: OverlapReport) -> list[str]:
    lines = ["longest idle times, and what the host did in them"]
    for gap in report.gaps[:MAX_GAPS]:
        causes = ", ".join(f"{name} {_ms(length)}" for name, length in gap.causes[:4])
        before, after = ("?" if step == NO_STEP else str(step) for step in (gap.before, gap.after))
        where = f"{before} to {after}" if before != after else f"in {before}"
        lines.append(f"  {_ms(gap.end_ns - gap.start_ns):>10}  {where:>16}  {causes}")
    return lines


def _stalls(report: OverlapReport) -> list[str]:
    limit = _ms(report.stall_limit_ns)
    if not report.stalls:
        return [f"no stall of the loop of {limit} or more"]
    count = len(report.stalls)
    lines = [f"{count} stall{'s' if count > 1 else ''} of the loop of {limit} or more, and what held it"]
    for stall in report.stalls[:MAX_STALLS]:
        seen = f"  in {', '.join(stall.seen)}" if stall.seen else ""
        lines.append(f"  {_ms(stall.end_ns - stall.start_ns):>10}  {stall.name}{seen}")
    return lines


def _spread(spread: Spread) -> str:
    return f"median {_ms(spread.median)}, mean {_ms(spread.mean)}, p99 {_ms(spread.p99)}, most {_ms(spread.most)}"


def _ms(nanoseconds: float) -> str:
    if abs(nanoseconds) < 1e6:
        return f"{nanoseconds / 1e3:.1f} us"
    return f"{nanoseconds / 1e6:.2f} ms"
