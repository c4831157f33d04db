"""An asyncio loop whose time jumps from one thing to do to the next, so that hours of leases take seconds."""

import asyncio
import selectors


class _Jump(selectors.SelectSelector):
    """Instead of waiting, moves the loop's time."""

    loop = None

    def select(self, timeout=None):
        ready = super().select(0)
        if not ready and timeout and timeout > 0:
            self.loop.now += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """``now`` is its time, in seconds since it was made."""

    def __init__(self):
        self.now = 0.0
        selector = _Jump()
        selector.loop = self
        super().__init__(selector)

    def time(self):
        return self.now


def run_virtually(main):
    """Runs an async function to its end in virtual time."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
