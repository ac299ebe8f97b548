"""Features of ARM CPUs beyond those that LLVM reports."""

import sys

import numba
import pytest

from specdec.quant.dot4 import choose_dot4
from specdec.runtime import arm_features
from specdec.runtime.arm_features import complete_features, has_dot_product, set_numba_features


@pytest.mark.parametrize(
    ("reported", "has_sdot", "expected", "dot4"),
    [
        ("", False, "+neon", "neon"),  # macOS reports nothing
        ("", True, "+neon,+dotprod", "sdot"),
        ("+neon,+fp-armv8,+crc,+lse", True, "+neon,+fp-armv8,+crc,+lse,+dotprod", "sdot"),  # Linux on a Neoverse N1
        ("+neon,+fp-armv8", False, "+neon,+fp-armv8", "neon"),
        ("+dotprod,+neon", True, "+dotprod,+neon", "sdot"),
    ],
)
def test_an_arm_cpu_gets_the_byte_products_that_it_has(reported: str, has_sdot: bool, expected: str, dot4: str) -> None:
    assert complete_features(reported, has_sdot) == expected
    assert choose_dot4(expected) == dot4


def test_features_that_the_user_sets_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_features, "get_host_cpu_features", lambda: "+crc")
    monkeypatch.setattr(arm_features, "has_dot_product", lambda: True)
    for given, expected in ((None, "+crc,+neon,+dotprod"), ("", ""), ("+neon", "+neon")):
        monkeypatch.setattr(numba.config, "CPU_FEATURES", given)
        set_numba_features()
        features = numba.config.CPU_FEATURES
        assert features == expected


@pytest.mark.parametrize(("platform", "expected"), [("darwin", True), ("win32", False)])
def test_systems_without_a_list_of_features(monkeypatch: pytest.MonkeyPatch, platform: str, expected: bool) -> None:
    monkeypatch.setattr(sys, "platform", platform)
    assert has_dot_product() is expected


@pytest.mark.skipif(sys.platform != "linux", reason="Linux has getauxval")
def test_linux_has_a_bit_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arm_features, "HWCAP_ASIMDDP", (1 << 64) - 1)  # some bit of any CPU
    assert has_dot_product()
    monkeypatch.setattr(arm_features, "HWCAP_ASIMDDP", 0)
    assert not has_dot_product()
