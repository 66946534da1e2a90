#!/bin/sh
# Usage: docker/local-base.sh IMAGE PACKAGE...
# An image of Debian with some packages, made by debootstrap: no registry is asked. It takes a minute,
# needs root, and apt works inside. SUITE is bookworm if it is not set, MIRROR debootstrap's own.
set -eu

[ $# -ge 2 ] || { sed -n '2s/^# //p' "$0" >&2; exit 2; }
image=$1
shift

fail() { echo "no local image $image: $*" >&2; exit 3; }

[ "$(id -u)" -eq 0 ] || fail "it needs root"
command -v docker >/dev/null || fail "there is no docker"
command -v debootstrap >/dev/null || apt-get -y -q install --no-install-recommends debootstrap >&2 ||
    fail "there is no debootstrap"

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages=$(echo ca-certificates tzdata "$@" | tr ' ' ',')
debootstrap --variant=minbase --include="$packages" "${SUITE:-bookworm}" "$work/root" \
    ${MIRROR:+"$MIRROR"} >"$work/log" 2>&1 || fail "debootstrap: $(tail -n 1 "$work/log")"
rm -rf "$work"/root/var/cache/apt/archives/*.deb "$work"/root/var/lib/apt/lists/*
[ ! -x "$work/root/usr/bin/python3" ] || ln -s /usr/bin/python3 "$work/root/usr/local/bin/python"

# What pip is told to trust outside, and the index that it is told to ask, is so inside as well.
bundle=/etc/ssl/certs/ca-certificates.crt
trusted=${PIP_CERT:-${SSL_CERT_FILE:-}}
set --
[ -z "$trusted" ] || {
    cp "$trusted" "$work/root$bundle"
    set -- --change "ENV PIP_CERT=$bundle SSL_CERT_FILE=$bundle"
}
[ -z "${PIP_INDEX_URL:-}" ] || set -- "$@" --change "ENV PIP_INDEX_URL=$PIP_INDEX_URL"
tar -cf "$work/image.tar" -C "$work/root" .
docker import --change "ENV LANG=C.UTF-8" "$@" "$work/image.tar" "$image" >/dev/null ||
    fail "docker import went wrong"
echo "$image: $(($(docker image inspect -f '{{.Size}}' "$image") / 1000000)) MB" >&2
