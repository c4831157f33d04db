"""kvtierctl certs: a small certificate authority for the nodes. Works anywhere; no daemon is asked."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvtierd.cli.common import JsonOption, SettingsOption, load, print_json, settings_path
from kvtierd.errors import UsageError

if TYPE_CHECKING:
    from kvtierd.cluster.certs import Authority, Description
    from kvtierd.settings import ClusterSettings

certs_app = typer.Typer(
    help="Certificates with which the nodes of a cluster trust each other.", no_args_is_help=True
)


@certs_app.callback()
def _certs() -> None:
    """Certificates with which the nodes of a cluster trust each other."""


@certs_app.command()
def init(
    directory: Annotated[
        Path, typer.Argument(metavar="DIR", help="Directory for ca.pem and ca.key; made if missing.")
    ],
    days: Annotated[int, typer.Option(help="How long the authority is valid.")] = 3650,
    force: Annotated[
        bool, typer.Option("--force", help="Replace one that is there: its certificates count no longer.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Make a certificate authority. Do it once for a cluster, on a machine you trust; ca.key never goes to the nodes.

    JSON: certificate, key (files), not_after, fingerprint_sha256.
    """
    from kvtierd.cluster import certs

    certs.make_authority(directory, days=days, force=force)
    (made,) = certs.describe(directory / certs.CA_CERTIFICATE)
    key = directory / certs.CA_KEY
    if as_json:
        print_json({
            "certificate": made.file, "key": str(key), "not_after": made.not_after,
            "fingerprint_sha256": made.fingerprint_sha256,
        })  # fmt: skip
        return
    print(f"{made.file}   goes to every node as /etc/kvtierd/tls/ca.pem; valid until {made.not_after[:10]}")
    print(f"{key}   stays here: whoever has it can be any node")


@certs_app.command()
def issue(
    name: Annotated[
        str | None, typer.Argument(metavar="[NAME]", help="Node, as the settings' peers name it.")
    ] = None,
    every: Annotated[
        bool, typer.Option("--all", help="For every peer of the settings that has none in the directory yet.")
    ] = False,
    address: Annotated[
        list[str] | None, typer.Option(help="The node's address, repeatable; default: the peer's.")
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(help="The cluster's name; default: as the settings say.")
    ] = None,
    ca: Annotated[Path, typer.Option("--ca", metavar="DIR", help="Where ca.pem and ca.key are.")] = Path(),
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: where ca.pem is.")
    ] = None,
    days: Annotated[int, typer.Option(help="How long the certificates are valid.")] = 825,
    force: Annotated[bool, typer.Option("--force", help="Replace those that are there.")] = False,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Issue the certificate and the key of a node, or of every node.

    Writes NAME.pem and NAME.key. On the node they belong in /etc/kvtierd/tls as node.pem and node.key, beside ca.pem.

    JSON: authority, certificates [{node, certificate, key, dns_names, ip_addresses, not_after, written}].
    """
    from kvtierd.cluster import certs

    if every == (name is not None):
        raise UsageError("say for whom: a node's name, or --all")
    if every and address:
        raise UsageError("--address is for one node; --all takes the addresses from the settings")
    known = _cluster_settings(settings, needed=every or cluster is None)
    wanted = _wanted(name, address, known)
    cluster_name = cluster or (known.name if known else "")
    authority = certs.Authority.load(ca)
    directory = out or ca
    issued = _issue(authority, wanted, cluster_name, directory, days=days, force=force, keep=every)
    if as_json:
        print_json({"authority": str(ca / certs.CA_CERTIFICATE), "certificates": issued})
        return
    for entry in issued:
        verb = "written" if entry["written"] else "kept"
        print(
            f"{entry['node']}: {entry['certificate']}, {entry['key']} {verb}, valid until {entry['not_after'][:10]}"
        )
        if entry["shortened"]:
            print("    not longer, since the authority ends then")
    print(
        f"\non each node, in /etc/kvtierd/tls: ca.pem from {ca / certs.CA_CERTIFICATE}, NAME.pem as node.pem,"
    )
    print("NAME.key as node.key (owner root, mode 0600)")


@certs_app.command()
def show(
    files: Annotated[
        list[Path] | None, typer.Argument(metavar="[FILE]...", help="PEM files; default: this node's own.")
    ] = None,
    settings: SettingsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show certificates: whose they are, until when, and who signed them. Exit 1 when one is not valid now.

    Without FILE: those that the settings name for this node, and everything that is wrong with them.

    JSON: certificates [{file, subject, issuer, dns_names, ip_addresses, authority, not_before, not_after, days_left,
    valid, key, serial, fingerprint_sha256}], problems [{code, message, hint, fatal}].
    """
    from kvtierd.cluster import certs, identity

    problems: list[identity.IdentityProblem] = []
    if not files:
        loaded = load(settings)
        tls = loaded.cluster.tls
        files = [file for file in (Path(tls.ca), Path(tls.cert)) if file.exists()]
        problems = identity.check_identity(loaded)
    shown = [entry for file in files for entry in certs.describe(file)]
    if as_json:
        print_json({
            "certificates": [dataclasses.asdict(entry) for entry in shown],
            "problems": [dataclasses.asdict(problem) for problem in problems],
        })  # fmt: skip
    else:
        paragraphs = [_text(entry) for entry in shown]
        for problem in problems:
            remedy = f"\n    do: {problem.hint}" if problem.hint else ""
            paragraphs.append(f"{'WRONG' if problem.fatal else 'note'}: {problem.message}{remedy}")
        print("\n\n".join(paragraphs))
    if any(not entry.valid for entry in shown) or any(problem.fatal for problem in problems):
        raise typer.Exit(1)


def _cluster_settings(option: Path | None, *, needed: bool) -> ClusterSettings | None:
    file, named = settings_path(option)
    if not named and not file.exists():
        if not needed:
            return None
        raise UsageError(
            f"there are no settings ({file}) to take the cluster's name and its peers from",
            hint="name the file with --settings FILE; or for a single node give NAME, --cluster and --address",
        )
    return load(option).cluster


def _wanted(
    name: str | None, addresses: list[str] | None, known: ClusterSettings | None
) -> dict[str, tuple[str, ...]]:
    """Node -> addresses."""
    peers: dict[str, tuple[str, ...]] = {p.name: (p.address,) for p in known.peers} if known else {}
    if name is None:
        if not peers:
            raise UsageError(
                "the settings name no peers", hint="write [cluster] peers, or issue for one NAME"
            )
        return peers
    if addresses:
        return {name: tuple(addresses)}
    if peers and name not in peers:
        raise UsageError(
            f"{name} is not among the peers: {', '.join(peers)}",
            hint="correct the name, or give its --address if it is still to be added",
        )
    return {name: peers.get(name, ())}


def _issue(
    authority: Authority,
    wanted: dict[str, tuple[str, ...]],
    cluster: str,
    directory: Path,
    *,
    days: int,
    force: bool,
    keep: bool,
) -> list[dict[str, Any]]:
    from kvtierd.cluster import certs
    from kvtierd.endpoint.names import certificate_names

    files = {node: (directory / f"{node}.pem", directory / f"{node}.key") for node in wanted}
    for node, pair in files.items():
        certificate_names(node, cluster)  # all of them before the first is written
        if pair[0].name == certs.CA_CERTIFICATE:
            raise UsageError(f"a certificate for {node} would be named like the authority's: rename the node")
    kept = {node for node, pair in files.items() if keep and not force and all(f.exists() for f in pair)}
    for node in kept:
        authority.refuse_foreign(files[node][0], node, cluster)
    certs.refuse_existing(
        [file for node, pair in files.items() if node not in kept for file in pair], force=force
    )
    entries = []
    for node, (certificate_file, key_file) in files.items():
        shortened = False
        if node not in kept:
            made = authority.issue(node, cluster, wanted[node], days=days)
            certs.write_pair(certificate_file, made.certificate_pem, key_file, made.key_pem)
            shortened = made.shortened
        description = certs.describe(certificate_file)[0]
        entries.append({
            "node": node, "certificate": str(certificate_file), "key": str(key_file),
            "dns_names": list(description.dns_names), "ip_addresses": list(description.ip_addresses),
            "not_after": description.not_after, "shortened": shortened, "written": node not in kept,
        })  # fmt: skip
    return entries


def _text(entry: Description) -> str:
    if entry.valid:
        state = f"valid until {entry.not_after[:10]}, {entry.days_left} days"
    elif entry.days_left < 0:
        state = f"EXPIRED on {entry.not_after[:10]}"
    else:
        state = f"NOT VALID before {entry.not_before}"
    lines = [
        entry.file,
        f"  subject      {entry.subject}{' (authority)' if entry.authority else ''}",
        f"  names        {', '.join((*entry.dns_names, *entry.ip_addresses)) or '-'}",
        f"  validity     {state}",
        f"  issuer       {entry.issuer}",
        f"  key          {entry.key}",
        f"  fingerprint  {entry.fingerprint_sha256} (SHA-256)",
    ]
    return "\n".join(lines)
