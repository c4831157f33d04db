if [ "$1" -eq 0 ]; then
    stop_everything
fi
