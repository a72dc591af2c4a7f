"""Networks over tokens and neurons: MLPs, gated MLPs, embeddings, class tokens, sizes stored as attributes."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.norms import RMSNorm
from networks.recipe import Recipe, tokens


def mlp() -> nn.Module:
    """A chain without names."""
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


class SwiGLUChunk(nn.Module):
    """Gate and value from one layer."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 10, bias=False)
        self.down = nn.Linear(5, 4, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        gate, value = self.up(x).chunk(2, dim=-1)
        return self.head(F.relu(self.down(F.silu(gate) * value)))


class SwiGLU(nn.Module):
    """Gate and value from two layers: the product is zero where one of them is."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(4, 6, bias=False)
        self.up_proj = nn.Linear(4, 6, bias=False)
        self.down_proj = nn.Linear(6, 4, bias=False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))))


class Language(nn.Module):
    """Words in, the next word out; the stream starts as an embedding, which is never pruned."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 4)
        self.norm = nn.LayerNorm(4)
        self.lm_head = nn.Linear(4, 7, bias=False)
        if tied:
            self.lm_head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        x = x + self.fc2(F.gelu(self.fc1(x)))
        return self.lm_head(self.norm(x))


class Llama(nn.Module):
    """One layer: RMSNorm, attention with inferred heads, RMSNorm, gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(7, 4)
        self.input_layernorm = RMSNorm(4)
        self.q_proj = nn.Linear(4, 4, bias=False)
        self.k_proj = nn.Linear(4, 4, bias=False)
        self.v_proj = nn.Linear(4, 4, bias=False)
        self.o_proj = nn.Linear(4, 4, bias=False)
        self.post_attention_layernorm = RMSNorm(4)
        self.mlp = SwiGLU()
        self.mlp.head = nn.Identity()
        self.lm_head = nn.Linear(4, 7, bias=False)

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embed_tokens(input_ids)
        h = self.input_layernorm(x)
        shape = (*h.shape[:-1], -1, 2)
        q, k, v = (p(h).view(shape).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(out.transpose(1, 2).reshape(*h.shape[:-1], -1))
        x = x + self.mlp(self.post_attention_layernorm(x))
        return self.lm_head(x)


class VisionTransformer(nn.Module):
    """Class token, position embedding and layer scale: raw parameters of the width of the stream."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 5, 2, stride=2)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 5))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 5))
        self.fc1 = nn.Linear(5, 6)
        self.fc2 = nn.Linear(6, 5)
        self.gamma = nn.Parameter(torch.ones(5))
        self.norm = nn.LayerNorm(5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat((self.cls_token.expand(x.shape[0], -1, -1), x), dim=1) + self.pos_embed
        x = x + self.gamma * self.fc2(F.gelu(self.fc1(x)))
        x = self.norm(x)
        return self.head(x[:, 0] + x[:, 1:].mean(1))


class Mixer(nn.Module):
    """MLP-Mixer: one MLP over the tokens, one over the channels."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(3, 4)
        self.token1, self.token2 = nn.Linear(5, 6), nn.Linear(6, 5)
        self.channel1, self.channel2 = nn.Linear(4, 6), nn.Linear(6, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        x = x + self.token2(F.gelu(self.token1(x.transpose(1, 2)))).transpose(1, 2)
        x = x + self.channel2(F.gelu(self.channel1(x)))
        return self.head(x.mean(1))


class StoredSize(nn.Module):
    """A view to an attribute's size: zeros are put back in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden_dim = 6
        self.conv = nn.Conv2d(3, self.hidden_dim, 3, padding=1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(self.hidden_dim, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(F.relu(self.conv(x))).view(x.shape[0], self.hidden_dim)
        return self.head(F.relu(self.fc(x)))


class CheckedSize(nn.Module):
    """The forward pass insists on a width."""

    def __init__(self) -> None:
        super().__init__()
        self.width = 6
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.fc1(x))
        if x.shape[-1] != self.width:
            raise ValueError(f"expected {self.width} features, got {x.shape[-1]}")
        return self.head(F.relu(self.fc2(x / x.shape[-1] ** 0.5)))


class Dropouts(nn.Module):
    """Dropout as a module, by channel and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.drop_channels = nn.Dropout2d(0.3)
        self.fc1 = nn.Linear(5 * 16, 6)
        self.drop = nn.Dropout(0.5)
        self.fc2 = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop_channels(F.relu(self.conv(x))).flatten(1)
        x = self.drop(F.relu(self.fc1(x)))
        return self.head(F.dropout(F.relu(self.fc2(x)), 0.4, self.training))


RECIPES: dict[str, Recipe] = {
    "mlp-plain": Recipe(mlp, (4,), "0 2", narrows=[("2", "0"), ("4", "2")]),
    "swiglu-chunk": Recipe(
        SwiGLUChunk, (4,), "up down", narrows=[("down", {"up": [1, 6]}), ("head", "down")]
    ),
    "swiglu": Recipe(
        SwiGLU,
        (4,),
        "gate_proj up_proj down_proj",
        narrows=[("down_proj", "gate_proj up_proj"), ("down_proj", "gate_proj"), ("down_proj", "up_proj")],
        frees=[("gate_proj", "up_proj"), ("up_proj", "gate_proj")],
    ),
    "language": Recipe(
        lambda: Language(tied=False), tokens(5, 7), "fc1 fc2", narrows=[("fc2", "fc1")], whole="fc1 fc2"
    ),
    "language-tied": Recipe(
        lambda: Language(tied=True), tokens(5, 7), "fc1 fc2", narrows=[("fc2", "fc1")], whole="fc1 fc2"
    ),
    "llama": Recipe(
        Llama,
        tokens(5, 7),
        "q_proj k_proj v_proj o_proj mlp.gate_proj mlp.up_proj mlp.down_proj",
        narrows=[
            ("o_proj", {"q_proj": [2, 3], "k_proj": [2, 3], "v_proj": [2, 3]}),
            ("mlp.down_proj", "mlp.gate_proj mlp.up_proj"),
        ],
        whole="o_proj mlp.down_proj v_proj",
    ),
    # The class token and the positions are always there: no channel of the stream is zero.
    "vision-transformer": Recipe(
        VisionTransformer, (3, 4, 4), "patch fc1 fc2", narrows=[("fc2", "fc1")], whole="fc2"
    ),
    "mixer": Recipe(
        Mixer,
        (5, 3),
        "embed token1 token2 channel1 channel2",
        narrows=[("token2", "token1"), ("channel2", "channel1")],
        whole="token2 channel2",
    ),
    "stored-size": Recipe(StoredSize, (3, 4, 4), "conv fc", narrows=[("head", "fc")]),
    "checked-size": Recipe(CheckedSize, (4,), "fc1 fc2", narrows=[("head", "fc2")]),
    "dropout": Recipe(
        Dropouts, (3, 4, 4), "conv fc1 fc2", narrows=[("fc1", "conv"), ("fc2", "fc1"), ("head", "fc2")]
    ),
}  # fmt: skip
