"""The Triton pair against the eager pair: in Triton's interpreter bit for bit, on CUDA where there is one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

CHECK = Path(__file__).with_name("fp8_interpreter_check.py")


def check_output(**environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(CHECK)],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_interpreted_kernels_agree_with_eager_in_every_bit() -> None:
    assert "bitwise equal on cpu" in check_output(TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_compiled_kernels_agree_with_eager_in_every_bit() -> None:
    assert "bitwise equal on cuda" in check_output()


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["quantise", "dequantise"])
@pytest.mark.parametrize("half", [True, False])
def test_compiled_for_hopper_nothing_is_fused_approximated_or_flushed(kernel: str, half: bool) -> None:
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from europa_exp.comm import fp8_triton

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter is on")
    function = getattr(fp8_triton, f"_{kernel}_kernel")
    pointers = {"values": "*i16" if half else "*i32", "codes": "*u8", "scales": "*i32"}
    constants = {"HALF": half, "BLOCKS": fp8_triton.BLOCKS_PER_PROGRAM, "WIDTH": 128}
    signature = {
        name: "constexpr" if name in constants else pointers.get(name, "i32") for name in function.arg_names
    }
    source = ASTSource(function, signature, constexprs=constants)
    try:
        ptx = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    except RuntimeError as error:  # a Triton without NVIDIA's compiler
        pytest.skip(f"can't compile for CUDA here: {error}")
    assert re.search(r"mul\S*\.f32", ptx)
    assert not re.search(r"\bfma|\.ftz|\.approx|div\.full", ptx)
    if kernel == "quantise":
        assert "div.rn.f32" in ptx
