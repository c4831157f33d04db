case "$1" in
    remove)
        if systemd_runs; then systemctl daemon-reload || true; fi
        ;;
    purge)
        # What kvtierd made itself. The user stays: files of it may be elsewhere.
        rm -rf /var/lib/kvtierd /var/log/kvtierd /var/cache/kvtierd /run/kvtierd
        if [ -d /etc/kvtierd ]; then rmdir --ignore-fail-on-non-empty /etc/kvtierd; fi
        ;;
esac
