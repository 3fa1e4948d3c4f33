"""Between two steps: whether all ranks save now, or stop. They must do it at the same step, or they wait for ever."""

from __future__ import annotations

import time
from dataclasses import dataclass

from air_nb.checkpoint.group import Ranks
from air_nb.checkpoint.schedule import Pace, Schedule
from air_nb.checkpoint.signals import StopReason
from air_nb.errors import CheckpointError

__all__ = ["Boundary", "Verdict"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What all ranks do between two steps.

    Attributes:
        save: Save.
        stop: Save, then end the loop.
        failed: The save in flight has failed on some rank.
    """

    save: bool = False
    stop: StopReason = StopReason.NONE
    failed: bool = False


class Boundary:
    """Makes the ranks agree. By number of steps they do anyhow; by time, the clock of the first one counts.

    Args:
        ranks: All ranks.
        schedule: When to save.
        step: Number of steps completed.
    """

    def __init__(self, ranks: Ranks, schedule: Schedule, step: int) -> None:
        self._ranks = ranks
        self._schedule = schedule
        self._pace = Pace(step)
        self._asked_step = step
        self._asked_at_s = time.monotonic()
        self._ask_s = 0.0

    def decide(self, step: int, stop: StopReason, *, failed: bool, is_end: bool) -> Verdict:
        """Decide after a step. Collective: every rank calls.

        Args:
            step: Number of steps completed.
            stop: What the signals of this rank ask for.
            failed: Whether a save has failed on this rank.
            is_end: The data of this rank has ended.

        Raises:
            CheckpointError: The ranks are not at the same step, or one did not come.
        """
        due = self._schedule.due_by_step(step) and not is_end
        # Asked before each save, too: ranks that are not at the same step would wait for each other for ever.
        if self._ranks.world_size > 1 and not (due or is_end or self._pace.is_due(step)):
            return Verdict()
        by_time = self._ranks.is_first and self._schedule.due_by_time(time.monotonic())
        values = self._ask(step, [int(stop), int(by_time), int(failed)])
        return Verdict(save=due or bool(values[1]), stop=StopReason(values[0]), failed=bool(values[2]))

    def _ask(self, step: int, values: list[int]) -> list[int]:
        began_at_s = time.monotonic()
        step_us = _us((began_at_s - self._asked_at_s) / max(step - self._asked_step, 1))
        # Of how long asking took, the least counts: that was the rank that came last and waited for nobody.
        *answers, highest, lowest, slowest_us, ask_us = self._ranks.largest(
            [*values, step, -step, step_us, -_us(self._ask_s)]
        )
        if highest != -lowest:
            msg = (
                f"rank {self._ranks.rank} has done {step} steps, others between {-lowest} and {highest}: the loader "
                "gives the ranks different numbers of batches. air_nb.data.DataLoader gives all the same number"
            )
            raise CheckpointError(msg)
        self._pace.asked(step, step_us=slowest_us, ask_us=-ask_us)
        self._asked_step, self._asked_at_s = step, time.monotonic()
        self._ask_s = self._asked_at_s - began_at_s
        return answers


def _us(seconds: float) -> int:
    return int(seconds * 1e6)
