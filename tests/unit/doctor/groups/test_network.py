"""Ports, peers and the cards' own network, where the fixture hosts have no case."""

import os

import pytest

from kvtierd.plan.inventory import Nic, PortOwner
from kvtierd.plan.model import PortUse

from ..bedside import examined, host, npus, planned, said, written

SIGN = {"/etc/ascend_install.info": "Driver_Install_Path_Param=/usr/local/Ascend\n"}
CONF = "".join(f"address_{n}=29.17.1.{n + 2}\nnetmask_{n}=255.255.0.0\n" for n in range(2))
CLUSTER = {
    "node": {"name": "h", "series": "800I-A2"},
    "pool": {"dram": "8GiB"},
    "cluster": {
        "mode": "static",
        "master": "h",
        "insecure": True,
        "peers": [{"name": "h", "address": "10.0.0.1"}, {"name": "other", "address": "10.0.0.2"}],
    },
}
MINE = said("ip", "route", "get", "10.0.0.1", stdout="local 10.0.0.1 dev lo src 10.0.0.1 uid 0\n")
OTHER = said("ip", "route", "get", "10.0.0.2", stdout="10.0.0.2 dev enp1s0 src 10.0.0.1 uid 0\n")


def tool(device, verb, stdout, **about):
    return said("hccn_tool", "-i", str(device), verb, "-g", stdout=stdout, **about)


def cards(check, root, answers=(), conf=CONF, **fields):
    written(root, SIGN)
    if conf is not None:
        written(root, {"/etc/hccn.conf": conf})
    return examined(f"network.{check}", root, inventory=host(npus=npus(2)), commands=answers, **fields)


@pytest.mark.parametrize(
    "check", ["hccn-conf", "hccn-subnet", "hccn-device", "hccn-link", "hccn-health", "mtu"]
)
def test_cards_that_move_kv_another_way_are_not_asked(tmp_path, check):
    written(tmp_path, SIGN)
    by_plan = examined(
        f"network.{check}",
        tmp_path,
        inventory=host(npus=npus(2)),
        plan=planned(protocol="device_sdma", series="A3"),
    )
    by_chip = examined(f"network.{check}", tmp_path, inventory=host(npus=npus(2, "Ascend910")))
    assert by_plan.found.startswith("does not apply: device_sdma")
    assert by_chip.found.startswith("does not apply: A3")


class TestTheFile:
    def test_complete(self, tmp_path):
        assert cards("hccn-conf", tmp_path).severity == "ok"

    def test_missing_in_a_container(self, tmp_path):
        written(tmp_path, {"/.dockerenv": ""})
        outcome = cards("hccn-conf", tmp_path, conf=None)
        assert outcome.severity == "fail"
        assert "-v /etc/hccn.conf" in outcome.fix

    @pytest.mark.parametrize(
        ("conf", "text"),
        [
            ("address_0=29.17.1.2\nnetmask_0=255.255.0.0\n", "no address for device 1"),
            (CONF.replace("29.17.1.3", "29.17.1.2"), "29.17.1.2 is the address of devices 0, 1"),
            (CONF.replace("29.17.1.3", "29.17.1.300"), "no address for device 1"),
            ("", "no address for device 0, 1"),
        ],
    )
    def test_incomplete(self, tmp_path, conf, text):
        outcome = cards("hccn-conf", tmp_path, conf=conf)
        assert (outcome.severity, outcome.found) == ("fail", text)

    def test_a_pipe_in_its_place_costs_one_time_limit(self, tmp_path):
        written(tmp_path, SIGN)
        (tmp_path / "etc/hccn.conf").parent.mkdir(exist_ok=True)
        os.mkfifo(tmp_path / "etc/hccn.conf")
        outcome = cards("hccn-conf", tmp_path, conf=None)
        assert outcome.severity == "unknown"
        assert "no answer within" in outcome.found

    def test_a_card_without_a_netmask(self, tmp_path):
        assert (
            cards("hccn-subnet", tmp_path, conf="address_0=29.17.1.2\naddress_1=29.17.1.3\n").severity
            == "warn"
        )


class TestTheDevice:
    ALIKE = (
        tool(0, "-ip", "ipaddr:29.17.1.2\nnetmask:255.255.0.0\n"),
        tool(1, "-ip", "ipaddr:29.17.1.3\nnetmask:255.255.0.0\n"),
    )

    def test_as_in_the_file(self, tmp_path):
        assert cards("hccn-device", tmp_path, self.ALIKE).severity == "ok"

    @pytest.mark.parametrize(
        ("answer", "severity"),
        [
            (tool(1, "-ip", "ipaddr:29.17.1.9\nnetmask:255.255.0.0\n"), "fail"),
            (tool(1, "-ip", "ipaddr:29.17.1.3\nnetmask:255.255.255.0\n"), "fail"),
            (tool(1, "-ip", "the command is not supported\n"), "fail"),
            (tool(1, "-ip", "", code=None, timed_out=True), "unknown"),
        ],
    )
    def test_another_answer(self, tmp_path, answer, severity):
        outcome = cards("hccn-device", tmp_path, (self.ALIKE[0], answer))
        assert outcome.severity == severity
        assert "device 1" in outcome.found

    def test_without_the_tool_nothing_is_claimed(self, tmp_path):
        outcome = cards("hccn-device", tmp_path)
        assert outcome.severity == "unknown"
        assert "not installed" in outcome.found


@pytest.mark.parametrize(
    ("state", "severity"),
    [
        ("link status: UP\n", "ok"),
        ("link status: DOWN\n", "fail"),
        ("link status: Up \r\n", "ok"),
        ("\x00\xff", "unknown"),
    ],
)
def test_link(tmp_path, state, severity):
    answers = (tool(0, "-link", "link status: UP\n"), tool(1, "-link", state))
    assert cards("hccn-link", tmp_path, answers).severity == severity


@pytest.mark.parametrize(
    ("state", "severity"),
    [("Success", "ok"), ("Fault", "warn"), ("Receive timeout", "warn"), ("Init", "note"), ("", "unknown")],
)
def test_health(tmp_path, state, severity):
    answers = [tool(n, "-net_health", f"net health status: {state}\n") for n in range(2)]
    assert cards("hccn-health", tmp_path, answers).severity == severity


@pytest.mark.parametrize(
    ("sizes", "nic", "severity"),
    [
        ((4096, 4096), 9000, "ok"),
        ((4096, 4096), 1500, "note"),
        ((4096, 1500), 9000, "warn"),
        ((4096, 4096), None, "ok"),
    ],
)
def test_mtu(tmp_path, sizes, nic, severity):
    if nic:
        written(tmp_path, {"/sys/class/net/enp1s0/mtu": f"{nic}\n"})
    answers = [tool(n, "-mtu", f"mtu:{size}\n") for n, size in enumerate(sizes)]
    assert cards("mtu", tmp_path, answers).severity == severity


def test_950_is_asked_in_its_own_words(tmp_path):
    written(tmp_path, SIGN)
    table = "| UdieID | PortID | Speed | Link Status |\n| 0 | 4 | 400G | {} |\n| 0 | 5 | 400G | DOWN |\n"
    for first, severity in (("UP", "note"), ("DOWN", "warn")):
        answers = [said("hccn_tool", "-g", "-dev_info", "-i", "0", stdout=table.format(first))]
        outcome = examined(
            "network.hccn-link", tmp_path, inventory=host(npus=npus(1, "Ascend950PR")), commands=answers
        )
        assert outcome.severity == severity


class TestPeers:
    def look(self, root, commands, peers=None, **fields):
        settings = CLUSTER
        if peers:
            settings = {**CLUSTER, "cluster": {**CLUSTER["cluster"], "peers": peers}}
        return examined("network.peers", root, settings=settings, plan=planned(), commands=commands, **fields)

    def test_well(self, tmp_path):
        outcome = self.look(tmp_path, (MINE, OTHER))
        assert outcome == ("ok", "h: 10.0.0.1 is this host's; other: 10.0.0.2 by enp1s0", "")

    def test_an_own_address_is_also_known_by_the_interface(self, tmp_path):
        inventory = host(nics=(Nic(name="enp1s0", addresses=("10.0.0.1",)),))
        away = said("ip", "route", "get", "10.0.0.1", stdout="10.0.0.1 dev x src 1.2.3.4\n")
        assert self.look(tmp_path, (away, OTHER), inventory=inventory).severity == "ok"

    @pytest.mark.parametrize(
        ("commands", "severity", "text"),
        [
            ((OTHER,), "unknown", "h: ip route get"),
            ((MINE,), "unknown", "other: ip route get"),
            (
                (said("ip", "route", "get", "10.0.0.1", stdout="10.0.0.1 dev x"), OTHER),
                "fail",
                "no interface",
            ),
            ((MINE, said("ip", "route", "get", "10.0.0.2", code=2)), "fail", "no route to 10.0.0.2"),
            (
                (MINE, said("ip", "route", "get", "10.0.0.2", stdout="local 10.0.0.2 dev lo")),
                "fail",
                "other: 10.0.0.2 is an address of this host",
            ),
        ],
    )
    def test_ill(self, tmp_path, commands, severity, text):
        outcome = self.look(tmp_path, commands)
        assert outcome.severity == severity
        assert text in outcome.found

    def test_a_name_is_asked_of_the_hosts_resolver(self, tmp_path):
        peers = [{"name": "h", "address": "10.0.0.1"}, {"name": "other", "address": "other.example"}]
        named = said("getent", "hosts", "other.example", stdout="10.0.0.2  other.example\n")
        assert self.look(tmp_path, (MINE, OTHER, named), peers).severity == "ok"
        loop = said("getent", "hosts", "other.example", stdout="127.0.1.1  other.example\n")
        assert "loopback" in self.look(tmp_path, (MINE, loop), peers).found
        assert self.look(tmp_path, (MINE,), peers).severity == "warn"


@pytest.mark.parametrize(
    ("limits", "reserved", "severity"),
    [
        ("32768\t60999", "", "ok"),
        ("5000\t60999", "", "warn"),
        ("5000\t60999", "5000-5001", "ok"),
        ("5000\t60999", "8000", "warn"),
        ("", "", "unknown"),
        ("a b", "", "unknown"),
    ],
)
def test_ephemeral_ports(tmp_path, limits, reserved, severity):
    written(
        tmp_path,
        {
            "/proc/sys/net/ipv4/ip_local_port_range": limits,
            "/proc/sys/net/ipv4/ip_local_reserved_ports": reserved,
        },
    )
    use = PortUse(port=5000, unit="u", purpose="p")
    outcome = examined("network.ephemeral", tmp_path, plan=planned(ports=(use,)))
    assert outcome.severity == severity


def test_usual_ports_are_named_without_a_plan(tmp_path):
    inventory = host(ports_in_use=(PortOwner(address="0.0.0.0", port=5000),))
    outcome = examined("network.ports", tmp_path, inventory=inventory)
    assert outcome.severity == "note"
    assert "Docker registry" in outcome.found


@pytest.mark.parametrize(
    ("nic", "up", "severity"),
    [("enp1s0", True, "ok"), ("enp1s0", False, "fail"), ("eth9", True, "fail"), (None, False, "note")],
)
def test_nic(tmp_path, nic, up, severity):
    inventory = host(nics=(Nic(name="enp1s0", up=up), Nic(name="lo")))
    node = {"series": "800I-A2", **({"nic": nic} if nic else {})}
    settings = {"node": node, "pool": {"dram": "8GiB"}}
    assert examined("network.nic", tmp_path, inventory=inventory, settings=settings).severity == severity
