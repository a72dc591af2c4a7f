"""Attention as people write it: views with the sizes of the heads stored, inferred or computed."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.recipe import Recipe


class Block(nn.Module):
    """A residual attention layer of two heads of size 3 over tokens of size 4; ``attend`` is the subclass's."""

    def __init__(self, heads: int = 2, dim: int = 3) -> None:
        super().__init__()
        self.heads, self.dim = heads, dim
        self.embed = nn.Linear(3, 4)
        self.norm = nn.LayerNorm(4)
        self.layers(heads * dim)
        self.proj = nn.Linear(heads * dim, 4)
        self.head = nn.Linear(4, 3)

    def layers(self, width: int) -> None:
        self.q, self.k, self.v = nn.Linear(4, width), nn.Linear(4, width), nn.Linear(4, width)

    def attend(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.proj(self.attend(self.norm(x)))
        return self.head(x.mean(1))


class ByHand(Block):
    """Sizes from attributes, as in minGPT."""

    def attend(self, x: Tensor) -> Tensor:
        B, N, _ = x.size()
        q = self.q(x).view(B, N, self.heads, self.dim).transpose(1, 2)
        k = self.k(x).view(B, N, self.heads, self.dim).transpose(1, 2)
        v = self.v(x).view(B, N, self.heads, self.dim).transpose(1, 2)
        weights = F.softmax((q @ k.transpose(-2, -1)) * self.dim**-0.5, dim=-1)
        return (weights @ v).transpose(1, 2).contiguous().view(B, N, self.heads * self.dim)


class HuggingFace(Block):
    """The number of heads is inferred, so that whole heads can go."""

    def attend(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = torch.matmul(q, k.transpose(2, 3)) * self.dim**-0.5
        out = torch.matmul(F.softmax(weights, dim=-1), v).transpose(1, 2).contiguous()
        return out.reshape(*x.shape[:-1], -1).contiguous()


class ScaledDotProduct(Block):
    """The size of a head is inferred: values may lose a channel of every head. Queries may not: it sets the scale."""

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)


class Einsum(Block):
    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)) for layer in (self.q, self.k, self.v))
        weights = torch.einsum("bnhd,bmhd->bhnm", q, k).mul(0.5).softmax(-1)
        return torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2)


class Fused(Block):
    """timm's: one layer for queries, keys and values; the size of a head comes from the stream."""

    def __init__(self) -> None:
        super().__init__(2, 2)

    def layers(self, width: int) -> None:
        self.qkv = nn.Linear(4, 3 * width)

    def attend(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        qkv = self.qkv(x).reshape(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        q, k, v = qkv.unbind(0)
        weights = (q * 2**-0.5 @ k.transpose(-2, -1)).softmax(dim=-1)
        return (weights @ v).transpose(1, 2).reshape(B, N, C)


class Grouped(Block):
    """Llama's grouped queries: four heads share two of keys and values, repeated."""

    def __init__(self) -> None:
        super().__init__(4, 2)

    def layers(self, width: int) -> None:
        self.q, self.k, self.v = nn.Linear(4, width), nn.Linear(4, width // 2), nn.Linear(4, width // 2)

    def repeat(self, x: Tensor, times: int = 2) -> Tensor:
        b, heads, n, d = x.shape
        x = x[:, :, None, :, :].expand(b, heads, times, n, d)
        return x.reshape(b, heads * times, n, d)

    def attend(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(q, self.repeat(k), self.repeat(v), is_causal=True)
        return out.transpose(1, 2).reshape(*x.shape[:-1], -1)


class Rotary(Block):
    """Positions turn pairs of channels of queries and keys."""

    def __init__(self) -> None:
        super().__init__(2, 4)
        angle = torch.outer(torch.arange(5.0), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", torch.cat([angle, angle], -1).cos())
        self.register_buffer("sin", torch.cat([angle, angle], -1).sin())

    def turn(self, x: Tensor) -> Tensor:
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * self.cos + torch.cat((-b, a), dim=-1) * self.sin

    def attend(self, x: Tensor) -> Tensor:
        shape = (*x.shape[:-1], -1, self.dim)
        q, k, v = (layer(x).view(shape).transpose(1, 2) for layer in (self.q, self.k, self.v))
        out = F.scaled_dot_product_attention(self.turn(q), self.turn(k), v)
        return out.transpose(1, 2).reshape(*x.shape[:-1], -1)


class Frequencies(Rotary):
    """The angles are computed from a frequency per pair of channels, the same for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("frequency", torch.tensor([1.0, 0.1]))

    def turn(self, x: Tensor) -> Tensor:
        angle = torch.arange(5)[:, None] * self.frequency
        angle = torch.cat([angle, angle], -1)
        a, b = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return x * angle.cos() + torch.cat((-b, a), dim=-1) * angle.sin()


class RelativeBias(Block):
    """A learned bias per head and distance."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.zeros(9, 2))
        apart = torch.arange(5)[:, None] - torch.arange(5)[None, :]
        self.register_buffer("index", apart + 4)

    def attend(self, x: Tensor) -> Tensor:
        q, k, v = (layer(x).unflatten(-1, (self.heads, self.dim)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        weights = q @ k.transpose(-2, -1) + self.table[self.index].permute(2, 0, 1)
        return (weights.softmax(-1) @ v).transpose(1, 2).flatten(2)


class MultiQuery(Block):
    """All heads share one key and one value, which need no view."""

    def layers(self, width: int) -> None:
        self.q, self.k, self.v = nn.Linear(4, width), nn.Linear(4, self.dim), nn.Linear(4, self.dim)

    def attend(self, x: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (self.heads, -1))
        weights = torch.einsum("bnhd,bmd->bhnm", q, self.k(x)).softmax(-1)
        return torch.einsum("bhnm,bmd->bnhd", weights, self.v(x)).flatten(2)


class Multihead(Block):
    """torch's own: its weights are no layers of their own, and its output layer is never called."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 4)

    def layers(self, width: int) -> None:
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def attend(self, x: Tensor) -> Tensor:
        out, _ = self.attention(x, x, x, need_weights=False)
        return self.fc2(F.gelu(self.fc1(out)))


class CrossAttention(nn.Module):
    """torch's decoder layer style: a learned query reads a sequence of another width."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(1, 2, 4))
        self.memory = nn.Linear(3, 6)
        self.attention = nn.MultiheadAttention(4, 2, kdim=6, vdim=6, batch_first=True)
        self.fc = nn.Linear(4, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        memory = F.relu(self.memory(x))
        out, _ = self.attention(self.query.expand(x.shape[0], -1, -1), memory, memory)
        return self.head(F.relu(self.fc(out)).mean(1))


class EncoderLayer(nn.Module):
    """nn.TransformerEncoderLayer as it comes, which has a fused kernel of its own for inference."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.encoder = nn.TransformerEncoderLayer(4, 2, 6, dropout=0.0, batch_first=True, **options)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(x)).mean(1))


def heads(*channels: int, of: str = "q k v") -> dict[str, list[int]]:
    return {layer: list(channels) for layer in of.split()}


LAYERS = "embed q k v proj"
HEAD1 = heads(3, 4, 5)  # all of the second head

RECIPES: dict[str, Recipe] = {
    # Rows go, and zeros are put back in front of the views: their sizes are in the code.
    "attention-by-hand": Recipe(ByHand, (5, 3), LAYERS, whole="v proj"),
    "attention-hf": Recipe(HuggingFace, (5, 3), LAYERS, narrows=[("proj", HEAD1)], whole="v proj"),
    "attention-sdpa": Recipe(ScaledDotProduct, (5, 3), LAYERS, whole="q proj"),  # the code fixes the heads
    "attention-einsum": Recipe(Einsum, (5, 3), LAYERS, whole="proj"),
    "attention-fused": Recipe(Fused, (5, 3), "embed qkv proj", whole="qkv proj"),
    # Two heads of queries and the keys and values they share.
    "attention-grouped": Recipe(
        Grouped, (5, 3), LAYERS, narrows=[("proj", {"q": [4, 5, 6, 7], "k": [2, 3], "v": [2, 3]})], whole="proj"
    ),
    "attention-rotary": Recipe(Rotary, (5, 3), LAYERS, narrows=[("proj", heads(4, 5, 6, 7))], whole="proj"),
    "attention-frequencies": Recipe(Frequencies, (5, 3), LAYERS, narrows=[("proj", heads(4, 5, 6, 7))], whole="proj"),
    "attention-bias": Recipe(RelativeBias, (5, 3), LAYERS, whole="proj"),
    "attention-multiquery": Recipe(MultiQuery, (5, 3), LAYERS, narrows=[("proj", "v")], whole="proj"),
    "attention-torch": Recipe(Multihead, (5, 3), "embed fc1 fc2 proj", narrows=[("fc2", "fc1"), ("proj", "fc2")]),
    "attention-cross": Recipe(CrossAttention, (5, 3), "memory fc", narrows=[("head", "fc")]),
    "encoder-layer": Recipe(
        EncoderLayer, (5, 3), "embed encoder.linear1 encoder.linear2", narrows=[("encoder.linear2", "encoder.linear1")]
    ),
    "encoder-layer-prenorm": Recipe(
        lambda: EncoderLayer(norm_first=True, activation="gelu"),
        (5, 3),
        "embed encoder.linear1 encoder.linear2",
        narrows=[("encoder.linear2", "encoder.linear1")],
        whole="encoder.linear2",
    ),
}
