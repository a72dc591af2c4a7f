"""What a mask means: the feature map is zero after its own normalisation, in train and in eval mode."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import case, to_score
from oracles import zeroed

EXACT = 1e-12

# Norms further on that see a layer's channels by themselves, from which channel on: their shift goes with the channel.
FURTHER = {
    "preact": [
        *(("dense1.bn", "conv", 0), ("dense2.bn", "conv", 0), ("bn", "conv", 0)),
        *(("dense2.bn", "dense1.conv", 3), ("bn", "dense1.conv", 3), ("bn", "dense2.conv", 5)),
    ],
    "depthwise": [("bn2", "expand", 0)],
}


def every_third(layers: dict[str, str | None], model: nn.Module) -> dict[str, list[int]]:
    """Some channels of every layer, never all of them."""
    widths = {
        n: m.out_features if isinstance(m, nn.Linear) else m.out_channels
        for n, m in model.named_modules()
        if n in layers
    }
    return {n: list(range(i % 2, widths[n] - 1, 3)) for i, n in enumerate(layers) if widths[n] > 1}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", to_score())
def test_masked_equals_the_net_zeroed_by_hand(name: str, training: bool) -> None:
    c = case(name)
    removed = every_third(c.norms, c.model)
    mask = sosp.Mask.from_removed(c.model, removed, c.inputs[:2])
    assert {n: v.tolist() for n, v in mask.removed.items()} == {n: v for n, v in removed.items() if v}
    model = sosp.masked(c.model, mask)
    twin = zeroed.zeroed(c.model, c.norms, removed)
    with torch.no_grad():
        for norm, layer, start in FURTHER.get(name, []):
            for channel in removed.get(layer, []):
                zeroed._zero(twin.get_submodule(norm), start + channel)
    assert type(model) is type(c.model)
    for m in (model, twin):
        m.train(training)
    outputs = model(c.inputs)
    assert torch.allclose(outputs, twin(c.inputs), rtol=EXACT, atol=EXACT)
    assert not torch.allclose(outputs, c.model.train(training)(c.inputs))
    if training:  # the statistics seen on the way are the same too
        for (key, a), (_, b) in zip(model.named_buffers(), twin.named_buffers(), strict=True):
            assert torch.allclose(a, b, rtol=EXACT, atol=EXACT), key


def feature_maps(model: nn.Module, names: list[str], x: Tensor) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    handles = [
        model.get_submodule(n).register_forward_hook(lambda m, i, o, n=n: found.__setitem__(n, o.detach().clone()))
        for n in names
    ]
    model(x)
    for h in handles:
        h.remove()
    return found


def test_removed_maps_stay_zero_through_training_and_the_rest_learns() -> None:
    c = case("residual")
    removed = every_third(c.norms, c.model)
    model = sosp.masked(c.model, sosp.Mask.from_removed(c.model, removed, c.inputs[:2]))
    model.train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-2)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = F.cross_entropy(model(c.inputs), c.targets)
        loss.backward()
        optimiser.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < losses[0]
    for training in (True, False):
        model.train(training)
        maps = feature_maps(model, [c.norms[n] or n for n in removed], c.inputs)
        for n, channels in removed.items():
            assert (maps[c.norms[n] or n][:, channels] == 0).all(), n


def test_the_mask_does_not_depend_on_how_it_was_scored() -> None:
    c = case("residual")
    removed = {"conv1": [0], "block1.conv1": [1]}
    masks = []
    for gate in ("weights", "features"):
        found = sosp.find_structures(c.model, c.inputs[:2], gate=gate)
        first = torch.ones(len(found))
        for layer, ids in zip(found.layers, found.ids, strict=True):
            first[ids[removed.get(layer.name, [])]] = 0
        masks.append(sosp.select(sosp.Saliency(found, "first-order", first), ratio=2 / len(found)))
    assert masks[0] == masks[1] == sosp.Mask.from_removed(c.model, removed, c.inputs[:2])
    outputs = [sosp.masked(c.model, m)(c.inputs) for m in masks]
    assert torch.equal(*outputs)


def test_masked_copies_save_and_load_like_the_original() -> None:
    c = case("conv-bn")
    mask = sosp.Mask.from_removed(c.model, every_third(c.norms, c.model), c.inputs[:2])
    model = sosp.masked(c.model, mask)
    assert list(model.state_dict()) == list(c.model.state_dict())
    again = copy.deepcopy(model)
    assert torch.equal(again(c.inputs), model(c.inputs))
    other = sosp.masked(case("conv-bn").model, mask)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(c.inputs), model(c.inputs))
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(c.inputs), model(c.inputs))


def test_masks_add_up_and_a_masked_model_can_be_scored_again() -> None:
    c = case("conv-bn")
    one, two = ({n: [i] for n in c.norms} for i in (0, 2))
    both = {n: [0, 2] for n in c.norms}
    first = sosp.masked(c.model, sosp.Mask.from_removed(c.model, one, c.inputs[:2]))
    twice = sosp.masked(first, sosp.Mask.from_removed(first, two, c.inputs[:2]))
    once = sosp.masked(c.model, sosp.Mask.from_removed(c.model, both, c.inputs[:2]))
    assert torch.allclose(twice(c.inputs), once(c.inputs), rtol=EXACT, atol=EXACT)
    s = sosp.score(first, (c.inputs, c.targets))
    gone = torch.cat([ids[:1] for ids in s.structures.ids])
    assert (s.scores[gone] == 0).all()  # nothing is lost by removing what is gone


def test_single_weights_are_zero_and_stay_zero() -> None:
    c = case("mlp")
    found = sosp.find_structures(c.model, c.inputs[:2], kind="weights")
    s = sosp.score(c.model, (c.inputs, c.targets), structures=found)
    mask = sosp.select(s, ratio=0.5)
    assert mask.kind == "weights"
    assert sum(map(len, mask.removed.values())) == round(0.5 * len(found))
    model = sosp.masked(c.model, mask).train()
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        optimiser.zero_grad()
        F.cross_entropy(model(c.inputs), c.targets).backward()
        optimiser.step()
    model(c.inputs)
    for n, gone in mask.removed.items():
        weight = model.get_parameter(n).detach().flatten()
        assert (weight[gone] == 0).all()
        assert (c.model.get_parameter(n).detach().flatten()[gone] != 0).any()
        kept = torch.ones(len(weight), dtype=torch.bool)
        kept[gone] = False
        assert (weight[kept] != 0).all()


def test_a_mask_prints_a_line_per_layer() -> None:
    c = case("mlp")
    mask = sosp.Mask.from_removed(c.model, {"fc1": [0, 2]}, c.inputs[:2])
    assert repr(mask) == f"Mask(2 of {mask.structures} structures removed, {2 / mask.structures:.1%})"
    assert f"  fc1  {2:>6} of {mask.layers[0].channels:>6}" in str(mask)
    assert len(str(mask).splitlines()) == 1 + len(mask.layers)


# --- flags instead of numbers


def test_flags_say_which_channels_go() -> None:
    c = case("mlp")
    flags = torch.tensor([True, False, True, *[False] * (c.model.fc1.out_features - 3)])
    wanted = sosp.Mask.from_removed(c.model, {"fc1": [0, 2]}, c.inputs[:2])
    for given in (flags, flags.numpy()):
        mask = sosp.Mask.from_removed(c.model, {"fc1": given}, c.inputs[:2])
        assert mask == wanted
        assert mask.chosen == 2
    assert not sosp.Mask.from_removed(c.model, {"fc1": flags & False}, c.inputs[:2]).removed


def test_flags_of_another_length_and_flags_in_a_list_are_refused() -> None:
    c = case("mlp")
    with pytest.raises(sosp.errors.StructureError, match=r"flags of shape \(2,\) for 'fc1'; give one for each of its"):
        sosp.Mask.from_removed(c.model, {"fc1": torch.tensor([True, False])}, c.inputs[:2])
    with pytest.raises(sosp.errors.StructureError, match=r"channel True of 'fc1'"):
        sosp.Mask.from_removed(c.model, {"fc1": [True, False]}, c.inputs[:2])
    with pytest.raises(sosp.errors.ArgumentError, match=r"removed=\['fc1'\] must give layers their channels"):
        sosp.Mask.from_removed(c.model, ["fc1"], c.inputs[:2])
