#!/bin/sh
# Usage: docker/local-base-from-host.sh [-c COMMAND] IMAGE PACKAGE...
# An image out of packages that this Debian has installed, and all that they depend on: no registry
# is asked, and it takes seconds. What is missing is installed first. Never push such an image: it
# has the certificates that this machine trusts.
set -eu

command=
[ "${1:-}" != -c ] || { command=$2; shift 2; }
[ $# -ge 2 ] || { sed -n '2s/^# //p' "$0" >&2; exit 2; }
image=$1
shift
always="base-files coreutils dash libc-bin tzdata ca-certificates"

fail() { echo "no local image $image: $*" >&2; exit 3; }

for tool in apt-cache dpkg-query docker; do
    command -v $tool >/dev/null || fail "there is no $tool"
done
wanted=$(for package in $always "$@"; do
    dpkg-query -W -f '${db:Status-Abbrev}' "$package" 2>/dev/null | grep -q '^ii' || echo "$package"
done)
if [ -n "$wanted" ]; then
    # shellcheck disable=SC2086 # one word each
    install() { apt-get -y -q install --no-install-recommends $wanted >&2; }
    { [ "$(id -u)" -eq 0 ] && { install || { apt-get -q update >&2 && install; }; }; } ||
        fail "not installed:" $wanted
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
# shellcheck disable=SC2086
apt-cache depends --recurse --installed --no-recommends --no-suggests --no-conflicts --no-breaks \
    --no-replaces --no-enhances $always "$@" | grep '^[a-z0-9]' | sort -u |
    xargs -r dpkg-query -W -f '${db:Status-Abbrev} ${binary:Package}\n' 2>/dev/null |
    sed -n 's/^ii *//p' >"$work/packages"
[ -s "$work/packages" ] || fail "apt-cache does not tell what the packages depend on"

mkdir -p "$work/own/etc" "$work/own/tmp" "$work/own/root" "$work/own/var/tmp" "$work/own/usr/local/bin" \
    "$work/own/run" "$work/own/proc" "$work/own/sys" "$work/own/dev"
chmod 1777 "$work/own/tmp" "$work/own/var/tmp"
chmod 755 "$work/own"
echo "root:x:0:0:root:/root:/bin/sh" >"$work/own/etc/passwd"
echo "root:x:0:" >"$work/own/etc/group"
ln -s /usr/bin/python3 "$work/own/usr/local/bin/python"
# What pip is told to trust outside, and the index that it is told to ask, is so inside as well.
bundle=/etc/ssl/certs/ca-certificates.crt
trusted=${PIP_CERT:-${SSL_CERT_FILE:-}}
[ -z "$trusted" ] || { mkdir -p "$work/own/etc/ssl/certs" && cp "$trusted" "$work/own$bundle"; }

# With the places that /bin, /lib … point to, and each Python file's compiled form beside it.
xargs dpkg -L <"$work/packages" | python3 -c '
import glob, os, sys
unwanted = ("/usr/share/doc", "/usr/share/man", "/usr/share/info", "/usr/share/lintian",
            "/usr/share/locale", "/usr/share/bug", "/usr/share/zoneinfo/right", "/boot", "/dev",
            "/home", "/proc", "/run", "/sys", "/etc/passwd", "/etc/group")
found = {"/bin", "/sbin", "/lib", "/lib64"}
for line in [*sys.stdin, "/etc/ssl/certs/ca-certificates.crt"]:
    folder, name = os.path.split(line.rstrip("\n"))
    path = os.path.join(os.path.realpath(folder), name)
    if not path.startswith(unwanted) and not os.path.lexists(sys.argv[1] + path):
        found.add(path)
        if path.endswith(".py"):
            found.update(glob.glob(f"{os.path.dirname(path)}/__pycache__/{name[:-3]}.*.pyc"))
sys.stdout.write("".join(f"{path[1:]}\0" for path in sorted(found) if os.path.lexists(path)))
' "$work/own" >"$work/files"

set --
[ -z "$trusted" ] || set -- --change "ENV PIP_CERT=$bundle SSL_CERT_FILE=$bundle"
[ -z "$command" ] || set -- "$@" --change "CMD $command"
[ -z "${PIP_INDEX_URL:-}" ] || set -- "$@" --change "ENV PIP_INDEX_URL=$PIP_INDEX_URL"

tar -cf "$work/image.tar" -C / --no-recursion --null --files-from "$work/files"
(cd "$work/own" && find . -mindepth 1 -printf '%P\0') |
    tar -rf "$work/image.tar" -C "$work/own" --owner 0 --group 0 --no-recursion --null --files-from -
docker import --change "ENV PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" \
    --change "ENV LANG=C.UTF-8" "$@" "$work/image.tar" "$image" >/dev/null ||
    fail "docker import went wrong"
echo "$image: $(wc -l <"$work/packages") packages, $(($(docker image inspect -f '{{.Size}}' "$image") / 1000000)) MB" >&2
