"""What counts among the outputs of a network, and what it is taken for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sosp.core.batches import Chunk
from sosp.core.outputs import find_output_tensors, infer_loss

N = 4
A, B = torch.randn(N, 3), torch.randn(N, 2)


@pytest.mark.parametrize(
    ("outputs", "names"),
    [
        (A, ["output"]),
        ((A, B), ["0", "1"]),
        ([A, B.long()], ["0"]),
        ({"loss": A.sum(), "logits": A, "hidden_states": (B,)}, ["logits"]),
        (
            {"last_hidden_state": A, "pooler_output": B, "past_key_values": ((B,),)},
            ["last_hidden_state", "pooler_output"],
        ),
        (
            {"logits": A, "pred_boxes": B, "last_hidden_state": A, "encoder_last_hidden_state": A},
            ["logits", "pred_boxes"],
        ),
        ({"start_logits": A, "end_logits": A, "attentions": (A,)}, ["start_logits", "end_logits"]),
        ({"out": A, "aux": A}, ["out"]),
        (SimpleNamespace(sample=A, scale=2.0), ["sample"]),
        ({"maps": [A, B]}, ["maps.0", "maps.1"]),
        ((A, torch.randn(2, N, 5)), ["0"]),  # such as the state of a recurrent network: layers come first
        ({"hidden_states": A}, ["hidden_states"]),  # nothing else is there
    ],
)
def test_outputs_that_count(outputs: Any, names: list[str]) -> None:
    assert list(find_output_tensors(outputs, N)) == names


IMAGE = torch.randn(N, 3, 8, 8)
CLASSES, YES_NO = torch.tensor([0, 2, 1, 1]), torch.tensor([[1.0, 0, 1]] * N)


@pytest.mark.parametrize(
    ("name", "outputs", "targets", "loss"),
    [
        ("output", A, None, "cross_entropy"),
        ("output", A, CLASSES, "cross_entropy"),
        ("output", A, A.softmax(1), "cross_entropy"),
        ("output", A, torch.randn(N, 3), "mse"),
        ("output", A, YES_NO, "bce"),
        ("output", A[:, :1], None, "mse"),
        ("output", A[:, :1], YES_NO[:, :1], "bce"),
        ("output", A[:, 0], None, "mse"),
        ("output", IMAGE, None, "mse"),  # as the input
        ("output", torch.randn(N, 5, 8, 8), None, "cross_entropy"),
        ("last_hidden_state", torch.randn(N, 6, 5), None, "mse"),
        ("answer", A, None, "mse"),
        ("answer", A, CLASSES, "cross_entropy"),
        ("start_logits", A, None, "cross_entropy"),
        ("heads.0", A, None, "cross_entropy"),
    ],
)
def test_what_outputs_are_taken_for(name: str, outputs: Tensor, targets: Tensor | None, loss: str) -> None:
    chunk = Chunk(IMAGE, targets, ((0, 0, N),))
    assert infer_loss(name, outputs, chunk, targets) == loss
