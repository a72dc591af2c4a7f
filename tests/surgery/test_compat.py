"""A shrunk network is an ordinary network: it copies, saves, exports, compiles, trains and moves like any other."""

import io
import shutil
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import sosp
from networks import case
from networks.compare import all_apart, apart, loss_of, mask_of, outputs, some_channels
from networks.recipe import randomise
from sosp.core.layers import Scatter

# Residual adds, concatenations, depthwise filters with squeeze-and-excitation, tokens, attention, zeros put back.
NAMES = ["resnet", "densenet", "mobilenet-v3", "vision-transformer", "attention-sdpa", "flatten-constant"]
CASES = pytest.mark.parametrize("name", NAMES)
CONVS = pytest.mark.parametrize("name", NAMES[:4])  # the last one's view does not take any other memory layout

# The same float32 sums, perhaps in another order; other programs may also fold a batch norm into a convolution.
SAME = 1e-5
# 8 bits of mantissa, some ten layers, results of size 1.
BFLOAT = 0.1
HALF = 0.02  # 11 bits


def pair(name: str, seed: int | None = None) -> tuple[nn.Module, nn.Module, Tensor]:
    """The shrunk and the masked network in float32 and eval mode, with an example; with a seed, other weights."""
    c = case(name)
    model, x = c.model.float(), c.example.float()
    if seed is not None:
        randomise(model, torch.Generator().manual_seed(seed))
    mask = mask_of(case(name).model, some_channels(c, 0.3), case(name))
    return sosp.shrink(model, mask, x), sosp.masked(model, mask), x


def check_same(a: Tensor, b: Tensor, bound: float = SAME) -> None:
    worst = apart(a, b)
    assert worst < bound


# --- copies and files


@CASES
def test_deepcopy_is_a_network_of_its_own(name: str) -> None:
    small, _, x = pair(name)
    before = small(x)
    twin = deepcopy(small)
    assert torch.equal(twin(x), before)
    with torch.no_grad():
        for p in twin.parameters():
            p.mul_(1.5)
    assert torch.equal(small(x), before)
    assert not torch.allclose(twin(x), before)


@CASES
def test_the_state_dict_goes_into_another_shrunk_copy(name: str) -> None:
    small, _, x = pair(name)
    other, _, _ = pair(name, seed=1)
    assert set(small.state_dict()) <= set(case(name).model.state_dict())
    assert not torch.allclose(other(x), small(x))
    file = io.BytesIO()
    torch.save(small.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(other(x), small(x))


@CASES
def test_it_pickles_whole(name: str) -> None:
    small, _, x = pair(name)
    file = io.BytesIO()
    torch.save(small, file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=False)(x), small(x))


# --- other programs


@CASES
def test_export(name: str) -> None:
    small, _, x = pair(name)
    batch = torch.export.Dim("batch", min=2, max=64)
    program = torch.export.export(small, (x,), dynamic_shapes=((({0: batch}),) if batch_is_free(name) else None))
    check_same(program.module()(x), small(x))
    if batch_is_free(name):
        check_same(program.module()(x[:3]), small(x[:3]))


def batch_is_free(name: str) -> bool:
    return name != "flatten-constant"  # view(-1, 20) ties the batch to the width


@pytest.fixture
def fresh_compiler() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("training", [False, True])
@CASES
def test_compile_in_one_graph(name: str, training: bool, fresh_compiler: None) -> None:
    small, _, x = pair(name)
    wanted = outputs(deepcopy(small), x, training)
    compiled = torch.compile(small, backend="eager", fullgraph=True)
    assert all_apart(outputs(compiled, x, training), wanted) < SAME


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch's own, of its own parts
@pytest.mark.skipif(shutil.which("g++") is None, reason="inductor needs a C++ compiler")
def test_compile_to_machine_code(fresh_compiler: None) -> None:
    small, _, x = pair("flatten-constant")  # some 20 seconds for the first program on a machine, whatever it is
    with torch.no_grad():
        check_same(torch.compile(small, backend="inductor", fullgraph=True)(x), small(x))


@pytest.mark.filterwarnings("ignore")  # the exporter's own, of its own parts
@CASES
def test_onnx(name: str, tmp_path: Path) -> None:
    for package in ("onnx", "onnxscript"):
        pytest.importorskip(package)
    runtime = pytest.importorskip("onnxruntime")
    small, _, x = pair(name)
    file = tmp_path / "small.onnx"
    torch.onnx.export(small, (x,), str(file), dynamo=True, verbose=False)
    session = runtime.InferenceSession(str(file), providers=["CPUExecutionProvider"])
    (found,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    check_same(torch.from_numpy(found), small(x))


# --- training


@pytest.fixture
def one_process(tmp_path: Path) -> Iterator[None]:
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


@CASES
def test_distributed_data_parallel(name: str, one_process: None) -> None:
    small, masked, x = pair(name)
    parallel = nn.parallel.DistributedDataParallel(small.train())
    mine, theirs = outputs(parallel, x, training=True), outputs(masked, x, training=True)
    assert all_apart(mine, theirs) < SAME
    loss_of(mine).backward()
    assert all(p.grad is not None for p in small.parameters())


OPTIMISERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.AdamW(p, lr=1e-3, eps=1e-3),  # eps: gradients of exactly zero stay harmless noise
}


@pytest.mark.parametrize("optimiser", OPTIMISERS)
@CASES
def test_training_goes_the_way_of_the_masked_network(name: str, optimiser: str) -> None:
    small, masked, x = (part.double() for part in pair(name))
    losses: list[list[float]] = [[], []]
    for model, seen in zip((small, masked), losses, strict=True):
        steps = OPTIMISERS[optimiser](model.parameters())
        for _ in range(4):
            steps.zero_grad()
            (found,) = outputs(model, x, training=True)
            loss = F.mse_loss(found, torch.ones_like(found))
            loss.backward()
            steps.step()
            seen.append(float(loss.detach()))
    assert losses[0][-1] < losses[0][0]
    # float64, amplified by four steps
    assert apart(*map(torch.tensor, losses)) < 1e-8
    assert all_apart(outputs(small, x), outputs(masked, x)) < 1e-8


@CASES
def test_autocast(name: str) -> None:
    small, masked, x = pair(name)
    with torch.autocast("cpu", torch.bfloat16):
        (found,) = outputs(small, x)
    assert torch.isfinite(found).all()
    check_same(found, masked(x), BFLOAT)


@CASES
def test_autocast_trains(name: str) -> None:
    small, _, x = pair(name)
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(outputs(small, x, training=True)).float()
    loss.backward()
    assert all(torch.isfinite(p.grad).all() for p in small.parameters() if p.grad is not None)


@CASES
def test_functional_call(name: str) -> None:
    small, _, x = pair(name)
    other, _, _ = pair(name, seed=1)
    assert torch.equal(torch.func.functional_call(small, other.state_dict(), x), other(x))
    parameters = {n: p.detach() for n, p in small.named_parameters()}
    found = torch.func.grad(lambda p: loss_of([torch.func.functional_call(small, p, x)]))(parameters)
    loss_of([small(x)]).backward()
    for n, p in small.named_parameters():
        check_same(found[n], torch.zeros_like(p) if p.grad is None else p.grad, 1e-4)


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # attention's kernel is not batched
@CASES
def test_one_gradient_per_example(name: str) -> None:
    small, _, x = pair(name)
    parameters = {n: p.detach() for n, p in small.named_parameters()}

    def loss(p: dict[str, Tensor], row: Tensor) -> Tensor:
        return loss_of([torch.func.functional_call(small, p, row[None])])

    found = torch.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    loss_of([small(x[:1])]).backward()
    for n, p in small.named_parameters():
        check_same(found[n][0], torch.zeros_like(p) if p.grad is None else p.grad, 1e-4)


# --- precision, memory layout, device


@CONVS
def test_channels_last(name: str) -> None:
    small, masked, x = pair(name)
    small = small.to(memory_format=torch.channels_last)
    for training in (False, True):
        mine = outputs(small, x.to(memory_format=torch.channels_last), training)
        assert all_apart(mine, outputs(masked, x, training)) < SAME


@CASES
def test_double(name: str) -> None:
    small, masked, x = pair(name)
    found = small.double()(x.double())
    assert found.dtype == torch.float64
    check_same(found, masked.double()(x.double()), 1e-10)


@CASES
def test_half(name: str) -> None:
    small, masked, x = pair(name)
    wanted = masked(x)
    found = small.half()(x.half())
    assert found.dtype == torch.float16
    check_same(found, wanted, HALF)


@CASES
def test_a_device_without_numbers(name: str) -> None:
    small, _, x = pair(name)
    shape = small(x).shape
    found = small.to("meta")(x.to("meta"))
    assert found.device.type == "meta"
    assert found.shape == shape


INDEX = {
    "holes": [0, -1, 2, 1, -1, 4, 3],
    "in order": [0, 1, -1, 2, 3, 4, -1],
    "fewer": [3, 0, 4],
    "twice": [1, 1, 0, -1],
}


@pytest.mark.parametrize("index", INDEX.values(), ids=INDEX)
def test_a_scatter_keeps_channels_last_both_ways(index: list[int]) -> None:
    """And moves what it moves in the usual layout."""
    scatter = Scatter(torch.tensor(index), 1, 5)
    x = torch.arange(2 * 5 * 3 * 4, dtype=torch.float64).view(2, 5, 3, 4)
    wanted = torch.stack([x[:, i] if i >= 0 else 0 * x[:, 0] for i in index], 1)
    slope = torch.randn(wanted.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    back = torch.zeros_like(x)
    for j, i in enumerate(index):
        back[:, i] += slope[:, j] if i >= 0 else 0
    for layout in (torch.contiguous_format, torch.channels_last):
        given = x.to(memory_format=layout, copy=True).requires_grad_()
        found = scatter(given)
        (gradient,) = torch.autograd.grad(found, given, slope.to(memory_format=layout))
        assert torch.equal(found, wanted)
        assert torch.equal(gradient, back)
        assert found.is_contiguous(memory_format=layout)
        assert gradient.is_contiguous(memory_format=layout)


@pytest.mark.gpu
@CASES
def test_cuda(name: str) -> None:
    small, masked, x = (part.double() for part in pair(name))
    for training in (False, True):
        mine = outputs(small.cuda(), x.cuda(), training)
        assert all(t.is_cuda for t in mine)
        assert all_apart(mine, outputs(masked.cuda(), x.cuda(), training)) < 1e-10
        # CUDA's hardswish divides by a six of single precision, whatever its input.
        assert all_apart([t.cpu() for t in mine], outputs(masked.cpu(), x, training)) < 1e-6
