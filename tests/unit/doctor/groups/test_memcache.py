import pytest

from .small_host import SmallHost

META = """ock.mmc.meta_service_url = tcp://127.0.0.1:5000
ock.mmc.meta_service.config_store_url = tcp://127.0.0.1:6000
ock.mmc.meta_service.metrics_url = http://127.0.0.1:8000
"""
MAIN = ("python3", "-c", "from memcache_hybrid import MetaService; MetaService.main()")


@pytest.fixture
def host(tmp_path):
    return SmallHost(tmp_path)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("ock.mmc.evict_threshold_low = 60  # per cent", ":4: ock.mmc.evict_threshold_low"),
        ("ock.mcc.evict_threshold_low = 60", "without a word"),
        ("ock.mmc.meta_service_url = tcp://127.0.0.1:5000", "set in line 1 and again in line 4"),
        ("ock.mmc.no_such_key = 1", "no_such_key"),
        ("ock.mmc.log_path = /var/log/m/logs", "/logs itself"),
    ],
)
def test_each_fault_of_a_file_is_found_with_its_line(host, line, said):
    host.put("/etc/mmc-meta.conf", META + line + "\n")
    found = host.find("memcache.confs", confs=("/etc/mmc-meta.conf",))
    assert found.severity == "fail"
    assert said in found.found
    assert str(host.root) not in found.found


@pytest.mark.parametrize(
    ("name", "content", "severity", "said"),
    [
        ("notes.conf", b"", "unknown", "name does not tell"),
        ("meta.json", b"{ // no\n}", "fail", "meta.json:1"),
        ("mmc-meta.conf", b"\x00\xff" * 4000, "fail", "mmc-meta.conf"),
        ("mmc-meta.conf", b"#" * (1024 * 1024 + 1), "unknown", "larger than"),
    ],
)
def test_a_file_that_is_none_is_said_and_never_a_traceback(host, name, content, severity, said):
    host.put(f"/etc/{name}", content)
    found = host.find("memcache.confs", confs=(f"/etc/{name}",))
    assert found.severity == severity
    assert said in found.found
    assert "itself failed" not in found.found


def test_a_directory_and_a_missing_file_in_place_of_a_conf(host):
    (host.root / "etc" / "mmc-meta.conf").mkdir(parents=True)
    assert host.find("memcache.confs", confs=("/etc/mmc-meta.conf",)).severity == "unknown"
    assert host.find("memcache.confs", confs=("/etc/mmc-local.conf",)).severity == "fail"


def test_a_link_is_named_with_its_target_on_that_host(host):
    host.put("/data/real.conf", META)
    host.put("/etc/.keep")
    (host.root / "etc" / "mmc-meta.conf").symlink_to("/data/real.conf")
    host.process(77, "vllm", MMC_META_CONFIG_PATH="/etc/mmc-meta.conf")
    found = host.find("memcache.env-confs")
    assert found.severity == "fail"
    assert "/etc/mmc-meta.conf" in found.found
    assert "symbolic link" in found.found
    assert "(pid 77)" in found.found


def test_a_file_that_is_not_memcaches_is_not_quoted(host):
    host.put("/etc/shadow", "root:$6$hush:19000:0:::\n")
    host.process(78, "sh", MMC_LOCAL_CONFIG_PATH="/etc/shadow")
    found = host.find("memcache.env-confs")
    assert found.severity == "fail"
    assert "pid 78" in found.found
    assert "hush" not in found.found


def test_files_are_checked_where_there_is_no_inventory(host):
    (host.root / "proc" / "meminfo").unlink()
    host.put("/etc/mmc-meta.conf", META)
    assert host.find("memcache.confs", confs=("/etc/mmc-meta.conf",)).severity == "ok"


@pytest.mark.parametrize(
    ("size", "severity"),
    [("40GB", "ok"), ("950GB", "warn"), ("2TB", "fail"), ("", "ok"), ("much", "unknown")],
)
def test_a_size_is_taken_times_the_ranks_and_compared_with_the_host(host, size, severity):
    host.put("/etc/mmc-local.conf", f"ock.mmc.local_service.dram.size = {size}\n" if size else "")
    assert host.find("memcache.per-rank", confs=("/etc/mmc-local.conf",)).severity == severity


def test_a_foreign_metaservice_fails_where_kvtierd_is_to_run_one_and_its_own_does_not(host):
    host.process(50, *MAIN)
    assert host.find("memcache.one-meta").severity == "note"
    found = host.find("memcache.one-meta", settings='[node]\nseries = "A3"\n')
    assert found.severity == "fail"
    assert "pid 50" in found.found
    # In the emulation and in a container it has a /tmp of its own.
    assert host.find("memcache.one-meta", settings='[node]\nseries = "emulated"\n').severity == "note"
    host.put("/proc/50/cgroup", "0::/kvtierd.slice/kvtier-meta-main.service\n")
    assert host.find("memcache.one-meta", settings='[node]\nseries = "A3"\n').severity == "ok"


def test_a_process_that_only_speaks_of_a_metaservice_is_none(host):
    host.process(51, "grep", "mmc_meta_service", "/var/log/messages")
    host.process(52, "vi", "run_meta.py.txt")
    assert host.find("memcache.one-meta").found in {
        "none runs",
        "a MetaService that is not kvtierd's runs: grep (pid 51)",
    }


@pytest.mark.parametrize(
    ("url", "severity"),
    [
        ("http://127.0.0.1:8000", "ok"),
        ("http://0.0.0.0:8000", "fail"),
        ("http://[::]:8000", "fail"),
        ("http://10.0.0.1:8000", "warn"),
        ("http://8.8.8.8:8000", "fail"),
        ("somewhere", "unknown"),
    ],
)
def test_the_http_service_is_to_listen_on_loopback(host, url, severity):
    host.put("/etc/mmc-meta.conf", f"ock.mmc.meta_service.metrics_url = {url}\n")
    host.process(9, *MAIN, MMC_META_CONFIG_PATH="/etc/mmc-meta.conf")
    assert host.find("memcache.exposed").severity == severity


def test_a_log_directory_on_a_read_only_mount_or_behind_a_link_fails(host):
    settings = '[paths]\nlogs = "/var/log/kv"\n'
    assert host.find("memcache.log-dir", settings=settings).severity == "ok"
    host.put("/proc/mounts", "/dev/sda2 / ext4 rw 0 0\n/dev/sdb /var/log ext4 ro 0 0\n")
    assert host.find("memcache.log-dir", settings=settings).severity == "fail"
    host.put("/proc/mounts", "/dev/sda2 / ext4 rw 0 0\n")
    # MemCache follows links above its directory, and refuses the directory itself.
    host.put("/data/.keep")
    host.put("/var/.keep")
    (host.root / "var" / "log").symlink_to("/data")
    assert host.find("memcache.log-dir", settings=settings).severity == "ok"
    host.put("/proc/mounts", "/dev/sda2 / ext4 rw 0 0\n/dev/sdb /data ext4 ro 0 0\n")
    assert host.find("memcache.log-dir", settings=settings).severity == "fail"
    host.put("/proc/mounts", "/dev/sda2 / ext4 rw 0 0\n")
    host.put("/data/kv/.keep")
    (host.root / "data" / "kv" / "memcache").symlink_to("/elsewhere")
    found = host.find("memcache.log-dir", settings=settings)
    assert found.severity == "fail"
    assert "/var/log/kv/memcache" in found.found


@pytest.mark.parametrize(
    ("state", "severity"),
    [("meta_up", "fail"), ("pool_ready", "ok"), ("joinable", "ok"), ("down", "note"), ("", "ok")],
)
def test_a_metaservice_without_memory_is_said_by_the_daemons_word(host, state, severity):
    daemon = {"status": {"tier_state": state, "tier_reasons": ["no rank"]}, "peers": {}}
    assert host.find("memcache.capacity", daemon=daemon).severity == severity


def test_a_hung_import_is_unknown_and_a_broken_one_fails(host):
    python = "/opt/e/bin/python3"
    versions = '{"memcache_hybrid": "1.3.0", "memfabric_hybrid": "%s"}'
    probe = f'{{"python": "3.11.1", "versions": {versions}, "dirs": ["/s/memcache_hybrid/lib"]}}'
    settings = '[node]\nseries = "emulated"\n'
    host.command(python, "-I", "-c", "x" * 61, out="KVTIERD-PROBE " + probe % "1.2.0" + "\n")
    assert host.find("memcache.wheels", settings=settings).severity == "fail"
    host.command(python, "-I", "-c", "x" * 61, out="KVTIERD-PROBE " + probe % "1.3.0" + "\n")
    assert host.find("memcache.wheels", settings=settings).severity == "ok"
    host.command(python, "-I", "-c", "import memcache_hybrid", timed_out=True)
    assert host.find("memcache.import", settings=settings).severity == "unknown"
    host.command(python, "-I", "-c", "import memcache_hybrid", code=1, stderr="ImportError: libx.so")
    found = host.find("memcache.import", settings=settings)
    assert (found.severity, "libx.so" in found.found) == ("fail", True)
