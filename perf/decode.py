"""How fast is one decoding step over a KV cache, contiguous, paged and ragged, beside others?

TB/s of keys and values, each counted once: what a step must read from memory.
"""

from perf import cases
from perf.command import compare, make_parser, selected


def main() -> None:
    arguments = make_parser(__doc__).parse_args()
    chosen = selected(cases.DECODE, arguments.cases)
    compare("decode", chosen, arguments, lambda case: case.kv_bytes, "tbytes")


if __name__ == "__main__":
    main()
