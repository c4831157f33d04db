"""Driver, firmware, CANN and the cards, where the fixture hosts have no case."""

import os

import pytest

from kvtierd.plan.inventory import NpuProcess

from ..bedside import DRIVER, GIB, engine, examined, host, npus, planned, said, written

INFO = "/etc/ascend_install.info"
GOOD_INFO = "Driver_Install_Path_Param=/usr/local/Ascend\nDriver_Install_Mode=normal\nDriver_Install_Status=complete\n"
GOOD_DRIVER = "Version=25.2.0\nInnerversion=V100R001C22SPC002B220\ncompatible_version_fw=[7.0.0,7.8.99]\n"
TOOLKIT = "/usr/local/Ascend/{}/{}-linux/ascend_toolkit_install.info"


def test_a_host_without_any_sign_of_an_npu_is_left_alone(tmp_path):
    for check in ("driver", "install", "firmware", "cann", "npu-smi", "health", "hbm", "devices", "series"):
        outcome = examined(f"ascend.{check}", tmp_path)
        assert outcome.severity == "ok", check
        assert "does not apply" in outcome.found


def test_a_container_with_the_driver_and_without_the_install_file_is_told_to_mount_it(tmp_path):
    written(tmp_path, {DRIVER: GOOD_DRIVER})
    outcome = examined("ascend.driver", tmp_path)
    assert outcome.severity == "fail"
    assert "-v /etc/ascend_install.info" in outcome.fix


@pytest.mark.parametrize(
    ("info", "severity", "text"),
    [
        (GOOD_INFO, "ok", "normal, complete"),
        (GOOD_INFO.replace("normal", "vnpu_guest"), "note", "vnpu_guest"),
        (GOOD_INFO.replace("complete", "failed"), "warn", "failed"),
        ("Driver_Install_Mode=normal\n", "warn", "no Driver_Install_Path_Param"),
        (GOOD_INFO.replace("/usr/local/Ascend", "/gone"), "fail", "/gone, which does not exist"),
        (GOOD_INFO.replace("/usr/local/Ascend", "/var/davinci"), "note", "the driver is in /var/davinci"),
    ],
)
def test_the_installers_own_words(tmp_path, info, severity, text):
    written(tmp_path, {INFO: info, DRIVER: GOOD_DRIVER, "/var/davinci/driver/version.info": GOOD_DRIVER})
    outcome = examined("ascend.install", tmp_path)
    assert outcome.severity == severity
    assert text in outcome.found


@pytest.mark.parametrize(
    ("fits", "firmware", "severity"),
    [
        ("[7.0.0,7.8.99]", "7.7.0.1.231", "ok"),
        ("[7.0.0,7.8.99]", "7.8.99", "ok"),
        ("[7.0.0,7.8.99]", "7.9.0.1", "warn"),
        ("[6.0.0,6.4.99],[7.0.0,7.1.99]", "7.1.0.3.220", "ok"),
        ("[6.0.0,6.4.99],[7.0.0,7.1.99]", "6.5.0", "warn"),
        ("", "7.7.0", "unknown"),
        ("[7.0.0,7.8.99]", "", "unknown"),
    ],
)
def test_the_firmware_is_compared_number_by_number(tmp_path, fits, firmware, severity):
    driver = GOOD_DRIVER.replace("[7.0.0,7.8.99]", fits)
    written(
        tmp_path,
        {INFO: GOOD_INFO, DRIVER: driver, "/usr/local/Ascend/firmware/version.info": f"Version={firmware}\n"},
    )
    assert examined("ascend.firmware", tmp_path).severity == severity


@pytest.mark.parametrize(
    ("home", "machine", "severity"),
    [
        ("ascend-toolkit/latest", "aarch64", "ok"),
        ("cann", "aarch64", "ok"),
        ("cann-8.5.0", "aarch64", "ok"),
        ("cann-8.5.0", "x86_64", "warn"),
    ],
)
def test_cann_in_the_places_of_its_releases(tmp_path, home, machine, severity):
    written(
        tmp_path, {INFO: GOOD_INFO, DRIVER: GOOD_DRIVER, TOOLKIT.format(home, machine): "version=8.5.0\n"}
    )
    assert examined("ascend.cann", tmp_path).severity == severity


def test_missing_cann_is_a_failure_only_where_something_on_the_host_needs_it(tmp_path):
    written(tmp_path, {INFO: GOOD_INFO, DRIVER: GOOD_DRIVER})
    settings = {"node": {"series": "800I-A2"}, "pool": {"dram": "8GiB"}}
    assert examined("ascend.cann", tmp_path).severity == "warn"
    assert examined("ascend.cann", tmp_path, settings=settings).severity == "fail"
    boxed = {**settings, "meta": {"runner": "docker", "image": "i", "version": "1.3.0"}}
    assert examined("ascend.cann", tmp_path, settings=boxed).severity == "ok"


@pytest.mark.parametrize("what", ["pipe", "directory", "binary", "huge"])
def test_odd_things_in_the_place_of_files_are_no_traceback(tmp_path, what):
    written(tmp_path, {INFO: GOOD_INFO, "/usr/local/Ascend/firmware/version.info": "Version=7.7.0\n"})
    place = tmp_path / DRIVER.lstrip("/")
    place.parent.mkdir(parents=True, exist_ok=True)
    if what == "pipe":
        os.mkfifo(place)
    elif what == "directory":
        place.mkdir()
    elif what == "binary":
        place.write_bytes(os.urandom(4096))
    else:
        with place.open("wb") as file:
            file.truncate(1 << 32)
    outcome = examined("ascend.driver", tmp_path)
    assert outcome.severity in {"fail", "unknown"}
    assert "the check itself failed" not in outcome.found


def test_a_hung_npu_smi_is_unknown(tmp_path):
    written(tmp_path, {INFO: GOOD_INFO})
    inventory = host(problems=("npu-smi info: no answer within 4.0 s, killed",))
    outcome = examined("ascend.npu-smi", tmp_path, inventory=inventory)
    assert outcome.severity == "unknown"
    assert "no answer within" in outcome.found


@pytest.mark.parametrize(
    ("health", "severity"),
    [("OK", "ok"), ("Warning", "warn"), ("Alarm", "warn"), ("Critical", "fail"), (None, "unknown")],
)
def test_health(tmp_path, health, severity):
    written(tmp_path, {INFO: GOOD_INFO})
    outcome = examined("ascend.health", tmp_path, inventory=host(npus=npus(2, health=health)))
    assert outcome.severity == severity


class TestMemoryOfTheCards:
    FULL = npus(1, hbm_used_bytes=60 * GIB)

    def test_memory_that_nobody_owns(self, tmp_path):
        written(tmp_path, {INFO: GOOD_INFO})
        inventory = host(npus=self.FULL)
        assert examined("ascend.hbm", tmp_path, inventory=inventory).severity == "warn"
        plan = planned(engine(devices=(0,)))
        assert examined("ascend.hbm", tmp_path, inventory=inventory, plan=plan).severity == "fail"

    def test_a_holder_that_is_there_is_well(self, tmp_path):
        written(tmp_path, {INFO: GOOD_INFO, "/proc/71/stat": "71 (python3) S 1 ..."})
        inventory = host(npus=self.FULL, npu_processes=(NpuProcess(card=0, pid=71, name="python3"),))
        outcome = examined("ascend.hbm", tmp_path, inventory=inventory)
        assert outcome == ("ok", "1 of 1 dies are in use, all by processes that exist", "")

    def test_a_holder_that_is_gone_and_one_outside_this_container(self, tmp_path):
        written(tmp_path, {INFO: GOOD_INFO})
        inventory = host(npus=self.FULL, npu_processes=(NpuProcess(card=0, pid=71),))
        assert examined("ascend.hbm", tmp_path, inventory=inventory).severity == "warn"
        written(tmp_path, {"/.dockerenv": ""})
        outcome = examined("ascend.hbm", tmp_path, inventory=inventory)
        assert outcome.severity == "note"
        assert "outside this container" in outcome.found

    def test_the_drivers_own_share_is_no_finding(self, tmp_path):
        written(tmp_path, {INFO: GOOD_INFO})
        assert examined("ascend.hbm", tmp_path, inventory=host(npus=npus(8))).severity == "ok"


def test_a_card_on_the_bus_that_the_driver_did_not_take(tmp_path):
    written(tmp_path, {INFO: GOOD_INFO})
    for bus in ("0000:c1:00.0", "0000:c2:00.0"):
        written(
            tmp_path,
            {
                f"/sys/bus/pci/devices/{bus}/vendor": "0x19e5\n",
                f"/sys/bus/pci/devices/{bus}/class": "0x120000\n",
            },
        )
    # Huawei's network cards are no accelerators.
    written(
        tmp_path,
        {
            "/sys/bus/pci/devices/0000:03:00.0/vendor": "0x19e5\n",
            "/sys/bus/pci/devices/0000:03:00.0/class": "0x020000\n",
        },
    )
    outcome = examined("ascend.cards", tmp_path, inventory=host(npus=npus(1, bus_id="0000:C1:00.0")))
    assert outcome.severity == "warn"
    assert outcome.found.endswith("0000:c2:00.0")


LISTING = """total 0
crw-rw---- 1 0 1000 235, 0 Nov 28 09:12 davinci0
crw-rw---- 1 0 1000 236, 0 Nov 28 09:12 davinci_manager
crw-rw---- 1 0 1000 237, 0 Nov 28 09:12 devmm_svm
crw-rw---- 1 0 1000 238, 0 Nov 28 09:12 hisi_hdc
"""


@pytest.mark.parametrize(
    ("user", "listing", "severity"),
    [
        (None, LISTING, "ok"),
        ("insider", LISTING, "ok"),
        ("stranger", LISTING, "fail"),
        ("stranger", LISTING.replace("crw-rw----", "crw-rw-rw-"), "ok"),
        # The first class that fits decides: a group without the right is refused although others have it.
        ("insider", LISTING.replace("crw-rw----", "crw----rw-"), "fail"),
        ("nobody-there", LISTING, "warn"),
        (None, LISTING.replace("crw-rw---- 1 0 1000 235, 0", "-rw-r--r-- 1 0 0 0"), "fail"),
        (None, "", "unknown"),
    ],
)
def test_who_may_open_the_device_files(tmp_path, user, listing, severity):
    written(
        tmp_path,
        {
            INFO: GOOD_INFO,
            "/etc/passwd": "insider:x:1001:1001::/:/bin/sh\nstranger:x:1002:1002::/:/bin/sh\n",
            "/etc/group": "HwHiAiUser:x:1000:insider\n",
        },
    )
    outcome = examined(
        "ascend.device-access",
        tmp_path,
        plan=planned(engine(devices=(0,), user=user)),
        commands=[said("ls", "-ln", "/dev", stdout=listing)],
    )
    assert outcome.severity == severity


@pytest.mark.parametrize(
    ("wanted", "name", "count", "severity"),
    [
        ("auto", "910B3", 8, "ok"),
        ("300I-A2", "910B3", 8, "ok"),
        ("A3", "910B3", 8, "fail"),
        ("A3", "Ascend910", 16, "ok"),
        ("A5", "Ascend950PR", 8, "ok"),
        ("auto", "310P3", 4, "note"),
        ("800I-A2", "310P3", 4, "warn"),
    ],
)
def test_series_against_chips(tmp_path, wanted, name, count, severity):
    written(tmp_path, {INFO: GOOD_INFO})
    settings = {"node": {"series": wanted}, "pool": {"dram": "8GiB"}}
    outcome = examined("ascend.series", tmp_path, inventory=host(npus=npus(count, name)), settings=settings)
    assert outcome.severity == severity


@pytest.mark.parametrize(
    ("protocol", "name", "severity"),
    [
        ("auto", "910B3", "ok"),
        ("device_sdma", "910B3", "fail"),
        ("host_shm", "910B3", "note"),
        ("device_rdma", "Ascend910", "note"),
        ("device_urma", "Ascend950PR", "ok"),
        ("device_rdma", "Ascend950PR", "fail"),
    ],
)
def test_protocol_against_chips(tmp_path, protocol, name, severity):
    written(tmp_path, {INFO: GOOD_INFO})
    settings = {"node": {"series": "auto"}, "pool": {"dram": "8GiB", "protocol": protocol}}
    outcome = examined("ascend.protocol", tmp_path, inventory=host(npus=npus(8, name)), settings=settings)
    assert outcome.severity == severity
