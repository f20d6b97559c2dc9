"""The PTX parser: syntax, scopes, parameter layout, and where basic blocks are cut."""

import pytest

from fa4.emulator import ptx
from fa4.emulator.ptx import Immediate, Memory, Not, Pair, Register, Symbol, Vector


def parse_body(body: str) -> ptx.Kernel:
    text = (
        ".version 9.0\n.target sm_90a\n.address_size 64\n.visible .entry f()\n{\n"
        ".reg .pred %p<9>; .reg .b32 %r<99>; .reg .b64 %rd<9>;\n" + body + "\n}\n"
    )
    return ptx.parse(text).kernels["f"]


def operands(statement: str) -> tuple[ptx.Operand, ...]:
    return parse_body(statement).instructions[0].operands


def test_parameters_have_natural_alignment() -> None:
    module = ptx.parse(
        ".version 9.0\n.target sm_90a\n.address_size 64\n"
        ".entry f(.param .u8 a, .param .u64 b, .param .align 64 .b8 c[128], .param .f32 d,\n"
        "  .param .u64 .ptr .global .align 16 e)\n{ ret; }"
    )
    found = {p.name: (p.offset, p.size) for p in module.kernels["f"].parameters.values()}
    assert found == {"a": (0, 1), "b": (8, 8), "c": (64, 128), "d": (192, 4), "e": (200, 8)}
    assert module.kernels["f"].parameter_bytes == 208
    assert module.target == "sm_90a"


def test_shared_variables_and_thread_count_are_kept() -> None:
    module = ptx.parse(
        ".target sm_90a\n.extern .shared .align 1024 .b8 dyn[];\n.shared .align 16 .b32 s[5];\n"
        ".entry f()\n.reqntid 384, 1, 1\n{ ret; }"
    )
    assert module.shared["dyn"] == ptx.SharedVariable("dyn", 0, 1024)
    assert module.shared["s"] == ptx.SharedVariable("s", 20, 16)
    assert module.kernels["f"].reqntid == (384, 1, 1)


def test_operands_of_every_form() -> None:
    assert operands("mov.b32 %r1, -5;") == (Register("%r1"), Immediate(-5))
    assert operands("mov.b32 %r1, 0x1fU;")[1] == Immediate(31)
    assert operands("mov.b32 %r1, 010;")[1] == Immediate(8)
    assert operands("mov.f32 %r1, 0f3F800000;")[1] == Immediate(0x3F800000, 0x3F800000)
    assert operands("mov.f32 %r1, 1.5;")[1] == Immediate(1.5)
    assert operands("mov.u32 %r1, %tid.x;")[1] == Symbol("%tid.x")
    assert operands("ld.global.b32 %r1, [%rd2+-8];")[1] == Memory(Register("%rd2"), -8)
    assert operands("st.shared.b32 [%r1+4], %r2;")[0] == Memory(Register("%r1"), 4)
    assert operands("elect.sync %r1|%p2, -1;")[0] == Pair(Register("%r1"), Register("%p2"))
    assert operands("setp.eq.and.s32 %p1, %r1, %r2, !%p2;")[3] == Not(Register("%p2"))
    assert operands("mov.b64 {%r1, %r2}, %rd1;")[0] == Vector((Register("%r1"), Register("%r2")))
    copy = operands("cp.async.bulk.tensor.2d.x [%r1], [%rd1, {%r2, %r3}], [%r4+8];")
    assert copy[1] == Memory(Register("%rd1"), 0, (Register("%r2"), Register("%r3")))
    assert copy[2] == Memory(Register("%r4"), 8)


def test_predicates() -> None:
    plain, negated = parse_body("@%p1 mov.b32 %r1, 0; @!%p2 mov.b32 %r1, 1;").instructions
    assert (plain.predicate, plain.predicate_negated) == ("%p1", False)
    assert (negated.predicate, negated.predicate_negated) == ("%p2", True)


def test_names_of_nested_scopes_are_their_own() -> None:
    scope = "{ .reg .pred P; W: setp.ne.b32 P, %r1, 0; @P bra D; bra.uni W; D: }\n"
    kernel = parse_body(scope + scope + "ret;")
    first, second = kernel.instructions[:3], kernel.instructions[3:6]
    assert first[0].operands[0] != second[0].operands[0]
    assert first[0].operands[1] == second[0].operands[1] == Register("%r1")
    assert first[1].operands != second[1].operands  # bra D
    for instructions in (first, second):
        assert instructions[1].predicate == instructions[0].operands[0].name
        assert kernel.labels[instructions[2].operands[0].name] in (0, 3)
    assert kernel.labels[first[1].operands[0].name] == 3
    assert kernel.labels[second[1].operands[0].name] == 6


def test_registers_may_be_declared_late_and_in_banks() -> None:
    kernel = parse_body("mov.b32 %r98, 0; { .reg .b32 %x<3>; mov.b32 %x2, 1; } ret;")
    assert kernel.register_type("%r98") == "b32"
    assert kernel.register_type("%r99") is None
    inner = kernel.instructions[1].operands[0]
    assert isinstance(inner, Register)
    assert kernel.register_type(inner.name) == "b32"


def test_opcodes_may_be_split_over_lines_and_touch_their_operands() -> None:
    kernel = parse_body("mov\n  .b64\n {%r1,%r2}, %rd1; st.shared.b32[%r1],%r2; ret;")
    assert [i.opcode for i in kernel.instructions] == ["mov.b64", "st.shared.b32", "ret"]


def test_double_colons_belong_to_the_opcode() -> None:
    (instruction, _) = parse_body(
        "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%r1]; ret;"
    ).instructions
    assert instruction.parts[-2] == "shared::cluster"
    assert instruction.operands[0] == Symbol("_")


def test_lines_and_sources_are_kept() -> None:
    text = (
        ".version 9.0\n.target sm_90a\n.entry f()\n{\n.loc 1 17 3\nret;\n"
        '.loc 1 20 1, function_name x, inlined_at 1 3 4\n// comment\nret;\n}\n.file 1 "a/b.py"\n'
        ".section .debug_str { .b8 1, 2; }\n"
    )
    module = ptx.parse(text)
    first, second = module.kernels["f"].instructions
    assert (first.line, first.source) == (6, "a/b.py:17")
    assert (second.line, second.source) == (9, "a/b.py:20")
    assert module.line_text(6) == "ret;"


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("mov.b32 %r1, #;", "PTX line 7: unexpected character '#'"),
        (".global .b32 x;", "PTX line 7: '.global' is not supported here"),
        ("mov.b32 %r1 %r2;", "PTX line 7: expected ',', found '%r2'"),
        ("{ ret;", "The PTX ends inside f"),
    ],
)
def test_what_is_not_understood_is_an_error(body: str, message: str) -> None:
    with pytest.raises(ptx.PtxSyntaxError, match=message.replace("(", r"\(")):
        parse_body(body)


def test_blocks_are_cut_at_labels_branches_and_waits() -> None:
    kernel = parse_body(
        """
        mov.b32 %r1, 0;
        mov.b32 %r2, 0;
        bar.sync 0;
        L: mov.b32 %r3, 0;
        mbarrier.try_wait.parity.shared.b64 %p1, [%r1], %r2;
        @%p1 bra L;
        mov.b32 %r4, 0;
        bar.arrive 1, 64;
        ret;
        E:
        """
    )
    blocks, labels = ptx.basic_blocks(kernel)
    assert [[i.opcode.split(".")[0] for i in block.instructions] for block in blocks] == [
        ["mov", "mov"],
        ["bar"],
        ["mov"],
        ["mbarrier", "bra"],
        ["mov", "bar", "ret"],
    ]
    assert labels == {"L": 2, "E": 5}
