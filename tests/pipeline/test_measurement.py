"""What ``prune`` measures: file, memory, time, and agreement on inputs that were used for nothing else."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosp
from helpers.quarters import EXAMPLES, Net, pictures
from sosp.core.batches import Chunk, iterate_chunks
from sosp.errors import ArgumentError
from sosp.graph.latency import Latency
from sosp.pipeline.held_out import HeldOut
from sosp.pipeline.measurement import count_file_bytes, measure_memory
from sosp.pipeline.pruned import PruningWarning, list_shortcomings


def hold(model: nn.Module, *parts: tuple[Any, Any], loss: str = "cross_entropy", keyed: bool = False) -> HeldOut:
    chunks = [Chunk(x, y, ((None, 0, len(y)),), keyed) for x, y in parts]
    return HeldOut(model, chunks, loss, "here")


# --- memory, files, time


def test_memory_is_what_lives_at_once() -> None:
    """In front of the last layer: 4 channels of 6 x 6 numbers of both inputs, and 8 channels that are made of them."""
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 8, 3, padding=1), nn.Flatten(), nn.Linear(288, 3)
    )
    weights = 4 * sum(p.numel() for p in model.parameters())
    assert measure_memory(model, torch.randn(2, 1, 6, 6)) == weights + 4 * 2 * (4 + 8) * 36
    model[1] = nn.ReLU(inplace=True)
    assert measure_memory(model, torch.randn(2, 1, 6, 6)) == weights + 4 * 2 * (4 + 8) * 36
    assert model.training


def test_memory_counts_what_a_skip_keeps() -> None:
    class Skip(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            a = x * 2  # lives to the end
            return a + (a * 3) * 4  # two results and a; then a and two sums

    assert measure_memory(Skip(), torch.zeros(10)) == 4 * 10 * 3


def test_the_size_of_the_file(model: Net, tmp_path: Path) -> None:
    found = sosp.prune(model, pictures(), macs=0.6)
    for network, mask in ((model, None), (found.model, found.mask)):
        sosp.save(tmp_path / "a.safetensors", network, mask)
        size = (tmp_path / "a.safetensors").stat().st_size
        # The header of a file, escaped JSON, is estimated; here it is as long as the numbers.
        assert count_file_bytes(network, mask) == pytest.approx(size, rel=0.15)
    assert found.measured.bytes == (count_file_bytes(model), count_file_bytes(found.model, found.mask))


def test_what_cannot_be_measured_is_named(model: Net) -> None:
    class Single(nn.Module):
        """Takes all inputs but the first eight, of which it was given an example."""

        def __init__(self, net: nn.Module) -> None:
            super().__init__()
            self.net, self.calls = net, 0

        def forward(self, x: Tensor) -> Tensor:
            assert torch.is_grad_enabled() or not torch.is_inference_mode_enabled(), "no inference mode"
            return self.net(x)

    found = sosp.prune(Single(model).eval(), pictures()[0], macs=0.6, repair=False)
    assert found.measured.latency is None
    assert "no inference mode" in found.measured.missing["latency"]
    assert found.measured.answers is not None
    assert "latency not measured: StructureError" not in str(found)
    assert "latency not measured: " in str(found)


# --- agreement


def test_agreement_and_accuracy_by_hand() -> None:
    """Of four answers the small network changes two, one of them from wrong to right."""
    rows = {"a": [0, 1, 2, 0], "b": [0, 1, 1, 2]}
    a, b = (nn.Embedding.from_pretrained(torch.eye(3)[rows[k]]) for k in "ab")
    x, y = torch.arange(4), torch.tensor([0, 1, 0, 2])
    found = hold(a, (x[:3], y[:3]), (x[3:], y[3:])).compare(b)
    assert found.agreement.after == 0.5
    assert (found.accuracy.before, found.accuracy.after) == (0.5, 0.75)
    assert found.accuracy.spread == pytest.approx(torch.tensor([0.0, 0, 0, -1]).std().item() / 2)
    assert found.agreement.inputs == 4
    assert hold(a, (x, y.float())).compare(b).accuracy is None
    assert hold(a, (x, y + 1)).compare(b).accuracy is None  # there is no class 3


def test_labels_of_positions_and_ignored_ones() -> None:
    net = nn.Embedding.from_pretrained(torch.eye(4))
    x = torch.tensor([[0, 1, 2], [2, 2, 0]])
    y = torch.tensor([[0, 1, -100], [0, 2, 1]])
    found = hold(net, (x, y)).compare(net)
    assert found.accuracy.before == pytest.approx((1 + 1 / 3) / 2)


def test_numbers_agree_by_their_error() -> None:
    """The variance over both batches is that of 0, 1, 2, 3; one output is off by 1."""
    theirs, ours = (nn.Embedding.from_pretrained(torch.tensor([[0.0], [1], [2], [x]])) for x in (3, 2))
    x = torch.arange(4)
    found = hold(theirs, (x[:3], x[:3]), (x[3:], x[3:]), loss="mse").compare(ours)
    assert found.agreement.after == pytest.approx(1 - 1 / 5)
    assert found.accuracy is None


DATA: dict[str, Any] = {
    "a pair": pictures,
    "inputs": lambda: pictures()[0],
    "a loader": lambda: DataLoader(TensorDataset(*pictures()), batch_size=10, shuffle=True),
    "a generator": lambda: zip(*(t.split(10) for t in pictures()), strict=True),
}


@pytest.mark.parametrize("kind", DATA)
def test_unused_inputs_are_used_for_nothing_else(model: Net, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, set[bytes]] = {}

    def note(module: str) -> None:
        def noted(*args: Any, **how: Any) -> Any:
            for chunk in iterate_chunks(*args, **how):
                seen.setdefault(module, set()).update(x.numpy().tobytes() for x in chunk.inputs)
                yield chunk

        monkeypatch.setattr(f"{module}.iterate_chunks", noted)

    steps = "sosp.scoring.score", "sosp.refit.inputs", "sosp.pipeline.scored_call"
    for module in steps:
        note(module)
    found = sosp.prune(
        model, DATA[kind](), macs=0.7, scoring=sosp.Scoring(examples=20), repair=sosp.Repair(examples=40)
    )
    scored, repaired, unused = (seen[module] for module in steps)
    assert [len(scored), len(repaired), len(unused)] == [20, 40, EXAMPLES - 40]
    assert scored < repaired
    assert not repaired & unused
    assert found.measured.answers.agreement.inputs == EXAMPLES - 40


def test_the_test_part_of_a_dataset_is_used() -> None:
    digits, network = sosp.data.digits(), sosp.nets.make("digits_resnet", classes=10, width=0.25)
    found = sosp.prune(network.eval(), digits, macs=0.7, repair=sosp.Repair(examples=100))
    assert found.saliency.examples == 256
    accuracy, source = found.measured.answers.accuracy, digits.test.subset(500, 0)
    assert str(accuracy).endswith("on 500 inputs of the test data")
    assert accuracy.before == pytest.approx(sosp.evaluate(network, source).top1)
    assert accuracy.after == pytest.approx(sosp.evaluate(found.model, source).top1)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"scoring": sosp.Scoring(examples=None)}, "uses all inputs (examples=None)"),
        ({"repair": sosp.Repair(examples=64)}, "use all 64 inputs"),
        ({"repair": sosp.Repair(seed=3)}, "different seeds"),
    ],
)
def test_why_agreement_is_not_measured(model: Net, options: dict[str, Any], why: str) -> None:
    found = sosp.prune(model, pictures(), macs=0.7, **options)
    assert why in found.measured.missing["agreement"]
    assert f"agreement not measured: {found.measured.missing['agreement']}" in str(found)


def test_one_seed_draws_for_scoring_and_repair(model: Net) -> None:
    drawn = sosp.Scoring(examples=20, generator=torch.Generator().manual_seed(5))
    found = sosp.prune(model, pictures(), macs=0.7, scoring=drawn, repair=sosp.Repair(examples=30))
    assert found.measured.answers.agreement.inputs == 34


# --- words


def test_the_print_names_what_was_used_and_measured(model: Net) -> None:
    text = str(sosp.prune(model, pictures(), macs=0.6))
    assert re.search(
        r"scored by sosp-i on own logits \(cross-entropy, T = 1\), 56 inputs; coupled channels; .*"
        r"widths in steps of 8.*; repaired on 56 inputs\n",
        text,
    )
    for words in (
        r"file size +[\d.]+ kB -> +[\d.]+ kB  \([\d.]+% ",
        r"peak memory +[\d.]+ kB -> +[\d.]+ kB  \([\d.]+% left\)",
        r"latency +[\d.]+ ms -> +[\d.]+ ms  \([\d.]+% .*\), 8 inputs on the CPU with 1 thread, \d+ runs in turns",
        r"agreement [\d.]+% \(± [\d.]+\) on 8 inputs used for neither scoring nor repair",
        r"accuracy [\d.]+% -> [\d.]+% \(± [\d.]+\) on 8 inputs",
        r"next: .*sosp\.train\(pruned\.model, data",
    ):
        assert re.search(words, text), words


def test_a_cut_in_vain_warns(model: Net) -> None:
    """One filter of a layer whose outputs meet others in an add: a scatter puts the rest back into place."""
    mask = sosp.Mask.from_removed(model, {"skip": [0]}, pictures()[0])
    found = sosp.prune(model, pictures(), ratio=0.3, repair=False)
    vain = replace(found, mask=mask, cost_after=found.cost_before)
    (reason,) = list_shortcomings(replace(vain, measured=None))
    assert "1 structures were removed, but 100.0% of the parameters and 100.0% of the MACs are left" in reason
    assert "sosp.trace(model, example)" in reason


def test_a_slower_network_warns_once(model: Net, monkeypatch: pytest.MonkeyPatch) -> None:
    def timed(models: dict[str, nn.Module], *_: Any) -> dict[str, Latency]:
        before, after = Latency(1e-3, 0.9e-3, 1.1e-3, 30, "cpu"), Latency(2e-3, 1.8e-3, 2.2e-3, 30, "cpu")
        return dict(zip(models, (before, after), strict=True))

    monkeypatch.setattr("sosp.pipeline.measurement.measure_in_turns", timed)
    with pytest.warns(PruningWarning, match="slower: 2 ms, original 1 ms.*outputs of independent filters") as caught:
        sosp.prune(model, pictures(), ratio=0.3, preset="paper")
    assert len([w for w in caught if w.category is PruningWarning]) == 1


def test_a_difference_within_the_spread_does_not_warn(model: Net) -> None:
    found = sosp.prune(model, pictures(), macs=0.6)
    before, after = Latency(1.0, 0.8, 1.3, 30, "cpu"), Latency(1.2, 1.0, 1.4, 30, "cpu")
    assert not replace(found.measured, latency=(before, after)).slower
    assert replace(found.measured, latency=(before, replace(after, low=1.31))).slower


def test_repair_that_lowers_the_agreement_is_said(model: Net) -> None:
    found = sosp.prune(model, pictures(), macs=0.6)
    worse = replace(found, measured=None, repaired=replace(found.repaired, agreement_before=0.9, agreement_after=0.8))
    assert [r for r in list_shortcomings(worse) if "from 90.0% to 80.0%" in r]


def test_the_next_step_after_a_large_loss(model: Net) -> None:
    found = sosp.prune(model, pictures(), macs=0.6)
    answers = found.measured.answers
    lost = replace(answers, agreement=replace(answers.agreement, after=0.5))
    assert "a larger budget than macs=" in replace(found, measured=replace(found.measured, answers=lost)).next_step


def test_where_the_network_is_in_a_record(model: Net) -> None:
    x = pictures()[0]
    found = sosp.prune(model, x, macs=0.6)
    for act in (lambda: sosp.prune(found, x), lambda: sosp.score(found, x), lambda: sosp.latency({"a": found}, x)):
        with pytest.raises(ArgumentError, match=r"Pruned record; give its network: \.model"):
            act()
