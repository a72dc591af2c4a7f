"""On a GPU: the fused kernels and the other memory layouts give what the CPU gives."""

import copy
import warnings

import pytest
import torch

import sosp
from networks import case, to_score

pytestmark = pytest.mark.gpu

# float64 on both sides; only the order of sums differs.
EXACT = 1e-10


@pytest.fixture(autouse=True, params=[False, True], ids=["channels first", "channels last"])
def layout(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Jets choose their layout by whether TF32 is allowed; float64 is computed exactly either way."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", request.param)
    return bool(request.param)


@pytest.mark.parametrize("method", ["sosp-h", "sosp-i", "sosp-i-diagonal", "first-order", "exact"])
@pytest.mark.parametrize("gate", ["weights", "features"])
@pytest.mark.parametrize("name", to_score())
def test_scores_equal_those_of_the_cpu(name: str, gate: str, method: str, layout: bool) -> None:
    c = case(name)
    model, x, y = copy.deepcopy(c.model).cuda(), c.inputs.cuda(), c.targets.cuda()
    x = x.contiguous(memory_format=torch.channels_last) if layout and x.dim() == 4 else x
    with warnings.catch_warnings():
        warnings.simplefilter("error", sosp.SlowPathWarning)
        found = [
            sosp.score(m, data, method=method, structures=sosp.find_structures(m, data[0][:2], gate=gate))
            for m, data in ((c.model, (c.inputs, c.targets)), (model, (x, y)))
        ]
    for field in ("first", "second", "pairs"):
        here, there = (getattr(s, field) for s in found)
        assert (here is None) == (there is None)
        if here is not None:
            assert there.is_cuda
            assert float((there.cpu() - here).norm()) <= EXACT * float(here.norm()), field


def test_masks_and_selection_work_where_the_scores_are(layout: bool) -> None:
    c = case("residual")
    model = copy.deepcopy(c.model).cuda()
    masks = [
        sosp.select(sosp.score(m, (x, y), method="sosp-i"), ratio=0.4)
        for m, x, y in ((c.model, c.inputs, c.targets), (model, c.inputs.cuda(), c.targets.cuda()))
    ]
    assert masks[0] == masks[1]
    out = sosp.masked(model, masks[1])(c.inputs.cuda())
    assert torch.allclose(out.cpu(), sosp.masked(c.model, masks[0])(c.inputs), rtol=1e-9, atol=1e-9)
