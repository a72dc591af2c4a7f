"""What goes in and what comes out: several inputs, dicts, named tuples, dataclasses, pyramids of feature maps."""

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from networks.recipe import EXAMPLES, Recipe, floats


class TwoInputs(nn.Module):
    """Pictures and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 5, 3, padding=1)
        self.fc = nn.Linear(4, 5)
        self.mix = nn.Linear(10, 6)
        self.head = nn.Linear(6, 3)

    def forward(self, image: Tensor, numbers: Tensor) -> Tensor:
        x = torch.cat([F.relu(self.conv(image)).amax((2, 3)), F.relu(self.fc(numbers))], -1)
        return self.head(F.relu(self.mix(x)))


class Keywords(nn.Module):
    """As Hugging Face models are called: a mask hides words; a dict with a name for the result comes back."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 5)
        self.classifier = nn.Linear(5, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, **unused: Any) -> dict[str, Tensor]:
        x = F.gelu(self.fc2(F.gelu(self.fc1(self.embed(input_ids)))))
        if attention_mask is not None:
            x = x.masked_fill(attention_mask[..., None] == 0, 0.0)
        return {"logits": self.classifier(x.sum(1))}


class Graph(NamedTuple):
    nodes: Tensor
    weights: Tensor


@dataclass
class Prediction:
    scores: Tensor
    parts: list[Tensor]


class GraphNet(nn.Module):
    """A named tuple in, a dataclass out."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.Linear(3, 5)
        self.update = nn.Linear(8, 6)
        self.score = nn.Linear(6, 3)
        self.part = nn.Linear(5, 2)

    def forward(self, graph: Graph) -> Prediction:
        messages = torch.matmul(graph.weights.softmax(-1), F.relu(self.message(graph.nodes)))
        nodes = F.relu(self.update(torch.cat([graph.nodes, messages], -1)))
        return Prediction(self.score(nodes.mean(1)), [self.part(messages)])


class Pyramid(nn.Module):
    """A feature pyramid: every level comes back under its name; the top-down path adds them up."""

    def __init__(self) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(3, 4, 3, stride=2, padding=1)
        self.c2 = nn.Conv2d(4, 6, 3, stride=2, padding=1)
        self.lateral1 = nn.Conv2d(4, 5, 1)
        self.lateral2 = nn.Conv2d(6, 5, 1)
        self.out1 = nn.Conv2d(5, 2, 3, padding=1)
        self.out2 = nn.Conv2d(5, 2, 3, padding=1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        c1 = F.relu(self.c1(x))
        c2 = F.relu(self.c2(c1))
        p2 = self.lateral2(c2)
        p1 = self.lateral1(c1) + F.interpolate(p2, size=c1.shape[-2:], mode="nearest")
        return OrderedDict([("p1", self.out1(p1)), ("p2", self.out2(p2))])


class Features(nn.Module):
    """Logits and the hidden features they were made from, which must keep their width."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 5)
        self.head = nn.Linear(5, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = F.relu(self.fc2(F.relu(self.fc1(x))))
        return {"logits": self.head(hidden), "features": hidden}


def words(generator: torch.Generator) -> dict[str, Tensor]:
    hidden = torch.ones(EXAMPLES, 5, dtype=torch.long)
    hidden[1:, 3:] = 0
    return {
        "input_ids": torch.randint(7, (EXAMPLES, 5), generator=generator),
        "attention_mask": hidden,
    }


def graph(generator: torch.Generator) -> tuple[Graph]:
    return (Graph(*floats((4, 3), (4, 4))(generator)),)


RECIPES: dict[str, Recipe] = {
    "two-inputs": Recipe(
        TwoInputs,
        floats((3, 4, 4), (4,)),
        "conv fc mix",
        narrows=[("mix", "conv"), ("mix", "conv fc"), ("head", "mix")],
        whole="conv fc",
    ),
    "keywords": Recipe(Keywords, words, "fc1 fc2", narrows=[("fc2", "fc1"), ("classifier", "fc2")]),
    "graph": Recipe(
        GraphNet,
        graph,
        "message update",
        narrows=[("update", "message"), ("part", "message"), ("score", "update")],
    ),
    "pyramid": Recipe(
        Pyramid,
        (3, 8, 8),
        "c1 c2 lateral2 lateral1",
        narrows=[
            ("c2", "c1"),
            ("lateral1", "c1"),
            ("lateral2", "c2"),
            ("out1", "lateral1 lateral2"),
            ("out2", "lateral1 lateral2"),
        ],
        whole="lateral1",
    ),
    # The features that come back keep their width: fc2 loses rows, zeros are put back.
    "features": Recipe(Features, (4,), "fc1 fc2", narrows=[("fc2", "fc1")]),
}
