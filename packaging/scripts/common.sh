# Parts that the scripts of both formats share; the build puts this text in front of each.

# Whether a systemd runs here: not in a chroot, an image being built, or a container without one.
systemd_runs() { [ -d /run/systemd/system ]; }

# The user, the group of the control socket and the directories. Without systemd's tools only the group matters.
make_user_and_directories() {
    if command -v systemd-sysusers >/dev/null 2>&1; then
        systemd-sysusers kvtierd.conf || true
    elif ! getent group kvtierd >/dev/null 2>&1 && command -v groupadd >/dev/null 2>&1; then
        groupadd --system kvtierd || true
    fi
    if command -v systemd-tmpfiles >/dev/null 2>&1; then
        systemd-tmpfiles --create kvtierd.conf || true
    else
        mkdir -p /run/kvtierd /var/lib/kvtierd /var/log/kvtierd
    fi
}

# At the first installation only: enabled or not, as the presets of package and administrator say. Not started.
apply_presets() {
    if command -v systemctl >/dev/null 2>&1; then
        systemctl --no-reload preset kvtierd.service || true
    fi
}

# The new version takes over. Only the daemon is restarted, and only if it runs: MetaService, pool and engines go on,
# and the new daemon adopts them. kvtierd-hugepages.service has done its work and is left alone.
restart_daemon() {
    if systemd_runs; then
        systemctl daemon-reload || true
        systemctl try-restart kvtierd.service || true
    fi
}

# Before the files go: the daemon first, so that it starts nothing again, then everything it ran, whose programs go
# too; then the hugepages that kvtierd raised.
stop_everything() {
    if systemd_runs; then
        systemctl stop kvtierd.service || true
        systemctl stop kvtierd.slice kvtierd-hugepages.service || true
    fi
    if command -v systemctl >/dev/null 2>&1; then
        systemctl --no-reload disable kvtierd.service >/dev/null 2>&1 || true
    fi
    if [ -e /var/lib/kvtierd/hugepages.json ]; then
        kvtierctl hugepages release || true
    fi
}
