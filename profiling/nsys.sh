#!/bin/sh
# Fifty steady decode steps under Nsight Systems, then the overlap report of what it saw.
#
#   profiling/nsys.sh OUT [options of `slipstream profile`, such as --model NAME --rows 64 --no-overlap]
#
# The capture range opens once the load is steady and closes after the steps; the process itself goes on and ends by
# itself (`stop`, not `stop-shutdown`; no signal). Graphs are traced node by node, so their kernels have names.
set -eu
out=${1:?usage: nsys.sh OUT [options of slipstream profile]}
shift
nsys profile --output "$out" --force-overwrite true --trace cuda,nvtx --cuda-graph-trace node \
    --capture-range cudaProfilerApi --capture-range-end stop --kill none \
    slipstream profile --nvtx --steps 50 --out "$out.marks" "$@"
nsys export --type sqlite --force-overwrite true --output "$out.sqlite" "$out.nsys-rep"
slipstream overlap-report "$out.sqlite" --out "$out"
