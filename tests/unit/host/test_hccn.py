"""hccn.conf and hccn_tool's answers as values."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvtierd.host import hccn

TABLE = """+--------+--------+--------+----------+-------------+------------+
| UdieID | PortID | Speed  | PortType | Link Status | Media Type |
+--------+--------+--------+----------+-------------+------------+
| 0      | 4      | 400G   | UBoE     | UP          | copper     |
| 1      | 5      | 400G   | UBoE     | DOWN        | copper     |
+--------+--------+--------+----------+-------------+------------+
"""


def test_the_file_by_device():
    text = "# cards\naddress_0=29.17.1.2\n netmask_0 = 255.255.0.0 \naddress_12=29.17.1.14\ngateway_0=29.17.0.1\n"
    cards = hccn.parse_conf(text)
    assert cards[0] == hccn.CardAddress(device=0, address="29.17.1.2", netmask="255.255.0.0")
    assert cards[0].network == "29.17.0.0/16"
    assert cards[12].network is None
    assert set(cards) == {0, 12}


def test_the_last_of_a_repeated_key_counts():
    assert hccn.parse_conf("address_0=29.17.1.2\naddress_0=29.17.1.9\n")[0].address == "29.17.1.9"


@pytest.mark.parametrize(
    "line", ["address_0=nonsense", "address_0=", "address_x=1.2.3.4", "address_0 1.2.3.4"]
)
def test_lines_that_name_no_address(line):
    assert hccn.parse_conf(line) == {}


def test_the_tools_answers():
    address = hccn.parse_address("ipaddr:29.17.1.2\r\nnetmask:255.255.0.0\r\n", 3)
    assert address == hccn.CardAddress(device=3, address="29.17.1.2", netmask="255.255.0.0")
    assert hccn.parse_address("The device is not ready\n", 3) is None
    assert hccn.parse_link("link status: down\n") == "DOWN"
    assert hccn.parse_health("net health status: Receive timeout\n") == "Receive timeout"
    assert (hccn.parse_mtu("mtu:8192\n"), hccn.parse_mtu("mtu 1500"), hccn.parse_mtu("mtu: many")) == (
        8192,
        1500,
        None,
    )


def test_the_ports_of_a_950():
    assert [(p.udie, p.port, p.link) for p in hccn.parse_ports(TABLE)] == [
        ("0", "4", "UP"),
        ("1", "5", "DOWN"),
    ]
    assert hccn.parse_ports("| a | b |\n| c | d |\n") == ()


@given(st.text())
def test_no_text_makes_them_raise(text):
    hccn.parse_conf(text)
    hccn.parse_address(text, 0)
    hccn.parse_link(text)
    hccn.parse_health(text)
    hccn.parse_mtu(text)
    hccn.parse_ports("| Link Status |\n" + text)
