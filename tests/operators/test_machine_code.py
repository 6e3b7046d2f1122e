"""The loss's Triton kernel as machine code for five GPU generations, without a GPU: Triton brings the assembler."""

import re

import pytest

triton = pytest.importorskip("triton", reason="needs triton: pip install triton")

WIDTH, N_REAL = 50304, 50257  # GPT-2's vocabulary, padded


def machine_code(capability, dtype):
    """Disassembled kernel, compiled as at a launch with logits that begin at a multiple of 16 bytes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from operators.softmax_triton import BLOCK_BYTES, WARPS, head_loss_rows

    options = {"width": WIDTH, "n_real": N_REAL, "IGNORED": -2, "FIND": True, "OVERWRITE": True}
    options["BLOCK"] = BLOCK_BYTES // (4 if dtype == "fp32" else 2)
    signature = {"logits": f"*{dtype}", "columns": "*i64", "log_sums": "*fp32", "picked": "*fp32"}
    source = ASTSource(
        head_loss_rows,
        signature | dict.fromkeys(options, "constexpr"),
        constexprs={(head_loss_rows.arg_names.index(name),): value for name, value in options.items()},
        attrs={(0,): [["tt.divisibility", 16]]},
    )
    return triton.compile(source, GPUTarget("cuda", capability, 32), {"num_warps": WARPS}).asm["sass"]


GPUS, DTYPES = [75, 80, 90, 100, 120], ["bf16", "fp16", "fp32"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("capability", GPUS)
def test_rows_are_read_and_written_16_bytes_at_a_time_without_local_memory(capability, dtype):
    code = machine_code(capability, dtype)
    accesses = re.findall(r"\b(?:LDG|STG)\.\S*", code)  # of the GPU's memory
    narrow = [name[:3] for name in accesses if ".128" not in name]
    # Loads of a row: the target's column and logit. Stores: that logit, log-sum-exp, the target logit's gradient
    assert sorted(narrow) == ["LDG", "LDG", "STG", "STG", "STG"]
    assert len(accesses) - len(narrow) >= 3  # each pass reads, the second one writes
    assert not re.search(r"\b(?:LDL|STL)\b", code)  # local memory
