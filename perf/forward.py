"""How fast is the forward pass, beside every other implementation installed, in one run?

TFLOP/s: 2 M N (d + dv) a head and sequence, half of that when causal. Median of interleaved rounds.
"""

from perf import cases
from perf.command import compare, make_parser, selected


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    chosen = selected(cases.FORWARD, arguments.cases)
    compare("forward", chosen, arguments, lambda case: case.forward_flops, "tflops")


if __name__ == "__main__":
    main()
