#!/bin/sh
# Usage: docker/engine.sh start DIR | stop DIR
# A Docker engine of its own, with everything it needs in DIR: the one that may already run on this
# machine is left alone. `start` prints its DOCKER_HOST; started twice, it is the same one. Needs
# root, and gets Debian's packages if there is no dockerd. `stop` leaves no process and no mount.
# Status 3 and one line on stderr say why there is no engine here. SMOKE_ENGINE=none pretends that.
set -eu

no_engine() {
    echo "no container engine: $*" >&2
    exit 3
}

alive() { [ -s "$dir/pid" ] && kill -0 "$(cat "$dir/pid")" 2>/dev/null; }
answers() { docker -H "$host" version >/dev/null 2>&1; }

get() {
    DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::http::Timeout=20 -o Acquire::Retries=1 \
        -y -q "$@" >"$dir/apt.log" 2>&1
}

install_docker() {
    command -v apt-get >/dev/null ||
        no_engine "dockerd is not installed, and there is no apt-get to get it with"
    set -- install --no-install-recommends docker.io iptables ca-certificates
    get "$@" || { get update && get "$@"; } ||
        no_engine "apt-get could not install docker.io: $(tail -n 1 "$dir/apt.log")"
    # The compose file can be tried then as well.
    docker compose version >/dev/null 2>&1 || command -v docker-compose >/dev/null ||
        get install --no-install-recommends docker-compose || true
}

start() {
    [ "${SMOKE_ENGINE:-}" != none ] || no_engine "SMOKE_ENGINE=none"
    mkdir -p "$dir"
    if ! { alive && answers; }; then
        [ "$(id -u)" -eq 0 ] || no_engine "it needs root, and this is user $(id -un)"
        command -v dockerd >/dev/null && command -v iptables >/dev/null || install_docker
        # A dockerd that was killed leaves its containerd, which ends by itself: then again.
        until launch; do
            tries=$((${tries:-0} + 1))
            { [ $tries -lt 5 ] && grep -q "still running" "$dir/log"; } ||
                no_engine "dockerd does not start: $(reason)"
            sleep 2
        done
    fi
    echo "$host"
}

launch() {
    rm -f "$dir/pid"
    echo "{}" >"$dir/daemon.json" # not the settings of the engine that the machine may have
    # In a session of its own: Ctrl-C is for the tests.
    setsid dockerd --host "$host" --data-root "$dir/data" --exec-root "$dir/exec" \
        --pidfile "$dir/pid" --config-file "$dir/daemon.json" >"$dir/log" 2>&1 </dev/null &
    started=$!
    for _ in $(seq 300); do
        answers && return 0
        kill -0 "$started" 2>/dev/null || return 1
        sleep 0.1
    done
    kill "$started"
    return 1
}

reason() { grep -E 'failed to|fatal|Error|denied' "$dir/log" | tail -n 1 | cut -c 1-300; }

stop() {
    if alive; then
        running=$(docker -H "$host" ps -q 2>/dev/null || true)
        # shellcheck disable=SC2086 # one word each
        [ -z "$running" ] || docker -H "$host" rm -f $running >/dev/null 2>&1 || true
        pid=$(cat "$dir/pid")
        kill "$pid"
        for _ in $(seq 300); do
            kill -0 "$pid" 2>/dev/null || break
            sleep 0.1
        done
        ! kill -0 "$pid" 2>/dev/null || kill -9 "$pid"
    fi
    # What a killed one leaves behind; the deepest first.
    awk -v under="$dir/" 'index($2, under) == 1 {print $2}' /proc/mounts | sort -r |
        while read -r place; do umount -l "$place"; done
}

[ $# -eq 2 ] || { sed -n '2,3s/^# //p' "$0" >&2; exit 2; }
mkdir -p "$2"
dir=$(cd "$2" && pwd)
host="unix://$dir/socket"
case $1 in
start | stop) "$1" ;;
*) sed -n '2,3s/^# //p' "$0" >&2; exit 2 ;;
esac
