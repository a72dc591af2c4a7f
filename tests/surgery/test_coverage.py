"""A small part of the coverage benchmark: networks of other packages, pruned by ``sosp.prune`` and compared."""

import importlib.util
import sys
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks" / "surgery"
NETWORKS = {
    "own/unet-inverted": "default",
    "own/pixel_embedding": "independent",
    "own/torch_encoder": "coupled",
    "timm/lcnet_050": "independent",
    "timm/vit_tiny_patch16_224": "coupled",
    "timm/resnet10t": "coupled",
    "transformers/bert": "default",
    "transformers/gpt2": "independent",
    "transformers/llama": "coupled",
    "transformers/opt": "coupled",
    "transformers/vit": "default",
    "transformers/hubert": "independent",
    "transformers/t5": "coupled",
    "transformers/mamba": "default",
}


@pytest.fixture(scope="module")
def coverage() -> Any:
    for package in ("timm", "transformers"):
        pytest.importorskip(package)
    spec = importlib.util.spec_from_file_location("coverage_benchmark", FOLDER / "coverage.py")
    assert spec is not None
    assert spec.loader is not None
    module: ModuleType = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(FOLDER))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(FOLDER))
    return module


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_of_other_packages_become_smaller_and_compute_the_same(coverage: Any, name: str) -> None:
    found: dict[str, Any] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other packages
        coverage.check_way(coverage.networks.build(name), coverage.WAYS[NETWORKS[name]], found)
    assert "wrong" not in found
    assert {f"{where} {mode}" for where in ("example", "fresh") for mode in ("eval", "train")} <= found.keys()
    assert found["left"] <= coverage.BUDGET * (1 + 1e-9)
