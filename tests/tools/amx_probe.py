"""Check whether this machine multiplies int8 tiles (AMX): `python tests/tools/amx_probe.py` prints the result of each step.

The steps: what CPUID reports, the state that the system saves per thread (XCR0), its permission for tile data, then one `tdpbssd`
of known numbers, before and after the thread has slept. They run in a separate process, since a machine that reports AMX may
still kill it. The constants are from Intel's manual, volume 1, chapter 18, and from Linux's Documentation/arch/x86/xstate.rst.
"""

import ctypes
import platform
import subprocess
import sys
import time

import llvmlite.binding as llvm
import numpy as np

ARCH_REQ_XCOMP_PERM, XTILEDATA, SYS_ARCH_PRCTL = 0x1023, 18, 158
TILE_STATE_MASK = 0b11 << 17  # in XCR0: tile configuration and tile data
ROWS, ROW_BYTES = 16, 64
IR = """
target triple = "{triple}"
define i64 @cpuid() {{
  %r = call {{i32, i32, i32, i32}} asm sideeffect "cpuid", "={{ax}},={{bx}},={{cx}},={{dx}},{{ax}},{{cx}}"(i32 7, i32 0)
  %d = extractvalue {{i32, i32, i32, i32}} %r, 3
  %w = zext i32 %d to i64
  ret i64 %w
}}
define i64 @xcr0() {{
  %r = call {{i32, i32}} asm sideeffect "xgetbv", "={{ax}},={{dx}},{{cx}}"(i32 0)
  %l = extractvalue {{i32, i32}} %r, 0
  %w = zext i32 %l to i64
  ret i64 %w
}}
define void @tiles(i8* %config, i8* %out, i8* %a, i8* %b) "target-features"="+amx-tile,+amx-int8" {{
  call void asm sideeffect "ldtilecfg ($0)", "r,~{{memory}}"(i8* %config)
  call void asm sideeffect "tilezero %tmm0; tileloadd ($1,$3,1), %tmm1; tileloadd ($2,$3,1), %tmm2; tdpbssd %tmm2, %tmm1, %tmm0; tilestored %tmm0, ($0,$3,1); tilerelease", "r,r,r,r,~{{memory}}"(i8* %out, i8* %a, i8* %b, i64 64)
  ret void
}}
"""  # noqa: E501  inline assembly must be on one line


def compile_ir() -> llvm.ExecutionEngine:
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    llvm.initialize_native_asmparser()
    module = llvm.parse_assembly(IR.format(triple=llvm.get_process_triple()).replace("i8*", "ptr"))
    return llvm.create_mcjit_compiler(module, llvm.Target.from_default_triple().create_target_machine())


def can_multiply(engine: llvm.ExecutionEngine) -> bool:
    """Return whether the product of tiles of random bytes equals numpy's."""
    rng = np.random.default_rng(0)
    config = np.zeros(64, np.uint8)
    config[0] = 1  # palette
    config[16:22:2], config[48:51] = ROW_BYTES, ROWS
    a = rng.integers(-128, 128, (ROWS, ROW_BYTES), np.int8)
    b = rng.integers(-128, 128, (ROWS, ROWS, 4), np.int8)  # (k / 4, columns, 4)
    out = np.empty((ROWS, ROWS), np.int32)
    run = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 4)(engine.get_function_address("tiles"))
    run(*(array.ctypes.data for array in (config, out, a, b)))
    return bool((out == a.astype(np.int32) @ b.transpose(0, 2, 1).reshape(ROW_BYTES, ROWS).astype(np.int32)).all())


def probe() -> str:
    """Print the result of each step, and return the overall result."""
    if platform.system() != "Linux" or platform.machine() != "x86_64":
        return f"not checked on {platform.system()} {platform.machine()}"
    engine = compile_ir()
    number = ctypes.CFUNCTYPE(ctypes.c_uint64)
    features = number(engine.get_function_address("cpuid"))()
    print("CPUID: amx_tile", features >> 24 & 1, "amx_int8", features >> 25 & 1, flush=True)
    if (features >> 24 & 3) != 3:
        return "the CPU has no AMX"
    saved = number(engine.get_function_address("xcr0"))()
    print(f"XCR0: {saved:#x}", flush=True)
    if saved & TILE_STATE_MASK != TILE_STATE_MASK:
        return "the system does not save tiles"
    error = ctypes.CDLL(None, use_errno=True).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XTILEDATA)
    print("arch_prctl:", error, ctypes.get_errno(), flush=True)
    if error:
        return "the system denied permission"
    for wait in (0.0, 0.05):
        time.sleep(wait)
        print("tdpbssd:", can_multiply(engine), flush=True)
    return "AMX works"


if __name__ == "__main__":
    if sys.argv[1:] == ["here"]:
        print(probe())
    else:
        exit_code = subprocess.run([sys.executable, __file__, "here"], check=False).returncode
        sys.exit(f"the probe process ended with {exit_code}" if exit_code else 0)
