"""How fast is the forward pass of packed sequences of mixed lengths, beside others?

Lengths from 128 to 8k, drawn with a fixed seed: uniform (most work in the long ones) and log (as
many sequences in each octave). FLOP are those of the sequences, as in perf.forward.
"""

from perf import cases
from perf.command import compare, make_parser, selected


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    chosen = selected(cases.VARLEN, arguments.cases)
    compare("varlen", chosen, arguments, lambda case: case.forward_flops, "tflops")


if __name__ == "__main__":
    main()
