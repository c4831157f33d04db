case "$1" in
    configure)
        make_user_and_directories
        if [ -z "$2" ]; then
            apply_presets
            if systemd_runs; then systemctl daemon-reload || true; fi
        else
            restart_daemon
        fi
        ;;
esac
