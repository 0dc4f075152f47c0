"""Covers kernels/cpu/kv_heads.py."""

import numpy as np
import pytest

from kernels.cpu.compiler import compiled, is_available
from kernels.cpu.kv_heads import extend_by_integers, truncate_by_integers

pytestmark = pytest.mark.skipif(not is_available(), reason="needs numba")


@compiled()
def _extend(halves, floats):
    for i in range(len(halves)):
        floats[i] = extend_by_integers(halves[i])


@compiled()
def _truncate(floats, halves):
    for i in range(len(floats)):
        halves[i] = truncate_by_integers(floats[i])


def test_every_float16_is_extended_without_an_instruction_for_it():
    halves = np.arange(1 << 16).astype(np.uint16).view(np.int16)
    floats = np.empty(len(halves), np.float32)
    _extend(halves, floats)
    np.testing.assert_array_equal(floats, halves.view(np.float16).astype(np.float32))


def test_floats_are_rounded_to_float16_without_an_instruction_for_it():
    halves = np.arange(1 << 16).astype(np.uint16).view(np.float16).astype(np.float32)
    finite = np.sort(halves[np.isfinite(halves)])
    middles = finite[1:] / 2 + finite[:-1] / 2  # which go to the even one
    edges = np.array([65504, 65519, 65520, 65536, 1e30, np.inf, np.nan, 2**-24, 2**-25, 1e-30, 0], np.float32)
    values = np.concatenate([halves, middles, np.nextafter(middles, 1e9), np.nextafter(middles, -1e9), edges])
    values = np.concatenate([values, -values])
    found = np.empty(len(values), np.int16)
    _truncate(values, found)
    with np.errstate(over="ignore"):
        expected = values.astype(np.float16)
    np.testing.assert_array_equal(found.view(np.float16), expected)
    assert (np.signbit(found.view(np.float16)) == np.signbit(expected))[~np.isnan(expected)].all()
