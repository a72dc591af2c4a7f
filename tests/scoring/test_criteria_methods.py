"""The table of methods: what each is, what it takes, and how it says that it cannot work here."""

from dataclasses import FrozenInstanceError, fields
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosp
from networks import Case, case, to_score
from sosp.errors import ArgumentError, DataError, LossError, StructureError
from sosp.graph.records import SCOPES
from sosp.graph.structures import KINDS
from sosp.scoring.methods import NEEDS, Method
from sosp.scoring.score import check_requirements

RANKS_NOTHING = {"training", "rotation"}  # needs of methods whose result comes another way

FIRST = ["sosp-h", "sosp-i", "sosp-i-diagonal", "first-order", "exact", "random"]
LAYERWISE = {"magnitude-l1", "magnitude-l2", "fpgm", "hrank", "ccp"}
DATA_FREE = {"magnitude-l1", "magnitude-l2", "slimming", "fpgm"}


class Reads:
    """Batches that count how often they were asked for."""

    def __init__(self, c: Case) -> None:
        self.c, self.count = c, 0

    def __iter__(self) -> Any:
        for i in range(0, 10, 2):
            self.count += 1
            yield self.c.inputs[i : i + 2], self.c.targets[i : i + 2]


def structures(c: Case, **options: Any) -> sosp.Structures:
    return sosp.find_structures(c.model, c.inputs[:2], **options)


def test_the_table() -> None:
    assert list(sosp.METHODS)[:6] == FIRST
    assert "slimming" in sosp.METHODS
    for name, method in sosp.METHODS.items():
        assert set(method.kinds) <= set(KINDS), name
        assert set(method.needs) <= set(NEEDS), name
        assert method.scope in SCOPES, name
        assert method.about, name
        assert "\n" not in method.about, name
        assert any(character.isdigit() for character in method.source), f"{name} names no year"
        assert method.run.__doc__, name
    assert {name for name, m in sosp.METHODS.items() if m.scope == "layer"} >= LAYERWISE
    assert "run" in {f.name for f in fields(Method)}
    with pytest.raises(FrozenInstanceError):
        sosp.METHODS["fpgm"].scope = "global"  # type: ignore[misc]


@pytest.mark.parametrize("method", sorted(DATA_FREE))
def test_what_looks_at_weights_alone_reads_no_data(method: str) -> None:
    c = case("conv-bn")
    data, found = Reads(c), structures(c)
    s = sosp.score(c.model, data, method=method, structures=found)
    assert data.count == 0
    assert s.examples == 0
    assert torch.equal(s.scores, sosp.score(c.model, None, method=method, structures=found).scores)
    # Without structures one batch is read, to find them.
    assert torch.equal(s.scores, sosp.score(c.model, data, method=method).scores)
    assert data.count == 1


@pytest.mark.parametrize("method", ["taylor", "taylor-bn", "fisher", "hrank", "ccp", "snip"])
def test_the_others_read_all_they_were_allowed(method: str) -> None:
    c = case("conv-bn")
    assert sosp.score(c.model, Reads(c), method=method).examples == 10
    assert sosp.score(c.model, Reads(c), method=method, examples=7).examples == 7


@pytest.mark.parametrize("method", sosp.METHODS)
def test_a_saliency_carries_the_scope_of_its_method(method: str) -> None:
    if not RANKS_NOTHING.isdisjoint(sosp.METHODS[method].needs):
        pytest.skip("it ranks no structures of a network as it is")
    c = case("conv-bn")
    s = sosp.score(c.model, (c.inputs, c.targets), method=method)
    assert s.scope == sosp.METHODS[method].scope
    assert s.objective == sosp.METHODS[method].objective
    assert bool(torch.isfinite(s.scores).all())
    assert s.to("cpu").scope == s.scope
    assert s.with_objective("joint").scope == s.scope


def test_an_objective_that_was_asked_for_goes_before_that_of_the_method() -> None:
    c = case("conv-bn")
    assert sosp.score(c.model, (c.inputs, c.targets), method="ccp", objective="joint").objective == "joint"
    assert sosp.score(c.model, (c.inputs, c.targets), method="sosp-h", objective="signed").objective == "signed"


# --- what a network lacks


@pytest.mark.parametrize("method", ["slimming", "taylor-bn"])
def test_a_method_of_norms_names_the_layers_without(method: str) -> None:
    c, found = case("concat"), structures(case("concat"))
    data = Reads(c)
    with pytest.raises(StructureError) as caught:
        sosp.score(c.model, data, method=method, structures=found)
    text = str(caught.value)
    for word in (f"method={method!r}", "batch norm", "not met by 'right'", "exclude=['right']", "'magnitude-l1'"):
        assert word in text
    assert "'left'" not in text
    assert "'slimming'" not in text.replace(f"method={method!r}", "")
    assert "'group-fisher'" in text  # a chain: its channels go together with nothing
    assert data.count == 0
    kept = structures(c, exclude=["right"])
    assert len(sosp.score(c.model, data, method=method, structures=kept).scores) == 8


def test_only_the_first_few_layers_are_named() -> None:
    c = case("attention")
    with pytest.raises(StructureError, match=r"not met by 'q', 'k', 'v' and 3 more.*exclude=\['q', 'k', 'v', \.\.\.\]"):
        sosp.score(c.model, (c.inputs, c.targets), method="slimming")


def test_a_norm_without_a_scale_is_none() -> None:
    norm = nn.BatchNorm2d(4, affine=False)
    model = nn.Sequential(nn.Conv2d(2, 4, 3), norm, nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    with pytest.raises(StructureError, match="not met by '0'"):
        sosp.score(model, (torch.randn(4, 2, 4, 4), torch.zeros(4, dtype=torch.long)), method="slimming")


@pytest.mark.parametrize("method", ["group-fisher", "group-fisher-macs"])
@pytest.mark.parametrize(("name", "torn"), [("residual", "'block1.conv2'"), ("depthwise", "'depthwise'")])
def test_a_method_of_groups_names_what_is_torn(name: str, torn: str, method: str) -> None:
    c, found = case(name), structures(case(name))
    with pytest.raises(StructureError) as caught:
        sosp.score(c.model, (c.inputs, c.targets), method=method, structures=found)
    for word in (f"method={method!r}", torn, "groups='coupled'", "'fisher'", "'taylor-bn'"):
        assert word in str(caught.value)
    assert "'group-fisher'" not in str(caught.value).replace(f"method={method!r}", "")
    coupled = structures(c, groups="coupled")
    assert len(sosp.score(c.model, (c.inputs, c.targets), method=method, structures=coupled).scores) == len(coupled)


@pytest.mark.parametrize("name", to_score())
def test_coupled_structures_are_coupled(name: str) -> None:
    c = case(name)
    try:
        found = structures(c, groups="coupled")
    except StructureError:
        return  # no stream can lose a channel as a whole
    assert NEEDS["coupled"].lacking(c.model, found) is None


def test_structures_without_a_flow_are_not_known_to_be_coupled() -> None:
    c = case("conv-bn")
    found = structures(c)
    bare = sosp.Structures(found.kind, found.gate, found.layers, found.ids, found.wiring)
    with pytest.raises(StructureError, match="not met by 'conv1', 'conv2'"):
        sosp.score(c.model, (c.inputs, c.targets), method="group-fisher", structures=bare)


def test_what_is_learned_in_training_cannot_be_scored() -> None:
    c = case("conv-bn")
    learned = Method(lambda problem, options: torch.ones(9), "learned", "2020", needs=("training",))
    with pytest.raises(StructureError) as caught:
        check_requirements("learned", {"learned": learned, **sosp.METHODS}, c.model, structures(c))
    assert "method='learned' needs to be learned while the network trains. Train with it first" in str(caught.value)


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((m, "weights") for m in ("sosp-i", "exact", "slimming", "taylor", "fisher", "group-fisher", "fpgm", "hrank")),
        *((m, "blocks") for m in ("fpgm", "hrank", "ccp", "group-fisher-macs")),
    ],
)
def test_a_kind_that_a_method_does_not_take(method: str, kind: str) -> None:
    c, data = case("residual"), Reads(case("residual"))
    with pytest.raises(ArgumentError) as caught:
        sosp.score(c.model, data, method=method, structures=structures(c, kind=kind))
    for word in (f"method={method!r}", f"kind={kind!r}", "'filters'", "These work here", "'sosp-h'", "'magnitude-l1'"):
        assert word in str(caught.value)
    assert data.count == 0


@pytest.mark.parametrize("kind", KINDS)
def test_the_methods_that_are_named_do_work(kind: str) -> None:
    c = case("residual")
    found = structures(c, kind=kind)
    few = {"exact"} if kind == "weights" else set()
    fit = [n for n, m in sosp.METHODS.items() if kind in m.kinds and "coupled" not in m.needs and n not in few]
    assert {"magnitude-l1", "random", "snip", "first-order"} <= set(fit)
    for method in fit:
        if RANKS_NOTHING.isdisjoint(sosp.METHODS[method].needs):
            scores = sosp.score(c.model, (c.inputs, c.targets), method=method, structures=found).scores
            assert scores.shape == (len(found),), method


# --- a network in half precision, and on the way there


@pytest.mark.parametrize("method", ["fisher", "taylor", "hrank", "magnitude-l2", "fpgm", "ccp", "group-fisher", "snip"])
def test_single_precision_finds_nearly_the_same(method: str) -> None:
    c = case("conv-bn")
    wanted = sosp.score(c.model, (c.inputs, c.targets), method=method).scores
    found = sosp.score(c.model.float(), (c.inputs.float(), c.targets), method=method).scores

    def off(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b).norm() / b.norm())

    assert off(found, wanted) < 1e-4


def test_eigendamage_says_where_it_is() -> None:
    c = case("conv-bn")
    with pytest.raises(StructureError, match=r"its own basis.*sosp\.eigendamage\(model, data, ratio=\.\.\.\)"):
        sosp.score(c.model, (c.inputs, c.targets), method="eigendamage")


def test_who_samples_is_named() -> None:
    c = case("conv-bn")
    with pytest.raises(ArgumentError, match=r"classes= is only for 'sosp-i', 'sosp-i-diagonal', 'obd', 'obd-diagonal'"):
        sosp.score(c.model, (c.inputs, c.targets), method="fisher", classes=2)


# --- without labels -------------------------------------------------------------------------------------


UNLABELLED = {
    "tensor": lambda x: x,
    "batches": lambda x: list(x.split(3)),
    "tuples": lambda x: [(part,) for part in x.split(3)],
    "no target": lambda x: [(part, None) for part in x.split(3)],
    "loader": lambda x: DataLoader(TensorDataset(x), batch_size=3),
    "iterator": lambda x: iter(x.split(3)),
}


@pytest.mark.parametrize("form", UNLABELLED)
@pytest.mark.parametrize("method", ["sosp-obs", "obd", "obd-diagonal", "hrank"])
def test_what_looks_at_no_label_needs_none(method: str, form: str) -> None:
    c = case("conv-bn")
    wanted = sosp.score(c.model, (c.inputs, c.targets), method=method)
    found = sosp.score(c.model, UNLABELLED[form](c.inputs), method=method)
    assert found.examples == wanted.examples == len(c.inputs)
    torch.testing.assert_close(found.scores, wanted.scores)


def test_numbers_without_targets() -> None:
    c = case("mlp")
    targets = torch.randn_like(c.model(c.inputs))
    wanted = sosp.score(c.model, (c.inputs, targets), method="sosp-obs", loss="mse")
    torch.testing.assert_close(sosp.score(c.model, c.inputs, method="sosp-obs", loss="mse").scores, wanted.scores)


def test_a_network_is_cut_and_repaired_without_labels() -> None:
    c = case("conv-bn")
    x = torch.cat([c.inputs, c.inputs.flip(-1)])
    forms = (x, c.targets.repeat(2)), x
    with_labels, without = (sosp.prune(c.model, data, method="sosp-obs", repair=True) for data in forms)
    assert with_labels.mask == without.mask
    torch.testing.assert_close(with_labels.model(x), without.model(x))


def test_labels_that_are_missed() -> None:
    c = case("conv-bn")
    with pytest.raises(DataError, match=r"data is a Tensor of inputs without labels.*Give \(inputs, targets\)"):
        sosp.prune(c.model, c.inputs, preset="paper")
    with pytest.raises(DataError, match=r"each batch must be \(inputs, targets\)"):
        sosp.score(c.model, [(c.inputs,)])
    with pytest.raises(DataError, match="cannot be predicted for a loss function of your own"):
        sosp.score(c.model, c.inputs, method="sosp-obs", loss=lambda f, y: f.square().sum(1))


# --- without a loss -------------------------------------------------------------------------------------

OF_THE_LOSS = ["sosp-h", "sosp-i", "first-order", "taylor", "fisher", "obd", "sosp-obs", "snip"]


@pytest.mark.parametrize("method", OF_THE_LOSS)
def test_labels_that_are_all_ignored_are_no_loss(method: str) -> None:
    c = case("conv-bn")
    ignored = torch.full_like(c.targets, -100)
    said = rf"every label of the 10 examples is -100.* no loss.*method='{method}' is zero"
    with pytest.raises(LossError, match=said):
        sosp.score(c.model, (c.inputs, ignored), method=method)
    with pytest.raises(LossError, match=said):
        sosp.prune(c.model, [(c.inputs[:4], ignored[:4]), (c.inputs[4:], ignored[4:])], method=method, preset="paper")
    ignored[-1] = 0  # one that counts is enough
    assert sosp.score(c.model, (c.inputs, ignored), method=method).scores.any()


@pytest.mark.parametrize("method", ["random", "hrank", "magnitude-l1"])
def test_what_takes_no_loss_does_not_mind(method: str) -> None:
    c = case("conv-bn")
    assert sosp.score(c.model, (c.inputs, torch.full_like(c.targets, -100)), method=method).scores.any()
