"""Settings and tensors of other programs' files that only look like ours: sizes that are floats, zero points beyond the codes."""

from __future__ import annotations

import pytest
import torch

from qforge.errors import ModelError
from qforge.layouts import compressed_tensors_config as compressed
from qforge.layouts import kv_cache, mlx, trtllm
from qforge.layouts.gguf_blocks import GgufBlocks
from qforge.qlinear import QuantizedLinear
from qforge.scheme import parse


@pytest.mark.parametrize(
    ("read", "config"),
    [
        (mlx.read_config, {"bits": 4.0, "group_size": 32}),
        (mlx.read_config, {"bits": 4, "group_size": 32.0}),
        (mlx.read_config, {"bits": 4, "group_size": 32, "a": {"bits": 8, "group_size": 64.0}}),
        (trtllm.read_config, {"quant_algo": "W4A16_AWQ", "group_size": 64.0}),
    ],
)
def test_a_size_that_is_a_float_is_refused(read, config):
    with pytest.raises(ModelError, match="readable"):
        read(config, ["a"], lambda name: torch.ones(4, 2))


@pytest.mark.parametrize("weights", [{"type": "two\nlines"}, {"num_bits": "two\nlines"}, {"strategy": "two\nlines"}, {"strategy": "group", "group_size": "two\nlines"}])
def test_what_a_file_says_stays_in_one_line(weights):
    """Where a message quotes it."""
    with pytest.raises(ModelError) as e:
        compressed.read_config({"config_groups": {"a": {"targets": ["Linear"], "weights": weights}}}, ["a"])
    assert r"two\nlines" in str(e.value)
    with pytest.raises(ModelError) as e:
        kv_cache.described("trtllm", {"kv_cache_quant_algo": "two\nlines"})
    assert r"two\nlines" in str(e.value)


@pytest.mark.parametrize(("above", "fits"), [(0, True), (5, True), (6, False), (7, False), (200, False)])
def test_zero_points_beyond_the_codes_are_refused(above, fits):
    """32 values of -10: codes of 0 and a zero point of 10, both `above` more."""
    scheme, layout = parse("int4-g32-asym"), GgufBlocks("Q5_0")
    q = QuantizedLinear(scheme, torch.zeros(1, 32, dtype=torch.uint8), torch.ones(1, 1), torch.full((1, 1), 10, dtype=torch.uint8))
    tensors = layout.pack(q) | {"zeros_above": torch.full((1, 1), above, dtype=torch.uint8)}
    if fits:
        back = layout.unpack(tensors, scheme)
        assert (int(back.codes[0, 0]), int(back.zeros[0, 0])) == (above, 10 + above)
    else:
        with pytest.raises(ModelError, match="beyond"):
            layout.unpack(tensors, scheme)
