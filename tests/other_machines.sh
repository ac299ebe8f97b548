#!/usr/bin/env bash
# The golden texts and the kernels' tests on machines that are not here:
#     tests/other_machines.sh [arm64] [sdot] [avx2] [no-fma] [sse2]
# all of them without arguments, on x86-64 Linux, with the packages of `pip install ".[test]"` in PYTHON (python3).
#
# avx2, no-fma and sse2: machine code for an x86 of no more than that, on this one. arm64 and sdot: an ARM program, numba and all,
# under user-mode emulation, without its instruction for products of bytes and with it; as root, on Debian or Ubuntu with
# debootstrap and qemu-user-static (apt-get install). Debian's arm64 packages and the wheels for aarch64 are fetched into WORK, which
# is kept if it is given. About 15 minutes on a core, most of them numba's, emulated.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
[ -n "${WORK:-}" ] || { WORK=$(mktemp -d) && trap 'rm -rf "$WORK"' EXIT; }
mkdir -p "$WORK"
export NUMBA_CACHE_DIR=$WORK/machine-code PYTHONDONTWRITEBYTECODE=1

# the tests that say something of a machine's arithmetic
tests=(tests/test_golden.py tests/test_elementary.py tests/test_kernels.py tests/test_half.py tests/test_int8.py)
emulated=(tests/test_golden.py tests/test_elementary.py)
run() {
    echo "+ $*"
    "$@" -m pytest -q -p no:cacheprovider -o addopts= "${selected[@]}"
}

# Debian's Python for ARM, unpacked and not installed, which needs no emulation; beside it the wheels
arm64_tree() {
    [ -d "$WORK/site" ] && return
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1,libstdc++6 bookworm "$WORK/arm64"
    for package in "$WORK"/arm64/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -C "$WORK/arm64" -x --keep-directory-symlink --skip-old-files
    done
    platforms=()
    for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${platform}_aarch64")
    done
    "$python" -m pip install -q --target "$WORK/wheels" --only-binary=:all: --python-version 3.11 "${platforms[@]}" \
        numba numpy typer rich pytest
    mv "$WORK/wheels" "$WORK/site"
}

emulate() {
    arm64_tree
    run env PYTHONPATH="$WORK/site" "$@" qemu-aarch64-static -cpu max -L "$WORK/arm64" "$WORK/arm64/usr/bin/python3.11"
}

for machine in "${@:-arm64 sdot avx2 no-fma sse2}"; do
    for name in $machine; do
        echo "== $name"
        case $name in
            avx2) selected=("${tests[@]}") && run env NUMBA_CPU_NAME=haswell NUMBA_CPU_FEATURES=+avx,+avx2,+f16c,+fma "$python" ;;
            no-fma) selected=("${tests[@]}") && run env NUMBA_CPU_NAME=ivybridge NUMBA_CPU_FEATURES=+avx,+f16c "$python" ;;
            sse2) selected=("${tests[@]}") && run env NUMBA_CPU_NAME=x86-64 NUMBA_CPU_FEATURES=+sse2 "$python" ;;
            arm64) selected=("${emulated[@]}") && emulate NUMBA_CPU_NAME=generic NUMBA_CPU_FEATURES=+neon ;;
            sdot) selected=(tests/test_golden.py tests/test_int8.py -k "golden_text and int8 or multiply_bytes or sdot") &&
                emulate NUMBA_CPU_NAME=neoverse-n1 NUMBA_CPU_FEATURES=+neon,+dotprod ;;
            *) echo "$name is no machine that is known here" >&2 && exit 2 ;;
        esac
    done
done
