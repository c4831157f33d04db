#!/bin/sh
# kvtierd as the command of a container that has no systemd: a daemon that dies is started again, and its units go on
# meanwhile. SIGTERM goes to the daemon, and this ends with it. Arguments are kvtierd's.
#
# Behind an init that collects orphans (docker run --init): the units' supervisors are orphans.
set -u
stopping='' daemon='' pause=''
trap 'stopping=yes; for pid in $daemon $pause; do kill -TERM "$pid" 2>/dev/null; done' TERM INT
delay=1
while :; do
    started=$(date +%s)
    kvtierd "$@" &
    daemon=$!
    [ -z "$stopping" ] || kill -TERM "$daemon" # it came in between
    wait "$daemon"
    status=$?
    # A signal ends the wait, not yet the daemon.
    while kill -0 "$daemon" 2>/dev/null; do
        wait "$daemon"
        status=$?
    done
    daemon=''
    [ -z "$stopping" ] || exit "$status"
    # One that fails at once, again and again, is tried less and less often.
    [ $(($(date +%s) - started)) -lt 60 ] || delay=1
    echo "kvtierd ended with status $status; units go on, next start in $delay s" >&2
    sleep "$delay" &
    pause=$!
    wait "$pause"
    pause=''
    [ -z "$stopping" ] || exit "$status"
    delay=$((delay * 2))
    [ "$delay" -le 60 ] || delay=60
done
