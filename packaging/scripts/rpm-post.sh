make_user_and_directories
if [ "$1" -eq 1 ]; then
    apply_presets
    if systemd_runs; then systemctl daemon-reload || true; fi
fi
