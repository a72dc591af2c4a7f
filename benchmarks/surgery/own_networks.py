"""Networks of our own: encoders with decoders that segment images, and small ones with every kind of connection."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

Draw = Callable[[int, int], Any]


class DetectorHeads(nn.Module):
    """The backbone and the heads of a detector of torchvision: all that it computes with weights before the boxes."""

    def __init__(self, detector: Any) -> None:
        super().__init__()
        self.backbone = detector.backbone
        self.head = detector.head if hasattr(detector, "head") else detector.rpn.head

    def forward(self, x: Tensor) -> Tensor:
        found = tree_leaves(self.head(list(self.backbone(x).values())))
        return torch.cat([y.flatten(1) for y in found], 1)


# Segmentation: encoder x decoder --------------------------------------------------------------------------------------


def conv(into: int, out: int, kernel: int = 3, stride: int = 1, groups: int = 1) -> nn.Sequential:
    """A convolution with its norm and ReLU."""
    layer = nn.Conv2d(into, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(out), nn.ReLU())


class Residual(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(conv(into, out, 3, stride), nn.Conv2d(out, out, 3, 1, 1), nn.BatchNorm2d(out))
        self.skip = nn.Conv2d(into, out, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.skip(x))


class Inverted(nn.Module):
    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        wide = 3 * into
        self.body = nn.Sequential(conv(into, wide, 1), conv(wide, wide, 3, stride, wide), nn.Conv2d(wide, out, 1))
        self.same = into == out and stride == 1

    def forward(self, x: Tensor) -> Tensor:
        return x + self.body(x) if self.same else self.body(x)


class Squeezed(nn.Module):
    """A convolution and the gates of squeeze-and-excitation."""

    def __init__(self, into: int, out: int, stride: int) -> None:
        super().__init__()
        self.body = conv(into, out, 3, stride)
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(out, out // 4, 1), nn.ReLU(), nn.Conv2d(out // 4, out, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        return x * self.gate(x).sigmoid()


BLOCKS = {"residual": Residual, "inverted": Inverted, "squeezed": Squeezed}
WIDTHS = (16, 24, 32, 48)


class Encoder(nn.Module):
    """Feature maps at 1/2, 1/4, 1/8 and 1/16 of the image."""

    def __init__(self, block: type[nn.Module]) -> None:
        super().__init__()
        self.stem = conv(3, 16, 3)
        self.stages = nn.ModuleList(block(a, b, 2) for a, b in zip((16, *WIDTHS), WIDTHS, strict=False))

    def forward(self, x: Tensor) -> list[Tensor]:
        x = self.stem(x)
        found = []
        for stage in self.stages:
            x = stage(x)
            found.append(x)
        return found


def enlarge(x: Tensor, like: Tensor) -> Tensor:
    return F.interpolate(x, size=like.shape[-2:], mode="bilinear", align_corners=False)


class UnetDecoder(nn.Module):
    """Each level is enlarged and concatenated with the level above."""

    out = 16

    def __init__(self) -> None:
        super().__init__()
        pairs = [(48 + 32, 32), (32 + 24, 24), (24 + 16, 16)]
        self.blocks = nn.ModuleList(nn.Sequential(conv(a, b), conv(b, b)) for a, b in pairs)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        *skips, x = features
        for block, skip in zip(self.blocks, reversed(skips), strict=True):
            x = block(torch.cat([enlarge(x, skip), skip], 1))
        return x


class LinkDecoder(nn.Module):
    """Transposed convolutions; the levels are added."""

    out = 16

    def __init__(self) -> None:
        super().__init__()
        pairs = [(48, 32), (32, 24), (24, 16)]
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(a, a // 4, 1), nn.ConvTranspose2d(a // 4, a // 4, 4, 2, 1), conv(a // 4, b, 1))
            for a, b in pairs
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        *skips, x = features
        for block, skip in zip(self.blocks, reversed(skips), strict=True):
            x = block(x) + skip
        return x


class PyramidDecoder(nn.Module):
    """A feature pyramid: lateral convolutions, added from the top, and merged."""

    out = 24

    def __init__(self) -> None:
        super().__init__()
        self.lateral = nn.ModuleList(nn.Conv2d(w, 24, 1) for w in WIDTHS)
        self.smooth = nn.ModuleList(
            nn.Sequential(nn.Conv2d(24, 24, 3, 1, 1), nn.GroupNorm(4, 24), nn.ReLU()) for _ in WIDTHS
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        levels = [layer(x) for layer, x in zip(self.lateral, features, strict=True)]
        for k in reversed(range(3)):
            levels[k] = levels[k] + enlarge(levels[k + 1], levels[k])
        levels = [layer(x) for layer, x in zip(self.smooth, levels, strict=True)]
        return sum(enlarge(x, levels[0]) for x in levels)  # type: ignore[return-value]


class AtrousDecoder(nn.Module):
    """Parallel dilated convolutions and a pooled branch, and a low-level skip (DeepLabV3+)."""

    out = 32

    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList(nn.Conv2d(48, 16, 3, 1, d, d) for d in (1, 2, 4))
        self.pooled, self.low = nn.Conv2d(48, 16, 1), conv(24, 8, 1)
        self.project, self.merge = conv(64, 32, 1), conv(40, 32)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[-1]
        pooled = enlarge(self.pooled(x.mean((2, 3), keepdim=True)), x)
        x = self.project(torch.cat([*(b(x).relu() for b in self.branches), pooled], 1))
        return self.merge(torch.cat([enlarge(x, features[1]), self.low(features[1])], 1))


class PoolingDecoder(nn.Module):
    """Pooled at several sizes and concatenated (PSPNet)."""

    out = 32

    def __init__(self) -> None:
        super().__init__()
        self.levels = nn.ModuleList(nn.Sequential(nn.AdaptiveAvgPool2d(s), conv(48, 12, 1)) for s in (1, 2, 4))
        self.merge = conv(48 + 36, 32)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        x = features[-1]
        return self.merge(torch.cat([x, *(enlarge(level(x), x) for level in self.levels)], 1))


class AttentionDecoder(nn.Module):
    """Skips weighted by attention gates (Attention U-Net)."""

    out = 24

    def __init__(self) -> None:
        super().__init__()
        pairs = [(48, 32), (32, 24)]
        self.up = nn.ModuleList(nn.ConvTranspose2d(a, b, 2, 2) for a, b in pairs)
        self.query = nn.ModuleList(nn.Conv2d(b, b // 2, 1) for _, b in pairs)
        self.key = nn.ModuleList(nn.Conv2d(b, b // 2, 1) for _, b in pairs)
        self.weigh = nn.ModuleList(nn.Conv2d(b // 2, 1, 1) for _, b in pairs)
        self.merge = nn.ModuleList(conv(2 * b, b) for _, b in pairs)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        _, *skips, x = features
        for up, q, k, w, merge, skip in zip(
            self.up, self.query, self.key, self.weigh, self.merge, reversed(skips), strict=True
        ):
            x = up(x)
            skip = skip * w(F.relu(q(x) + k(skip))).sigmoid()
            x = merge(torch.cat([x, skip], 1))
        return x


DECODERS = {
    "unet": UnetDecoder, "linknet": LinkDecoder, "fpn": PyramidDecoder, "deeplab": AtrousDecoder,
    "pspnet": PoolingDecoder, "attention-unet": AttentionDecoder,
}  # fmt: skip


class Segmenter(nn.Module):
    def __init__(self, block: type[nn.Module], decoder: Callable[[], Any]) -> None:
        super().__init__()
        self.encoder, self.decoder = Encoder(block), decoder()
        self.head = nn.Conv2d(self.decoder.out, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        return enlarge(self.head(self.decoder(self.encoder(x))), x)


# Connections of every kind, as in the tests of Torch-Pruning ----------------------------------------------------------


class Function(nn.Module):
    """Layers by name, and what forward does with them."""

    def __init__(self, forward: Callable[..., Any], **layers: nn.Module | nn.Parameter) -> None:
        super().__init__()
        for name, layer in layers.items():
            setattr(self, name, layer)
        self.function = forward

    def forward(self, *args: Tensor, **kwargs: Tensor) -> Any:
        return self.function(self, *args, **kwargs)


def concat() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = torch.cat([m.a(x), m.b(x), m.c(x)], 1)
        return m.head(m.d(torch.cat([y, m.b(x)], 1)).mean((2, 3)))

    layers = {"a": conv(3, 16), "b": conv(3, 24), "c": conv(3, 8), "d": conv(72, 32)}
    return Function(forward, head=nn.Linear(32, 5), **layers)


def split() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        a, b, c = m.a(x).split([8, 16, 24], 1)
        return m.head(torch.cat([m.b(a), m.c(b), m.d(c)], 1).mean((2, 3)))

    return Function(forward, a=conv(3, 48), b=conv(8, 16), c=conv(16, 16), d=conv(24, 16), head=nn.Linear(48, 5))


def concat_split() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = torch.cat([m.a(x), m.b(x)], 1)
        left, right = x.chunk(2, 1)
        return m.head(torch.cat([m.c(left) + m.d(right), right], 1).mean((2, 3)))

    return Function(forward, a=conv(3, 16), b=conv(3, 32), c=conv(24, 24), d=conv(24, 24), head=nn.Linear(48, 5))


def reshape() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        x = F.adaptive_avg_pool2d(m.a(x), 4)
        x = m.fc(x.reshape(len(x), -1)).relu()
        return m.head(x.view(len(x), 4, 8).transpose(1, 2).flatten(1))

    return Function(forward, a=conv(3, 16), fc=nn.Linear(256, 32), head=nn.Linear(32, 5))


def parameters() -> nn.Module:
    """Parameters that are used by hand: a scale, a shift, a token."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.b(m.a(x) * m.scale + m.shift).flatten(2).transpose(1, 2)
        x = torch.cat([m.token.expand(len(x), -1, -1), x], 1)
        return m.head(m.c(x).relu()[:, 0])

    return Function(
        forward, a=conv(3, 24), b=conv(24, 32, 3, 8), c=nn.Linear(32, 48), head=nn.Linear(48, 5),
        scale=nn.Parameter(torch.ones(24, 1, 1)), shift=nn.Parameter(torch.zeros(1, 24, 1, 1)),
        token=nn.Parameter(torch.zeros(1, 1, 32)),
    )  # fmt: skip


def two_inputs() -> nn.Module:
    def forward(m: Any, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        z = m.a(x) + m.b(y)
        return {"logits": m.head(m.c(z).mean((2, 3))), "aux": m.aux(z).mean((2, 3))}

    return Function(forward, a=conv(3, 24), b=conv(3, 24), c=conv(24, 32), aux=conv(24, 7), head=nn.Linear(32, 5))


def grouped() -> nn.Module:
    layers = [conv(3, 32), conv(32, 64, groups=4), conv(64, 64, groups=64), conv(64, 32, 1), conv(32, 48, groups=8)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 5))


def transposed() -> nn.Module:
    layers = [
        conv(3, 24, 3, 2),
        conv(24, 32, 3, 2),
        nn.ConvTranspose2d(32, 24, 4, 2, 1),
        nn.BatchNorm2d(24),
        nn.PReLU(24),
    ]
    return nn.Sequential(
        *layers,
        nn.ConvTranspose2d(24, 16, 2, 2, groups=4),
        nn.InstanceNorm2d(16, affine=True),
        nn.Conv2d(16, 3, 3, 1, 1),
    )


def lenet() -> nn.Module:
    features = [nn.Conv2d(3, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.AdaptiveMaxPool2d(5)]
    return nn.Sequential(
        *features, nn.Flatten(), nn.Linear(400, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)
    )


def shared() -> nn.Module:
    """One layer at two depths, and one module under two names."""

    def forward(m: Any, x: Tensor) -> Tensor:
        x = m.a(x)
        return m.head(m.b(m.twice(m.twice(x)) + x).mean((2, 3)))

    return Function(forward, a=conv(3, 24), twice=conv(24, 24), b=conv(24, 32), head=nn.Linear(32, 5))


def dense_block() -> nn.Module:
    def forward(m: Any, x: Tensor) -> Tensor:
        for layer in m.layers:
            x = torch.cat([x, layer(x)], 1)
        return m.head(x.mean((2, 3)))

    layers = nn.ModuleList(
        nn.Sequential(nn.BatchNorm2d(3 + 16 * k), nn.ReLU(), nn.Conv2d(3 + 16 * k, 16, 3, 1, 1)) for k in range(5)
    )
    return Function(forward, layers=layers, head=nn.Linear(83, 5))


def shuffled() -> nn.Module:
    layers = [conv(3, 32), conv(32, 64, 1, groups=4), nn.ChannelShuffle(4), conv(64, 64, 3, groups=64), conv(64, 48, 1)]
    return nn.Sequential(
        *layers, nn.PixelShuffle(2), conv(12, 24), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(24, 5)
    )


def pixel_embedding() -> nn.Module:
    """A super-resolution network."""

    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.a(x)
        for block in m.blocks:
            y = y + block(y)
        return F.pixel_shuffle(m.up(y), 2) + enlarge(x, F.pixel_shuffle(m.up(y), 2))

    blocks = nn.ModuleList(
        nn.Sequential(nn.Conv2d(24, 32, 3, 1, 1), nn.ReLU(), nn.Conv2d(32, 24, 3, 1, 1)) for _ in range(3)
    )
    return Function(forward, a=nn.Conv2d(3, 24, 3, 1, 1), blocks=blocks, up=nn.Conv2d(24, 12, 3, 1, 1))


def torch_encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 64, 0.0, batch_first=True, norm_first=norm_first)
    return Function(
        lambda m, x: m.head(m.body(m.embed(x)).mean(1)),
        embed=nn.Linear(8, 32), body=nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), head=nn.Linear(32, 5),
    )  # fmt: skip


def torch_transformer() -> nn.Module:
    body = nn.Transformer(32, 4, 2, 2, 64, 0.0, batch_first=True)
    return Function(
        lambda m, x: m.head(m.body(m.embed(x), m.embed(x[:, :5]))),
        embed=nn.Linear(8, 32), body=body, head=nn.Linear(32, 5),
    )  # fmt: skip


def recurrent() -> nn.Module:
    return Function(
        lambda m, x: m.head(m.b(m.rnn(m.a(x).relu())[0][:, -1]).relu()),
        a=nn.Linear(8, 64), rnn=nn.GRU(64, 16, batch_first=True), b=nn.Linear(16, 64), head=nn.Linear(64, 5),
    )  # fmt: skip


def waves() -> nn.Module:
    """A temporal convolutional network over a wave."""
    layers: list[nn.Module] = [nn.Conv1d(1, 24, 9, 4), nn.BatchNorm1d(24), nn.ReLU()]
    for d in (1, 2, 4):
        layers += [nn.Conv1d(24, 24, 3, 1, d, d), nn.GELU(), nn.GroupNorm(4, 24)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(24, 5))


def perceptron() -> nn.Module:
    layers = [nn.Linear(8, 64), nn.LayerNorm(64), nn.GELU(), nn.Linear(64, 64), nn.BatchNorm1d(64), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(64, 1))


def _images(batch: int, length: int) -> Tensor:
    return torch.randn(batch, 3, 32, 32)


def _sequences(batch: int, length: int) -> Tensor:
    return torch.randn(batch, length, 8)


TABLE: dict[str, tuple[Callable[[], nn.Module], Draw]] = {
    **{
        f"{decoder}-{block}": (lambda d=decoder, b=block: Segmenter(BLOCKS[b], DECODERS[d]), _images)  # type: ignore[misc]
        for decoder, block in product(DECODERS, BLOCKS)
    },
    **{
        f.__name__: (f, _images)
        for f in (
            *(concat, split, concat_split, reshape, parameters, grouped, transposed, lenet, shared, dense_block),
            *(shuffled, pixel_embedding),
        )
    },
    "two_inputs": (two_inputs, lambda batch, length: {key: _images(batch, length) for key in "xy"}),
    "torch_encoder": (lambda: torch_encoder(False), _sequences),
    "torch_encoder_pre_norm": (lambda: torch_encoder(True), _sequences),
    "torch_transformer": (torch_transformer, _sequences),
    "recurrent": (recurrent, _sequences),
    "waves": (waves, lambda batch, length: torch.randn(batch, 1, 50 * length)),
    "perceptron": (perceptron, lambda batch, length: torch.randn(batch, 8)),
}  # fmt: skip
