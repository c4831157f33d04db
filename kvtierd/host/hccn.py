"""Reads ``/etc/hccn.conf`` and what ``hccn_tool`` prints about the cards' own network ports. Pure: text in, values out.

A card's port has an address of its own, which no ``ip addr`` of the host shows. The file says which address the driver
gave it at boot; the tool asks the card. Odd text gives no value, never an exception.
"""

from __future__ import annotations

import ipaddress
import re

from kvtierd.plan.inventory import Record

CONF: str = "/etc/hccn.conf"
MAX_LINES = 10_000


class CardAddress(Record):
    """The address of one card's port, and its netmask where it is known."""

    device: int
    address: str
    netmask: str = ""

    @property
    def network(self) -> str | None:
        """The subnet, as ``29.17.0.0/16``; ``None`` without a valid netmask."""
        try:
            return str(ipaddress.ip_interface(f"{self.address}/{self.netmask}").network)
        except ValueError:
            return None


class CardPort(Record):
    """One row of ``hccn_tool -g -dev_info`` (950): a die's port and its link."""

    udie: str
    port: str
    link: str


def parse_conf(text: str) -> dict[int, CardAddress]:
    """``address_N`` and ``netmask_N`` lines by device; the last of a repeated key counts, as the driver reads it."""
    values: dict[tuple[str, int], str] = {}
    for line in text.splitlines()[:MAX_LINES]:
        match = re.fullmatch(r"\s*(address|netmask)_(\d{1,3})\s*=\s*(\S+)\s*", line)
        if match:
            values[match[1], int(match[2])] = match[3]
    return {
        device: CardAddress(device=device, address=address, netmask=values.get(("netmask", device), ""))
        for (key, device), address in values.items()
        if key == "address" and is_address(address)
    }


def parse_address(text: str, device: int) -> CardAddress | None:
    """``hccn_tool -i N -ip -g``: ``ipaddr:29.17.1.2`` and ``netmask:255.255.0.0``."""
    address, netmask = _value(text, "ipaddr"), _value(text, "netmask")
    if address is None or not is_address(address):
        return None
    return CardAddress(device=device, address=address, netmask=netmask or "")


def parse_link(text: str) -> str | None:
    """``hccn_tool -i N -link -g``: ``UP`` or ``DOWN``."""
    status = _value(text, "link status")
    return status.upper() if status else None


def parse_health(text: str) -> str | None:
    """``hccn_tool -i N -net_health -g``: ``Success``, ``Fault``, ``Receive timeout`` and others."""
    return _value(text, "net health status")


def parse_mtu(text: str) -> int | None:
    """``hccn_tool -i N -mtu -g``: ``mtu:8192``."""
    match = re.search(r"\bmtu\s*[: ]\s*(\d{2,6})\b", text, flags=re.IGNORECASE)
    return int(match[1]) if match else None


def parse_ports(text: str) -> tuple[CardPort, ...]:
    """The table of ``hccn_tool -g -dev_info -i N``, found by its header's names; empty when there is none."""
    header: list[str] = []
    ports: list[CardPort] = []
    for line in text.splitlines()[:MAX_LINES]:
        stripped = line.strip()
        if not stripped.startswith("|"):
            continue
        cells = [cell.strip() for cell in stripped.strip("|").split("|")]
        names = [re.sub(r"[^a-z]", "", cell.lower()) for cell in cells]
        if "linkstatus" in names:
            header = names
        elif header:
            row = dict(zip(header, cells, strict=False))
            ports.append(
                CardPort(
                    udie=row.get("udieid", "?"),
                    port=row.get("portid", "?"),
                    link=row.get("linkstatus", "?").upper(),
                )
            )
    return tuple(ports)


def is_address(text: str) -> bool:
    """Whether it is an IP address."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _value(text: str, name: str) -> str | None:
    match = re.search(rf"^\s*{name}\s*:[ \t]*(\S[^\r\n]*?)\s*$", text, flags=re.MULTILINE | re.IGNORECASE)
    return match[1] if match else None
