"""How a set of ranks is written in a sentence (pure)."""

from __future__ import annotations

from collections.abc import Collection

__all__ = ["format_ranks", "name_ranks"]


def format_ranks(ranks: Collection[int]) -> str:
    """``[0, 1, 2, 5]`` -> ``"0-2, 5"``."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and parts[-1][-1] == rank - 1:
            parts[-1].append(rank)
        else:
            parts.append([rank])
    return ", ".join(f"{part[0]}-{part[-1]}" if len(part) > 1 else str(part[0]) for part in parts)


def name_ranks(ranks: Collection[int]) -> str:
    """``[3]`` -> ``"rank 3"``, ``[0, 1]`` -> ``"ranks 0-1"``."""
    return f"rank{'' if len(ranks) == 1 else 's'} {format_ranks(ranks)}"
