"""Networks that decide which of their layers run: what was not seen is not cut, nor is what it might read."""

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import sosp
from helpers.unchanged import check_unchanged
from sosp.errors import StructureError, SurgeryError
from sosp.graph.forward_code import PathWarning, find_model_error, format_names
from sosp.graph.tracer import Tracer
from sosp.graph.wiring import Recorder
from sosp.surgery import shrink

PATHS = pytest.mark.filterwarnings("ignore::sosp.graph.forward_code.PathWarning")


def made(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return build().eval()


def noise(rows: int, shift: float = 0.0, seed: int = 1) -> Tensor:
    return torch.randn(rows, 6, generator=torch.Generator().manual_seed(seed)) + shift


def line_of(cls: type, text: str) -> str:
    """``file.py:12`` of the line of a class that has this in it."""
    lines, start = inspect.getsourcelines(cls)
    return f"{Path(__file__).name}:{start + next(i for i, line in enumerate(lines) if text in line)}"


def check_every_way(model: nn.Module, removed: dict[str, list[int]], x: Tensor, inputs: list[Tensor]) -> Any:
    """The smaller network is the masked one on inputs that take other ways as well."""
    mask = sosp.Mask.from_removed(model, removed, x)
    small, masked = sosp.shrink(model, mask, x), sosp.masked(model, mask)
    with torch.no_grad():
        for y in inputs:
            torch.testing.assert_close(small(y), masked(y), atol=1e-6, rtol=0)
    return small


class Branch(nn.Module):
    """One of two layers, by what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        y = self.b(y) if x.mean() > 0 else self.c(y)
        return self.head(y.relu())


class Item(Branch):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        way = int(x.mean().item() > 0)
        return self.head((self.c, self.b)[way](y).relu())


class Normed(Branch):
    """The norm behind the first layer is one of two."""

    def __init__(self) -> None:
        super().__init__()
        self.n, self.m = nn.BatchNorm1d(8), nn.BatchNorm1d(8)
        nn.init.normal_(self.n.bias)
        nn.init.normal_(self.m.bias)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        y = self.n(y) if x.mean() > 0 else self.m(y)
        return self.head(self.c(self.b(y.relu())).relu())


WAYS = [noise(5, 2), noise(5, -2), noise(1, 2), noise(1, -2)]


@PATHS
@pytest.mark.parametrize("cls", [Branch, Item])
@pytest.mark.parametrize(("shift", "way", "other"), [(2, "b", "c"), (-2, "c", "b")])
def test_the_way_that_was_not_seen_still_works(cls: type[Branch], shift: float, way: str, other: str) -> None:
    model, x = made(cls), noise(5, shift)
    assert sosp.trace(model, x).unused_modules == (other,)
    assert [layer.name for layer in sosp.find_structures(model, x).layers] == ["a", way]
    small = check_every_way(model, {"a": [0, 3], way: [1, 2]}, x, WAYS)
    assert small.a.weight.shape == (6, 6)  # it is narrower, and what it gave is put in place
    assert small.get_submodule(way).weight.shape == (6, 8)
    assert small.get_submodule(other).weight.shape == (8, 8)


@PATHS
def test_a_norm_that_was_not_seen_reads_all_channels() -> None:
    model, x = made(Normed), noise(5, 2)
    small = check_every_way(model, {"b": [0, 1], "c": [3]}, x, WAYS)
    assert small.b.weight.shape == (6, 8)
    # What is removed from the first layer is zero behind the norm that was seen, and only there.
    check_every_way(model, {"a": [0, 3]}, x, WAYS)


def test_it_is_said_and_the_line_named() -> None:
    model, x = made(Branch), noise(5, 2)
    where = line_of(Branch, "x.mean() > 0")
    with pytest.warns(PathWarning, match=rf"__bool__ at {where}.* c did not run") as caught:
        sosp.find_structures(model, x)
    assert caught[0].filename == __file__
    flow = sosp.trace(model, x)
    (pin,) = (p for p in flow.pinned if p.op == "__bool__")
    assert (pin.where, pin.layers) == (where, ("a", "b", "head"))
    assert "c did not" in pin.why
    assert "did not run on the example: c" in str(flow)


class Experts(nn.Module):
    """A mixture of experts: every row goes to one."""

    def __init__(self, count: bool = False) -> None:
        super().__init__()
        self.count = count
        self.gate, self.head = nn.Linear(6, 4), nn.Linear(6, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6)) for _ in range(4)
        )

    def forward(self, x: Tensor) -> Tensor:
        p = self.gate(x).softmax(-1)
        out, best = torch.zeros_like(x), p.argmax(-1)
        for i, expert in enumerate(self.experts):
            if self.count:
                rows = (best == i).nonzero()[:, 0]
                out = out.index_add(0, rows, p[rows, i : i + 1] * expert(x[rows])) if len(rows) else out
            elif (best == i).any():
                out[best == i] = p[best == i, i : i + 1] * expert(x[best == i])
        return self.head(x + out)


@PATHS
@pytest.mark.parametrize("count", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_experts_that_ran_get_smaller_inside(count: bool, seed: int) -> None:
    model, x = made(lambda: Experts(count)), noise(40, seed=seed)[:3]
    flow = sosp.trace(model, x)
    seen = [i for i in range(4) if f"experts.{i}.0" not in flow.unused_modules]
    assert 0 < len(seen) < 4
    layers = [layer.name for layer in sosp.find_structures(model, x).layers]
    assert [n for n in layers if n.endswith(".0")] == [f"experts.{i}.0" for i in seen]
    removed = {f"experts.{i}.0": [0, 2, 5] for i in seen} | {f"experts.{i}.3": [1] for i in seen}
    small = check_every_way(model, removed, x, [noise(40, seed=9), *noise(40, seed=9).split(3)])
    for i, expert in enumerate(small.experts):
        assert expert[0].weight.shape == ((5, 6) if i in seen else (8, 6))
        assert expert[3].weight.shape == ((5, 5) if i in seen else (6, 8))


class Skips(nn.Module):
    """All layers run on the example; fewer do where the first one gives little."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        if y.sum() > 1e-3:
            y = self.b(y).relu()
        return self.head(y)


def test_where_every_layer_ran_there_is_a_warning() -> None:
    with pytest.warns(PathWarning, match=rf"__bool__ at {line_of(Skips, 'y.sum()')}.*sosp\.masked"):
        sosp.find_structures(made(Skips), noise(5))


class Sentences(nn.Module):
    """Looks at which words are padding, as transformers do; with ``deep`` at what the layers made of them."""

    def __init__(self, deep: bool) -> None:
        super().__init__()
        self.words, self.b, self.head, self.deep = nn.Embedding(9, 6), nn.Linear(6, 8), nn.Linear(8, 3), deep
        self.register_buffer("places", torch.arange(5))

    def forward(self, words: Tensor) -> Tensor:
        there = (words > 0) & (self.places < 4)
        y = self.b(self.words(words))
        if (y if self.deep else there.float()).sum() != 0.5:
            y = y * there.float().unsqueeze(-1)
        return self.head(y.relu().mean(1))


def test_a_look_at_what_is_padding_needs_no_warning() -> None:
    words = torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(0))
    model = Sentences(deep=False)
    assert len(sosp.find_structures(model, words)) == 8  # warnings are errors here
    with pytest.warns(PathWarning, match="values of tensors"):
        sosp.find_structures(Sentences(deep=True), words)


@PATHS
def test_where_the_cut_itself_changes_the_way_both_ways_work() -> None:
    """Without most of its channels the first layer gives little: the smaller network, and the masked one, skip."""
    model, x = made(Skips), noise(5)
    with torch.no_grad():
        model.a.weight[1:], model.a.bias[1:] = 1e-9, 1e-9
    mask = sosp.Mask.from_removed(model, {"a": [0], "b": [2, 4]}, x)
    with torch.no_grad():
        assert model.a(x).relu().sum() > 1e-3 > sosp.masked(model, mask).a(x).relu().sum()
    check_every_way(model, {"a": [0], "b": [2, 4]}, x, [x, 1e12 * x])


class Sizes(Branch):
    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        y = self.b(y) if x.shape[-1] > 5 else self.c(y)
        return self.head(y.relu())


class Leftover(Branch):
    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.b(self.a(x).relu()).relu())


class Calibrated(Leftover):
    """Looks at numbers of its own, not at what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if self.c.bias.sum().item() < 1e9 else self.c(x)


@pytest.mark.parametrize("cls", [Sizes, Leftover, Calibrated])
def test_layers_that_no_value_brings_in_cost_nothing(cls: type[Branch]) -> None:
    model, x = made(cls), noise(5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert [layer.name for layer in sosp.find_structures(model, x).layers] == ["a", "b"]
        flow = sosp.trace(model, x)
        assert [s.pinned for s in flow.streams if s.producers != ("head",)] == [0, 0]
        small = check_every_way(model, {"a": [0, 3], "b": [1]}, x, [x])
    if cls is not Calibrated:
        assert flow.unused_modules == ("c",)
    assert small.b.weight.shape == (7, 6)
    assert small.head.in_features == 7


@PATHS
def test_a_mask_of_a_layer_that_another_example_does_not_run() -> None:
    model = made(Branch)
    mask = sosp.Mask.from_removed(model, {"b": [0]}, noise(5, 2))
    with pytest.raises(StructureError, match=r"'b'.*does not run on the example"):
        sosp.shrink(model, mask, noise(5, -2))
    with pytest.raises(StructureError, match="'c'"):
        sosp.Mask.from_removed(model, {"c": [0]}, noise(5, 2))


@PATHS
@pytest.mark.parametrize(("rows", "compared"), [(5, [5]), (20, [8, 8, 4]), (100, [8] * 8)])
def test_more_rows_are_compared_where_values_decide(
    rows: int, compared: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    check = shrink._check_rows

    def counted(small: nn.Module, masked: nn.Module, inputs: Tensor, modes: tuple[str, ...]) -> None:
        seen.append(len(inputs))
        check(small, masked, inputs, modes)

    monkeypatch.setattr(shrink, "_check_rows", counted)
    for cls, wanted in ((Branch, compared), (Leftover, compared[:1])):
        model, x = made(cls), noise(rows, 2)
        sosp.shrink(model, sosp.Mask.from_removed(model, {"a": [0]}, x), x)
        assert seen == wanted
        seen.clear()


@PATHS
def test_what_differs_names_the_line_that_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = made(Branch), noise(5, 2)
    mask = sosp.Mask.from_removed(model, {"a": [0], "b": [1]}, x)
    monkeypatch.setattr(shrink, "set_rows_to_zero", lambda small, *rest: nn.init.ones_(small.b.bias))
    with pytest.raises(SurgeryError) as caught:
        sosp.shrink(model, mask, x)
    for word in ("out_features", f"__bool__ at {line_of(Branch, 'x.mean() > 0')}", "exclude=", "a, b", "sosp.masked"):
        assert word in str(caught.value)


class Told(nn.Module):
    """One of two layers, by what it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(6, 8), nn.Linear(8, 6), nn.Linear(8, 6)

    def forward(self, x: Tensor, way: bool) -> Tensor:
        y = self.a(x).relu()
        return self.b(y) if way else self.c(y)


class Router(nn.Module):
    """Decides, and all of its layers run."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: Tensor) -> tuple[Tensor, bool]:
        y = self.second(self.first(x).relu())
        return y, bool(x.mean() > 0)


class Routed(nn.Module):
    """One module decides, another one goes that way, and a third has nothing to do with it."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.told, self.head = Router(), Told(), nn.Linear(6, 3)
        self.apart = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))

    def forward(self, x: Tensor) -> Tensor:
        y, way = self.router(x)
        return self.head(self.apart(x) + y + self.told(x, way))


@PATHS
def test_the_module_that_decides_and_the_one_that_is_told_keep_what_another_way_reads() -> None:
    model, x = made(Routed), noise(5, 2)
    assert sosp.trace(model, x).unused_modules == ("told.c",)
    small = check_every_way(model, {"told.a": [0, 3], "router.first": [4], "apart.0": [1, 2]}, x, WAYS)
    assert (small.told.b.in_features, small.router.second.in_features) == (8, 8)
    assert (small.apart[0].out_features, small.apart[2].in_features) == (6, 6)
    (pin,) = (p for p in sosp.trace(model, x).pinned if p.op == "__bool__")
    assert {"router.first", "told.a"} <= set(pin.layers)
    assert "apart.0" not in pin.layers


@PATHS
def test_where_every_layer_ran_no_width_is_kept() -> None:
    model, x = made(Skips), noise(5)
    assert {p.op for p in sosp.trace(model, x).pinned} == {"sum", "return"}


class Borrowed(Branch):
    """Uses the weight of a layer by hand, and not its bias."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        y = self.b(y) if x.mean() > 0 else y
        return self.head(nn.functional.linear(y, self.c.weight).relu())


@PATHS
def test_a_layer_whose_weight_is_used_by_hand_was_seen() -> None:
    assert sosp.trace(made(Borrowed), noise(5, 2)).unused_modules == ()


def test_a_count_of_rows_is_told_where_layers_did_not_run_and_only_there() -> None:
    model, x = made(lambda: Experts(count=True)), noise(40)
    best = model.gate(x).argmax(-1).tolist()
    x = x[[best.index(i) for i in range(4)]]  # a row for each of them
    sosp.find_structures(model, x)  # warnings are errors here
    with pytest.warns(PathWarning, match=r"nonzero at .* did not run on the example"):
        sosp.find_structures(model, x[:1])


class Decides(Branch):
    """In two lines."""

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x).relu()
        y = self.b(y) if x.mean() > 0 else self.c(y)
        return self.head(y.relu() if x.sum() > 0 else y)


@PATHS
def test_the_line_that_decides_first_is_named() -> None:
    flow = sosp.trace(made(Decides), noise(5, 2))
    (pin,) = (p for p in flow.pinned if p.op == "__bool__")
    assert pin.where == line_of(Decides, "x.mean() > 0")


def test_three_names_are_listed_and_the_rest_counted() -> None:
    assert format_names(("a", "b", "c")) == "a, b, c"
    assert format_names(("a", "b", "c", "d")) == "a, b, c and 1 more"
    assert format_names(("a", "b", "c", "d", "e")) == "a, b, c and 2 more"


# --- batches whose tensors have first axes that differ


class Illustrated(nn.Module):
    """Every text has an image, and the images are laid out as one list of patches; texts know how many are theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.patch, self.token, self.mix, self.head = nn.Linear(2, 5), nn.Linear(3, 5), nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, patches: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
        images = self.patch(patches).relu().split(counts.tolist())
        x = torch.stack([image.mean(0) for image in images]) + self.token(tokens).mean(1).relu()
        return self.head(self.mix(x).relu())


class Owned(Illustrated):
    """The same without a look at values: an index array says whose a patch is."""

    def forward(self, patches: Tensor, tokens: Tensor, owner: Tensor) -> Tensor:
        images = torch.zeros(len(tokens), 5, dtype=patches.dtype, device=patches.device)
        images = images.index_add(0, owner, self.patch(patches).relu())
        return self.head(self.mix(images + self.token(tokens).mean(1).relu()).relu())


def illustrated(model: type[nn.Module], examples: int) -> dict[str, Tensor]:
    """Texts of seven tokens with one to three patches each."""
    generator = torch.Generator().manual_seed(2)
    counts = torch.arange(examples) % 3 + 1
    total = int(counts.sum())
    places = {"counts": counts} if model is Illustrated else {"owner": torch.arange(examples).repeat_interleave(counts)}
    return {
        "patches": torch.randn(total, 2, generator=generator).double(),
        "tokens": torch.randn(examples, 7, 3, generator=generator).double(),
        **places,
    }


@PATHS
@pytest.mark.parametrize("model", [Illustrated, Owned])
@pytest.mark.parametrize("examples", [1, 3, 12])
def test_a_model_that_runs_only_on_its_whole_batch_is_pruned(model: type[nn.Module], examples: int) -> None:
    net, x = made(model).double(), illustrated(model, examples)
    data = [(x, torch.arange(examples) % 4)] * 2
    pruned = sosp.prune(net, data, ratio=0.4, repair=False, scoring=sosp.Scoring(examples=2))
    assert {layer.name for layer in pruned.saliency.structures.layers} == {"patch", "token", "mix"}
    assert pruned.cost_after.params < pruned.cost_before.params
    # Sums of at most 7 terms in double precision.
    torch.testing.assert_close(pruned.model(**x), sosp.masked(net, pruned.mask)(**x), atol=1e-12, rtol=0)


# --- whose error it is


def test_an_error_of_the_trace_is_not_reported_as_one_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise IndexError("ours")

    monkeypatch.setattr(Tracer, "label_outputs", fail)
    words = r"cannot be followed: IndexError: ours\. The model itself runs on the example.*report it"
    with pytest.raises(StructureError, match=words):
        sosp.trace(made(Branch), noise(5))


def test_an_error_of_the_recorder_is_not_reported_as_one_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise IndexError("ours")

    monkeypatch.setattr(Recorder, "size", fail)
    with pytest.raises(
        StructureError, match=r"cannot be traced .*IndexError: ours\. The model itself runs .*report it"
    ):
        sosp.find_structures(made(Branch), noise(5))


@pytest.mark.parametrize("job", [sosp.trace, sosp.find_structures])
def test_an_error_of_the_model_is_reported_as_its_own(job: Callable[..., Any]) -> None:
    class Fails(Branch):
        def forward(self, x: Tensor) -> Tensor:
            raise IndexError("theirs")

    with pytest.raises(StructureError, match=r"does not run on the example \(shapes \(5, 6\)\): IndexError: theirs"):
        job(made(Fails), noise(5))


@pytest.mark.parametrize("training", [False, True])
def test_looking_for_the_error_of_a_model_leaves_no_trace(training: bool) -> None:
    class Counts(Branch):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))
            self.norm = nn.BatchNorm1d(3)

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            self.kept = self.norm(super().forward(x))
            return torch.rand(()) * self.kept

    model = made(Counts).train(training)
    with check_unchanged(model):
        assert find_model_error(model, noise(5)) is None
        assert isinstance(find_model_error(model, noise(5)[:, :2]), RuntimeError)
