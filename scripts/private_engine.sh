# shellcheck shell=bash
# A Docker engine of our own, for machines that have none running and no registry: sourced by compose-test.sh.
# Needs root, dockerd (docker.io) and debootstrap. Nothing outside "$STATE" changes: without the four switches
# below, dockerd would add firewall chains, set FORWARD to DROP and turn on ip_forward for the whole machine.

engine_start() {
  mkdir -p "$STATE"
  setsid dockerd --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
    --storage-driver=overlay2 --data-root "$STATE/data" --exec-root "$STATE/exec" \
    -H "unix://$STATE/docker.sock" -p "$STATE/docker.pid" >"$STATE/dockerd.log" 2>&1 &
  export DOCKER_HOST="unix://$STATE/docker.sock"
  for _ in $(seq 100); do
    if docker info >/dev/null 2>&1; then return; fi
    sleep 0.2
  done
  tail -n 20 "$STATE/dockerd.log" >&2
  echo "the private engine did not start" >&2
  return 1
}

engine_stop() {
  if [ -f "$STATE/docker.pid" ]; then
    local pid
    pid=$(cat "$STATE/docker.pid")
    kill "$pid"
    for _ in $(seq 100); do
      if ! kill -0 "$pid" 2>/dev/null; then break; fi
      sleep 0.2
    done
  fi
  ip link del docker0 2>/dev/null || true
}

# Makes two images from Debian's packages and this machine's Python: $1, what the Dockerfiles start from, and $2, the
# same with g++, to build in.
engine_base_images() {
  local image=$1 build_image=$2 root="$STATE/root" python prefix name
  if docker image inspect "$image" "$build_image" >/dev/null 2>&1; then return; fi
  python=$("$PYTHON" -c 'import os, sys; print(os.path.realpath(sys.executable))')
  prefix=$("$PYTHON" -c 'import sys; print(sys.base_prefix)')
  rm -rf "$root"
  debootstrap --variant=minbase --include=ca-certificates,libssl3,libffi8,libsqlite3-0,zlib1g,libbz2-1.0,liblzma5,\
libreadline8,libuuid1,libexpat1,libncursesw6,libgdbm6,libnsl2 bookworm "$root" "$(engine_mirror)" \
    >"$STATE/debootstrap.log"
  tar -C "$prefix" --exclude='site-packages/*' --exclude=test --exclude='*.a' --exclude=__pycache__ \
    -cf - "bin/$(basename "$python")" lib | tar -C "$root/usr/local" -xf -
  for name in python python3; do ln -s "$(basename "$python")" "$root/usr/local/bin/$name"; done
  chroot "$root" ldconfig
  chroot "$root" python -m ensurepip >/dev/null 2>&1
  ln -s pip3 "$root/usr/local/bin/pip"
  engine_import "$root" "$image"
  cp /etc/resolv.conf "$root/etc/resolv.conf"
  chroot "$root" sh -c 'apt-get update && apt-get install -y --no-install-recommends g++' >"$STATE/apt.log" 2>&1
  engine_import "$root" "$build_image"
  rm -rf "$root"
}

# A folder as an image. $1: the folder; $2: the image's name.
engine_import() {
  tar -C "$1" --exclude=./dev --exclude=./var/cache/apt --exclude=./var/lib/apt/lists --exclude=./etc/resolv.conf \
    -cf - . | docker import -c 'ENV PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin' \
    -c 'CMD ["python3"]' - "$2" >/dev/null
}

# Adds a wheelhouse to an image, because builds have no network here. $1: the new image's name; $2: the base; the
# rest: lock files to gather wheels for.
engine_wheels_image() {
  local image=$1 base=$2 lock
  shift 2
  for lock in "$@"; do
    "$PYTHON" -m pip download -q -d "$STATE/wheels" --only-binary :all: --no-deps -r "$lock" 2>>"$STATE/wheels.log"
  done
  docker build -q -t "$image" -f - "$STATE/wheels" >"$STATE/build.log" 2>&1 <<IMAGE
FROM $base
COPY . /wheels
ENV PIP_NO_INDEX=1 PIP_FIND_LINKS=/wheels
IMAGE
}

# The Debian mirror that this machine's own apt uses.
engine_mirror() {
  cat /etc/apt/sources.list /etc/apt/sources.list.d/* 2>/dev/null \
    | sed -nE 's/^(URIs:|deb( \[[^]]*\])?) *(http[^ ]*).*/\3/p' | head -n 1
}
