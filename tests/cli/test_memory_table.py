"""The memory arithmetic gives the published numbers, and the formula of each type of parameter and master."""

import pytest

from zero1_cuda.memory import model as memory

RANKS = (1, 4, 16, 64, 256, 1024)

# GB (1e9 bytes) per rank in Rajbhandari et al. 2020, table 1, column P_os; truncated or rounded in the last digit.
PUBLISHED = {
    7_500_000_000: ("120", "52.5", "35.6", "31.4", "30.4", "30.1"),
    128_000_000_000: ("2048", "896", "608", "536", "518", "513"),
    1_000_000_000_000: ("16000", "7000", "4750", "4187", "4046", "4011"),
}


@pytest.mark.parametrize("numel", PUBLISHED)
def test_published_values(numel):
    for world_size, printed in zip(RANKS, PUBLISHED[numel], strict=True):
        last_digit = 0.1 if "." in printed else 1.0
        got = memory.predicted_bytes(numel, world_size, 2) / 1e9
        assert abs(got - float(printed)) < last_digit, f"N={world_size}: {got} GB, published {printed}"


@pytest.mark.parametrize(
    ("param_bytes", "split", "whole", "shared"),
    [(2, False, 4, 12), (2, True, 4, 10), (4, False, 8, 8), (4, True, 8, 8)],
    ids=["16-bit", "split", "fp32", "fp32 asked to split"],
)
@pytest.mark.parametrize("world_size", [1, 2, 3, 8, 1024])
def test_formula(param_bytes, split, whole, shared, world_size):
    numel = 1_000_003
    row = memory.footprint(numel, world_size, param_bytes, split)
    exact = whole * numel + shared * numel / world_size
    assert exact <= row.predicted < exact + 1, "rounded up to a whole byte"
    assert row.predicted == memory.predicted_bytes(numel, world_size, param_bytes, split)
    assert row.predicted == row.params + row.grads + row.state == row.total
    assert row.baseline == 16 * numel
    assert memory.formula(param_bytes, split) == f"{whole} Psi + {shared} Psi/N"


@pytest.mark.parametrize("param_bytes", [2, 4])
def test_overlap_costs_one_slice_of_the_gradients(param_bytes):
    alone, four = (memory.footprint(1000, n, param_bytes, overlap=True) for n in (1, 4))
    assert alone.buffers == 0
    assert four.buffers == param_bytes * 1000 // 4
    assert four.total == four.predicted + four.buffers
    assert four.floor == 2 * param_bytes * 1000


def test_integers_stay_exact_where_a_float_would_not():
    numel = 10**15 + 1
    assert memory.predicted_bytes(numel, 1, 2) == 16 * numel


@pytest.mark.parametrize("wrong", [(-1, 1, 2), (1, 0, 2), (1, 1, 8)], ids=["numel", "world_size", "param_bytes"])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError, match="must"):
        memory.predicted_bytes(*wrong)


def test_table_shows_every_row_and_no_division_by_zero():
    rows = [memory.footprint(7_500_000_000, n, overlap=True) for n in RANKS]
    lines = memory.table(rows, memory.formula(2)).splitlines()
    assert [line.split()[0] for line in lines[1:-1]] == [str(n) for n in RANKS]
    assert lines[1 + RANKS.index(64)].split()[4:6] == ["31.41", "120.00"]
    assert lines[0].split()[-2:] == ["buffers", "total"]
    assert lines[1].split()[-2:] == ["0.00", "120.00"]
    nothing = memory.table([memory.footprint(0, 1)], memory.formula(2)).splitlines()[1]
    assert nothing.split() == ["1", "0.00", "0.00", "0.00", "0.00", "0.00", "0.0%", "0.00", "0.00"]
