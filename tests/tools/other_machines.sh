#!/usr/bin/env bash
# The golden texts and the kernels' tests on machines that are not here:
#     tests/tools/other_machines.sh [avx-vnni] [avx2] [no-fma] [sse2] [arm64] [sdot]
# all of them without arguments, on x86-64 Linux, with PYTHON (python3), which has the packages of `pip install ".[test]"`.
#
# avx-vnni (on a CPU that has it), avx2, no-fma and sse2: machine code for an x86 of no more than that, run on this one; 3 to 5
# minutes each. arm64 and sdot: an ARM program, numba and all, emulated, without an instruction for products of bytes and with it;
# a quarter of an hour each, most of it spent compiling. They need root, debootstrap and qemu-user-static (apt-get install), and
# fetch Debian's packages and the wheels for ARM into WORK, a folder that is kept if it is given.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-python3}
[ -n "${WORK:-}" ] || { WORK=$(mktemp -d) && trap 'rm -rf "$WORK"' EXIT; }
mkdir -p "$WORK"
export NUMBA_CACHE_DIR=$WORK/machine-code PYTHONDONTWRITEBYTECODE=1
pytest=(-m pytest -q -p no:cacheprovider -n 0 -m '')

x86() { # CPU, its features
    NUMBA_CPU_NAME=$1 NUMBA_CPU_FEATURES=$2 "$python" "${pytest[@]}" \
        tests/test_{golden,kernels}.py tests/layers/test_kv_formats.py tests/runtime/test_elementary.py tests/quant
}

arm() { # CPU, its features, tests
    [ -d "$WORK/site" ] || make_arm
    PYTHONPATH=$WORK/site NUMBA_CPU_NAME=$1 NUMBA_CPU_FEATURES=$2 \
        qemu-aarch64-static -cpu max -L "$WORK/arm64" "$WORK/arm64/usr/bin/python3.11" "${pytest[@]}" "${@:3}"
}

make_arm() { # Debian's packages are unpacked, not installed, which needs no emulation
    debootstrap --foreign --arch=arm64 --variant=minbase --include=python3,libgomp1,libstdc++6 \
        bookworm "$WORK/arm64" >"$WORK/log"
    for package in "$WORK"/arm64/var/cache/apt/archives/*.deb; do
        dpkg-deb --fsys-tarfile "$package" | tar -C "$WORK/arm64" -x --keep-directory-symlink --skip-old-files
    done
    platforms=()
    for platform in manylinux_2_28 manylinux_2_27 manylinux_2_17 manylinux2014; do
        platforms+=(--platform "${platform}_aarch64")
    done
    "$python" -m pip install -q --target "$WORK/wheels" --only-binary=:all: --python-version 3.11 "${platforms[@]}" \
        numba numpy typer rich pytest pytest-xdist
    mv "$WORK/wheels" "$WORK/site"
}

[ $# -gt 0 ] || set -- avx-vnni avx2 no-fma sse2 arm64 sdot
for machine; do
    echo "== $machine"
    case $machine in
        avx-vnni)
            if grep -q avx_vnni /proc/cpuinfo; then x86 alderlake +avx,+avx2,+f16c,+fma,+avxvnni; else echo "not on this CPU"; fi
            ;;
        avx2) x86 haswell +avx,+avx2,+f16c,+fma ;;
        no-fma) x86 ivybridge +avx,+f16c ;;
        sse2) x86 x86-64 +sse2 ;;
        arm64)
            arm generic +neon tests/test_golden.py tests/layers/test_kv_formats.py tests/runtime/test_elementary.py tests/quant/test_{groupwise,int8}.py \
                -k "golden or elementary or fp16_conversions or neon or every_instruction"
            ;;
        sdot)
            arm neoverse-n1 +neon,+dotprod tests/test_golden.py tests/layers/test_kv_formats.py tests/quant/test_{groupwise,int8}.py \
                -k "golden_output and (int8 or int4) or golden_bits or native_and_portable or sdot or every_instruction or fp16_conversions"
            ;;
        *) echo "$machine is none of avx-vnni, avx2, no-fma, sse2, arm64 and sdot" >&2 && exit 2 ;;
    esac
done
