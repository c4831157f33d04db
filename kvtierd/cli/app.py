"""The command line: which verbs there are, in the order an operator meets them."""

from __future__ import annotations

import typer

from kvtierd.cli import common
from kvtierd.cli.apply import apply, reload
from kvtierd.cli.bench import bench_app
from kvtierd.cli.certs import certs_app
from kvtierd.cli.cluster import pause, peers, promote, resume, switchover
from kvtierd.cli.conf import conf_app
from kvtierd.cli.dataset import dataset_app
from kvtierd.cli.demo import demo
from kvtierd.cli.doctor import doctor
from kvtierd.cli.events import events
from kvtierd.cli.hugepages import hugepages
from kvtierd.cli.inventory import inventory
from kvtierd.cli.l3 import l3_app
from kvtierd.cli.logs import logs
from kvtierd.cli.plan import plan
from kvtierd.cli.plugin import plugin_app
from kvtierd.cli.plugins import plugins
from kvtierd.cli.policy import policy_app, why
from kvtierd.cli.purge import purge
from kvtierd.cli.size import size
from kvtierd.cli.status import status
from kvtierd.cli.support_bundle import support_bundle
from kvtierd.cli.units import drain, restart, start, stop
from kvtierd.cli.verify import verify
from kvtierd.cli.version import version

app = typer.Typer(
    name="kvtierctl",
    help="Looks after the tiered KV cache of this host. Exit 0: ok; 1: the thing asked about is bad; 2: usage;"
    " 3: the daemon cannot be reached.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


@app.callback()
def _global(settings: common.SettingsOption = None, socket: common.SocketOption = None) -> None:
    common.chosen["settings"] = settings
    common.chosen["socket"] = socket


for verb in (
    status,
    plan,
    apply,
    reload,
    events,
    why,
    logs,
    start,
    stop,
    restart,
    drain,
    doctor,
    inventory,
    hugepages,
    purge,
    verify,
    peers,
    switchover,
    promote,
    pause,
    resume,
    plugins,
    size,
    demo,
    version,
):
    app.command()(verb)
app.command("support-bundle")(support_bundle)
app.add_typer(bench_app, name="bench")
app.add_typer(certs_app, name="certs")
app.add_typer(conf_app, name="conf")
app.add_typer(plugin_app, name="plugin")
app.add_typer(l3_app, name="l3")
app.add_typer(dataset_app, name="dataset")
app.add_typer(policy_app, name="policy")
