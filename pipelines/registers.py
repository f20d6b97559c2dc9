"""Registers of a CTA's roles: what setmaxnreg can move from one to another."""

from __future__ import annotations

REGISTER_FILE = 65_536  # 32-bit registers per SM
WARPGROUP = 128  # threads


def registers_at_launch(threads: int, ctas_per_sm: int = 1) -> int:
    """Registers that setmaxnreg can move between the warps of a CTA: what its launch was given.

    That is as many for every thread, in units of 8. An increase beyond all of them waits for ever.
    """
    return REGISTER_FILE // (threads * ctas_per_sm) // 8 * 8 * threads


def role_problems(
    roles: dict[str, tuple[int, int]], threads: int, ctas_per_sm: int = 1, most: int = 240
) -> list[str]:
    """What is wrong with the registers that roles ask for.

    roles  name of a schedule's field: (registers of a thread, warpgroups of the role)
    most   that a thread may ask for
    """
    problems = [
        f"{role}={count} is not a multiple of 8 from 24 to {most}"
        for role, (count, _) in roles.items()
        if count % 8 or not 24 <= count <= most
    ]
    at_launch = registers_at_launch(max(threads, WARPGROUP), ctas_per_sm)
    wanted = WARPGROUP * sum(count * warpgroups for count, warpgroups in roles.values())
    if wanted > at_launch:
        problems.append(f"the roles' registers, {wanted}, exceed the CTA's {at_launch}")
    return problems
