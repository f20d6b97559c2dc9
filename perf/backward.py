"""How fast is the backward pass alone, by autograd, beside every other implementation installed?

TFLOP/s: five products, 2 M N (3 d + 2 dv) a head and sequence, half of that when causal.
"""

from perf import cases
from perf.command import compare, make_parser, selected


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    chosen = selected(cases.BACKWARD, arguments.cases)
    compare("backward", chosen, arguments, lambda case: case.backward_flops, "tflops")


if __name__ == "__main__":
    main()
