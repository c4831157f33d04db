"""The engine's process: ``python -m kvtierd_refengine.server``. Options, threads, signals, the way out.

Exit status: 0 after SIGTERM, SIGINT or SIGHUP, 1 when it cannot serve, 2 for wrong options.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
import threading
from collections.abc import Sequence
from typing import Final

from kvtierd_refengine import NOTICE, __version__
from kvtierd_refengine.options import FATAL_PREFIX, EngineOptions, parse_command_line

_log = logging.getLogger(__name__)
_THREAD_VARIABLES: Final = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS")
_STOP_SIGNALS: Final = frozenset({signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
_CONF_VARIABLE: Final = "MMC_LOCAL_CONFIG_PATH"
# After the drain: 3 s for aborted requests, 1 s for calls in flight, 5 s for the MemCache client, and some air.
_LEAVE_SECONDS: Final = 11.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the server until it is told to stop. Returns the exit status."""
    options = parse_command_line(sys.argv[1:] if argv is None else argv)
    if options.l3 and not os.environ.get(_CONF_VARIABLE):
        return _fatal(
            f"--l3 on needs {_CONF_VARIABLE} in the environment: the path of mmc-local.conf", status=2
        )
    # Before any thread exists: all of them inherit the mask.
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    # Read by the BLAS library when numpy is first imported, which is why nothing above imports it.
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(options.threads)
    logging.basicConfig(
        stream=sys.stdout,
        level=logging.INFO,
        format=f"(refengine pid={os.getpid()}) %(levelname)s %(asctime)s [%(filename)s:%(lineno)d] %(message)s",
        datefmt="%m-%d %H:%M:%S",
    )
    _log.info("%s (version %s)", NOTICE, __version__)
    return asyncio.run(_serve(options))


async def _serve(options: EngineOptions) -> int:
    from aiohttp import web

    from kvtierd_refengine.app import EngineServer
    from kvtierd_refengine.l3store import MemcacheStore

    stop = _stop_event()
    server = EngineServer(options, MemcacheStore() if options.l3 else None)
    runner = web.AppRunner(
        server.app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0, keepalive_timeout=30.0
    )
    await runner.setup()
    try:
        await web.TCPSite(runner, options.host, options.port).start()
    except OSError as error:
        _log.error("cannot listen on %s:%d: %s", options.host, options.port, error)
        return 1
    loading = asyncio.create_task(server.load())
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait({loading, stopping}, return_when=asyncio.FIRST_COMPLETED)
    if loading.done() and (problem := loading.exception()):
        return _fatal(f"cannot build the engine: {problem}", status=1)
    await stopping
    _log.info("stopping: finishing running requests for up to %g s", options.drain)
    _leave_after(options.drain + _LEAVE_SECONDS)
    for site in list(runner.sites):
        await site.stop()
    if not await server.drain(options.drain):
        _log.warning("requests were still running after %g s; they are cut off", options.drain)
    await server.close()
    await runner.cleanup()
    _log.info("stopped")
    return 0


def _stop_event() -> asyncio.Event:
    """Set by the first stop signal. A second one ends the process at once.

    MemCache's client installs handlers of its own for these signals during init, in native code and over whoever was
    there first; caught in a hanging init, a signal would do nothing. The signals are blocked for good, so that no
    handler ever runs, and a thread takes them from the kernel instead.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()

    def take() -> None:
        number = signal.sigwait(_STOP_SIGNALS)
        _log.info("told to stop by %s", signal.Signals(number).name)
        loop.call_soon_threadsafe(stop.set)
        signal.sigwait(_STOP_SIGNALS)
        _log.warning("told to stop a second time: leaving at once")
        leave(0)

    threading.Thread(target=take, name="signals", daemon=True).start()
    return stop


def _leave_after(seconds: float) -> None:
    """A thread that ends the process whatever else hangs, such as a MemCache init that never returns."""

    def give_up() -> None:
        _log.error("stopping took longer than %g s: leaving", seconds)
        leave(0)

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()


def leave(status: int) -> None:
    """Ends the process without unwinding: native threads of MemCache can crash an ordinary interpreter exit."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _fatal(message: str, *, status: int) -> int:
    print(f"{FATAL_PREFIX} {message}", file=sys.stderr, flush=True)
    return status


if __name__ == "__main__":
    leave(main())
