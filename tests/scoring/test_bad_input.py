"""What cannot work is refused by an error that names the thing and the way out, and the model stays as it was."""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.data import DataLoader, TensorDataset

import sosp
from helpers.unchanged import check_refused, check_unchanged
from networks import SCORED_EXAMPLES, Case, case
from sosp.errors import (
    ArgumentError,
    DataError,
    DifferentiationError,
    DisconnectedError,
    LossError,
    SospError,
    StructureError,
)
from sosp.refit import FewInputsWarning

METHODS = ("sosp-h", "sosp-i", "sosp-i-diagonal", "first-order", "exact")  # those that differentiate the loss


def batches(c: Case, size: int = 2) -> list[tuple[Tensor, Tensor]]:
    return list(zip(c.inputs.split(size), c.targets.split(size), strict=True))


def structures(c: Case, **options: Any) -> sosp.Structures:
    return sosp.find_structures(c.model, c.inputs[:2], **options)


# --- losses that are no numbers


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_loss_that_is_no_number_names_its_example(method: str, value: float) -> None:
    c = case("mlp")
    data = batches(c)
    data[2][0][1] = value  # the second example of the third batch
    with check_refused(c.model, LossError, "example 1 of batch 2", "nan", "weights"):
        sosp.score(c.model, data, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_an_infinite_loss_names_its_example(method: str) -> None:
    c = case("mlp")

    def loss(f: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(f, y.abs(), reduction="none") / (y >= 0)

    data = batches(c, size=5)
    data[1] = (data[1][0], torch.where(torch.arange(5) == 3, -1, data[1][1]))
    with check_refused(c.model, LossError, "example 3 of batch 1", "inf"):
        sosp.score(c.model, data, method=method, loss=loss)


@pytest.mark.parametrize("method", METHODS)
def test_an_example_keeps_its_place_when_batches_are_cut(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sosp.scoring.passes.CPU_CHUNK", 1)  # four examples at a time
    c = case("mlp")
    data = [(c.inputs.clone(), c.targets)]
    data[0][0][6] = float("nan")
    with check_refused(c.model, LossError, "example 6 of batch 0"):
        sosp.score(c.model, data, method=method)


def test_a_row_of_a_pair_is_named_by_its_number() -> None:
    c = case("mlp")
    x, y = c.inputs.repeat(60, 1), c.targets.repeat(60)
    x[417] = float("nan")
    with check_refused(c.model, LossError, "the loss of example 417 is nan"):
        sosp.score(c.model, (x, y), examples=None)


def test_weights_that_are_no_numbers() -> None:
    c = case("mlp")
    with torch.no_grad():
        c.model.fc1.weight[0, 0] = float("nan")
    with check_refused(c.model, LossError, "example 0", "diverged"):
        sosp.score(c.model, (c.inputs, c.targets))


# --- data that is none


EMPTY: dict[str, Callable[[Case], Any]] = {
    "a list": lambda c: [],
    "a generator": lambda c: iter(()),
    "a loader": lambda c: DataLoader(TensorDataset(c.inputs[:0], c.targets[:0])),
    "a pair": lambda c: (c.inputs[:0], c.targets[:0]),
    "batches": lambda c: [(c.inputs[:0], c.targets[:0])] * 2,
    "a dict": lambda c: {"input": c.inputs[:0], "labels": c.targets[:0]},
}


@pytest.mark.parametrize("method", [*METHODS, "random"])
@pytest.mark.parametrize("what", EMPTY)
def test_empty_data(what: str, method: str) -> None:
    c = case("mlp")
    with check_refused(c.model, DataError, "empty"):
        sosp.score(c.model, EMPTY[what](c), method=method, structures=structures(c))


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (torch.ones(3, 5), ["Tensor", "DataLoader", "(inputs, targets)"]),
        (5, ["int", "DataLoader"]),
        (None, ["NoneType", "DataLoader"]),
        ("data", ["str", "DataLoader"]),
        (TensorDataset(torch.ones(3, 5)), ["batch 0", "list of 1", "(inputs, targets)"]),
        ((torch.ones(3, 5), torch.ones(3), torch.ones(3)), ["batch 0", "Tensor", "(inputs, targets)"]),
        ([(torch.ones(3, 5), torch.ones(3), torch.ones(3))], ["batch 0", "tuple of 3", "(inputs, targets)"]),
        ([torch.ones(3, 5)], ["batch 0", "Tensor"]),
        ([(1, 2)], ["batch 0", "no tensor"]),
        ({"train": "loader"}, ["batch 0", "no tensor"]),
        ((torch.ones(3, 5), torch.tensor(1)), ["batch 0", "(inputs, targets)"]),
        ((torch.ones(3, 5), torch.zeros(4, dtype=torch.long)), ["3 examples", "4"]),
        ((torch.ones(3, 5), [0, 1, 2]), ["batch 0", "Tensor"]),
    ],
)
def test_data_of_a_wrong_form(data: Any, words: list[str]) -> None:
    c = case("mlp")
    with check_refused(c.model, DataError, *words):
        sosp.score(c.model, data)


@pytest.mark.parametrize("examples", [0, -1, 2.5, "all", True])
def test_a_number_of_examples_that_is_none(examples: Any) -> None:
    c = case("mlp")
    with check_refused(c.model, ArgumentError, f"examples={examples!r}", "positive", "None for all"):
        sosp.score(c.model, (c.inputs, c.targets), examples=examples)


# --- labels


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("label", [4, -1, -99, 255])
def test_labels_outside_the_classes(method: str, label: int) -> None:
    c = case("mlp")
    data = [(x, y.clone()) for x, y in batches(c)]
    data[2][1][1] = label
    with check_refused(c.model, DataError, "example 1 of batch 2", f"is {label}", "4 outputs", "labels 0 to 3"):
        sosp.score(c.model, data, method=method)


@pytest.mark.parametrize("method", METHODS)
def test_the_label_that_torch_ignores_is_fine(method: str) -> None:
    c = case("softplus")
    ignored = c.targets.clone()
    ignored[[2, 5]] = -100
    kept = ignored != -100
    found = sosp.score(c.model, (c.inputs, ignored), method=method).scores
    without = sosp.score(c.model, (c.inputs[kept], c.targets[kept]), method=method).scores
    # They count as examples with a loss of zero: 8 losses over 10 examples.
    assert torch.allclose(found, 0.8 * without, rtol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_squared_loss_with_targets_of_another_shape(method: str) -> None:
    c = case("mlp")
    with check_refused(c.model, DataError, "mse", "(10, 4)", "(10,)", "Reshape"):
        sosp.score(c.model, (c.inputs, c.targets), method=method, loss="mse")


# --- names


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "sosp_h"}, ["method='sosp_h'", "Did you mean 'sosp-h'?", "first-order"]),
        ({"method": "xyz"}, ["method='xyz'", "Choose one of", "sosp-i"]),
        ({"loss": "crossentropy"}, ["loss='crossentropy'", "Did you mean 'cross_entropy'?", "mse"]),
        ({"loss": None}, ["loss=None", "cross_entropy"]),
        ({"objective": "joints"}, ["objective='joints'", "Did you mean 'joint'?", "individual"]),
    ],
)
def test_unknown_names_in_score(options: dict[str, Any], words: list[str]) -> None:
    c = case("mlp")
    with check_refused(c.model, ArgumentError, *words):
        sosp.score(c.model, (c.inputs, c.targets), **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"kind": "filter"}, ["kind='filter'", "Did you mean 'filters'?", "blocks"]),
        ({"gate": "feature"}, ["gate='feature'", "Did you mean 'features'?", "weights"]),
        ({"groups": "independant"}, ["groups='independant'", "Did you mean 'independent'?"]),
        ({"exclude": [3]}, ["exclude holds 3", "names, patterns", "modules"]),
        ({"exclude": None}, ["exclude holds None", "names"]),
        ({"groups": None}, ["groups=None", "list of groups"]),
        ({"groups": [3]}, ["groups=[3]", "list of groups"]),
        ({"groups": ["left", "right"]}, ["groups=['left', 'right']", "list of groups", "['conv1', 'conv2']"]),
        ({"groups": {"left": [0]}}, ["groups={'left': [0]}", "list of groups"]),
        ({"groups": [{"left": ["x"]}]}, ["channel 'x' of 'left'", "whole numbers"]),
        ({"groups": [{"left": [0.5]}]}, ["channel 0.5 of 'left'", "whole numbers"]),
        ({"groups": [["left"]], "kind": "blocks"}, ["groups=", "kind='blocks'", "kind='filters'"]),
        ({"groups": [["left"]], "kind": "weights"}, ["groups=", "kind='weights'", "kind='filters'"]),
    ],
)
def test_wrong_arguments_of_find_structures(options: dict[str, Any], words: list[str]) -> None:
    c = case("concat")
    with check_refused(c.model, ArgumentError, *words):
        structures(c, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"exclude": ["lefft"]}, ["'lefft'", "Did you mean 'left'?"]),
        ({"exclude": ["block*"]}, ["'block*'", "matches no layer"]),
        ({"exclude": ["left.weight"]}, ["'left.weight'", "matches no layer"]),
        ({"exclude": [nn.Conv2d(1, 1, 1)]}, ["Conv2d", "matches no layer"]),
        ({"exclude": ["*"]}, ["no prunable structure", "exclude=", "Conv2d"]),
        ({"exclude": ["*"], "kind": "weights"}, ["no prunable weight"]),
        ({"groups": [["left", "rihgt"]]}, ["'rihgt'", "Did you mean 'right'?"]),
        ({"groups": [["head", "left"]]}, ["'head'", "not a prunable layer"]),
        ({"groups": [["left", "right"]]}, ["equal width", "'left': 3", "'right': 4"]),
        ({"groups": [{"left": [3]}]}, ["channel 3 of 'left'", "has 3"]),
        ({"groups": [{"left": [-1]}]}, ["channel -1 of 'left'"]),
        ({"groups": [{"left": [0], "mix": [1]}, {"mix": [1]}]}, ["channel 1 of 'mix'", "two groups"]),
        ({"groups": [{"left": [0, 0]}]}, ["channel 0 of 'left'"]),
        ({"kind": "blocks", "exclude": ["left", "right"]}, ["no removable block", "exclude=", "kind='filters'"]),
    ],
)
def test_structures_that_do_not_exist(options: dict[str, Any], words: list[str]) -> None:
    c = case("concat")
    with check_refused(c.model, StructureError, *words):
        structures(c, **options)


# --- models that do not fit


@pytest.mark.parametrize(
    "model",
    [nn.Sequential(nn.Flatten()), nn.Linear(5, 4), nn.Sequential(nn.LayerNorm(5), nn.Linear(5, 4)), nn.Softmax(1)],
)
def test_a_model_with_nothing_to_prune(model: nn.Module) -> None:
    with check_refused(model, StructureError, "no prunable structure", "Conv2d", "Linear"):
        sosp.find_structures(model, torch.ones(2, 5))


@pytest.mark.parametrize(
    ("example", "words"),
    [
        (torch.ones(2, 7).double(), ["(2, 7)", "RuntimeError", "shapes cannot be multiplied", "a tuple of arguments"]),
        (torch.ones(2, 5), ["(2, 5)", "RuntimeError", "dtype"]),  # float32 into float64
        ((torch.ones(2, 5), torch.ones(2)), ["TypeError", "positional"]),
        ({"x": torch.ones(2, 5)}, ["TypeError", "'x'"]),
    ],
)
def test_an_example_that_the_model_does_not_take(example: Any, words: list[str]) -> None:
    c = case("mlp")
    with check_refused(c.model, StructureError, "does not run on the example", *words):
        sosp.find_structures(c.model, example)


@pytest.mark.parametrize("error", [KeyError("mask"), AssertionError("even"), ZeroDivisionError()])
def test_a_model_that_fails_in_its_own_way(error: Exception) -> None:
    c = case("mlp")

    def fail(*_: Any) -> None:
        raise error

    c.model.act1.register_forward_hook(fail)
    with check_refused(c.model, StructureError, "does not run on the example", type(error).__name__):
        structures(c)


@pytest.mark.parametrize("example", [None, 3, "x", [], {}])
def test_an_example_without_tensors(example: Any) -> None:
    c = case("mlp")
    with check_refused(c.model, DataError, type(example).__name__, "without tensors", "model(...)"):
        sosp.find_structures(c.model, example)


def unchanged(x: Tensor) -> Tensor:
    return x


class Through(nn.Module):
    """A small network whose middle goes through ``mid`` and whose output goes through ``out``."""

    def __init__(self, mid: Callable[[Tensor], Any] = F.softplus, out: Callable[[Tensor], Any] = unchanged) -> None:
        super().__init__()
        self.fc1, self.fc2, self.head = nn.Linear(5, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.mid, self.out = mid, out
        for i, p in enumerate(self.parameters()):
            p.data = torch.randn(p.shape, generator=torch.Generator().manual_seed(i), dtype=torch.float64)

    def forward(self, x: Tensor) -> Any:
        return self.out(self.head(F.softplus(self.fc2(self.mid(self.fc1(x))))))


class Answer:
    """An output that says nothing about itself."""

    def __init__(self, answer: Tensor) -> None:
        self.answer = answer


DATA = (case("mlp").inputs, case("mlp").targets)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("out", [lambda y: {"answer": y}, Answer, lambda y: [[y]]])
def test_logits_under_any_name(method: str, out: Callable[[Tensor], Any]) -> None:
    wanted = sosp.score(Through(), DATA, method=method)
    assert torch.allclose(sosp.score(Through(out=out), DATA, method=method).scores, wanted.scores, rtol=1e-10)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_of_ones_own_finds_its_way(method: str) -> None:
    plain = sosp.score(Through(), DATA, method=method)
    own = sosp.score(
        Through(out=Answer), DATA, method=method, loss=lambda out, y: F.cross_entropy(out.answer, y, reduction="none")
    )
    assert torch.allclose(own.scores, plain.scores, rtol=1e-10)


@pytest.mark.parametrize("options", [{"method": "sosp-i"}, {"repair": True}], ids=str)
@pytest.mark.parametrize("name", ["answer", "logits"])
def test_outputs_by_name_with_a_loss_of_ones_own(name: str, options: dict[str, Any]) -> None:
    own = lambda out, y: F.cross_entropy(out[name], y, reduction="none")  # noqa: E731
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FewInputsWarning)
        assert sosp.prune(Through(out=lambda y: {name: y}), DATA, loss=own, **options).mask.chosen


@torch.no_grad()
def untracked(x: Tensor) -> Tensor:
    return F.softplus(x)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("out", [lambda y: y.argmax(1), lambda y: y.detach(), lambda y: y.round().long()])
def test_outputs_without_a_derivative(method: str, out: Callable[[Tensor], Any]) -> None:
    model = Through(out=out)
    with check_refused(model, DifferentiationError, "does not depend differentiably", "no_grad", "argmax", "logits"):
        sosp.score(model, DATA, method=method)


def test_a_forward_without_gradients() -> None:
    class Untracked(Through):
        @torch.no_grad()
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    model = Untracked()
    with check_refused(model, DifferentiationError, "does not depend differentiably", "no_grad"):
        sosp.find_structures(model, DATA[0])


@pytest.mark.parametrize("mid", [untracked, lambda x: F.softplus(x).detach(), lambda x: F.softplus(x).long().to(x)])
@pytest.mark.filterwarnings("ignore::sosp.scoring.passes.SlowPathWarning")  # no_grad has no fast way
def test_a_layer_without_gradients_has_no_structures(mid: Callable[[Tensor], Tensor]) -> None:
    model = Through(mid=mid)
    found = sosp.score(model, DATA)
    assert [layer.name for layer in found.structures.layers] == ["fc2"]
    assert found.scores.min() > 0


def test_one_layer_run_without_gradients_has_no_structures() -> None:
    class Partly(Through):
        def forward(self, x: Tensor) -> Any:
            with torch.no_grad():
                x = self.fc1(x)
            return self.head(F.softplus(self.fc2(F.softplus(x))))

    found = sosp.find_structures(Partly(), DATA[0])
    assert [layer.name for layer in found.layers] == ["fc2"]


@pytest.mark.parametrize("lazy", [nn.LazyLinear(4), nn.LazyBatchNorm1d(), nn.LazyBatchNorm1d(affine=False)])
def test_lazy_layers(lazy: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(5, 5), lazy, nn.Linear(5, 4))
    kinds = [type(m) for m in model]
    for job in (lambda: sosp.find_structures(model, torch.ones(2, 5)), lambda: sosp.score(model, DATA)):
        with pytest.raises(StructureError, match=r"'1\..*lazy.*one batch"):
            job()
    assert [type(m) for m in model] == kinds


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_without_statistics_of_its_own(training: bool) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 4)).train(
        training
    )
    for job in (lambda: sosp.find_structures(model, torch.ones(2, 5)), lambda: sosp.score(model, DATA)):
        with check_refused(model, DifferentiationError, "'1'", "track_running_stats=False", "GroupNorm"):
            job()


@pytest.mark.parametrize("key", ["weight", "bias"])
def test_two_layers_that_share_a_parameter(key: str) -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 3))
    setattr(model[4], key, getattr(model[2], key))
    assert len(sosp.find_structures(model, torch.ones(2, 3))) == 6  # the output layer is not pruned: nobody minds
    setattr(model[2], key, getattr(model[0], key))
    with check_refused(model, StructureError, f"'0.{key}' = '2.{key}'", "own copy", "exclude=['2']"):
        sosp.find_structures(model, torch.ones(2, 3))
    assert len(sosp.find_structures(model, torch.ones(2, 3), exclude=["2"])) == 3


@pytest.mark.parametrize("where", ["example", "data"])
def test_data_on_another_device(where: str) -> None:
    c = case("mlp")
    meta = c.inputs.to("meta")
    with check_refused(c.model, DataError, "meta", "cpu", ".to('cpu')", "model.to('meta')"):
        if where == "example":
            sosp.find_structures(c.model, meta)
        else:
            sosp.score(c.model, [(meta, c.targets)], structures=structures(c))


def test_labels_on_another_device() -> None:
    c = case("mlp")
    data = [*batches(c), (c.inputs, c.targets.to("meta"))]
    with check_refused(c.model, DataError, "batch 5 is on meta", "model on cpu"):
        sosp.score(c.model, data)


def test_a_model_on_another_device() -> None:
    model = case("mlp").model.to("meta")
    with pytest.raises(DataError, match=r"on cpu and the model on meta"):
        sosp.score(model, DATA)


@pytest.mark.parametrize("name", ["weight_norm", "parametrized"])
def test_single_weights_that_are_computed_from_others(name: str) -> None:
    model = Through()
    if name == "parametrized":
        nn.utils.parametrizations.weight_norm(model.fc2)
    else:
        nn.utils.parametrize.register_parametrization(model.fc2, "weight", nn.Identity())
    with check_refused(model, StructureError, "'fc2'", "computed from other parameters", "kind='filters'"):
        sosp.find_structures(model, DATA[0], kind="weights")
    assert len(sosp.find_structures(model, DATA[0])) == 8


# --- operations without the derivatives a method needs


class NoForwardMode(torch.autograd.Function):
    """``x^2`` with a backward that can be differentiated again, and without a forward-mode rule."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


class OnlyOnce(NoForwardMode):
    """The same with a backward that may be run but not differentiated."""

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("method", METHODS)
def test_an_operation_without_forward_mode_takes_the_slow_path(method: str) -> None:
    model = Through(mid=NoForwardMode.apply)
    with check_unchanged(model), pytest.warns(sosp.SlowPathWarning, match="slower"):
        found = sosp.score(model, DATA, method=method)
    plain = sosp.score(Through(mid=torch.square), DATA, method=method)
    assert torch.allclose(found.scores, plain.scores, rtol=1e-10)


@pytest.mark.parametrize("method", ["first-order", "sosp-i", "sosp-i-diagonal"])
def test_first_derivatives_suffice_where_no_second_are_needed(method: str) -> None:
    model = Through(mid=OnlyOnce.apply)
    with check_unchanged(model), pytest.warns(sosp.SlowPathWarning, match="slower"):
        found = sosp.score(model, DATA, method=method)
    plain = sosp.score(Through(mid=torch.square), DATA, method=method)
    assert torch.allclose(found.scores, plain.scores, rtol=1e-10)


@pytest.mark.filterwarnings("ignore::sosp.SlowPathWarning")
@pytest.mark.parametrize(("method", "kind"), [("sosp-h", "filters"), ("exact", "filters"), ("sosp-h", "weights")])
def test_an_operation_without_second_derivatives(method: str, kind: str) -> None:
    model = Through(mid=OnlyOnce.apply)
    found = sosp.find_structures(model, DATA[0], kind=kind)
    words = ["forward over reverse", "double backward", "first-order", "sosp-i", "once_differentiable"]
    with check_refused(model, DifferentiationError, *(["jets", *words] if kind == "filters" else words)):
        sosp.score(model, DATA, method=method, structures=found)


# --- losses of the user's own


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (
            lambda f, y: F.cross_entropy(f, y, reduction="sum"),
            ["one number for 10", "not the mean", "reduction='none'"],
        ),
        (lambda f, y: F.cross_entropy(f, y, reduction="none")[:-1], ["shape (9,)", "10 examples", "one loss per"]),
        (lambda f, y: f.sum(0), ["shape (4,)", "10 examples", "one loss per"]),
        (lambda f, y: 1.0, ["float", "one loss per example"]),
        (lambda f, y: None, ["NoneType", "one loss per example"]),
    ],
)
def test_a_loss_that_is_not_one_per_example(method: str, loss: Any, words: list[str]) -> None:
    c = case("softplus")
    with check_refused(c.model, LossError, *words):
        sosp.score(c.model, (c.inputs, c.targets), method=method, loss=loss)


@pytest.mark.parametrize("method", METHODS)
def test_a_loss_that_forgets_the_network(method: str) -> None:
    c = case("softplus")
    with check_refused(c.model, DifferentiationError, "loss", "detach", "argmax"):
        sosp.score(c.model, (c.inputs, c.targets), method=method, loss=lambda f, y: f.detach().sum(1))


def test_a_dict_without_labels_and_a_model_without_a_loss() -> None:
    c = case("mlp")
    with check_refused(c.model, DataError, "batch 0", "'labels'", "(inputs, targets)"):
        sosp.score(c.model, [{"input": c.inputs}])


# --- arguments that do not go together


@pytest.mark.parametrize("method", ["sosp-h", "first-order", "exact", "random"])
def test_sampled_classes_where_nothing_is_sampled(method: str) -> None:
    c = case("mlp")
    with check_refused(c.model, ArgumentError, "classes=", "'sosp-i'", f"method={method!r}"):
        sosp.score(c.model, (c.inputs, c.targets), method=method, classes=2)


@pytest.mark.parametrize("classes", [0, -2, 1.5, "all"])
def test_a_number_of_classes_that_is_none(classes: Any) -> None:
    c = case("mlp")
    with check_refused(c.model, ArgumentError, f"classes={classes!r}", "positive whole number"):
        sosp.score(c.model, (c.inputs, c.targets), method="sosp-i", classes=classes)


@pytest.mark.parametrize("method", ["exact", "sosp-i", "sosp-i-diagonal"])
def test_pairs_of_single_weights(method: str) -> None:
    c = case("mlp")
    found = structures(c, kind="weights")
    with check_refused(c.model, ArgumentError, f"method={method!r}", "kind='weights'", "'sosp-h'"):
        sosp.score(c.model, (c.inputs, c.targets), method=method, structures=found)


@pytest.mark.parametrize("method", [*METHODS, "random"])
@pytest.mark.parametrize("other", ["conv-bn", "attention"])
def test_structures_of_another_model(method: str, other: str) -> None:
    c, foreign = case("mlp"), structures(case(other))
    with check_refused(c.model, ArgumentError, f"'{foreign.layers[0].name}'", "find_structures(model, example)"):
        sosp.score(c.model, (c.inputs, c.targets), method=method, structures=foreign)


def renamed(model: nn.Module, **names: str) -> nn.Sequential:
    """The same chain with some of its modules under other names."""
    chain = nn.Sequential()
    for name, module in model.named_children():
        chain.add_module(names.get(name, name), module)
    return chain


@pytest.mark.parametrize("method", [*METHODS, "random"])
def test_structures_of_a_model_of_another_width(method: str) -> None:
    c = case("mlp")
    model = renamed(c.model)
    model.fc1, model.fc2 = nn.Linear(5, 9).double(), nn.Linear(9, 6).double()
    found = structures(c)
    with check_refused(model, ArgumentError, "'fc1'", "7", "9", "find_structures(model, example)"):
        sosp.score(model, (c.inputs, c.targets), method=method, structures=found)


@pytest.mark.parametrize("method", [*METHODS, "random"])
def test_structures_of_a_model_with_other_norms(method: str) -> None:
    c = case("conv-bn")
    model, found = renamed(c.model, bn2="norm2"), structures(c)
    with check_refused(model, ArgumentError, "'bn2'", "find_structures(model, example)"):
        sosp.score(model, (c.inputs, c.targets), method=method, structures=found)


# --- selecting


def saliency(name: str = "mlp", method: str = "sosp-h") -> sosp.Saliency:
    c = case(name)
    return sosp.score(c.model, (c.inputs, c.targets), method=method)


@pytest.mark.parametrize("value", [-0.1, 1.01, float("nan"), float("inf"), "half", True, [0.5]])
def test_a_ratio_that_is_none(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"ratio=.*number from 0 to 1"):
        sosp.select(saliency(), ratio=value)


@pytest.mark.parametrize("value", [-0.1, 1.01, float("nan"), "half", True])
def test_a_cap_that_is_none(value: Any) -> None:
    with pytest.raises(ArgumentError, match=r"cap=.*number from 0 to 1"):
        sosp.select(saliency(), ratio=0.5, cap=value)


def test_a_cap_below_the_ratio() -> None:
    with pytest.raises(ArgumentError, match=r"ratio=0\.5 asks for 6 of 13.*cap=0\.1 leaves only 0"):
        sosp.select(saliency(), ratio=0.5, cap=0.1)


def test_an_unknown_scale() -> None:
    with pytest.raises(ArgumentError, match=r"scale='mac'.*Did you mean 'macs'\?.*kernel"):
        sosp.select(saliency(), ratio=0.5, scale="mac")


def test_an_unknown_objective() -> None:
    with pytest.raises(ArgumentError, match=r"objective='order_'.*Did you mean 'order'\?"):
        saliency().with_objective("order_")


@pytest.mark.parametrize("method", ["sosp-h", "sosp-i", "random"])
@pytest.mark.parametrize(("name", "dead"), [("mlp", "'fc2'"), ("residual", "'block2.conv2', 'block2.downsample.0'")])
def test_a_mask_that_cuts_the_network_in_two(name: str, dead: str, method: str) -> None:
    with pytest.raises(DisconnectedError) as caught:
        sosp.select(saliency(name, method), ratio=1.0)
    assert f"every channel of {dead}" in str(caught.value)
    assert all(word in str(caught.value) for word in ("disconnects the network", "ratio", "cap=", "exclude"))


# --- masks by hand


@pytest.mark.parametrize(
    ("removed", "words"),
    [
        ({"fc3": [0]}, ["'fc3'", "not a prunable layer", "Did you mean"]),
        ({"head": [0]}, ["'head'", "output layer"]),
        ({"fc1": [7]}, ["channel 7 of 'fc1'", "0 to 6"]),
        ({"fc1": [-1]}, ["channel -1 of 'fc1'", "0 to 6"]),
        ({"fc1": [0.5]}, ["channel 0.5 of 'fc1'", "0 to 6"]),
        ({"fc1": ["a"]}, ["channel a of 'fc1'", "0 to 6"]),
        ({"fc1": [1, 2, 1]}, ["channel 1 of 'fc1' twice"]),
        ({"fc1": 3}, ["'fc1'", "3"]),
    ],
)
def test_masks_that_do_not_fit(removed: dict[str, Any], words: list[str]) -> None:
    c = case("mlp")
    with check_refused(c.model, StructureError, *words):
        sosp.Mask.from_removed(c.model, removed, c.inputs[:1])


def test_a_mask_of_an_unknown_kind() -> None:
    c = case("mlp")
    with check_refused(c.model, ArgumentError, "kind='neurons'", "filters"):
        sosp.Mask.from_removed(c.model, {"fc1": [0]}, c.inputs[:1], kind="neurons")


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (case("conv-bn").model, ["'fc1'", "does not have"]),
        (nn.Sequential(), ["'fc1'", "does not have"]),
        (nn.ModuleDict({"fc1": nn.Linear(5, 9)}), ["'fc1'", "7 channels", "9"]),
    ],
)
def test_a_mask_on_another_model(model: nn.Module, words: list[str]) -> None:
    c = case("mlp")
    mask = sosp.Mask.from_removed(c.model, {"fc1": [0]}, c.inputs[:1])
    with check_refused(model, StructureError, *words):
        sosp.masked(model, mask)


def test_a_mask_on_a_model_without_its_norms() -> None:
    c = case("conv-bn")
    mask = sosp.Mask.from_removed(c.model, {"conv1": [0]}, c.inputs[:1])
    model = renamed(c.model, bn1="norm1")
    with check_refused(model, StructureError, "'bn1'", "does not have"):
        sosp.masked(model, mask)


def mask_of_weights() -> sosp.Mask:
    c = case("mlp")
    return sosp.Mask.from_removed(c.model, {"fc1.weight": [0, 34]}, c.inputs[:1], kind="weights")


def test_a_mask_of_weights_on_another_model() -> None:
    model = case("conv-bn").model
    with check_refused(model, StructureError, "'fc1.weight'", "does not have"):
        sosp.masked(model, mask_of_weights())


def test_a_mask_of_weights_on_a_narrower_model() -> None:
    model = nn.ModuleDict({"fc1": nn.Linear(2, 2)})
    with check_refused(model, StructureError, "'fc1.weight'", "35", "4"):
        sosp.masked(model, mask_of_weights())


def test_every_error_is_one_of_ours() -> None:
    kinds = [e for e in vars(sosp.errors).values() if isinstance(e, type) and issubclass(e, Exception)]
    assert len(kinds) == 14
    assert all(issubclass(e, SospError) for e in kinds)
    assert SCORED_EXAMPLES == 10  # the messages above count on it


def test_a_scripted_network_is_refused_by_name() -> None:
    c = case("mlp")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # torch's word about scripting
        scripted = torch.jit.trace(c.model, c.inputs)
    for use in (sosp.trace, sosp.find_structures):
        with pytest.raises(StructureError, match="a scripted or traced module hides its layers"):
            use(scripted, c.inputs)


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch's own, while it compiles
@pytest.mark.parametrize("act", ["prune", "find_structures", "trace", "count", "score"])
def test_a_compiled_network_is_sent_back(act: str) -> None:
    model, x = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3)), torch.randn(8, 4)
    data = (x, torch.zeros(8, dtype=torch.long))
    calls = {
        "prune": lambda m: sosp.prune(m, data),
        "find_structures": lambda m: sosp.find_structures(m, x),
        "trace": lambda m: sosp.trace(m, x),
        "count": lambda m: sosp.count(m, x),
        "score": lambda m: sosp.score(m, data, structures=sosp.find_structures(model, x)),
    }
    for wrong, words in (
        (torch.compile(model), "compiled with torch.compile"),
        (None, "NoneType"),
        (nn.Linear, "the class Linear"),
    ):
        with pytest.raises(sosp.errors.ArgumentError, match=words):
            calls[act](wrong)
