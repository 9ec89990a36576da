"""Products by the faster of two libraries, which this processor decides."""

from __future__ import annotations

import pytest
import torch

from rl_megatron.models import experts, linear
from rl_megatron.models.experts import PackedExperts


def test_a_library_leads_where_it_uses_avx_512() -> None:
    found = torch.cpu.get_capabilities()  # of the library cpuinfo
    of_intel, wide = str(found.get("cpu_name")).startswith("Intel"), bool(found.get("avx512_f"))
    mkl = torch.backends.mkl.is_available()
    assert linear.ONEDNN_LEADS is (linear.HAS_ONEDNN and not (mkl and (of_intel or not wide)))
    assert linear.MKL_IS_WIDE is (mkl and of_intel and wide)


@pytest.mark.parametrize("leads", [False, True])
def test_a_product_is_the_same_by_both(leads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "ONEDNN_LEADS", leads and linear.HAS_ONEDNN)
    draw = torch.Generator().manual_seed(0)
    for rows in (3, 200):  # a small product goes through torch's own library in any case
        x, weight = (torch.randn(n, 128, generator=draw) for n in (rows, 96))
        wanted = (x.double() @ weight.double().T).float()
        torch.testing.assert_close(linear.linear(x, weight), wanted, rtol=1e-5, atol=1e-4)
    assert linear.through_onednn(x) is (leads and linear.HAS_ONEDNN)
    assert not linear.through_onednn(x.bfloat16())


def test_small_experts_are_packed_where_onednn_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    small, large = torch.zeros(8, 64, 64), torch.zeros(experts.MIN_PACKED).view(8, 256, -1)
    for leads in (False, True):
        monkeypatch.setattr(experts, "ONEDNN_LEADS", leads)
        assert PackedExperts.usable(small) is (leads and linear.HAS_ONEDNN)
        assert PackedExperts.usable(large) is linear.HAS_ONEDNN
        assert not PackedExperts.usable(large.bfloat16())
