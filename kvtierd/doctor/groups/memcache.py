"""MemCache: what is installed, what its files say, and what already runs in its place."""

from __future__ import annotations

import re
from urllib.parse import urlsplit

from kvtierd.checks import Group, Outcome, Patient, absent, fail, note, ok, unknown, warn, worst
from kvtierd.cluster.identity import EXPIRES_SOON_SECONDS, read_identity, validity
from kvtierd.doctor.looking import (
    Process,
    all_processes,
    file_facts,
    here,
    mount_of,
    mounts,
    present,
    resolved,
    shown,
)
from kvtierd.doctor.memcache_files import (
    ConfFile,
    confs_of,
    is_link,
    is_memcache_file,
    judge,
    named_confs,
    reader_of,
    summed,
    values,
)
from kvtierd.errors import ClusterError, KvtierError
from kvtierd.memcache.rest import MetaClient
from kvtierd.mmc_conf.rules import DRAM, METRICS_URL
from kvtierd.mmc_conf.sizes import parse_mmc_size
from kvtierd.mmc_conf.urls import MmcUrl, UrlError, parse_url
from kvtierd.mmc_conf.values import LOG_PATH
from kvtierd.plan.inventory import Inventory
from kvtierd.quantities import format_size
from kvtierd.settings.cluster import TlsSettings

GROUP = Group("memcache")
LOCK = "/tmp/mmc_meta_service.lock"
OWN_LOG, FABRIC_LOG = "/var/log/memcache_hybrid", "/var/log/memfabric_hybrid"
TLS = "ock.mmc.tls"
LEAST_KEY_BITS = 3072
_META_WORDS = re.compile(
    r"\bMetaService\.main\b|mmc_meta_service$|start_meta_service(?:\.py)?$|[/.]run_meta(?:\.py)?$"
)


@GROUP.check(
    "wheels",
    title="memcache-hybrid and memfabric-hybrid are there, in one version",
    why="The two are built together. With different versions the MetaService may start and the first engine that joins fails,"
    " or crashes in native code.",
    fix="PYTHON -m pip install memcache-hybrid==VERSION memfabric-hybrid==VERSION, the same version for both, on every node",
)
async def wheels(patient: Patient) -> Outcome:
    """What the inventory found in each interpreter and run package."""
    installs = (await patient.inventory()).memcache
    if not installs:
        return absent("no interpreter on this host is known to hold it")
    found = []
    for install in installs:
        place = install.python or install.home
        if install.problem:
            make = note if patient.settings is None else fail
            found.append(make(install.problem))
        elif install.memcache_version != install.memfabric_version:
            found.append(
                fail(
                    f"{place}: memcache-hybrid {install.memcache_version}, memfabric-hybrid {install.memfabric_version}",
                    f"{place} -m pip install memfabric-hybrid=={install.memcache_version}",
                )
            )
    good = ", ".join(dict.fromkeys(f"{i.memcache_version} in {i.python or i.home}" for i in installs))
    return worst(found, good)


@GROUP.check(
    "import",
    title="The interpreter can import MemCache",
    why="A wheel whose native libraries do not load is installed and useless: engines fail while they set up their connector,"
    " after minutes of loading weights.",
    fix="run PYTHON -I -c 'import memcache_hybrid' and read its last line; a library that is missing is named there (C library"
    " 2.28 or later, CANN's set_env.sh for some versions)",
)
async def imports(patient: Patient) -> Outcome:
    """A real import, in a child of each interpreter, with a time limit."""
    pythons = [i.python for i in (await patient.inventory()).memcache if i.python and not i.problem]
    if not pythons:
        return absent("no interpreter with the wheel")
    found = []
    for python in pythons:
        result = await patient.run(python, "-I", "-c", "import memcache_hybrid")
        if not result.ok:
            # Slow is not broken: 1.2.0 imports torch.
            hung = result.timed_out or result.error
            found.append((unknown if hung else fail)(f"{result.describe()}"))
    return worst(found, f"imported in {', '.join(pythons)}")


@GROUP.check(
    "confs",
    title="Hand-written MemCache files are what MemCache reads",
    why="MemCache refuses a file with a comment behind a value, a double or unknown key or a symbolic link, and ends with exit"
    " status 0; a byte order mark or a misspelt prefix it drops without a word and listens elsewhere.",
    fix="kvtierctl conf check FILE says it by line; better, let kvtierd write the files from its settings",
)
async def confs(patient: Patient) -> Outcome:
    """What ``kvtierctl conf check`` finds in the files of ``--conf``."""
    files = named_confs(patient)
    if not files:
        return absent("no --conf FILE is given")
    version, a3 = await reader_of(patient)
    found = await patient.look(
        "memcache.confs", lambda: [o for conf in files for o in judge(patient.view, conf, version, a3=a3)]
    )
    return summed(found, f"{len(files)} file(s) as MemCache {version} reads them")


@GROUP.check(
    "per-rank",
    title="dram.size, times the host's ranks, fits into the host",
    why="dram.size is what each rank takes, not the host: 640GB written for a host of 16 dies asks for ten terabytes. Hugepages"
    " run out, or the kernel kills the engine.",
    fix="divide the host's budget by its dies: 640 GB on 16 dies is dram.size = 40GB; kvtierd does so from [pool] dram",
)
async def per_rank(patient: Patient) -> Outcome:
    """dram.size of each hand-written local file times the dies, against memory and free hugepages."""
    files = [conf for conf in named_confs(patient) if conf.kind == "local"]
    if not files:
        return absent("no hand-written mmc-local.conf is given")
    inventory = await patient.inventory()
    read = await patient.look(
        "memcache.per-rank", lambda: [(conf, values(conf).get(DRAM, "")) for conf in files]
    )
    ranks = max(1, len(inventory.npus))
    found = [_rank_outcome(conf.place, size, ranks, inventory) for conf, size in read]
    return worst(found, "; ".join(o.found for o in found if o.severity == "ok") or "no size is set")


def _rank_outcome(place: str, text: str, ranks: int, inventory: Inventory) -> Outcome:
    try:
        size = parse_mmc_size(text) if text else 0
    except ValueError:
        return unknown(f"{place}: dram.size {text!r} is no size")
    total, memory = size * ranks, inventory.memory_total_bytes
    told = f"{place}: {format_size(size)} x {ranks} rank(s) = {format_size(total)}"
    if total > memory:
        return fail(f"{told}, and the host has {format_size(memory)}")
    if total > inventory.memory_available_bytes + sum(
        p.free_pages * p.page_size_bytes for p in inventory.hugepages
    ):
        return warn(f"{told}, more than is free")
    return ok(told)


@GROUP.check(
    "env-confs",
    title="The files that running engines name are there and valid",
    why="MMC_LOCAL_CONFIG_PATH and MMC_META_CONFIG_PATH are read once, at import. A file that has gone or was edited into"
    " something invalid works on until the next restart, which then fails.",
    fix="put the file right before the engine is restarted; kvtierctl conf check FILE",
)
async def env_confs(patient: Patient) -> Outcome:
    """/proc/PID/environ of every process we may read, and the files it names."""
    version, a3 = await reader_of(patient)
    view = patient.view
    listed = await all_processes(patient)

    def look() -> Outcome:
        named = confs_of(view, listed)
        hidden = sum(p.environ is None for p in listed)
        found = []
        for file in dict.fromkeys(conf for _, _, conf in named):
            pids = ", ".join(str(p.pid) for p, _, conf in named if conf == file)
            if file.path.is_file() and not is_memcache_file(file):
                found.append(fail(f"{file.place} has no line of MemCache's (pid {pids})"))
                continue
            found += [
                Outcome(o.severity, f"{o.found} (pid {pids})", o.fix)
                for o in judge(view, file, version, a3=a3)
            ]
        if not named and hidden:
            return unknown(
                f"the environment of {hidden} processes of other users cannot be read", "run it as root"
            )
        return summed(found, f"{len({c for _, _, c in named})} file(s) named by running processes")

    return await patient.look("memcache.env-confs", look)


@GROUP.check(
    "one-meta",
    title="No other MetaService is in the way",
    why="A host takes one MetaService: the second one ends with exit status 0, and 'already running' on stderr, also when the"
    " lock file merely belongs to another user. Two pools in one network take each other's ranks.",
    fix="stop the other one (systemctl, docker, or kill PID), then rm /tmp/mmc_meta_service.lock when it is left over",
    blocks=("meta",),
)
async def one_meta(patient: Patient) -> Outcome:
    """Processes that run a MetaService which is not kvtierd's, and the owner of the lock file."""
    found = await all_processes(patient)
    foreign = [p for p in found if _is_meta(p) and not _is_ours(patient, p)]
    if foreign:
        told = ", ".join(f"{p.name} (pid {p.pid})" for p in foreign)
        make = fail if any(_in_the_way(patient, p) for p in foreign) else note
        return make(f"a MetaService that is not kvtierd's runs: {told}")
    if any(_is_meta(p) for p in found):
        return ok("kvtierd's own runs")
    facts = await file_facts(patient, LOCK)
    user = (patient.settings.meta.user if patient.settings else None) or "root"
    if facts is None:
        return ok("none runs")
    if facts.is_link or user not in {facts.user, "root"}:
        return warn(
            f"none runs, but {LOCK} is {facts.user}'s ({facts.kind}), and the MetaService will run as {user}",
            f"rm {LOCK}",
        )
    return ok(f"none runs; {LOCK} is left over and does no harm")


def _in_the_way(patient: Patient, process: Process) -> bool:
    """Whether kvtierd's own would meet its lock: both on the host, not in a container or the emulation's own /tmp."""
    settings = patient.settings
    if settings is None or settings.meta.runner == "docker" or settings.node.series == "emulated":
        return False
    try:
        theirs = here(patient.view, f"/proc/{process.pid}/ns").joinpath("mnt").readlink()
        return theirs == here(patient.view, "/proc/1/ns").joinpath("mnt").readlink()
    except OSError:  # a recorded host
        return not patient.view.live


def _is_meta(process: Process) -> bool:
    return any(_META_WORDS.search(word) for word in process.argv[1:4]) or bool(
        _META_WORDS.search(process.name)
    )


def _is_ours(patient: Patient, process: Process) -> bool:
    """By its control group (systemd), by our wrapper, or by the files it was given."""
    if "/kvtierd.slice/" in (patient.view.text(f"/proc/{process.pid}/cgroup") or ""):
        return True
    given = (process.environ or {}).get("MMC_META_CONFIG_PATH", "")
    settings = patient.settings
    own = (settings.paths.state, settings.paths.runtime) if settings else ("/var/lib/kvtierd", "/run/kvtierd")
    return any("kvtierd" in word and "run_meta" in word for word in process.argv) or any(
        given.startswith(f"{directory}/") for directory in own
    )


@GROUP.check(
    "log-dir",
    title="MemCache's log directories can be written and are no links",
    why="MemCache appends /logs to log_path, refuses a symbolic link, and ends with exit status 0 when it cannot write; with the"
    " default, MemFabric writes to /var/log/memfabric_hybrid as well.",
    fix="write an absolute path of a real, writable directory to ock.mmc.log_path; kvtierd.service has LogsDirectory= for both",
    blocks=("meta",),
)
async def log_dir(patient: Patient) -> Outcome:
    """The directories by settings and files: links, read-only mounts, /logs twice."""
    view = patient.view
    wanted = {FABRIC_LOG: "MemFabric's own"}
    if patient.settings is not None:
        wanted[f"{patient.settings.paths.logs}/memcache"] = "[paths] logs"
    found = []
    for conf in named_confs(patient):
        written = await patient.look(str(conf.path), lambda conf=conf: values(conf).get(LOG_PATH, ""))  # type: ignore[misc]
        if written and not written.startswith("/"):
            found.append(
                fail(
                    f"{conf.place}: log_path {written!r} is relative: MemCache writes beside the Python binary"
                )
            )
        elif written.rstrip("/").endswith("/logs"):
            found.append(warn(f"{conf.place}: the logs go to {written.rstrip('/')}/logs"))
        elif written or conf.kind in {"meta", "sglang-meta"}:
            wanted[written or OWN_LOG] = conf.place
    table = mounts(view)
    for path, why in wanted.items():
        make = warn if path == FABRIC_LOG else fail  # that one it does without
        if is_link(view, path):
            found.append(make(f"{path} ({why}) is a symbolic link"))
        elif (mount := mount_of(table, resolved(view, path))) is not None and mount.read_only:
            found.append(make(f"{path} ({why}) is on {mount.directory}, which is read-only"))
    return worst(found, ", ".join(wanted))


@GROUP.check(
    "tls",
    title="MemCache's TLS files can be used",
    why="MemCache refuses keys of less than 3072 bits, files that are links and keys that others can read, and ends with exit"
    " status 0; an expired certificate shows only when a client connects.",
    fix="kvtierctl certs issue makes what MemCache takes; chmod 0400 for the key and the certificate",
)
async def tls(patient: Patient) -> Outcome:
    """[meta] tls, and hand-written files with tls.enable: pair, authority, dates, bits, modes."""
    sets: dict[str, tuple[str, str, str]] = {}
    settings = patient.settings
    if settings is not None and settings.meta.tls:
        own = settings.cluster.tls
        sets["[meta] tls"] = (own.ca, own.cert, own.key)
    for conf in named_confs(patient):
        read = await patient.look(str(conf.path), lambda conf=conf: values(conf))  # type: ignore[misc]
        if read.get(f"{TLS}.enable") == "true":
            sets[conf.place] = tuple(read.get(f"{TLS}.{n}.path", "") for n in ("ca", "cert", "key"))  # type: ignore[assignment]
    if not sets:
        return absent("MemCache's TLS is off")
    found: list[Outcome] = []
    for where, (ca, cert, key) in sets.items():
        found += await _tls_problems(patient, where, ca, cert, key, copied=where == "[meta] tls")
    return worst(found, ", ".join(sets))


async def _tls_problems(
    patient: Patient, where: str, ca: str, cert: str, key: str, *, copied: bool
) -> list[Outcome]:
    """``copied``: kvtierd makes copies with the modes that MemCache wants, so those of the originals do not matter."""
    view, found = patient.view, []
    missing = [path or "(not set)" for path in (ca, cert, key) if not path or not present(view, path)]
    if missing:
        return [fail(f"{where}: {', '.join(missing)} is missing")]
    if not copied:
        for path, harm in ((key, fail), (cert, warn)):
            facts = await file_facts(patient, path)
            if facts is not None and facts.is_link:
                found.append(fail(f"{where}: {path} is a symbolic link"))
            elif facts is not None and facts.mode & 0o077:
                found.append(
                    harm(f"{where}: {path} has mode {facts.mode:04o}; MemCache is known to take 0400")
                )
    ours = TlsSettings(**{n: str(here(view, p)) for n, p in (("ca", ca), ("cert", cert), ("key", key))})
    try:
        own = await patient.look(cert, lambda: read_identity(ours))
    except ClusterError as error:
        return [*found, fail(f"{where}: {shown(view, error.message)}", error.hint)]
    begins, ends = validity(own.certificate)
    if not begins <= patient.now_unix < ends:
        found.append(fail(f"{where}: {cert} is not valid at this time"))
    elif ends - patient.now_unix < EXPIRES_SOON_SECONDS:
        found.append(warn(f"{where}: {cert} expires in {int((ends - patient.now_unix) / 86400)} days"))
    result = await patient.run("openssl", "x509", "-noout", "-text", "-in", cert)
    bits = re.search(r"Public-Key: \((\d+) bit\)", result.stdout)
    if bits and int(bits[1]) < LEAST_KEY_BITS:
        found.append(
            fail(f"{where}: the key of {cert} has {bits[1]} bits, and MemCache wants {LEAST_KEY_BITS}")
        )
    return found


@GROUP.check(
    "exposed",
    title="MemCache's HTTP service listens on loopback",
    why="It has no authentication: whoever reaches it lists all keys, and PUT and DELETE change the pool's metadata.",
    fix="metrics_url = http://127.0.0.1:8000; kvtierd's exporter shows the metrics to others, read-only",
)
async def exposed(patient: Patient) -> Outcome:
    """metrics_url in the files of --conf and in those that running processes name."""
    listed = await all_processes(patient)

    def look() -> list[ConfFile]:
        named = [conf for _, _, conf in confs_of(patient.view, listed)]
        return list(dict.fromkeys((*named_confs(patient), *named)))

    files = [c for c in await patient.look("memcache.exposed", look) if c.kind in {"meta", "sglang-meta"}]
    found, well = [], []
    for conf in files:
        read = await patient.look(str(conf.path), lambda conf=conf: values(conf).get(METRICS_URL))  # type: ignore[misc]
        url = _url(read)
        if read and url is None:
            found.append(unknown(f"{conf.place}: metrics_url {read!r} is no address"))
        elif url is not None and url.reach in {"any", "public"}:
            found.append(fail(f"{conf.place}: {url} is open to everybody in the network"))
        elif url is not None and url.reach != "loopback":
            found.append(warn(f"{conf.place}: {url} can be reached from other hosts"))
        else:
            well.append(f"{conf.place}: {url or 'on loopback by default'}")
    return worst(found, "; ".join(well)) if files else absent("no MetaService's file is known")


def _url(text: str | None) -> MmcUrl | None:
    try:
        return parse_url(text, ("http", "https", ""), min_port=1) if text else None
    except UrlError:
        return None


@GROUP.check(
    "capacity",
    title="A running MetaService has somebody who holds memory",
    why="/health says ok without a single rank. Nothing can be stored then: every engine works, every hit rate is 0 %, and no"
    " log says why.",
    fix="kvtierctl status says who should hold the pool; start it, or the engines when they hold it themselves",
)
async def capacity(patient: Patient) -> Outcome:
    """By the daemon's word, else by asking the MetaService on loopback; only reading."""
    if patient.daemon is not None:
        state = str(patient.daemon.status.get("tier_state", ""))
        reasons = "; ".join(map(str, patient.daemon.status.get("tier_reasons") or ()))
        if state == "meta_up":
            return fail(f"the MetaService runs and the pool is not ready: {reasons or 'no reason is known'}")
        return (
            note(f"no MetaService: {reasons or 'none is known'}")
            if state == "down"
            else ok(f"the pool is {state}")
        )
    if not patient.view.live:
        return absent("nothing runs on a recorded host")
    plan = await patient.plan()
    url = plan.meta.metrics_url if plan is not None and plan.meta is not None else "http://127.0.0.1:8000"
    if urlsplit(url).scheme != "http":
        return absent("its HTTP service wants a certificate")
    client = MetaClient(url, timeout_seconds=1.0)
    try:
        health = await client.health()
        held = await client.capacity()
    except KvtierError as error:
        return absent(f"no MetaService answers at {url} ({error.stable_code})")
    total = held.dram.total_bytes + held.hbm.total_bytes
    if not total:
        return fail(f"{url} says {health.status}, and nobody holds memory")
    return ok(f"{format_size(total)} are held")
