case "$1" in
    remove) stop_everything ;;
esac
