if [ "$1" -eq 0 ] && systemd_runs; then
    systemctl daemon-reload || true
fi
