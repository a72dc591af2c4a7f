"""The user's model is borrowed: whatever is done with it, and however that ends, it comes back as it was."""

from collections import OrderedDict
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import sosp
from helpers.unchanged import check_unchanged, same, snapshot
from networks import Case, case
from sosp.core.progress import track_progress


def used(name: str) -> Case:
    """A case in the middle of its life: mixed modes, some parameters frozen, some with a gradient."""
    c = case(name)
    for i, m in enumerate(c.model.modules()):
        m.training = i % 3 == 0
    for i, p in enumerate(c.model.parameters()):
        p.requires_grad_(i % 4 != 1)
        p.grad = torch.full_like(p, 0.5) if i % 2 and p.requires_grad else None
    return c


def score(c: Case, method: str, kind: str = "filters", data: Any = None, **options: Any) -> sosp.Saliency:
    structures = sosp.find_structures(c.model, c.inputs[:2], kind=kind)
    return sosp.score(c.model, data or (c.inputs, c.targets), method=method, structures=structures, **options)


def mask(c: Case) -> sosp.Mask:
    return sosp.Mask.from_removed(c.model, {next(iter(c.norms)): [0]}, c.inputs[:1])


# Not those that are learned, need batch norms (which not every case has) or coupled channels.
LOOKING = [m for m, method in sosp.METHODS.items() if not method.needs]
JOBS: dict[str, Callable[[Case], object]] = {
    **{f"score, {method}": lambda c, method=method: score(c, method) for method in LOOKING},
    "score, sosp-h of weights": lambda c: score(c, "sosp-h", "weights"),
    "score, first-order of weights": lambda c: score(c, "first-order", "weights"),
    "score, sampled": lambda c: score(c, "sosp-i", classes=2),
    "score, structures found on the way": lambda c: sosp.score(c.model, (c.inputs, c.targets)),
    "find filters": lambda c: sosp.find_structures(c.model, c.inputs),
    "find blocks": lambda c: sosp.find_structures(c.model, c.inputs, kind="blocks"),
    "find weights": lambda c: sosp.find_structures(c.model, c.inputs, kind="weights"),
    "mask by hand": mask,
    "masked": lambda c: sosp.masked(c.model, mask(c)),
    "select": lambda c: sosp.select(score(c, "sosp-h"), ratio=0.2),
}


@pytest.mark.parametrize("job", JOBS)
@pytest.mark.parametrize("name", ["residual", "attention"])
def test_nothing_changes(name: str, job: str) -> None:
    c = used(name)
    inputs, targets = c.inputs.clone(), c.targets.clone()
    with check_unchanged(c.model):
        JOBS[job](c)
    assert torch.equal(c.inputs, inputs)
    assert torch.equal(c.targets, targets)


def test_a_change_would_be_noticed() -> None:
    def notice(act: Callable[[nn.Module], object]) -> bool:
        c = used("conv-bn")
        before = snapshot(c.model)
        act(c.model)
        return not same(before, snapshot(c.model))

    assert notice(lambda m: m.bn1.running_mean.data.add_(1e-9))
    assert notice(lambda m: m.head.weight.data.mul_(1.1))
    assert notice(lambda m: m.bn1.train(not m.bn1.training))
    assert notice(lambda m: m.conv1.register_forward_hook(print))
    assert notice(lambda m: m.conv1.requires_grad_(not m.conv1.weight.requires_grad))
    assert notice(lambda m: m.zero_grad())
    assert notice(lambda m: torch.rand(1))
    assert notice(lambda m: setattr(m, "last", 1))
    assert not notice(lambda m: m.conv1.weight.sum())


# --- when it ends badly


class SurpriseError(Exception):
    """Nothing the library could have expected."""


def failing_loss(error: BaseException, after: int) -> Callable[[Tensor, Tensor], Tensor]:
    calls: list[int] = []

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        calls.append(1)
        if len(calls) > after:
            raise error
        return F.cross_entropy(outputs, targets, reduction="none")

    return loss


class Failing(nn.Module):
    """Raises in the middle of a forward pass, after some that went well."""

    def __init__(self, body: nn.Module, error: BaseException, after: int) -> None:
        super().__init__()
        self.body, self.error = body, error
        self.left = iter(range(after))  # a counter of its own on the model would be reset

    def forward(self, x: Tensor) -> Tensor:
        fails = next(self.left, None) is None
        for i, layer in enumerate(self.body):
            if i == 3 and fails:
                raise self.error
            x = layer(x)
        return x


# One chunk holds at most 256 examples, so the second chunk, and with it the failure, comes after some work.
MANY = 300
METHODS = ("sosp-h", "sosp-i", "sosp-i-diagonal", "first-order", "exact")  # those that differentiate the loss


@pytest.mark.parametrize("error", [SurpriseError(), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_changes_when_the_loss_fails(method: str, error: BaseException) -> None:
    c = used("conv-bn")
    structures = sosp.find_structures(c.model, c.inputs[:2])
    many = torch.arange(MANY) % len(c.inputs)
    data = (c.inputs[many], c.targets[many])
    with check_unchanged(c.model), pytest.raises(type(error)):
        sosp.score(c.model, data, method=method, structures=structures, loss=failing_loss(error, after=1))


@pytest.mark.parametrize("error", [SurpriseError(), KeyboardInterrupt()], ids=["exception", "ctrl-c"])
@pytest.mark.parametrize("method", METHODS)
def test_nothing_changes_when_the_model_fails(method: str, error: BaseException) -> None:
    c = used("conv-bn")
    model = Failing(c.model, error, after=1)  # the structures are found; scoring fails
    with check_unchanged(model), pytest.raises(type(error)):
        sosp.score(model, (c.inputs, c.targets), method=method)


def test_nothing_changes_when_looking_for_structures_is_interrupted() -> None:
    model = Failing(used("conv-bn").model, KeyboardInterrupt(), after=0)
    with check_unchanged(model), pytest.raises(KeyboardInterrupt):
        sosp.find_structures(model, case("conv-bn").inputs)


def test_nothing_changes_when_the_data_fails() -> None:
    c = used("conv-bn")

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        torch.rand(3)
        yield c.inputs, c.targets
        raise SurpriseError

    with check_unchanged(c.model), pytest.raises(SurpriseError):
        sosp.score(c.model, batches())


# --- models that keep something from their last forward pass


def refuse(self: Any, *args: Any, **kwargs: Any) -> None:
    raise TypeError("this container is frozen")


def share(self: Any, memo: Any) -> Any:
    """Copying is no change: what cannot change may be shared."""
    return self


class FrozenDict(dict):
    __deepcopy__ = share
    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = refuse


class FrozenOrder(OrderedDict):
    """A configuration of the diffusers package is one."""

    __deepcopy__ = share
    __setitem__ = __delitem__ = clear = pop = popitem = setdefault = update = refuse


class FrozenList(list):
    __deepcopy__ = share
    __setitem__ = __delitem__ = append = clear = extend = insert = pop = refuse


class Keeper(nn.Module):
    """A network with a memory; ``keep`` is called with the module and its features on every forward pass."""

    def __init__(self, keep: Callable[[Any, Tensor], object]) -> None:
        super().__init__()
        self.fc, self.head = nn.Linear(3, 4), nn.Linear(4, 3)
        self.register_buffer("count", torch.zeros(2))
        self.register_buffer("cache", None)
        self.register_buffer("scratch", torch.ones(3), persistent=False)
        self.keep, self.calls, self.features = keep, 0, None
        self.seen: list[Tensor] = []
        self.named = {"x": 0}
        self.frozen, self.order, self.items = FrozenDict(x=0), FrozenOrder(), FrozenList([0])
        OrderedDict.__setitem__(self.order, "x", 0)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc(x))
        self.keep(self, x)
        return self.head(x)


def replace_buffer(m: Any, x: Tensor) -> None:
    m.count = m.count + 1


KEEPS: dict[str, Callable[[Any, Tensor], object]] = {
    "a buffer, in place": lambda m, x: m.count.add_(1),
    "a buffer, behind autograd's back": lambda m, x: m.count.data.add_(1),
    "a buffer by another": replace_buffer,
    "a buffer that was none": lambda m, x: setattr(m, "cache", torch.ones(1)),
    "a new buffer": lambda m, x: m.register_buffer("fresh", torch.ones(1)),
    "a buffer less": lambda m, x: m._buffers.pop("scratch", None),
    "a buffer that no file holds": lambda m, x: m.scratch.zero_(),
    "a number": lambda m, x: setattr(m, "calls", m.calls + 1),
    "its features": lambda m, x: setattr(m, "features", x),
    "its features, in a new place": lambda m, x: setattr(m, "last", [x]),
    "its features, in a list": lambda m, x: m.seen.append(x),
    "its features, in a dict": lambda m, x: m.named.update(x=x, y=x),
    "nothing": lambda m, x: None,
    "its features, in a frozen dict": lambda m, x: dict.__setitem__(m.frozen, "x", x),
    "its features, in a frozen order": lambda m, x: OrderedDict.__setitem__(m.order, "y", x),
    "its features, in a frozen list": lambda m, x: list.append(m.items, x),
    "a hook": lambda m, x: m.fc.register_forward_hook(lambda *_: None),
    "the mode": lambda m, x: m.train(),
}


@pytest.mark.parametrize("kept", KEEPS)
def test_what_a_forward_pass_changes_is_undone(kept: str) -> None:
    torch.manual_seed(0)
    model = Keeper(KEEPS[kept])
    x, y = torch.randn(5, 3), torch.tensor([0, 1, 2, 0, 1])
    with check_unchanged(model):
        saliency = sosp.score(model, (x, y))
    # What a forward pass keeps may be part of a graph; a model that holds on to it could not be copied.
    with check_unchanged(model):
        sosp.masked(model, sosp.select(saliency, ratio=0.25))


# --- hooks


def test_the_users_hooks_stay_and_work() -> None:
    c = case("conv-bn")
    heard: list[str] = []
    c.model.conv2.register_forward_hook(lambda m, args, y: heard.append("forward"))
    c.model.conv2.register_forward_pre_hook(lambda m, args: heard.append("before"))
    c.model.conv2.register_full_backward_hook(lambda m, into, out: heard.append("backward"))
    c.model.conv2.register_full_backward_pre_hook(lambda m, out: heard.append("before backward"))
    with check_unchanged(c.model):
        JOBS["score, sosp-h"](c)
    heard.clear()
    c.model(c.inputs).sum().backward()
    assert heard == ["before", "forward", "before backward", "backward"]


@pytest.mark.parametrize("method", METHODS)
def test_a_forward_hook_is_part_of_the_network(method: str) -> None:
    hooked, plain = case("softplus"), case("softplus")
    hooked.model.fc1.register_forward_hook(lambda m, args, y: 2 * y)
    with torch.no_grad():
        plain.model.fc1.weight.mul_(2), plain.model.fc1.bias.mul_(2)
    assert torch.allclose(score(hooked, method).scores, score(plain, method).scores, rtol=1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", ["conv-bn", "softplus"])
def test_backward_hooks_rest(name: str, method: str) -> None:
    """A hook that changes gradients would change every saliency, and one on a layer hides the norm behind it."""
    c = case(name)
    expected = score(c, method).scores
    heard: list[int] = []
    for m in c.model:
        m.register_full_backward_hook(lambda m, into, out: heard.append(1) or tuple(2 * g for g in into))
    assert torch.equal(score(c, method).scores, expected)
    assert heard == []


# --- chance, and the mode the caller is in


def test_a_shuffled_loader_takes_nothing_from_the_global_generator() -> None:
    c = case("mlp")
    loader = DataLoader(TensorDataset(c.inputs, c.targets), batch_size=3, shuffle=True)
    torch.manual_seed(5)
    untouched = torch.rand(4)
    torch.manual_seed(5)
    sosp.score(c.model, loader, examples=4)
    assert torch.equal(torch.rand(4), untouched)


@pytest.mark.parametrize("method", METHODS)
def test_the_callers_grad_mode_does_not_matter(method: str) -> None:
    c = case("residual")
    expected = score(c, method).scores
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            grad_mode = torch.is_inference_mode_enabled(), torch.is_grad_enabled()
            # Data made in inference mode cannot take part in a graph as it is.
            found = sosp.score(c.model, (c.inputs * 1, c.targets * 1), method=method).scores
            assert (torch.is_inference_mode_enabled(), torch.is_grad_enabled()) == grad_mode
        assert torch.equal(found, expected)


class InPlace(nn.Module):
    """Writes into its input before doing anything else."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.sub_(0.1))


@pytest.mark.parametrize(
    ("method", "kind"),
    [
        *((m, "filters") for m in METHODS),
        *((m, "weights") for m in ("sosp-h", "first-order")),
    ],
)
def test_a_network_that_writes_into_its_input_does_not_reach_the_data(method: str, kind: str) -> None:
    c = case("conv-bn")
    batches = [(c.inputs.clone(), c.targets)]
    found = score(replace(c, model=InPlace(c.model)), method, kind, data=batches).scores
    assert torch.equal(batches[0][0], c.inputs)
    assert torch.equal(found, score(c, method, kind, data=[(c.inputs - 0.1, c.targets)]).scores)


# --- the copy is a copy


def test_a_masked_copy_shares_nothing_with_the_original() -> None:
    c = used("residual")
    copy = sosp.masked(c.model, mask(c)).train()
    assert not {p.data_ptr() for p in copy.parameters()} & {p.data_ptr() for p in c.model.parameters()}
    with check_unchanged(c.model):
        F.cross_entropy(copy(c.inputs), c.targets).backward()
        torch.optim.SGD(copy.parameters(), lr=0.1).step()
    assert torch.equal(c.model.eval()(c.inputs), case("residual").model(c.inputs))


def test_scoring_a_masked_copy_changes_neither() -> None:
    c = used("conv-bn")
    copy = sosp.masked(c.model, mask(c))
    with check_unchanged(c.model), check_unchanged(copy):
        sosp.score(copy, (c.inputs, c.targets))
    assert torch.equal(copy.eval()(c.inputs), deepcopy(copy)(c.inputs))


# --- the terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Pretend that someone is watching, impatiently; the names of the bars shown."""
    shown: list[str] = []
    monkeypatch.setattr("sosp.core.progress.is_progress_wanted", lambda: True)
    monkeypatch.setattr("sosp.core.progress.BAR_DELAY", -1.0)
    monkeypatch.setattr("rich.progress.Progress.start", lambda bar: shown.append(bar.tasks[0].description))
    monkeypatch.setattr("rich.progress.Progress.stop", lambda bar: shown.append("end"))
    return shown


def test_one_bar_at_a_time(terminal: list[str]) -> None:
    for _ in track_progress(range(2), "outer"):
        assert list(track_progress("abc", "inner")) == ["a", "b", "c"]
    assert terminal == ["inner", "end", "outer", "end"]


def test_a_bar_is_taken_away_when_the_work_fails(terminal: list[str]) -> None:
    c = case("mlp")
    with pytest.raises(SurpriseError):
        sosp.score(c.model, [(c.inputs, c.targets)] * 60, examples=None, loss=failing_loss(SurpriseError(), after=1))
    assert terminal == ["Hessian-vector product", "end"]
