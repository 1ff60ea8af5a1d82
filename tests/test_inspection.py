"""The inspector: what it reads from machine code, and what it makes of compilers that fail."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from paracore.inspection.cuda import find_nvcc, inspect_cuda
from paracore.inspection.disassembly import (
    count_classes,
    find_loops,
    hottest_loop,
    parse_amdgcn,
    parse_sass,
)
from paracore.inspection.machine_code import Measurement, measure_amdgcn, parse_resource_usage
from paracore.inspection.report import Row, format_table, missed_requirements
from paracore.inspection.worker import Job, inspect
from paracore.kernels.configuration import SM_90, TARGETS, Configuration, Requirements, Target

# A main loop with a barrier's spin loop inside, a second loop, and a slow path behind the end.
SASS = """
	code for sm_90a
		Function : attend
	.headerflags	@"EF_CUDA_SM90"
        /*0000*/                   LDC R1, c[0x0][0x28] ;      /* 0x00000a00ff017b82 */
                                                               /* 0x000e220000000800 */
        /*0010*/                   IMAD.MOV.U32 R3, RZ, RZ, RZ ;
        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [UR4], R3 ;
        /*0030*/              @!P0 BRA 0x20 ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   MUFU.EX2 R9, R8 ;
        /*0060*/                   UTMALDG.2D [UR16], [UR6] ;
        /*0070*/              @P2  BRA 0x120 ;
        /*0080*/               @P1 BRA 0x10 ;
        /*0090*/                   FADD R2, R2, R9 ;
        /*00a0*/                   FFMA R2, R2, R9, R9 ;
        /*00b0*/                   IADD3 R4, R4, 0x1, RZ ;
        /*00c0*/                   ISETP.GE.AND P1, PT, R4, 0x8, PT ;
        /*00d0*/                   LDS.128 R12, [R10] ;
        /*00e0*/                   FMUL R2, R2, R12 ;
        /*00f0*/                   BRA.U !UP0, 0x90 ;
        /*0100*/               @P3 EXIT ;
        /*0110*/                   EXIT ;
        /*0120*/                   FLO.U32 R5, R5 ;
        /*0130*/                   BRA 0x80 ;
        /*0140*/                   BRA 0x140;
        /*0150*/                   NOP;
		Function : plain
        /*0000*/                   LDG.E.128 R4, desc[UR4][R2.64] ;
        /*0010*/                   EXIT ;
"""


def test_loops_run_from_a_backward_branchs_target_to_the_branch():
    """The jump back from the slow path behind EXIT closes no loop; the padding's self-jump ends the code."""
    instructions = parse_sass(SASS)["attend"]
    assert instructions[-1].opcode == "BRA"
    assert len(instructions) == 20
    assert find_loops(instructions) == [range(1, 9), range(2, 4), range(9, 16)]


def test_the_hottest_loop_is_the_one_that_owns_the_matrix_instructions():
    """Neither the spin loop inside nor the longer loop without matrix instructions displaces it."""
    counts = count_classes(hottest_loop(parse_sass(SASS)["attend"]))
    assert counts == {
        "matrix": 1,
        "memory": 1,
        "float": 0,
        "integer": 1,
        "special": 1,
        "control": 4,
        "other": 0,
        "total": 8,
    }


# The edges of a mask and what lies between, each a loop with the same products; a fourth with fewer.
THREE_STRETCHES = """
		Function : attend
        /*0000*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0010*/                   ISETP.GE.AND P0, PT, R4, R5, PT ;
        /*0020*/                   FSEL R2, R2, R9, P0 ;
        /*0030*/               @P1 BRA 0x00 ;
        /*0040*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0050*/                   MUFU.EX2 R9, R8 ;
        /*0060*/               @P1 BRA 0x40 ;
        /*0070*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24 ;
        /*0080*/                   LDS.128 R12, [R10] ;
        /*0090*/                   FSEL R2, R2, R9, P0 ;
        /*00a0*/               @P1 BRA 0x70 ;
        /*00b0*/                   FADD R2, R2, R9 ;
        /*00c0*/               @P1 BRA 0xb0 ;
        /*00d0*/                   EXIT ;
"""


def test_of_loops_with_the_same_products_the_one_without_masks_is_hottest():
    counts = count_classes(hottest_loop(parse_sass(THREE_STRETCHES)["attend"]))
    assert (counts["matrix"], counts["special"], counts["control"], counts["total"]) == (1, 1, 1, 3)


def test_without_matrix_instructions_the_longest_innermost_loop_is_hottest():
    instructions = parse_sass(SASS.replace("HGMMA.64x128x16.F32.BF16", "MOV"))["attend"]
    counts = count_classes(hottest_loop(instructions))
    assert (counts["float"], counts["integer"], counts["memory"], counts["total"]) == (3, 2, 1, 7)


def test_code_without_a_loop_counts_as_a_whole():
    assert count_classes(hottest_loop(parse_sass(SASS)["plain"]))["total"] == 2


@pytest.mark.parametrize(
    ("opcode", "kind"),
    [
        ("HMMA.16816.F32.BF16", "matrix"),
        ("UTCHMMA", "matrix"),
        ("QGMMA.64x64x32", "matrix"),
        ("LDGSTS.E.BYPASS.128", "memory"),
        ("LDSM.16.M88.4", "memory"),
        ("UBLKCP", "memory"),
        ("STL.64", "memory"),
        ("REDG.E.ADD", "memory"),
        ("REDUX.SUM", "integer"),
        ("F2FP.BF16.F32.PACK_AB", "float"),
        ("HFMA2.BF16", "float"),
        ("FLO.U32", "integer"),
        ("FENCE.VIEW.ASYNC", "control"),
        ("LOP3.LUT", "integer"),
        ("VIADD", "integer"),
        ("ULEA", "integer"),
        ("MUFU.RSQ", "special"),
        ("BAR.SYNC.DEFER_BLOCKING", "control"),
        ("LDGDEPBAR", "control"),
        ("S2R", "other"),
        ("MOV", "other"),
    ],
)
def test_classes_of_nvidia_instructions(opcode, kind):
    (instruction,) = parse_sass(f"Function : f\n /*0000*/ {opcode} R0, R1 ;")["f"]
    assert instruction.kind == kind


def test_asynchronous_copies_are_told_from_other_memory_instructions():
    opcodes = ("LDGSTS.E.128", "UTMALDG.2D", "UBLKCP", "LDG.E.128", "STS", "LDGDEPBAR")
    lines = "".join(f" /*{16 * i:04x}*/ {opcode} R0 ;\n" for i, opcode in enumerate(opcodes))
    copies = [i.opcode for i in parse_sass("Function : f\n" + lines)["f"] if i.asynchronous_copy]
    assert copies == ["LDGSTS.E.128", "UTMALDG.2D", "UBLKCP"]


# LLVM may place a loop's latch before its header: two backward branches then share a target.
AMDGCN = """
	.text
attend:                                    ; @attend
; %bb.0:
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_branch .LBB0_2
.LBB0_1:                                ;   in Loop: Header=BB0_2 Depth=1
	s_add_u32 s4, s4, 1
	s_cbranch_vccz .LBB0_3
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
	buffer_load_dwordx4 v1, s[8:11], 0 offen lds
	v_mfma_f32_32x32x8_bf16_1k a[0:15], v[0:1], v[2:3], a[0:15]
	v_exp_f32_e32 v4, v4
	v_pk_mul_f32 v[4:5], v[4:5], v[6:7]
	s_waitcnt vmcnt(0)
	s_cbranch_execz .LBB0_1
	v_mov_b32_e32 v9, v8
	s_branch .LBB0_1
.LBB0_3:
	s_endpgm
	.section	.AMDGPU.csdata
amdhsa.kernels:
  - .agpr_count:     16
    .private_segment_fixed_size: 12
    .sgpr_count:     56
    .sgpr_spill_count: 1
    .vgpr_count:     120
    .vgpr_spill_count: 3
"""


def test_amd_assembly_is_read_like_nvidias():
    instructions = parse_amdgcn(AMDGCN)
    assert find_loops(instructions) == [range(2, 12)]
    measured = measure_amdgcn(AMDGCN, shared_bytes=4096)
    assert (measured.registers, measured.spill_bytes, measured.shared_bytes) == (120, 16, 4096)
    assert (measured.matrix_instructions, measured.async_copies, measured.loop_async_copies) == (1, 1, 1)
    assert measured.loop_instructions == {
        "matrix": 1,
        "memory": 1,
        "float": 1,
        "integer": 1,
        "special": 1,
        "control": 4,
        "other": 1,
        "total": 10,
    }


def test_resource_usage_is_read_per_function():
    text = " Function f:\n  REG:80 STACK:8 SHARED:1024 LOCAL:0 CONSTANT[0]:624\n Function g:\n  REG:9 STACK:0"
    usage = parse_resource_usage(text)
    assert (usage["f"]["REG"], usage["f"]["STACK"], usage["g"]["REG"]) == (80, 8, 9)


def measurement(**changes: Any) -> Measurement:
    figures: dict[str, Any] = {
        "registers": 80,
        "spill_bytes": 0,
        "shared_bytes": 0,
        "matrix_instructions": 4,
        "async_copies": 2,
        "loop_instructions": dict.fromkeys(("matrix", "memory", "float", "integer"), 25)
        | {"special": 0, "control": 0, "other": 0, "total": 100},
        "loop_async_copies": 2,
    }
    return Measurement(**figures | changes)


@pytest.mark.parametrize(
    ("changes", "requirements", "reason"),
    [
        ({"spill_bytes": 8}, Requirements(), "spills 8 bytes, at most 0 allowed"),
        ({"matrix_instructions": 0}, Requirements(matrix_instructions=True), "no matrix instructions"),
        ({}, Requirements(matrix_instructions=False), "4 matrix instructions, none allowed"),
        ({"loop_async_copies": 0}, Requirements(loop_async_copies=True), "no asynchronous copies"),
        ({}, Requirements(max_loop_instructions=99), "100 instructions in the hottest loop, at most 99"),
        ({"shared_bytes": 9}, Requirements(max_shared_bytes=8), "9 bytes of shared memory, at most 8"),
    ],
)
def test_a_missed_requirement_is_named_with_its_numbers(changes, requirements, reason):
    (missed,) = missed_requirements(measurement(**changes), requirements)
    assert reason in missed


def test_met_requirements_are_not_reported():
    met = Requirements(
        matrix_instructions=True, loop_async_copies=True, max_loop_instructions=100, max_shared_bytes=0
    )
    assert missed_requirements(measurement(), met) == ()
    assert missed_requirements(measurement(spill_bytes=8), Requirements(max_spill_bytes=None)) == ()


def test_the_table_shows_figures_and_reasons():
    rows = [
        Row("attend", "bf16", "sm_90", measurement(), ()),
        Row("attend", "fp32", "sm_90", None, ("the compiler crashed",)),
    ]
    text = format_table(rows)
    assert "100: mat 25 mem 25 flt 25 int 25" in text
    assert text.splitlines()[-1] == "    MISSED: the compiler crashed"


# ---------------------------------------------------------------- compilers

pytest.importorskip("triton")


class CrashingKernel:
    """Stands for a kernel on which the compiler dies; only its name and key can be had."""

    arg_names = ("x",)
    cache_key = "crash"

    class fn:  # noqa: N801
        __name__ = "crashing_kernel"

    @property
    def __name__(self) -> str:
        os.kill(os.getpid(), signal.SIGSEGV)
        return "unreachable"


def catalogue(target: Target) -> list[Configuration]:
    """A kernel that compiles, with one that crashes and one that is refused beside it."""
    from paracore.kernels import rms_norm

    sound = [entry for entry in rms_norm.configurations(target) if entry.kernel_name == "sum_rows_kernel"]
    crashing = Configuration(CrashingKernel(), "crash", {"x": "*fp32"}, {}, num_warps=4)
    refused = Configuration(sound[0].kernel, "refused", {"total": "*fp32"}, {}, num_warps=4)
    return [crashing, refused, *sound]


CATALOGUE = f"{__name__}:catalogue"
JOBS = [Job("sm_90", entry.kernel_name, entry.name) for entry in catalogue(SM_90)]


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    cache = tmp_path_factory.mktemp("cache")
    found = {r.job.config: r for r in inspect(JOBS, workers=2, cache=cache, catalogue=CATALOGUE)}
    return {"cache": cache, **found}


def test_a_compiler_that_crashes_fails_alone(results):
    assert results["crash"].measurement is None
    assert "crashed with SIGSEGV" in results["crash"].error
    assert "declares ['total'], takes ['BLOCK_D'" in results["refused"].error
    assert results["fp32"].measurement.registers > 0


def test_only_finished_measurements_are_cached_and_used_again(results):
    (kept,) = results["cache"].glob("*")
    kept.write_text(kept.read_text().replace('"registers": ', '"registers": 1000'))
    again = {r.job.config: r for r in inspect(JOBS, workers=1, cache=results["cache"], catalogue=CATALOGUE)}
    assert again["fp32"].measurement is not None
    assert again["fp32"].measurement.registers >= 10000
    assert again["crash"].measurement is None


def test_a_worker_that_dies_leaves_no_job_unanswered():
    (result,) = inspect(JOBS[:1], workers=1, cache=None, catalogue="no.such:catalogue")
    assert result.measurement is None
    assert "No module named 'no'" in result.error


def test_rms_norm_meets_its_requirements_on_every_target():
    """The two configurations with the fewest registers to spare; `paracore kernels` compiles the rest."""
    from paracore.kernels import rms_norm

    jobs = {
        Job(name, entry.kernel_name, entry.name): entry.requirements
        for name, target in TARGETS.items()
        for entry in rms_norm.configurations(target)
        if entry.name in ("bf16 D<=1024 residual", "fp32 D<=16384 residual")
    }
    assert len(jobs) == 2 * 2 * len(TARGETS)
    for result in inspect(list(jobs), workers=2, cache=None):
        assert result.measurement is not None, result.error
        assert result.measurement.matrix_instructions == 0
        assert not missed_requirements(result.measurement, jobs[result.job]), result.job


def test_attention_meets_its_requirements_on_every_target():
    """Forward and what descriptors load at the commonest head dim; `paracore kernels` compiles the rest."""
    from paracore.kernels import attention

    forward, name = "attention_forward_kernel", "bf16 D=128"
    with_descriptors = {
        (kernel, f"{name} descriptors") for kernel in (forward, "attention_backward_query_kernel")
    }

    jobs = {
        Job(target_name, entry.kernel_name, entry.name): entry.requirements
        for target_name, target in TARGETS.items()
        for entry in attention.configurations(target)
        if (entry.kernel_name, entry.name) in {(forward, name), *with_descriptors}
    }
    assert [job.target for job in jobs] == ["sm_80", "sm_90", "sm_90", "sm_90", "sm_100", "gfx942"]
    assert [job.target for job, needed in jobs.items() if needed.max_loop_instructions] == ["sm_90"] * 2
    for result in inspect(list(jobs), workers=2, cache=None):
        assert result.measurement is not None, result.error
        assert result.measurement.loop_instructions["matrix"] > 0
        assert not missed_requirements(result.measurement, jobs[result.job]), result.job


def test_adamw_meets_its_requirements_on_every_target():
    """The commonest configuration and the one with most registers; `paracore kernels` compiles the rest."""
    from paracore.kernels import adamw

    jobs = {
        Job(name, entry.kernel_name, entry.name): entry.requirements
        for name, target in TARGETS.items()
        for entry in adamw.configurations(target)
        if entry.name in ("bf16 fp32 fp32", "bf16 bf16 drawn amsgrad")
    }
    assert len(jobs) == 2 * len(TARGETS)
    for result in inspect(list(jobs), workers=2, cache=None):
        assert result.measurement is not None, result.error
        assert not missed_requirements(result.measurement, jobs[result.job]), result.job


@pytest.mark.skipif(find_nvcc() is None, reason="no CUDA toolkit")
@pytest.mark.parametrize("target", ["sm_80", "sm_90", "sm_100"])
def test_cuda_sources_are_compiled_and_measured(target, tmp_path):
    source = tmp_path / "scale.cu"
    source.write_text(
        'extern "C" __global__ void scale(float* x, int n) { for (int i = 0; i < n; ++i) x[i] *= 2.0f; }\n'
    )
    (row,) = inspect_cuda(source, target, find_nvcc() or "")
    assert (row.kernel, row.config, row.target, row.missed) == ("scale", "scale.cu", target, ())
    assert row.measurement is not None
    assert row.measurement.loop_instructions["memory"] > 0


@pytest.mark.skipif(find_nvcc() is None, reason="no CUDA toolkit")
def test_a_cuda_source_that_does_not_compile_is_a_missed_requirement(tmp_path):
    source = tmp_path / "wrong.cu"
    source.write_text("__global__ void wrong() { undeclared(); }\n")
    (row,) = inspect_cuda(source, "sm_90", find_nvcc() or "")
    assert row.measurement is None
    assert "undeclared" in row.missed[0]
