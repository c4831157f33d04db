import pytest

from .small_host import SmallHost

HEAD = "Filesystem 1024-blocks Used Available Capacity Mounted on\n"


@pytest.fixture
def host(tmp_path):
    return SmallHost(tmp_path)


def df(host, line, path="/", option="-kP"):
    host.command("df", option, path, out=HEAD + line + "\n")


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("/dev/sda2 1000000000 300000000 700000000 30% /", "ok"),
        ("/dev/sda2 1000000000 999000000 1000000 99% /", "warn"),
        ("/dev/sda2 1000000000 980000000 20000000 98% /", "warn"),
        ("/dev/sda2 1000000000 1000000000 0 100% /", "fail"),
        ("nas:/export/with blank 1000000000 300000000 700000000 30% /", "ok"),
        ("nonsense", "unknown"),
    ],
)
def test_room_by_df(host, line, severity):
    df(host, line)
    found = host.find("disk.space")
    assert found.severity == severity
    assert "itself failed" not in found.found


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("/dev/sda2 60000000 1 59999999 1% /", "ok"),
        ("/dev/sda2 60000000 59900000 100000 99% /", "warn"),
        ("/dev/sda2 60000000 59999999 1 100% /", "fail"),
        ("btrfs 0 0 0 - /", "ok"),
        ("btrfs - - - - /", "ok"),
    ],
)
def test_inodes_by_df(host, line, severity):
    df(host, line, option="-iP")
    assert host.find("disk.inodes").severity == severity


def test_a_df_that_hangs_or_is_not_there_is_unknown(host):
    assert host.find("disk.space").severity == "unknown"
    host.command("df", "-kP", "/", timed_out=True)
    assert "no answer" in host.find("disk.space").found


def test_the_longest_mount_above_a_directory_counts(host):
    host.put(
        "/proc/mounts",
        "a / ext4 ro 0 0\n"
        "b /var/lib ext4 rw 0 0\n"
        "c /var/lib/kv ext4 ro 0 0\n"
        "d /run tmpfs rw 0 0\n"
        "d /tmp tmpfs rw 0 0\n"
        "e /var/log\\040x ext4 ro 0 0\n"
        "f /var/log ext4 rw 0 0\n",
    )
    for path in ("/var/lib/kvtierd", "/var/log/kvtierd", "/run/kvtierd", "/tmp/x"):
        host.put(f"{path}/.keep")
    assert host.find("disk.read-only").severity == "ok"
    host.put("/proc/mounts", "a / ext4 rw 0 0\nb /var/lib ext4 ro,relatime 0 0\n")
    assert host.find("disk.read-only").severity == "fail"


@pytest.mark.parametrize(
    ("out", "severity"),
    [
        ("2000\t/var/log/kvtierd/a.log\n2100\t/var/log/kvtierd\n", "ok"),
        ("1048576\t/var/log/kvtierd/a.log\n1048580\t/var/log/kvtierd\n", "warn"),
        ("11000000\t/var/log/kvtierd\n", "warn"),
        ("", "ok"),
        ("rubbish\n\t\n-5\t/x\n", "ok"),
    ],
)
def test_large_logs_by_du(host, out, severity):
    host.put("/var/log/kvtierd/.keep")
    host.command("du", "-ak", "--threshold=1M", "/var/log/kvtierd", out=out)
    found = host.find("disk.logs")
    assert found.severity == severity
    if "a.log" in out and severity == "warn":
        assert found.found.startswith("/var/log/kvtierd/a.log: 1 GiB")


SSD = '[node]\nseries = "emulated"\n[meta.local_conf]\n"ubsio.disk.path" = "/dev/sdb"\n'


@pytest.mark.parametrize(
    ("mounted", "kind", "severity"),
    [
        ("", "block special file", "ok"), ("", "regular file", "fail"), ("/dev/sdb", "block special file", "fail"),
        ("/dev/sdb3", "block special file", "fail"), ("/dev/sdbc", "block special file", "ok"),
    ],
)  # fmt: skip
def test_disks_of_the_ssd_tier(host, mounted, kind, severity):
    host.put("/dev/sdb")
    host.command("stat", "-L", "-c", "%a %U %G %F", "/dev/sdb", out=f"660 root disk {kind}\n")
    host.put("/proc/mounts", f"{mounted or 'none'} /data ext4 rw 0 0\n")
    assert host.find("disk.ssd", settings=SSD).severity == severity


@pytest.mark.parametrize(
    ("pattern", "severity"),
    [
        ("|/usr/lib/systemd/systemd-coredump %P", "ok"),
        ("|", "ok"),
        ("core", "note"),
        ("/var/crash/core.%p", "note"),
        ("", "note"),
    ],
)
def test_where_cores_go(host, pattern, severity):
    host.put("/proc/sys/kernel/core_pattern", pattern + "\n")
    df(host, "/dev/sda2 1000 10 990 1% /")
    assert host.find("disk.core-dumps").severity == severity
