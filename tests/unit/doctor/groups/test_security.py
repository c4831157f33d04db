import pytest

from kvtierd.doctor.groups.security import secret_flags

from .small_host import SmallHost

CLUSTER = """[node]
name = "a"
[cluster]
mode = "static"
master = "a"
peers = [{ name = "a", address = "10.0.0.1" }, { name = "b", address = "10.0.0.2" }]
"""


@pytest.fixture
def host(tmp_path):
    return SmallHost(tmp_path)


def stat(host, path, line, *, follow=False, there=True):
    if there:
        host.put(path)
    words = ("stat", "-L") if follow else ("stat",)
    host.command(*words, "-c", "%a %U %G %F", path, out=line + "\n")


@pytest.mark.parametrize(
    ("argv", "found"),
    [
        (("vllm", "serve", "--api-key", "sk-1"), ["--api-key"]),
        (("vllm", "serve", "--api-key=sk-1"), ["--api-key"]),
        (("sglang", "--admin-api-key", "x", "--api_key", "y"), ["--admin-api-key", "--api_key"]),
        (("curl", "--hf-token", "t"), ["--hf-token"]),
        (("vllm", "--api-key"), []),
        (("vllm", "--api-key", "--port", "1"), []),
        (("vllm", "--api-key", "$KEY"), []),
        (("vllm", "--api-key-file", "/etc/key"), []),
        (("vllm", "--max-tokens", "5", "--tokenizer", "x"), []),
        ((), []),
    ],
)
def test_options_with_a_secret_are_named(argv, found):
    assert secret_flags(argv) == found


def test_the_secret_itself_is_never_shown(host):
    host.process(7, "vllm", "serve", "--api-key", "hush-hush")
    found = host.find("security.secrets", engine=("sglang", "--admin-api-key=hush-too"))
    assert found.severity == "warn"
    assert "vllm (pid 7) has --api-key" in found.found
    assert "hush" not in found.found


@pytest.mark.parametrize(
    ("mode", "severity"), [("600", "ok"), ("400", "ok"), ("640", "warn"), ("644", "fail"), ("604", "fail")]
)
def test_the_mode_of_a_key(host, mode, severity):
    stat(host, "/etc/kvtierd/tls/node.key", f"{mode} root root regular file", follow=True)
    assert host.find("security.keys", settings=CLUSTER).severity == severity


def test_what_stat_cannot_tell_is_unknown(host):
    host.put("/etc/kvtierd/tls/node.key")
    assert host.find("security.keys", settings=CLUSTER).severity == "unknown"
    stat(host, "/etc/kvtierd/tls/node.key", "rubbish", follow=True)
    assert host.find("security.keys", settings=CLUSTER).severity == "unknown"


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("660 root kvtierd socket", "ok"), ("660 root root socket", "ok"), ("666 root kvtierd socket", "fail"),
        ("600 root root socket", "warn"), ("660 root users socket", "warn"),
    ],
)  # fmt: skip
def test_the_control_socket(host, line, severity):
    stat(host, "/run/kvtierd/kvtierd.sock", line)
    assert host.find("security.socket").severity == severity


@pytest.mark.parametrize(
    ("line", "severity"),
    [
        ("644 root root regular file", "ok"),
        ("646 root root regular file", "fail"),
        ("664 root ops regular file", "warn"),
        ("644 ops ops regular file", "note"),
    ],
)
def test_the_settings_file(host, line, severity):
    stat(host, "/etc/kvtierd/kvtierd.toml", line, follow=True)
    stat(host, "/etc/kvtierd", "755 root root directory", follow=True, there=False)
    assert host.find("security.settings-file").severity == severity


@pytest.mark.parametrize(
    ("address", "port", "severity"),
    [
        ("00000000", 5000, "warn"), ("0100007F", 5000, "ok"), ("0100000A", 6001, "warn"), ("00000000", 22, "ok"),
        ("00000000", 9476, "warn"),
    ],
)  # fmt: skip
def test_listeners_beyond_loopback(host, address, port, severity):
    host.put("/proc/net/tcp", f"  sl\n   0: {address}:{port:04X} 00000000:0000 0A 0 0 0\n")
    assert host.find("security.listeners", settings='[node]\nseries = "emulated"\n').severity == severity
