"""Which of a machine's addresses REDUCTION_INTERFACE means."""

import socket

import psutil
import pytest

from reducer.errors import ConfigError
from worker_client import config
from worker_client.client.interfaces import addresses, choose, towards

FOUND = {
    "lo": ["127.0.0.1", "::1"],
    "eth0": ["10.1.0.7"],
    "eth1": ["192.168.3.9", "192.168.4.9", "fd00::9"],
    "eth2": ["fd00:1::9"],
}


def test_all_interfaces_are_found():
    expected = {}
    for name, there in psutil.net_if_addrs().items():
        found = {one.address for one in there if one.family in {socket.AF_INET, socket.AF_INET6}}
        found = {one for one in found if not one.startswith("fe80")}
        expected |= {name: found} if found else {}
    assert {name: set(there) for name, there in addresses().items()} == expected
    assert addresses()["lo"][0] == "127.0.0.1"


@pytest.mark.parametrize(
    ("wanted", "meant"),
    [
        ("eth1", "192.168.3.9"),
        ("eth2", "fd00:1::9"),
        ("192.168.4.9", "192.168.4.9"),
        ("192.168.4.1/24", "192.168.4.9"),
        ("10.0.0.0/8", "10.1.0.7"),
        ("fd00::/64", "fd00::9"),
    ],
)
def test_a_name_an_address_or_a_network_will_do(wanted, meant):
    assert choose(wanted, FOUND) == meant


@pytest.mark.parametrize("wanted", ["eth", "10.2.0.0/16", "10.1.0.8"])
def test_the_error_names_what_there_is(wanted):
    there = r"eth0 \(10\.1\.0\.7\), eth1 \(192\.168\.3\.9 .* fd00::9\).* lo \(127.0.0.1 ::1\)"
    with pytest.raises(ConfigError, match=f"address of '{wanted}'.*{there}.*such as 10.0.0.0/8"):
        choose(wanted, FOUND)


def test_a_network_means_no_address_of_the_loopback_if_there_is_another():
    found = {"lo": ["127.0.0.1", "10.255.0.7"], "eth0": ["10.0.0.3"]}
    assert choose("10.0.0.0/8", found) == choose("10.0.0.3/8", found) == "10.0.0.3"
    assert choose("0.0.0.0/0", found) == "10.0.0.3"
    assert choose("10.255.0.0/16", found) == "10.255.0.7"
    assert choose("10.255.0.7/8", found) == "10.255.0.7"


def test_a_network_of_several_interfaces_means_none_of_them():
    with pytest.raises(ConfigError, match=r"several interfaces .* '0.0.0.0/0'; there are eth0"):
        choose("0.0.0.0/0", FOUND)


@pytest.mark.parametrize(
    ("host", "own"),
    [("localhost", "127.0.0.1"), ("[::1]", "::1"), ("no..name", None), ("fe80::1%lo", None)],
)
def test_the_address_on_the_way_to_a_host(host, own):
    assert towards(host) == own


def test_the_way_to_an_address_of_this_machine_is_that_address():
    there = [address for its in addresses().values() for address in its]
    assert [towards(address) for address in there] == there


def test_a_system_without_ipv6_has_no_way_there(without_ipv6):
    assert towards("::1") is None
    assert towards("localhost") == "127.0.0.1"


def test_where_to_listen_is_said_once(monkeypatch):
    monkeypatch.setenv("REDUCTION_INTERFACE", "eth1")
    assert config.load().interface == "eth1"
    monkeypatch.setenv("REDUCTION_BIND", "tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="REDUCTION_INTERFACE: unset REDUCTION_BIND"):
        config.load()
