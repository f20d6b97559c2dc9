"""The kernel that only reads does read: all of both tensors, and nothing else."""

import pytest
import torch

from fa4.emulator import run
from fa4.emulator.errors import EmulationError
from perf import contenders
from perf.cases import Case, make_inputs
from perf.reading import PIECE_BYTES, STAGES, reading_spec


def flat(pieces: int, missing: int = 0) -> torch.Tensor:
    return torch.zeros(pieces * PIECE_BYTES // 2 - missing, dtype=torch.bfloat16)


@pytest.mark.parametrize(("pieces", "ctas"), [(1, 1), (2 * STAGES, 2), (5, 16)])
def test_both_tensors_are_read_to_their_ends_and_no_farther(pieces: int, ctas: int) -> None:
    spec = reading_spec("sm_90a")
    # Copies have to end before their CTA does, and buffers to be free before they are filled.
    run(spec, flat(pieces), flat(pieces), pieces, ctas, check_races=True)
    for x, y in ((flat(pieces, 8), flat(pieces)), (flat(pieces), flat(pieces, 8))):
        with pytest.raises(EmulationError, match=r"cp\.async\.bulk"):
            run(spec, x, y, pieces, ctas)


def test_it_is_asked_for_the_bytes_of_a_decoding_step(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(
        contenders, "reading_kernel", lambda arch: lambda *arguments: asked.append(arguments)
    )
    properties = type("Properties", (), {"major": 9, "minor": 0, "multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda: properties)
    case = Case((1,) * 4, (1024,) * 4, 4, 2, 64, 64)
    inputs = make_inputs(case, "cpu")
    contenders.Fa4Reading().decode(case, inputs)()
    ((k, v, pieces, ctas),) = asked
    assert 2 * pieces * PIECE_BYTES == case.kv_bytes == 2 * (k.numel() + v.numel())
    assert (k.data_ptr(), v.data_ptr(), ctas) == (inputs.k.data_ptr(), inputs.v.data_ptr(), 132)
