"""A network of peers that is only what a test says it is; the board is the real one."""

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
