"""A network of peers that is only what a test says it is; the board is the real one."""

import asyncio
import types

from kvtierd.cluster.peer_server import Desk
from kvtierd.cluster.refusals import Refusals
from kvtierd.cluster.standing import PeerContact, Standing
from kvtierd.cluster.view_board import ViewBoard
from kvtierd.errors import ClusterError


class FakeNetwork:
    """Node ``a`` of a, b, c (and what ``witnesses`` adds); ``sent`` holds the election messages."""

    def __init__(self, node="a", names=("a", "b", "c"), witnesses=(), master=None):
        self.node = node
        self.settings = types.SimpleNamespace(
            peers=[types.SimpleNamespace(name=n, witness=n in witnesses) for n in names],
            voters=tuple(names),
            master=master,
        )
        self.links = {name: None for name in names if name != node}
        self.standing = Standing("unknown")
        self.refusals = Refusals()
        self.board = ViewBoard(node, set(names), self.refusals)
        self.desk = Desk(lambda: None)
        self.hint = ""
        self.sent = []
        self.greeted = []
        self.unreachable = set()
        self.uptimes = {}
        self.answer = lambda to, message: []
        self.on_take_over = None
        self.on_greet = lambda name: None

    async def elect(self, to, message, timeout_seconds):
        assert 0 < timeout_seconds < 60
        self.sent.append((to, message))
        answers = self.answer(to, message)
        if hasattr(answers, "__await__"):
            answers = await answers
        return answers

    async def greet(self, names, timeout_seconds=2.0):
        names = list(names)
        self.greeted.append(set(names))
        reached = {name for name in names if name in self.links and name not in self.unreachable}
        for name in sorted(reached):
            self.on_greet(name)
        return reached

    async def reach(self, name, seconds):
        return name in await self.greet([name])

    def uptime_seconds(self, name):
        return self.uptimes.get(name, 1000.0)

    async def take_over(self, to, epoch, timeout_seconds):
        if to in self.unreachable or self.on_take_over is None:
            raise ClusterError(f"{to} cannot be reached", code="cluster.unreachable")
        return await self.on_take_over(to, epoch)

    def set_hint(self, master):
        self.hint = master

    def contact(self, name):
        return PeerContact(name, True, None, "no route" if name in self.unreachable else "")


class JoinedNetwork(FakeNetwork):
    """One of several in one process that really reach each other; a node in ``lost`` reaches nobody.

    ``joined`` and ``lost`` are shared by all of them.
    """

    def __init__(self, node, names, joined, lost, master=None):
        super().__init__(node, names, master=master)
        self.joined, self.lost = joined, lost
        joined[node] = self
        self.board.listeners.append(lambda: asyncio.get_running_loop().call_soon(self.tell))

    def reached(self, name):
        return not {self.node, name} & self.lost

    def tell(self, *names):
        """What its board says goes to everybody in reach, as by the stream of views."""
        posted = self.board.posted
        for name in names or self.links:
            if self.reached(name):
                self.joined[name].board.offer(
                    posted.view, posted.revision, self.board.age_seconds(), self.node
                )

    async def run(self):
        """Says it again and again, so that a node that was lost hears of it."""
        while True:
            await asyncio.sleep(0.05)
            self.tell()

    async def elect(self, to, message, timeout_seconds):
        if not self.reached(to):
            await asyncio.sleep(timeout_seconds)
            raise ClusterError(f"{to} cannot be reached", code="cluster.unreachable")
        async with asyncio.timeout(timeout_seconds):
            return await self.joined[to].desk.elect(message)

    async def greet(self, names, timeout_seconds=2.0):
        found = {name for name in names if name in self.links and self.reached(name)}
        for name in found:
            self.tell(name)
            self.joined[name].tell(self.node)
        return found

    async def take_over(self, to, epoch, timeout_seconds):
        if not self.reached(to):
            raise ClusterError(f"{to} cannot be reached", code="cluster.unreachable")
        return await self.joined[to].desk.take_over(self.node, epoch)
