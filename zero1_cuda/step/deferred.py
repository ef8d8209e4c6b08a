"""Where the host may not wait for an agreement: what is looked at later, and who looks at once."""

from __future__ import annotations

import torch
from torch import Tensor

from .. import ops
from ..comm.grid import ProcessGrid
from .agreement import BACKWARD, CLIP, STEP, Agreement, Report, raise_together, words_faulty
from .streams import is_capturing

PLACES = (BACKWARD, CLIP, STEP)


class LastStep:
    """The agreement of the last step, of which a copy is on its way to the host.

    A step that was stopped has changed nothing on any rank; the next one raises on every rank what was wrong on any. In
    a captured graph no copy is made: a sticky word on the device says that a replay was stopped.
    """

    def __init__(self) -> None:
        self._agreement: Agreement | None = None
        self._words: Tensor | None = None
        self._event: torch.cuda.Event | None = None
        self._failed: Report | None = None
        self._captured = False

    def remember(self, agreement: Agreement) -> None:
        """Sends a copy of the agreement to the host, to be looked at in the next step."""
        control = agreement.control
        if is_capturing(control):
            self._captured = True
            return
        if control.is_meta:
            return
        if control.is_cuda:
            with torch.cuda.device(control.device):
                words = torch.empty(control.numel(), dtype=torch.int64, device="cpu", pin_memory=True)
                words.copy_(control, non_blocking=True)
                self._event = torch.cuda.Event()
                self._event.record()
        else:
            words = control.clone()
        self._agreement, self._words = agreement, words

    def failed(self, report: Report) -> None:
        """This rank has seen already that the step was stopped."""
        self._failed = report

    def _report(self, grid: ProcessGrid) -> Report | None:
        """What this rank brought to the last step, if that was stopped."""
        if self._failed is not None:
            return self._failed
        if self._agreement is None or self._words is None:
            return None
        if self._event is not None:
            self._event.synchronize()  # of the last step; newer work goes on
        words = self._words.tolist()
        stopped = words_faulty(grid.num_ranks, words) or words[ops.CONTROL_MODIFIED] > 0
        stopped |= words[ops.CONTROL_IN_BACKWARD] > 0 or words[ops.CONTROL_IN_CLIP] > 0
        return self._agreement.report if stopped else None

    def stopped(self, grid: ProcessGrid, skipped: Tensor) -> bool:
        """Whether the last step, or a replay since then, has been stopped. Only where the host can look."""
        return self._report(grid) is not None or (self._captured and bool(skipped[2]))

    def tell(self, grid: ProcessGrid, skipped: Tensor) -> None:
        """Collective, where it has been stopped: raises on every rank what was wrong on any."""
        report = self._report(grid)
        self.forget()
        skipped[2] = 0
        if report is not None:
            raise_together(grid, report)
        raise RuntimeError(
            "a captured step was stopped in a replay, and changed nothing: ranks differed in what must be equal"
        )

    def forget(self) -> None:
        """It has been looked at."""
        self._agreement = self._words = self._event = self._failed = None


class CallOrder:
    """From where this rank has sent its messages in this cycle, and in the one before.

    Ranks that do what they did in the last step need not look at what the others say: all of them do. One that does
    something else looks, and finds out whether it is alone with it.
    """

    def __init__(self) -> None:
        self.void: str | None = None  # where this cycle was lost, if it was
        self._last: list[str] = []
        self._now: list[str] = []

    @property
    def is_first(self) -> bool:
        """Whether no rank knows what to expect; then all of them look."""
        return not self._last

    def expects(self, name: str) -> bool:
        """Notes a message; whether one from there was expected."""
        at = len(self._now)
        self._now.append(name)
        return at < len(self._last) and self._last[at] == name

    def others_do(self, where: dict[str, int], name: str) -> list[str] | None:
        """What the others, who are where they were expected and do not look, send until their step is made.

        None: they are where this rank is or come there, or nobody is where all were expected.
        """
        at = len(self._now) - 1
        expected = self._last[at] if at < len(self._last) else name
        if not where[expected] or PLACES.index(expected) <= PLACES.index(name):
            return None
        return self._last[at + 1 :]

    def lose(self, name: str) -> None:
        """The others have made this cycle's step without this rank, which was in `name`."""
        self.void = name

    def begin_cycle(self) -> None:
        """The next cycle begins. After one that was lost, what the others did in it is expected again."""
        if not self.void:
            self._last = self._now
        self._now, self.void = [], None

    def forget(self) -> None:
        """Nobody knows any more what to expect."""
        self._last, self._now, self.void = [], [], None
