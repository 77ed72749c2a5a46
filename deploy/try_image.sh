#!/bin/sh
# Build the image of deploy/Dockerfile without a registry of images, and try the service in it.
#
#   deploy/try_image.sh [FOLDER]
#
# As root, on Debian with buildah and debootstrap. In place of python:3.11-slim, the base is a
# Debian 12 that debootstrap makes in FOLDER (a temporary one by default), with Debian's Python
# 3.11. Set TORCH_WHEELS to a folder with a wheel of torch if PyTorch's index cannot be reached, and
# BUILD_FLAGS to further flags of `buildah bud`, such as volumes with certificates.
set -eu
cd "$(dirname "$0")/.."
work=${1:-$(mktemp -d)}
work=$(realpath "$work")
base=docker.io/library/python:3.11-slim
export BUILDAH_ISOLATION=chroot STORAGE_DRIVER=vfs
buildah() { command buildah --root "$work/storage" --runroot "$work/run" "$@"; }
say() { printf '%s\n' "== $*"; }

if [ ! -x "$work/base/usr/bin/python3" ]; then
    say "a base for the image"
    debootstrap --variant=minbase --include=python3,python3-venv,python3-pip,ca-certificates \
        bookworm "$work/base" "${DEBIAN_MIRROR:-http://deb.debian.org/debian}"
fi
# What the image of Docker has and Debian has not: the name `python`, and a pip that may install.
ln -sf /usr/bin/python3 "$work/base/usr/local/bin/python"
rm -f "$work"/base/usr/lib/python3*/EXTERNALLY-MANAGED "$work"/base/var/cache/apt/archives/*.deb

made=$(buildah from scratch)
buildah add -q "$made" "$work/base" / > "$work/base.id"
buildah commit -q --rm "$made" "$base" > "$work/base.id"

set -- --network host --pull-never -f deploy/Dockerfile -t engram
if [ -n "${TORCH_WHEELS:-}" ]; then
    mkdir -p "$work/index/torch"
    cp -u "$TORCH_WHEELS"/torch-*.whl "$work/index/torch/"
    for wheel in "$work"/index/torch/*.whl; do
        name=$(basename "$wheel")
        echo "<a href=\"$(echo "$name" | sed 's/+/%2B/')\">$name</a>"
    done > "$work/index/torch/index.html"
    set -- "$@" --build-arg TORCH_INDEX=file:///index --volume "$work/index:/index:ro"
fi
say "the steps of deploy/Dockerfile"
# shellcheck disable=SC2086
buildah bud "$@" ${BUILD_FLAGS:-} .

say "the service in the image"
running=$(buildah from --pull-never engram)
trap 'buildah rm "$running" > "$work/removed"' EXIT
install -d -o 10001 -g 10001 "$work/bundle" "$work/cache"
run() {
    buildah run --network host -v "$work/bundle:/bundle" -v "$work/cache:/cache" "$running" -- "$@"
}
run sh -c 'test "$(id -u)" = 10001 && ! touch /usr/x 2> /dev/null && echo "user $(id -u), who cannot write to /usr"'
run python --version
run engram fit digits --task digits --regime head -o /bundle/digits.safetensors --overwrite --workers 0
run engram compose /bundle/digits.safetensors -o /bundle/own --overwrite
port=$(python3 -c 'import socket; s = socket.create_server(("127.0.0.1", 0)); print(s.getsockname()[1])')
buildah config --env PORT="$port" --env BUNDLE=/bundle/own --env ENGRAM_ASK_TOKEN=secret "$running"
# The image's own command: `buildah run` takes no ENTRYPOINT. Nothing else runs in it meanwhile, as
# the end of every run removes what the volumes of the image hold.
run sh -c 'exec engram serve "$BUNDLE" --host 0.0.0.0 --port "$PORT" "$@"' engram --log json &
service=$!
tries=0
until python3 -c "import sys, urllib.request; urllib.request.urlopen(sys.argv[1], timeout=4)" \
    "http://127.0.0.1:$port/healthz" 2> "$work/health"; do
    kill -0 "$service"
    tries=$((tries + 1))
    test "$tries" -lt 60
    sleep 1
done
python3 - "$port" <<'PYTHON'
import json, sys, urllib.error, urllib.request
url = f"http://127.0.0.1:{sys.argv[1]}/v1/tasks"
try:
    urllib.request.urlopen(url)
    sys.exit("it answers without the token")
except urllib.error.HTTPError as error:
    assert error.code == 401, error
asked = urllib.request.Request(url, headers={"Authorization": "Bearer secret"})
print("it answers:", [task["name"] for task in json.load(urllib.request.urlopen(asked))["tasks"]])
PYTHON
pkill -TERM -o -u 10001 -f "engram serve /bundle/own"
wait "$service"
say "it ended at SIGTERM with exit code 0"
say "size of the image, with its base: $(buildah images --format '{{.Size}}' engram)"
