"""Names of layers and formats, and sizes given by hand."""

import pytest

from fanfold.bench.jobs import FORMATS, LAYERS, layer_shape, weight_formats
from fanfold.errors import ArgumentError, UnsupportedError
from fanfold.formats.codec import shapes
from fanfold.spec import ExpertShape


def test_layers_by_name() -> None:
    mixtral = layer_shape("mixtral-8x7b")
    assert (mixtral.experts, mixtral.top_k, mixtral.activation.kind) == (ExpertShape(8, 4096, 14336), 2, "silu")
    oss = layer_shape("gpt-oss-120b")
    assert (oss.experts, oss.top_k, oss.activation.kind, oss.bias) == (
        ExpertShape(128, 2880, 2880),
        4,
        "clamped_swiglu",
        True,
    )


def test_a_layer_by_its_sizes() -> None:
    found = layer_shape("64, 8, 2048, 1024")
    assert (found.experts, found.top_k, found.name) == (ExpertShape(64, 2048, 1024), 8, "64,8,2048,1024")
    assert not found.bias


@pytest.mark.parametrize("text", ["qwen", "1,2,3", "4,2,8,16,", "4,2,8,x", "4,5,64,64", "4,0,64,64", "4,2,-8,8", ""])
def test_no_such_layer(text: str) -> None:
    with pytest.raises(ArgumentError, match="qwen3-30b"):
        layer_shape(text)


def test_sizes_of_nothing() -> None:
    with pytest.raises(ArgumentError, match="hidden"):
        layer_shape("4,2,0,64")


def test_formats() -> None:
    assert [fmt.name for fmt in weight_formats("nvfp4")] == ["nvfp4"]
    assert tuple(fmt.name for fmt in weight_formats("all")) == FORMATS
    with pytest.raises(UnsupportedError, match="gptq5"):
        weight_formats("gptq5")


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_holds_every_layer(name: str) -> None:
    (fmt,) = weight_formats(name)
    for layer in LAYERS.values():
        sizes = layer.experts
        assert shapes(fmt, sizes.intermediate, sizes.hidden)
        assert shapes(fmt, sizes.hidden, sizes.intermediate)
