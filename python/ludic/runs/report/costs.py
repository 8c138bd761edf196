"""What a run cost: seconds by phase, padding and memory, for summary.json and for the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

_TOKEN_KEYS = ("real_tokens", "padded_tokens", "padded_tokens_greedy", "padded_tokens_unpacked", "shared_tokens")


def sum_phases(
    seconds: Mapping[str, float],
    lines: Sequence[Mapping[str, float]],
    *,
    own: Sequence[str] = ("set_up", "evaluate"),
    timed: Sequence[str] = ("batching", "forward_backward", "optimizer", "checkpoint"),
) -> dict[str, float]:
    """Seconds by phase: the run's `own` phases (set-up reads the data), the start of a server if
    there was one, the parts of a step that the trainer `timed`, and the rest."""
    whole = {name: seconds.get(name, 0.0) for name in own}
    whole |= {name: seconds[name] for name in ("server_start",) if name in seconds}
    parts = {name: sum(line.get(f"perf/{name}_s", 0.0) for line in lines) for name in timed}
    rest = seconds.get("wall", 0.0) - sum(whole.values()) - sum(parts.values())
    return {name: round(value, 2) for name, value in {**whole, **parts, "other": max(0.0, rest)}.items()}


def sum_padding(lines: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Tokens of all training passes, as they were packed and as other packings would compute
    them."""
    real, computed, greedy, unpacked, shared = (sum(line.get(f"perf/{key}", 0.0) for line in lines) for key in _TOKEN_KEYS)
    if not computed:
        return {}
    return {
        "real_tokens": real,
        "computed_tokens": computed,
        "greedy_tokens": greedy,
        "unpacked_tokens": unpacked,
        "shared_tokens": shared,
        "saved_vs_greedy": 1 - computed / greedy,
        "saved_vs_unpacked": 1 - computed / unpacked,
    }


def format_seconds(wall_s: float, phases_s: Mapping[str, float]) -> str:
    phases = ", ".join(f"{name.replace('_', ' ')} {seconds:.1f}" for name, seconds in phases_s.items())
    return f"[bold]Seconds[/]: {wall_s:.1f} in all; {phases}"


def format_execution(wall_s: float, execution_s: float) -> str:
    return f"[bold]Programs[/] ran during {execution_s:.1f} s, {execution_s / max(wall_s, 1e-9):.0%} of the wall time"


def format_padding(padding: Mapping[str, float]) -> str:
    if not padding:
        return "[bold]Padding[/]: there were no training tokens"
    shared = padding.get("shared_tokens", 0)  # absent in summaries of before
    once = f" ({shared:,.0f} more, of beginnings that samples share, were computed once)" if shared else ""
    return (
        f"[bold]Padding[/]: {padding['computed_tokens']:,.0f} tokens computed for {padding['real_tokens']:,.0f} real ones{once}; greedy "
        f"packing would compute {padding['greedy_tokens']:,.0f} ({padding['saved_vs_greedy']:.1%} saved), no packing "
        f"{padding['unpacked_tokens']:,.0f} ({padding['saved_vs_unpacked']:.1%} saved)"
    )


def format_memory(peaks: Mapping[str, float]) -> str:
    gpu = f", {peaks['gpu_peak_mb']:,.0f} MiB on the GPU" if "gpu_peak_mb" in peaks else ""
    return f"[bold]Memory[/]: {peaks['process_peak_mb']:,.0f} MiB of this process at its peak{gpu}"


def show_costs(console: Console, summary: Mapping[str, Any], *, speed: str = "") -> None:
    """Print the lines of `wall_s`, `phases_s`, `padding` and `memory`. `speed` ends the first."""
    console.print(f"{format_seconds(summary['wall_s'], summary['phases_s'])}{speed}", highlight=False)
    console.print(format_padding(summary["padding"]), highlight=False)
    console.print(format_memory(summary["memory"]), highlight=False)
